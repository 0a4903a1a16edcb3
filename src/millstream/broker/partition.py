"""One partition as the broker sees it, and the only entry for appends: every batch enters the log here.

    a producer's batch               append       admitted by its header and checksum, then by the topic's rules
    a run of producers' batches      append_run   the kernel admits each batch within `run_limits`
    a batch that the broker encoded  append_own   its records were admitted one by one (`check_record`), or with it
                                                  (`admit_own`)
    a leader's batch                 follow       keeps its offsets: the leader admitted it

The kernel (`wire/kafka/runs.py`) only compares. This module decides the limits, and whether a topic takes runs at
all.

The broker validates the header of a batch, with its first and largest timestamp, but not the records inside. Two
exceptions: in a compacted topic every record needs a key, because compaction works by key; and if
`message.timestamp.before.max.ms` is set, every timestamp is checked (KIP-937).

A batch too large to decode on the event loop is checked in a thread. Batches that arrive meanwhile wait, so that the
log keeps the arrival order.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.record_rules import check_records, check_time, out_of_time
from millstream.broker.setting import LONG_MAX
from millstream.broker.settings import TopicSettings
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise, begin
from millstream.log.answers import Appended
from millstream.records import batch as batches
from millstream.records.aside import LIGHT_BYTES, Aside
from millstream.records.batch import (
    CODEC_MASK,
    CODEC_MAX,
    CONTROL,
    NO_PRODUCER,
    ORDINARY,
    TRANSACTIONAL,
    BatchHeader,
    BatchTooLarge,
)
from millstream.records.run import BatchRun
from millstream.stores.base import PartitionLog

if TYPE_CHECKING:
    from millstream.broker.inlet import Inlet


WAITING_MAX = 16
"""Batches of a partition that may wait for checks in a thread; each is a copy in memory."""


class RunLimits(NamedTuple):
    """The limits for each batch of a run."""

    batch_bytes_max: int
    bytes_max: int
    """For the whole run: it fits one segment."""
    timestamp_max: int


class Partition:
    __slots__ = (
        "_limits",
        "_limits_settings",
        "_limits_time_ms",
        "_turn",
        "_waiting",
        "index",
        "inlet",
        "log",
        "settings",
    )

    def __init__(self, index: int, log: PartitionLog, settings: TopicSettings) -> None:
        self.index = index
        self.log = log
        self.settings = settings
        self.inlet: Inlet | None = None
        """For single records; made for the first of them."""
        self._limits: RunLimits | None = None
        self._limits_time_ms = -1
        self._limits_settings: TopicSettings | None = None
        """What the cached limits are for: runs need them thousands of times a second."""
        self._turn: asyncio.Lock | None = None
        self._waiting = 0
        """Batches that a thread checks, or that wait for one."""

    def admit(self, records: memoryview, now_ms: int) -> BatchHeader:
        """Validates a producer's batch and returns its header; raises `RequestError` if invalid."""
        settings = self.settings
        size = len(records)
        if size > settings.message_bytes_max:
            self.check_size(size)
        header = batches.check(records)
        attributes = header.attributes
        if attributes & ~ORDINARY or attributes & CODEC_MASK > CODEC_MAX:
            raise self._refusal(attributes)
        if header.producer_id != NO_PRODUCER and (header.base_sequence < 0 or header.producer_epoch < 0):
            raise RequestError(Code.INVALID_RECORD, "a batch with a producer id needs an epoch and a sequence number")
        latest = now_ms + settings.timestamp_after_max_ms
        if header.max_timestamp > latest or header.base_timestamp > latest:
            raise out_of_time(records, settings, max(header.max_timestamp, header.base_timestamp), now_ms)
        return header

    def append(self, records: memoryview, clock: Clock) -> tuple[BatchHeader, Promise[Appended]]:
        """Appends one batch; raises `RequestError` if it is invalid."""
        settings = self.settings
        now_ms = clock.now_ms()
        header = self.admit(records, now_ms)
        if not settings.needs_more_checks:
            return header, self.log.append(records, header)
        header = self._prepare(records, header, now_ms)
        if not self._reads_records and not self._waiting:
            return header, self.log.append(records, header)
        return header, self._append_checked(records, header, now_ms)

    def admit_own(self, records: memoryview, now_ms: int) -> BatchHeader:
        """Validates a batch that the broker encoded, with its records, for `append_own`."""
        header = self.admit(records, now_ms)
        if self.settings.needs_more_checks and self._reads_records:
            check_records(records, self.settings, now_ms)
        return header

    def append_own(self, records: memoryview, header: BatchHeader, clock: Clock) -> Promise[Appended]:
        """Appends a batch that the broker encoded from admitted records."""
        settings = self.settings
        if len(records) > settings.message_bytes_max:
            self.check_size(len(records))
        if settings.needs_more_checks:
            header = self._prepare(records, header, clock.now_ms())
        return self.log.append(records, header)

    def follow(self, records: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Appends a leader's batch at its own offsets, in a store whose logs can follow (`LogStore.can_follow`)."""
        if len(records) > self.settings.log.segment_bytes:
            raise self._longer_than_a_segment(len(records))
        return self.log.follow(records, header)

    def check_size(self, size: int) -> None:
        """Validates the size of a batch."""
        limit = self.settings.message_bytes_max
        if size > limit:
            detail = f"the batch has {size} bytes, the topic's max.message.bytes is {limit}"
            raise RequestError(Code.MESSAGE_TOO_LARGE, detail)

    def check_record(self, key: bytes | None, timestamp: int | None, now_ms: int) -> None:
        """Validates a single record, for which the broker encodes a batch; raises `RequestError` if invalid."""
        settings = self.settings
        if key is None and settings.needs_more_checks and settings.log.compact:
            raise RequestError(Code.INVALID_RECORD, "a record without a key cannot go to a compacted topic")
        if timestamp is not None:
            check_time(settings, timestamp, now_ms)

    def run_limits(self, now_ms: int) -> RunLimits | None:
        """The limits of a run; None if batches need more checks (compacted, stamped), or some wait."""
        if self._limits_time_ms != now_ms or self._limits_settings is not self.settings:
            self._limits_time_ms, self._limits_settings = now_ms, self.settings
            self._limits = self._run_limits(now_ms)
        return None if self._waiting else self._limits

    def _run_limits(self, now_ms: int) -> RunLimits | None:
        settings = self.settings
        if settings.needs_more_checks:
            return None
        latest = min(now_ms + settings.timestamp_after_max_ms, LONG_MAX)
        return RunLimits(settings.message_bytes_max, settings.log.segment_bytes, latest)

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        """Appends batches admitted within `run_limits` in this turn of the event loop."""
        return self.log.append_run(run)

    @property
    def _reads_records(self) -> bool:
        """Whether the topic's rules are about the records inside a batch."""
        return self.settings.log.compact or self.settings.timestamp_before_max_ms < LONG_MAX

    def _prepare(self, records: memoryview, header: BatchHeader, now_ms: int) -> BatchHeader:
        settings = self.settings
        if len(records) > settings.log.segment_bytes:
            raise self._longer_than_a_segment(len(records))
        return batches.stamp(records, header, now_ms) if settings.log_append_time else header

    def _append_checked(self, records: memoryview, header: BatchHeader, now_ms: int) -> Promise[Appended]:
        if not self._waiting:
            try:
                check_records(records, self.settings, now_ms, bytes_max=LIGHT_BYTES)
                return self.log.append(records, header)
            except BatchTooLarge:
                pass
        if self._waiting == WAITING_MAX:
            raise RequestError(Code.REQUEST_TIMED_OUT, f"{WAITING_MAX} large batches wait for a check; retry later")
        self._waiting += 1
        return begin(self._append_in_turn(bytearray(records), header, now_ms))

    async def _append_in_turn(self, records: bytearray, header: BatchHeader, now_ms: int) -> Appended:
        if self._turn is None:
            self._turn = asyncio.Lock()
        try:
            async with self._turn:
                await Aside().run(check_records, records, self.settings, now_ms)
                appended = self.log.append(memoryview(records), header)
        finally:
            self._waiting -= 1
        return await appended

    def _longer_than_a_segment(self, size: int) -> RequestError:
        return RequestError(Code.RECORD_LIST_TOO_LARGE, f"the batch has {size} bytes, more than a whole segment")

    def _refusal(self, attributes: int) -> RequestError:
        if attributes & (CONTROL | TRANSACTIONAL):
            return RequestError(Code.INVALID_RECORD, "clients may not send control or transactional batches")
        if attributes & CODEC_MASK > CODEC_MAX:
            return RequestError(Code.UNSUPPORTED_COMPRESSION_TYPE, f"codec {attributes & CODEC_MASK} is unknown")
        return RequestError(Code.INVALID_RECORD, f"the batch's attributes {attributes:#06x} are unknown")
