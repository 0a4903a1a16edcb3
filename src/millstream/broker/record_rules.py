"""Checks of the records inside a batch: a timestamp within bounds (KIP-937), a key in a compacted topic.

The error names the invalid records, so that a producer can resend the others (KIP-467).
"""

from __future__ import annotations

from millstream.broker.settings import TopicSettings
from millstream.core.errors import Code, RequestError
from millstream.records import codec
from millstream.records.batch import NO_TIMESTAMP, BatchTooLarge, Buffer

NAMED_MAX = 100
"""Records that one error names."""
LOOK_BYTES_MAX = 4 << 20
"""Largest batch decoded here on the event loop."""


class RecordsRefused(RequestError):
    def __init__(self, code: Code, detail: str, records: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(code, detail)
        self.records = records
        """Index in the batch, and the error of the record there."""


def check_time(settings: TopicSettings, timestamp: int, now_ms: int) -> None:
    """For a single record; raises INVALID_TIMESTAMP."""
    earliest, latest = settings.time_bounds(now_ms)
    if timestamp != NO_TIMESTAMP and not earliest <= timestamp <= latest:
        raise RecordsRefused(Code.INVALID_TIMESTAMP, _out_of_time(timestamp, earliest, latest))


def check_records(batch: Buffer, settings: TopicSettings, now_ms: int, *, bytes_max: int = codec.BYTES_MAX) -> None:
    """Checks every record of a batch whose checksum was verified. Raises `RecordsRefused`, and `BatchTooLarge` if it
    needs more than `bytes_max`.
    """
    earliest, latest = settings.time_bounds(now_ms)
    bad = codec.judge(
        batch, earliest, latest, settings.log.compact, count_max=NAMED_MAX, bytes_max=bytes_max, check_crc=False
    )
    if not bad:
        return
    named = []
    code = Code.INVALID_RECORD
    for index, timestamp, has_key in bad:
        if settings.log.compact and not has_key:
            named.append((index, "a record without a key cannot go to a compacted topic"))
        else:
            code = Code.INVALID_TIMESTAMP  # which Kafka returns if both occur
            named.append((index, _out_of_time(timestamp, earliest, latest)))
    raise RecordsRefused(code, named[0][1], tuple(named))


def out_of_time(batch: Buffer, settings: TopicSettings, max_timestamp: int, now_ms: int) -> RecordsRefused:
    """The error for a batch whose header has a timestamp that is too late."""
    try:
        check_records(batch, settings, now_ms, bytes_max=LOOK_BYTES_MAX)
    except RecordsRefused as refusal:
        return refusal
    except BatchTooLarge:
        pass  # no reason to decompress megabytes for an error message
    return RecordsRefused(Code.INVALID_TIMESTAMP, _out_of_time(max_timestamp, *settings.time_bounds(now_ms)))


def _out_of_time(timestamp: int, earliest: int, latest: int) -> str:
    return f"timestamp {timestamp} is out of range: the topic accepts {earliest} to {latest}"
