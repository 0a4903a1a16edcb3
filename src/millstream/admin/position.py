"""A position in a partition, as users write it: `start`, `end`, an offset, a time, or a number of records from here.

    start  end          the oldest record, or after the newest
    1500                an offset
    2025-11-04T14:00    a time (local unless it names a zone); the first record at or after it
    @1762264800000      the same in milliseconds since the epoch
    -100  +100          relative: to the end when consuming, to the committed offset when a group seeks

Offsets outside a partition's range are moved to its nearest end.
"""

from __future__ import annotations

import datetime
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.admin.failure import Failure

if TYPE_CHECKING:
    from confluent_kafka.admin import OffsetSpec

    from millstream.admin.connection import Connection

TopicPartition = tuple[str, int]
MOMENT_MS_MAX = (1 << 63) - 1


class Kind(enum.Enum):
    START = enum.auto()
    END = enum.auto()
    OFFSET = enum.auto()
    TIME = enum.auto()
    RELATIVE = enum.auto()


@dataclass(frozen=True, slots=True)
class Position:
    kind: Kind
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        if text in ("start", "end"):
            return cls(Kind.START if text == "start" else Kind.END)
        if text.isascii() and text.isdigit():
            return cls(Kind.OFFSET, int(text))
        if re.fullmatch(r"[+-][0-9]+", text):
            return cls(Kind.RELATIVE, int(text))
        try:
            if re.fullmatch(r"@[0-9]+", text):
                moment_ms = int(text[1:])
            else:
                moment_ms = int(datetime.datetime.fromisoformat(text).timestamp() * 1000)
            if not 0 <= moment_ms <= MOMENT_MS_MAX:
                raise Failure(f"{text} is not a time after 1969 that records can have")
        except (ValueError, OverflowError):
            raise Failure(
                f"{text!r} is neither start, end, an offset, a time (2025-11-04T14:00 or @MILLISECONDS) nor +N or -N"
            ) from None
        return cls(Kind.TIME, moment_ms)


def spans(connection: Connection, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
    """The first offset and the one after the last, of each partition."""
    from confluent_kafka.admin import OffsetSpec

    wanted = list(partitions)
    starts = _list_offsets(connection, wanted, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
    ends = _list_offsets(connection, wanted, OffsetSpec.latest())  # type: ignore[no-untyped-call]
    return {partition: (starts[partition], ends[partition]) for partition in wanted}


def resolve(
    connection: Connection,
    position: Position,
    partitions: Iterable[TopicPartition],
    base: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, int]:
    """The offset of `position` in each partition; a relative one is added to `base` (default: the end)."""
    from confluent_kafka.admin import OffsetSpec

    held = spans(connection, partitions)
    if position.kind is Kind.START:
        return {partition: start for partition, (start, _) in held.items()}
    if position.kind is Kind.END:
        return {partition: end for partition, (_, end) in held.items()}
    if position.kind is Kind.TIME:
        found = _list_offsets(connection, held, OffsetSpec.for_timestamp(position.number))
        # -1: every record is older.
        return {partition: offset if offset >= 0 else held[partition][1] for partition, offset in found.items()}
    resolved = {}
    for partition, (start, end) in held.items():
        offset = position.number
        if position.kind is Kind.RELATIVE:
            offset += end if base is None else base.get(partition, start)
        resolved[partition] = min(max(offset, start), end)
    return resolved


def _list_offsets(
    connection: Connection, partitions: Iterable[TopicPartition], spec: OffsetSpec
) -> dict[TopicPartition, int]:
    import confluent_kafka

    request = {confluent_kafka.TopicPartition(topic, partition): spec for topic, partition in partitions}
    if not request:
        return {}
    answers = connection.admin.list_offsets(request)
    return {
        (where.topic, where.partition): connection.settle(future, f"{where.topic} partition {where.partition}").offset
        for where, future in answers.items()
    }
