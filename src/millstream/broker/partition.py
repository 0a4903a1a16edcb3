"""One partition as the broker sees it: the rules for what may be appended, over whatever log the store has.

A batch is judged by its header alone. Records inside are the producer's business, with one exception: in a compacted
topic every record needs a key, or compaction could not tell what it replaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.settings import TopicSettings
from millstream.clock import Clock
from millstream.errors import Code, RequestError
from millstream.log.answers import Appended
from millstream.promise import Promise
from millstream.records import batch as batches
from millstream.records import codec
from millstream.records.batch import (
    CODEC_MASK,
    CODEC_MAX,
    CONTROL,
    NO_PRODUCER,
    ORDINARY,
    TRANSACTIONAL,
    BatchHeader,
)
from millstream.stores.base import PartitionLog

if TYPE_CHECKING:
    from millstream.broker.inlet import Inlet


class Partition:
    __slots__ = ("index", "inlet", "log", "settings")

    def __init__(self, index: int, log: PartitionLog, settings: TopicSettings) -> None:
        self.index = index
        self.log = log
        self.settings = settings
        self.inlet: Inlet | None = None
        """For records that come one by one; made for the first of them."""

    def admit(self, records: memoryview) -> BatchHeader:
        """The header of a batch as a producer sent it; raises `RequestError` if it may not be stored."""
        settings = self.settings
        size = len(records)
        if size > settings.message_bytes_max:
            raise RequestError(
                Code.MESSAGE_TOO_LARGE,
                f"the batch has {size} bytes, the topic's max.message.bytes is {settings.message_bytes_max}",
            )
        header = batches.check(records)
        attributes = header.attributes
        if attributes & ~ORDINARY or attributes & CODEC_MASK > CODEC_MAX:
            raise self._refusal(attributes)
        if header.producer_id != NO_PRODUCER and (header.base_sequence < 0 or header.producer_epoch < 0):
            raise RequestError(Code.INVALID_RECORD, "a batch with a producer id needs an epoch and a sequence number")
        return header

    def append(self, records: memoryview, clock: Clock) -> tuple[BatchHeader, Promise[Appended]]:
        """Takes one batch; raises `RequestError` if it may not be stored."""
        return self._append(records, self.admit(records), clock)

    def append_own(self, records: memoryview, header: BatchHeader, clock: Clock) -> Promise[Appended]:
        """Takes one batch that the broker itself has just encoded: nobody can have damaged it."""
        return self._append(records, header, clock)[1]

    def _append(self, records: memoryview, header: BatchHeader, clock: Clock) -> tuple[BatchHeader, Promise[Appended]]:
        settings = self.settings
        if settings.needs_more_checks:
            size = len(records)
            if size > settings.log.segment_bytes:
                raise RequestError(Code.RECORD_LIST_TOO_LARGE, f"the batch has {size} bytes, more than a whole segment")
            if settings.log.compact:
                self._require_keys(records)
            if settings.log_append_time:
                header = batches.stamp(records, header, clock.now_ms())
        return header, self.log.append(records, header)

    def _refusal(self, attributes: int) -> RequestError:
        if attributes & (CONTROL | TRANSACTIONAL):
            return RequestError(Code.INVALID_RECORD, "control and transactional batches are not taken from clients")
        if attributes & CODEC_MASK > CODEC_MAX:
            return RequestError(Code.UNSUPPORTED_COMPRESSION_TYPE, f"codec {attributes & CODEC_MASK} is not known")
        return RequestError(Code.INVALID_RECORD, f"the batch's attributes {attributes:#06x} are not known")

    def _require_keys(self, records: memoryview) -> None:
        if any(key is None for _, key, _ in codec.keys(records)):
            raise RequestError(Code.INVALID_RECORD, "a record without a key cannot go to a compacted topic")
