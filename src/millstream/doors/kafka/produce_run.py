"""Produce requests that arrived together, appended together.

The door reads several small requests in flight at once. If their shapes are known, the requests for one partition
become one append and one promise, and all answers one send. Each request still gets its own answer, in order.
`wire/kafka/runs.py` decodes and encodes the bytes; this module appends them.

A run takes plain batches only. The general path checks batches of idempotent producers one by one. It also takes topics
that inspect batches (compacted, stamped by the broker), and every request that is not in order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce
from millstream.doors.outbox import Chunk
from millstream.log.answers import Appended
from millstream.wire.kafka.runs import Part, Request, answer, answers

if TYPE_CHECKING:
    from millstream.broker.session import Partition


def append_part(partition: Partition, part: Part, context: Context) -> Promise[Appended]:
    session = context.session
    log = partition.log
    metrics = session.metrics
    metrics.batches_in += part.count
    metrics.records_in += part.offsets
    promise = partition.append_run(part)
    if not promise.done and log.unsynced_bytes > session.config.partition_unsynced_bytes_max:
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
        """Settles when every append of the run has succeeded or failed."""
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
