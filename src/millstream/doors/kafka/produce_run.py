"""Produce requests that arrived together, appended together.

A producer with several small requests in flight has them read in one go. Where their shapes are known, those for the
same partition become one write and one promise, and all of them one send; each still gets its own answer, in order.
That nearly halves what a small request costs.

Only plain batches run: those of idempotent producers are judged one by one, and topics that look into batches
(compacted, stamped by the broker) are left to the general way, as is everything that is not in order.
"""

from __future__ import annotations

from struct import Struct

from millstream.broker.partition import Partition
from millstream.doors.kafka import api_00_produce
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce, KnownProduces
from millstream.doors.kafka.outbox import Chunk
from millstream.errors import RequestError
from millstream.log.answers import Appended
from millstream.promise import Promise
from millstream.records.batch import NO_PRODUCER, BatchHeader

_HEAD = Struct(">ihhi")
"""Size of the frame, API key, version, correlation id."""


class _Part:
    """What of a run goes to one partition."""

    __slots__ = ("batches", "headers", "offsets", "promise", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.batches: list[memoryview] = []
        self.headers: list[BatchHeader] = []
        self.offsets = 0
        self.promise: Promise[Appended] = Promise()


class ProduceRun:
    __slots__ = ("_known", "_parts", "_requests")

    def __init__(self, known: KnownProduces) -> None:
        self._known = known
        self._parts: dict[Partition, _Part] = {}
        self._requests: list[tuple[KnownProduce, int, BatchHeader, _Part, int]] = []

    @property
    def count(self) -> int:
        return len(self._requests)

    def take(self, data: memoryview, position: int, end: int) -> int:
        """Takes in whole frames from a position on while they fit the run; answers with where it stopped."""
        find, parts, requests = self._known.find, self._parts, self._requests
        while end - position >= _HEAD.size:
            size, key, version, correlation_id = _HEAD.unpack_from(data, position)
            after = position + 4 + size
            if key != api_00_produce.KEY or size < _HEAD.size or after > end:
                break
            frame = data[position + 4 : after]
            known = find(frame, version)
            records = known.records(frame) if known is not None else None
            if known is None or records is None:
                break
            partition = known.partition
            part = parts.get(partition)
            if part is None:
                if partition.settings.needs_more_checks:
                    break
                part = parts[partition] = _Part(partition.settings.log.segment_bytes)
            try:
                header = partition.admit(records)
            except RequestError:
                break
            part.room -= len(records)
            if header.producer_id != NO_PRODUCER or part.room < 0:
                break
            part.batches.append(records)
            part.headers.append(header)
            requests.append((known, correlation_id, header, part, part.offsets))
            part.offsets += header.last_offset_delta + 1
            position = after
        return position

    def append(self, context: Context) -> Promise[None]:
        """Settles when every append of the run is settled, well or badly."""
        broker = context.broker
        done: Promise[None] = Promise()
        waiting = 1

        def one_done(_: Promise[Appended]) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                done.settle(None)

        for partition, part in self._parts.items():
            if not part.batches:
                continue
            log = partition.log
            part.promise = log.append_run(part.batches, part.headers)
            part.batches = []  # the bytes belong to the connection's buffer
            broker.metrics.batches_in += len(part.headers)
            broker.metrics.records_in += part.offsets
            if not part.promise.done:
                waiting += 1
                part.promise.then(one_done)
                if log.unsynced_bytes > broker.config.partition_unsynced_bytes_max:
                    context.slow_down = True
        waiting -= 1
        if waiting == 0:
            done.settle(None)
        return done

    def answers(self) -> list[Chunk]:
        return [
            known.settled(correlation_id, header, part.promise, behind)
            for known, correlation_id, header, part, behind in self._requests
        ]
