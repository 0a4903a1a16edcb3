"""A reader that goes on behind damage."""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.log.replica import ReplicaLog
from millstream.records import codec


async def read_around(log: ReplicaLog, bytes_max: int = 1 << 20) -> tuple[dict[int, bytes | None], set[int]]:
    """What a reader that goes on behind each refusal gets, by offset; and which offsets are refused."""
    values: dict[int, bytes | None] = {}
    refused: set[int] = set()
    at = log.start
    while at < log.high_watermark:
        try:
            piece = await log.read(at, bytes_max)
        except RequestError as error:
            assert error.code is Code.CORRUPT_MESSAGE
            damaged = log.damage.at(at)
            assert damaged is not None and f"the next offset to read is {damaged.end}" in error.detail
            refused |= set(range(at, damaged.end))
            at = damaged.end
            continue
        values |= {record.offset: record.value for record in codec.iterate(piece.to_bytes()) if record.offset >= at}
        assert piece.next_offset > at
        at = piece.next_offset
    return values, refused
