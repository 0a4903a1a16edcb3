"""Produce requests of a known shape.

A producer that does not batch repeats the same few requests: client, topic and partition are the same, only the
correlation id and the batch differ. To decode these names, and to encode them into the same answer, is most of the cost
of a small request (`make bench`, the rows of one-record requests). So the door remembers the bytes of produce requests
up to the batch, with their meaning. If a request begins with known bytes, the door reads only the batch, and copies
the answer from a template with new numbers.

A request whose bytes differ anywhere, or that has anything unusual behind the batch, takes the general path. A shape is
learned from a request that passed the general path, and serves only clients with the same rights
(`Authorizer.scope`). All shapes are dropped when topics or rights change.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from millstream.core.clock import Clock
from millstream.core.errors import RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.api_00_produce import refused
from millstream.doors.kafka.context import Context
from millstream.log.answers import Appended
from millstream.security.rights import Operation
from millstream.wire.kafka import header, produce
from millstream.wire.kafka.primitives import array_length, string, uvarint
from millstream.wire.kafka.produce import PartitionAnswer, PartitionData
from millstream.wire.kafka.runs import Part, Request, Shape, answer, find, take

if TYPE_CHECKING:
    from millstream.broker.session import Counted, Partition

_I32 = Struct(">i")
_TAGS_BYTES = 3
"""Tagged fields behind the batch in flexible versions: partition, topic, request."""
_ANSWER_HEAD = Struct(">ii")


class KnownProduce(Shape):
    __slots__ = ("_data",)

    partition: Partition

    def __init__(self, prefix: bytes, data: PartitionData, partition: Partition, version: int) -> None:
        self._data = data._replace(records=None)
        is_flexible, has_log_start = version >= produce.FLEXIBLE_FROM, version >= produce.LOG_START_FROM
        tags = b"\0" if is_flexible else b""
        body = tags + produce.encode([PartitionAnswer(data.topic, data.partition, 0)], version)
        name = string(data.topic, is_flexible) if isinstance(data.topic, str) else data.topic.bytes
        one = array_length(1, is_flexible)
        # Base offset, append time and perhaps log start follow index (4) and error (2).
        numbers_at = len(tags) + len(one) + len(name) + len(one) + 6
        tail_at = numbers_at + (24 if has_log_start else 16)
        super().__init__(
            prefix,
            version,
            body[:numbers_at],
            body[tail_at:],
            partition,
            is_flexible=is_flexible,
            has_log_start=has_log_start,
        )

    @classmethod
    def learn(cls, frame: memoryview, data: PartitionData, context: Context) -> KnownProduce | None:
        """The shape of a request for one partition; None if it was refused or is not simple."""
        if data.records is None:
            return None
        try:
            partition = context.session.partition(data.topic, data.partition, Operation.WRITE)
        except RequestError:
            return None
        flexible = context.version >= produce.FLEXIBLE_FROM
        length = uvarint(len(data.records) + 1) if flexible else _I32.pack(len(data.records))
        start = len(frame) - (_TAGS_BYTES if flexible else 0) - len(data.records) - len(length)
        if frame[start : start + len(length)] != length:
            return None  # unknown bytes follow the batch
        prefix = bytes(frame[header.FIXED_BYTES : start])
        return cls(prefix, data, partition, context.version)

    def settled(self, correlation_id: int, append_time: int, promise: Promise[Appended]) -> bytes:
        """The whole frame of the answer to a settled append."""
        if promise.error is not None:
            return self.refused(correlation_id, promise.error)
        base_offset, log_start, _ = promise.value()
        return answer(self, correlation_id, base_offset, append_time, log_start)

    def refused(self, correlation_id: int, error: BaseException) -> bytes:
        """The whole frame of the answer to a failed append."""
        tags = b"\0" if self.is_flexible else b""
        body = tags + produce.encode([refused(self._data.topic, self._data.partition, error)], self.version)
        return _ANSWER_HEAD.pack(4 + len(body), correlation_id) + body


class KnownProduces:
    """The shapes that connections with the same rights share, by version and prefix, and the prefix lengths."""

    SHAPES_MAX = 4096
    LENGTHS_MAX = 8

    def __init__(self, topics: Counted, clock: Clock, authorizer: Counted) -> None:
        self._topics = topics
        self._authorizer = authorizer
        self._clock = clock
        self._now_ms = clock.now_ms()
        self._make_part = self._part_for  # bound once, not per request
        self._changes = topics.changes + authorizer.changes
        self._shapes: dict[tuple[int, bytes], KnownProduce] = {}
        self.lengths: dict[int, None] = {}
        """The lengths of known prefixes; most doors see one or two."""

    def shapes(self) -> dict[tuple[int, bytes], KnownProduce]:
        """The shapes that are still valid."""
        if self._changes != self._topics.changes + self._authorizer.changes:
            self._forget()
        return self._shapes

    def find(self, frame: memoryview, version: int) -> tuple[KnownProduce, memoryview] | None:
        """The shape of a request, and its batch."""
        return find(frame, header.FIXED_BYTES, version, self.shapes(), self.lengths)

    def take(self, data: memoryview, position: int, requests: list[Request[KnownProduce]]) -> int:
        """Adds the requests from a position on whose batches are stored unchanged; returns where it stopped."""
        if self._changes != self._topics.changes + self._authorizer.changes:
            self._forget()
        return take(data, position, self._shapes, self.lengths, self._make_part, requests)

    def _part_for(self, partition: Partition) -> Part | None:
        limits = partition.run_limits(self._now_ms)
        return None if limits is None else Part(*limits)

    def note_time(self) -> None:
        """Called every few seconds. A timestamp bound that lags by a few seconds is harmless: the general path reads
        the clock, and checks later batches.
        """
        self._now_ms = self._clock.now_ms()

    def learn(self, frame: memoryview, data: PartitionData, context: Context) -> None:
        if len(self._shapes) >= self.SHAPES_MAX:
            self._forget()
        known = KnownProduce.learn(frame, data, context)
        if known is None:
            return
        self._shapes[context.version, known.prefix] = known
        self.lengths[len(known.prefix)] = None
        if len(self.lengths) > self.LENGTHS_MAX:
            del self.lengths[next(iter(self.lengths))]

    def _forget(self) -> None:
        self._changes = self._topics.changes + self._authorizer.changes
        self._shapes.clear()
        self.lengths.clear()
