"""Produce requests that arrived together, appended together.

A producer with several small requests in flight has them read in one go. Where their shapes are known, those for the
same partition become one write and one promise, and all of them one send; each still gets its own answer, in order.
The bytes are taken apart and put together in `wire/kafka/runs.py`; here is what the broker has to do with them.

Only plain batches run: those of idempotent producers are judged one by one, and topics that look into batches
(compacted, stamped by the broker) are left to the general way, as is everything that is not in order.
"""

from __future__ import annotations

from functools import partial

from millstream.broker.partition import Partition
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce
from millstream.doors.outbox import Chunk
from millstream.log.answers import Appended
from millstream.wire.kafka.runs import Part, Request, answer, answers


def append_part(partition: Partition, part: Part, context: Context) -> Promise[Appended]:
    broker = context.broker
    log = partition.log
    metrics = broker.metrics
    metrics.batches_in += part.count
    metrics.records_in += part.offsets
    promise = partition.append_run(part)
    if not promise.done and log.unsynced_bytes > broker.config.partition_unsynced_bytes_max:
        context.slow_down = True
    return promise


class ProduceRun:
    __slots__ = ("_done", "_failures", "_requests", "_waiting")

    def __init__(self, requests: list[Request[KnownProduce]]) -> None:
        self._requests = requests
        self._failures: dict[Part, BaseException] = {}
        self._waiting = 1
        self._done: Promise[None] = Promise()

    @property
    def count(self) -> int:
        return len(self._requests)

    def append(self, context: Context) -> Promise[None]:
        """Settles when every append of the run is settled, well or badly."""
        for part, partition in {part: known.partition for known, _, part, _, _ in self._requests}.items():
            promise = append_part(partition, part, context)
            part.let_go()
            self._waiting += 1
            if promise.done:
                self._one_done(part, promise)
            else:
                promise.then(partial(self._one_done, part))
        self._count_down()
        return self._done

    def _one_done(self, part: Part, promise: Promise[Appended]) -> None:
        if promise.error is not None:
            self._failures[part] = promise.error
        else:
            base_offset, log_start, _ = promise.value()
            part.settle(base_offset, log_start)
        self._count_down()

    def _count_down(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._done.settle(None)

    def answers(self) -> list[Chunk]:
        if not self._failures:
            return [answers(self._requests)]
        return [
            known.refused(correlation_id, self._failures[part])
            if part in self._failures
            else answer(known, correlation_id, part.base_offset + behind, append_time, part.log_start)
            for known, correlation_id, part, behind, append_time in self._requests
        ]
