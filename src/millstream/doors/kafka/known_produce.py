"""Produce requests whose shape is known.

A producer that is not batching sends the same few requests over and over: the same client, topic and partitions, and
only the correlation id and the batch differ. Decoding the same names again, and encoding them into the same answer,
is most of what a small request costs (`make bench`, the rows of one-record requests). So the door remembers the
bytes of produce requests up to the batch, with what they meant. Where a request begins with bytes that are known,
only the batch is looked at, and the answer is a copy of a template with new numbers in it.

Nothing is assumed: bytes that differ anywhere, or anything unusual behind the batch, go the general way, and all is
forgotten whenever the set of topics changes.
"""

from __future__ import annotations

from struct import Struct

from millstream.broker.partition import Partition
from millstream.broker.topics import Topics
from millstream.doors.kafka.api_00_produce import answered
from millstream.doors.kafka.context import Context
from millstream.log.answers import Appended
from millstream.promise import Promise
from millstream.records.batch import LOG_APPEND_TIME, BatchHeader
from millstream.wire.kafka import header, produce
from millstream.wire.kafka.primitives import array_length, string, uvarint
from millstream.wire.kafka.produce import PartitionAnswer, PartitionData

_I32 = Struct(">i")
_TAGS = b"\0\0\0"
"""Behind the batch in flexible versions: no tags on the partition, the topic, the request."""
_ANSWER_HEAD = Struct(">ii")


class KnownProduce:
    __slots__ = (
        "_answer",
        "_data",
        "_head",
        "_is_flexible",
        "_size",
        "_tags",
        "_tail",
        "_version",
        "partition",
        "prefix",
    )

    def __init__(self, prefix: bytes, data: PartitionData, partition: Partition, version: int) -> None:
        self.prefix = prefix
        self._data = data._replace(records=None)
        self.partition = partition
        self._version = version
        self._is_flexible = version >= produce.FLEXIBLE_FROM
        self._tags = b"\0" if self._is_flexible else b""
        body = self._tags + produce.encode([PartitionAnswer(data.topic, data.partition, 0)], version)
        name = string(data.topic, self._is_flexible) if isinstance(data.topic, str) else data.topic.bytes
        one = array_length(1, self._is_flexible)
        # Behind index (4) and error (2) stand base offset, append time and, from version 5, the log's start.
        fields_at = len(self._tags) + len(one) + len(name) + len(one) + 6
        fields = "qqq" if version >= 5 else "qq"
        tail_at = fields_at + 8 * len(fields)
        self._size = 4 + len(body)
        self._head, self._tail = body[:fields_at], body[tail_at:]
        self._answer = Struct(f">ii{fields_at}s{fields}{len(self._tail)}s")

    @classmethod
    def learn(cls, frame: memoryview, data: PartitionData, context: Context) -> KnownProduce | None:
        """What a request for one partition teaches about the next one; None if it is not of the simple kind."""
        topic = context.broker.topics.find(data.topic)
        if topic is None or data.records is None or not 0 <= data.partition < len(topic.partitions):
            return None
        flexible = context.version >= produce.FLEXIBLE_FROM
        length = uvarint(len(data.records) + 1) if flexible else _I32.pack(len(data.records))
        start = len(frame) - (len(_TAGS) if flexible else 0) - len(data.records) - len(length)
        if frame[start : start + len(length)] != length:
            return None  # something follows the batch that is not understood here
        prefix = bytes(frame[header.FIXED_BYTES : start])
        return cls(prefix, data, topic.partitions[data.partition], context.version)

    def records(self, frame: memoryview) -> memoryview | None:
        """The batch of a request that begins with the known bytes; None if something unusual surrounds it."""
        start = header.FIXED_BYTES + len(self.prefix)
        if self._is_flexible:
            return self._flexible_records(frame, start)
        (size,) = _I32.unpack_from(frame, start)
        return frame[start + 4 :] if size == len(frame) - start - 4 else None

    def _flexible_records(self, frame: memoryview, start: int) -> memoryview | None:
        size = shift = 0
        for position in range(start, min(start + 5, len(frame))):
            byte = frame[position]
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                begin, end = position + 1, position + size
                return frame[begin:end] if size and frame[end:] == _TAGS else None
            shift += 7
        return None

    def settled(self, correlation_id: int, batch: BatchHeader, promise: Promise[Appended], behind: int = 0) -> bytes:
        """The whole frame of the answer to an append that is settled, so many offsets behind its first."""
        if promise.error is not None:
            body = self._tags + produce.encode([answered(self._data, batch, promise)], self._version)
            return _ANSWER_HEAD.pack(4 + len(body), correlation_id) + body
        base_offset, log_start, _ = promise.value()
        base_offset += behind
        append_time = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else -1
        if self._version < 5:
            return self._answer.pack(self._size, correlation_id, self._head, base_offset, append_time, self._tail)
        return self._answer.pack(
            self._size, correlation_id, self._head, base_offset, append_time, log_start, self._tail
        )


class KnownProduces:
    """What the door remembers, for all connections: shapes by version and bytes, and the lengths those bytes have."""

    SHAPES_MAX = 4096
    LENGTHS_MAX = 8

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._changes = topics.changes
        self._shapes: dict[tuple[int, bytes], KnownProduce] = {}
        self._ends: dict[int, None] = {}
        """Where the known bytes end in a frame; most producers of a door have one or two lengths between them."""

    def find(self, frame: memoryview, version: int) -> KnownProduce | None:
        if self._changes != self._topics.changes:
            self._forget()
        for end in self._ends:
            known = self._shapes.get((version, bytes(frame[header.FIXED_BYTES : end])))
            if known is not None and len(frame) > end + 4:
                return known
        return None

    def learn(self, frame: memoryview, data: PartitionData, context: Context) -> None:
        if len(self._shapes) >= self.SHAPES_MAX:
            self._forget()
        known = KnownProduce.learn(frame, data, context)
        if known is None:
            return
        self._shapes[context.version, known.prefix] = known
        self._ends[header.FIXED_BYTES + len(known.prefix)] = None
        if len(self._ends) > self.LENGTHS_MAX:
            del self._ends[next(iter(self._ends))]

    def _forget(self) -> None:
        self._changes = self._topics.changes
        self._shapes.clear()
        self._ends.clear()
