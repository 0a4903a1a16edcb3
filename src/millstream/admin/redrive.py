"""Sends dead letters back to their original topics.

A redriven record is a new one, at the end of its old partition, with its key, value and headers, but

- without the headers of its death (`millstream-dead-...`) and without a delay, which is over;
- with `millstream-redriven`, the number of its redrives, and `millstream-redriven-from`, the dead letter's position.

Each dead letter is sent back once, however often a redrive runs and however it ends: see `redrive_ledger.py`. The
record goes to the topic, so every group of the topic gets it, not only the queue in which it died.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure, explain
from millstream.admin.position import TopicPartition, spans
from millstream.admin.reading import headers_of, read
from millstream.admin.redrive_ledger import FROM_HEADER, Ledger, OffsetSet

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

DEAD_LETTERS = "__dlq__"
DEAD = "millstream-dead-"
REDRIVEN = "millstream-redriven"
DROPPED = (REDRIVEN, FROM_HEADER, "millstream-deliver-at")
CHUNK = 100
"""Dead letters per ledger entry."""


class Selection(NamedTuple):
    """Which dead letters are meant: those that meet every condition."""

    topic: str | None = None
    group: str | None = None
    reason: str | None = None
    """A part of the reason, in any case."""
    since_ms: int | None = None
    until_ms: int | None = None

    def has(self, letter: DeadLetter) -> bool:
        return (
            self.topic in (None, letter.topic)
            and self.group in (None, letter.group)
            and (self.reason is None or self.reason.lower() in letter.reason.lower())
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms < self.until_ms)
        )


@dataclass(slots=True)
class Report:
    selected: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By topic, group and reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    failed: int = 0
    read: int = 0
    total: int = 0
    """Dead letters in the topic."""
    seconds: float = 0.0
    """Since the first send."""


class RedriveFailed(Failure):
    """Some dead letters could not be sent. The next redrive determines which of the last ones the broker stored."""

    def __init__(self, report: Report, cause: Failure) -> None:
        super().__init__(f"{report.failed:,} dead letters could not be sent and remain in their topic: {cause}")
        self.report = report


def redrive(
    connection: Connection,
    selection: Selection | None = None,
    *,
    dead_letters: str = DEAD_LETTERS,
    limit: int | None = None,
    per_second: float | None = None,
    dry_run: bool = False,
    on_progress: Callable[[Report], object] | None = None,
) -> Report:
    """Sends the selected letters of the topic `dead_letters` back; by default, all."""
    if dead_letters not in connection.metadata().topics:
        raise Failure(f"there is no topic {dead_letters}, so there are no dead letters; --from names another topic")
    ledger = Ledger(connection, dead_letters, may_write=not dry_run)
    try:
        run = _Redrive(connection, dead_letters, ledger, selection or Selection(), limit, per_second)
        if dry_run:
            for chunk in run.chunks():
                run.count(chunk)
        else:
            run.send_all(on_progress or (lambda report: None))
    finally:
        ledger.close()
    if run.error is not None:
        raise RedriveFailed(run.report, explain(run.error, connection.address))
    return run.report


class DeadLetter(NamedTuple):
    """A dead letter, parsed from its headers."""

    topic: str
    partition: int
    group: str
    reason: str
    at_ms: int
    headers: list[tuple[str, bytes]]
    """The headers of the original record."""
    redriven: int
    is_unreadable: bool = False
    """The record was damaged: there is nothing to send back."""

    @classmethod
    def parse(cls, message: Message) -> DeadLetter | None:
        """None if it does not name its origin: another program wrote it."""
        headers = headers_of(message)
        said = {name: value.decode("utf-8", "replace") for name, value in headers}
        topic, partition = said.get(DEAD + "topic"), said.get(DEAD + "partition", "")
        if not topic or not partition.isdigit():
            return None
        try:
            moment = datetime.datetime.fromisoformat(said.get(DEAD + "at", ""))
            at_ms = int(moment.timestamp() * 1000)
        except ValueError:
            at_ms = message.timestamp()[1]
        kept = [(name, value) for name, value in headers if not name.startswith(DEAD) and name not in DROPPED]
        before = said.get(REDRIVEN, "")
        return cls(
            topic,
            int(partition),
            said.get(DEAD + "group", ""),
            said.get(DEAD + "reason", ""),
            at_ms,
            kept,
            int(before) if before.isdigit() and len(before) < 10 else 0,
            DEAD + "unreadable" in said,
        )


Chunk = list[tuple["Message", DeadLetter]]


class _Redrive:
    def __init__(
        self,
        connection: Connection,
        dead_letters: str,
        ledger: Ledger,
        selection: Selection,
        limit: int | None,
        per_second: float | None,
    ) -> None:
        self.report = Report()
        self.error: KafkaError | None = None
        self._connection = connection
        self._dlq = dead_letters
        self._ledger = ledger
        self._selection = selection
        self._limit = limit
        self._per_second = per_second
        self._started = 0.0
        """The time of the first send."""
        topics = connection.metadata().topics
        self._partitions = {name: len(each.partitions) for name, each in topics.items()}
        held = spans(connection, [(dead_letters, number) for number in topics[dead_letters].partitions])
        self._starts = {where: start for where, (start, _) in held.items()}
        self.report.total = sum(end - start for start, end in held.values())

    def send_all(self, on_progress: Callable[[Report], object]) -> None:
        report = self.report
        report.skipped["sent back by an interrupted redrive"] += self._ledger.recover()
        self._producer = self._connection.producer(
            {"enable.idempotence": True, "message.timeout.ms": 30_000, "message.max.bytes": 64 << 20}
        )
        for chunk in self.chunks():
            self.count(chunk)
            self._send(chunk)
            report.seconds = time.monotonic() - self._started
            on_progress(report)
            if self.error is not None:
                return
            due = report.sent / self._per_second if self._per_second else 0
            self._ledger.wait(max(due - report.seconds, 0))
        self._ledger.tidy()

    def count(self, chunk: Chunk) -> None:
        for _, letter in chunk:
            self.report.selected[letter.topic, letter.group, letter.reason] += 1

    def chunks(self) -> Iterator[Chunk]:
        size = CHUNK if self._per_second is None else max(min(CHUNK, int(self._per_second)), 1)
        chunk: Chunk = []
        left = self._limit
        for message in read(self._connection, self._starts):
            self.report.read += 1
            letter = self._selected(message)
            if letter is None:
                continue
            chunk.append((message, letter))
            if left is not None:
                left -= 1
            if len(chunk) >= size or left == 0:
                yield chunk
                chunk = []
            if left == 0:
                return
        if chunk:
            yield chunk

    def _selected(self, message: Message) -> DeadLetter | None:
        letter = DeadLetter.parse(message)
        skipped = self.report.skipped
        if letter is None:
            skipped["without an original topic"] += 1
        elif not self._selection.has(letter):
            skipped["not selected"] += 1
        elif self._ledger.has(message.partition() or 0, message.offset() or 0):
            skipped["already sent back"] += 1
        elif letter.is_unreadable:
            skipped["of damaged records"] += 1
        elif letter.topic not in self._partitions:
            skipped["of a deleted topic"] += 1
        else:
            return letter
        return None

    def _send(self, chunk: Chunk) -> None:
        """Writes `sending` to the ledger, sends, writes `sent`."""
        letters: dict[int, OffsetSet] = {}
        for message, _ in chunk:
            letters.setdefault(message.partition() or 0, OffsetSet()).add(message.offset() or 0, message.offset() or 0)
        targets = {self._target(letter) for _, letter in chunk}
        ends = {where: end for where, (_, end) in spans(self._connection, targets).items()}
        self._ledger.begin(letters, ends)
        self._started = self._started or time.monotonic()
        taken: dict[int, OffsetSet] = {}
        for message, letter in chunk:
            self._produce(message, letter, taken)
        while self._producer.flush(0.5):
            pass
        if self.error is None:  # else the next redrive checks which of them were stored
            self._ledger.end(taken)

    def _target(self, letter: DeadLetter) -> TopicPartition:
        """Its original partition; a topic recreated with fewer partitions gets another."""
        return letter.topic, letter.partition % self._partitions[letter.topic]

    def _produce(self, message: Message, letter: DeadLetter, taken: dict[int, OffsetSet]) -> None:
        partition, offset = message.partition() or 0, message.offset() or 0

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            if error is None:
                taken.setdefault(partition, OffsetSet()).add(offset, offset)
                self.report.sent += 1
            else:
                self.report.failed += 1
                self.error = self.error or error

        topic, target = self._target(letter)
        headers: list[tuple[str, str | bytes | None]] = [
            *letter.headers,
            (REDRIVEN, b"%d" % (letter.redriven + 1)),
            (FROM_HEADER, f"{self._dlq}/{partition}/{offset}".encode()),
        ]
        self._producer.produce(topic, message.value(), message.key(), target, on_delivery=on_delivery, headers=headers)
