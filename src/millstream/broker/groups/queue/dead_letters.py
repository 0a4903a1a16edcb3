"""Writes the dead records of a queue to the dead-letter topic (KIP-1191).

A dead letter has the record's key, value and headers, and these headers:

    millstream-dead-topic, -partition, -offset     origin of the record
    millstream-dead-group                          the queue
    millstream-dead-attempts, -reason, -at         number of attempts, reason, time
    millstream-dead-unreadable                     for an unreadable record: the offset where its batch ends

Its timestamp is the time of writing. Retention of the dead-letter topic counts from there, not from the record's age.

Rules
-----
1. `_dead_letter` is the whole way of a dead record. The record is durably DYING, with the end of the dead-letter topic
   at its death (`DeadRecord.after`), before its letter is written. It is DONE after its letter is durable.
2. After a crash or a failure the broker searches for the letter from that offset on, and writes it if it is missing.
3. A dead record of the dead-letter topic itself gets no letter: it is already there.
4. A failed read is retried. Only a record outside the log's range gets no letter. A damaged or undecodable record gets
   a letter without key and value, with the cause as reason.
5. A broker that lost the queue writes nothing: the new coordinator finds the same dead records.
6. A letter passes the same checks as every other batch (`broker/partition.py`). It is larger than its record, so the
   broker raises `max.message.bytes` of the dead-letter topic for it, unless an operator has set it. A refused letter
   is retried.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING

from millstream.broker.batches import decode, read_batches
from millstream.broker.groups.queue.storage import DeadRecord
from millstream.broker.topics import Topic, Topics
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.log.damage import UnreadableOffset
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import HEADER_BYTES
from millstream.records.record import Headers, Record, record_bytes_max
from millstream.stores.base import PartitionLog

if TYPE_CHECKING:
    from millstream.broker.groups.queue.states import QueueStates

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

HEADER = "millstream-dead-"
RETENTION_MS = 30 * 24 * 3_600_000
BATCH_RECORDS_MAX = 500
BATCH_BYTES = 1 << 20
"""Limit of a batch of several letters. A larger letter gets its own batch."""
READ_BYTES = 1 << 20
RETRY_SECONDS = 1.0

IDENTITY = ("topic", "partition", "offset", "group")
Identity = tuple[bytes, ...]


class DeadLetters:
    def __init__(
        self,
        topics: Topics,
        clock: Clock,
        in_background: Callable[[Awaitable[None]], None],
        check: Callable[[str], None] = lambda group_id: None,
    ) -> None:
        self._check = check
        """Raises unless this broker coordinates the group."""
        self._topics = topics
        self._clock = clock
        self._in_background = in_background
        self._busy: set[QueueStates] = set()

    def end(self, name: str, index: int) -> tuple[int, str]:
        """The lowest offset that a new dead letter can get, and where: see `DeadRecord`."""
        topic = self._topics.get(name)
        if topic is None:
            return 0, ""
        return topic.partitions[index % topic.partition_count].log.end, _where(topic, index)

    def write_letters(self, partition: QueueStates) -> None:
        """Takes all dead records of a partition to their end, in the background."""
        if partition not in self._busy and not partition.is_closed:
            self._busy.add(partition)
            self._in_background(self._run(partition))

    async def _run(self, partition: QueueStates) -> None:
        try:
            while (dead_records := partition.dead_records()[:BATCH_RECORDS_MAX]) and not partition.is_closed:
                for name, group in groupby(sorted(dead_records, key=lambda dead: dead.to), key=lambda dead: dead.to):
                    await self._dead_letter(partition, name, list(group))
        except Exception as error:
            if partition.is_closed:
                return
            name, index, retry = partition.topic.name, partition.index, RETRY_SECONDS
            if isinstance(error, RequestError):
                refusals.error("cannot write dead letters of %s-%d; retrying in %d s: %s", name, index, retry, error)
            else:
                logger.exception("unexpected error while writing dead letters of %s-%d", name, index)
            self._clock.call_later(RETRY_SECONDS, lambda: self.write_letters(partition))
        finally:
            self._busy.discard(partition)

    async def _dead_letter(self, partition: QueueStates, name: str, dead_records: list[DeadRecord]) -> None:
        """Takes dead records with the same dead-letter topic from DYING to DONE."""
        await partition.save_dead_records()
        if name == partition.topic.name:
            await partition.letters_written(dead_records)
            return
        target = await self._ensure(name)
        written = await self._find(target, partition, dead_records)
        if written:
            await partition.letters_written(written)
        missing = sorted(set(dead_records).difference(written))
        while missing:
            letters, count = await self._letters(partition, missing, target.settings.message_bytes_max)
            partition.check()
            if not partition.is_private:  # a pause may have outlasted this broker's lease on the group
                self._check(partition.group_id)
            if letters:
                await self._append(target, partition.index, letters)
            await partition.letters_written(missing[:count])
            missing = missing[count:]

    async def _append(self, target: Topic, index: int, letters: Sequence[Record]) -> None:
        batch = memoryview(codec.encode(letters))
        settings = target.settings
        if len(batch) > settings.message_bytes_max and "max.message.bytes" not in settings.overrides:
            room = {"max.message.bytes": str(2 * len(batch))}
            await self._topics.configure(target.name, {**settings.overrides, **room})
        _, stored = target.partitions[index % target.partition_count].append(batch, self._clock)
        await stored

    async def _ensure(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        try:
            return await self._topics.create(name, self._topics.default_partitions, {"retention.ms": str(RETENTION_MS)})
        except RequestError as error:
            if error.code != Code.TOPIC_ALREADY_EXISTS:
                raise
            topic = self._topics.get(name) or await self._topics.follow(name)  # another caller creates it now
            if topic is None:
                raise
            return topic

    async def _find(
        self, target: Topic, partition: QueueStates, dead_records: Sequence[DeadRecord]
    ) -> list[DeadRecord]:
        """The dead records whose letters a crash or a failed write has left in the dead-letter topic."""
        if partition.is_private:  # it does not survive a crash
            return []
        if any(dead.where != _where(target, partition.index) for dead in dead_records):
            # The topic has grown or was recreated: search all partitions.
            found = set[Identity]().union(*[await self._find_in(each.log, 0) for each in target.partitions])
        else:
            log = target.partitions[partition.index % target.partition_count].log
            found = await self._find_in(log, min(dead.after for dead in dead_records))
        return [dead for dead in dead_records if self._identity(partition, dead) in found]

    async def _find_in(self, log: PartitionLog, offset: int) -> set[Identity]:
        found: set[Identity] = set()
        aside = Aside()
        await log.refresh()  # another broker may have written them
        offset = max(offset, log.start)
        while offset < log.high_watermark:
            try:
                sound, next_offset = await read_batches(log, offset, READ_BYTES)
                for header, batch in sound:
                    for record in await decode(header, batch, aside):
                        headers = dict(record.headers)
                        found.add(tuple(headers.get(HEADER + part) or b"" for part in IDENTITY))
                    offset = header.next_offset
            except UnreadableOffset as error:  # an unreadable letter counts as missing
                next_offset = error.next_offset
            offset = max(offset, next_offset)
        return found

    async def _letters(
        self, partition: QueueStates, dead_records: Sequence[DeadRecord], bytes_max: int
    ) -> tuple[list[Record], int]:
        """Letters for one batch, and how many dead records they cover; records deleted by retention get none."""
        letters: list[Record] = []
        room = min(BATCH_BYTES, bytes_max) - HEADER_BYTES
        for count, dead in enumerate(dead_records):
            try:
                record = await self._record(partition, dead.offset)
            except UnreadableOffset as error:
                if not error.detail.startswith(dead.reason):
                    dead = dead._replace(reason=f"{dead.reason}; {error.detail}")
                unreadable = ((HEADER + "unreadable", str(error.next_offset).encode()),)
                record = Record(dead.offset, 0, None, None, unreadable)
            if record is not None:
                headers = record.headers + self._headers(partition, dead)
                letter = Record(0, self._clock.now_ms(), record.key, record.value, headers)
                room -= record_bytes_max(letter.value, letter.key, headers)
                if room < 0 and letters:
                    return letters, count
                letters.append(letter)
        return letters, len(dead_records)

    async def _record(self, partition: QueueStates, offset: int) -> Record | None:
        for header, batch in await partition.reading.batches(offset, 1):
            return partition.reading.records(header, batch).get(offset)
        return None

    def _headers(self, partition: QueueStates, dead: DeadRecord) -> Headers:
        topic, index, offset, group = self._identity(partition, dead)
        at = datetime.fromtimestamp(dead.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return (
            (HEADER + "topic", topic),
            (HEADER + "partition", index),
            (HEADER + "offset", offset),
            (HEADER + "group", group),
            (HEADER + "attempts", str(dead.attempts).encode()),
            (
                HEADER + "reason",
                dead.reason.encode(errors="backslashreplace"),
            ),  # one encoding error would block all letters
            (HEADER + "at", at.encode()),
        )

    def _identity(self, partition: QueueStates, dead: DeadRecord) -> Identity:
        parts = partition.topic.name, str(partition.index), str(dead.offset), partition.group_id
        return tuple(part.encode() for part in parts)


def _where(topic: Topic, index: int) -> str:
    return f"{topic.id.hex}/{index % topic.partition_count}"
