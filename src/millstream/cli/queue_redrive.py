"""`millstream queue redrive`: sends dead letters back to their original topics.

A redriven record is a new one, at the end of its old partition, with its key, value and headers, but

- without the headers of its death (`millstream-dead-...`) and without a delay, which is over;
- with `millstream-redriven`, the number of its redrives, and `millstream-redriven-from`, the dead letter's position.

Each dead letter is sent back once, however often the command runs and however it ends: see `redriven.py`. The record
goes to the topic, so every group of the topic gets it, not only the queue in which it died.
"""

from __future__ import annotations

import datetime
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.failure import Failure, explain
from millstream.cli.moment import past_ms
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import Partition, spans
from millstream.cli.progress import Progress
from millstream.cli.redriven import FROM_HEADER, Ledger, Runs, headers_of, read

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

DEAD = "millstream-dead-"
REDRIVEN = "millstream-redriven"
DROPPED = (REDRIVEN, FROM_HEADER, "millstream-deliver-at")
CHUNK = 100
"""Dead letters per ledger entry."""


def redrive(
    from_: Annotated[str, typer.Option("--from", metavar="TOPIC", help="The dead-letter topic.")] = "__dlq__",
    topic: Annotated[str | None, typer.Option(help="Only those that came from this topic.")] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Only those that this queue gave up.")] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only those whose reason has this text in it.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only those that died then or later: ISO, @ms, or 2h for ago.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only those that died before.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many.")] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="N/s", help="At most so many a second.", show_default="as fast as it goes")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, send nothing.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Send dead letters back to the topics they came from; each of them once."""
    now_ms = int(time.time() * 1000)
    wish = Wish(
        topic,
        group,
        None if reason is None else reason.lower(),
        None if since is None else past_ms(since, "--since", now_ms),
        None if until is None else past_ms(until, "--until", now_ms),
    )
    per_second = None if rate is None else parse_rate(rate)
    connection = Connection(broker)
    if from_ not in connection.metadata().topics:
        raise Failure(f"there is no topic {from_}, so there are no dead letters; --from names another topic")
    ledger = Ledger(connection, from_, may_write=not dry_run)
    try:
        sending = Redrive(connection, from_, ledger, wish, limit, per_second, dry_run)
        sending.run()
    finally:
        ledger.close()
    _show(sending, dry_run, output)
    if sending.error is not None:
        failed = explain(sending.error, broker)
        raise Failure(f"{sending.failed:,} dead letters were not taken and stay where they are: {failed}")


def parse_rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)(?:/s)?", text)
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"--rate {text} is not a number of records a second, as in 50/s")
    return float(match[1])


class Wish(NamedTuple):
    """The selection of dead letters."""

    topic: str | None = None
    group: str | None = None
    reason: str | None = None
    """In lower case."""
    since_ms: int | None = None
    until_ms: int | None = None

    def wants(self, letter: Letter) -> bool:
        return (
            self.topic in (None, letter.topic)
            and self.group in (None, letter.group)
            and (self.reason is None or self.reason in letter.reason.lower())
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms < self.until_ms)
        )


class Letter(NamedTuple):
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
    def read(cls, message: Message) -> Letter | None:
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


@dataclass(slots=True)
class Redrive:
    connection: Connection
    dlq: str
    ledger: Ledger
    wish: Wish
    limit: int | None
    per_second: float | None
    dry_run: bool
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By topic, group and reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    failed: int = 0
    error: KafkaError | None = None
    _looked_at: int = 0
    _started: float = 0.0
    """The time of the first send."""
    _producer: Any = None
    _partitions: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        topics = self.connection.metadata().topics
        self._partitions = {name: len(each.partitions) for name, each in topics.items()}
        held = spans(self.connection, [(self.dlq, number) for number in topics[self.dlq].partitions])
        if not self.dry_run:
            self.skipped["sent back by a redrive that was cut short"] += self.ledger.recover()
            self._producer = self.connection.producer(
                {"enable.idempotence": True, "message.timeout.ms": 30_000, "message.max.bytes": 64 << 20}
            )
        total = sum(end - start for start, end in held.values())
        with Progress(self.dlq, total, wanted=not self.dry_run) as progress:
            for chunk in self._chunks({place: start for place, (start, _) in held.items()}):
                for _, letter in chunk:
                    self.counts[letter.topic, letter.group, letter.reason] += 1
                if self.dry_run:
                    continue
                self._send(chunk)
                seconds = time.monotonic() - self._started
                progress.update(self.sent, self._looked_at, seconds)
                if self.error is not None:
                    return
                self.ledger.wait(max(self.sent / self.per_second - seconds, 0) if self.per_second else 0)
        if not self.dry_run:
            self.ledger.tidy()

    def _chunks(self, starts: dict[Partition, int]) -> Iterator[list[tuple[Message, Letter]]]:
        size = CHUNK if self.per_second is None else max(min(CHUNK, int(self.per_second)), 1)
        chunk: list[tuple[Message, Letter]] = []
        left = self.limit
        for message in read(self.connection, starts):
            self._looked_at += 1
            letter = self._wanted(message)
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

    def _wanted(self, message: Message) -> Letter | None:
        letter = Letter.read(message)
        if letter is None:
            self.skipped["without a word where from"] += 1
        elif not self.wish.wants(letter):
            self.skipped["not asked for"] += 1
        elif self.ledger.has(message.partition() or 0, message.offset() or 0):
            self.skipped["sent back before"] += 1
        elif letter.is_unreadable:
            self.skipped["of records that were damaged"] += 1
        elif letter.topic not in self._partitions:
            self.skipped["of a topic that is gone"] += 1
        else:
            return letter
        return None

    def _send(self, chunk: list[tuple[Message, Letter]]) -> None:
        """Writes `sending` to the ledger, sends, writes `sent`."""
        letters: dict[int, Runs] = {}
        for message, _ in chunk:
            letters.setdefault(message.partition() or 0, Runs()).add(message.offset() or 0, message.offset() or 0)
        targets = {self._target(letter) for _, letter in chunk}
        ends = {place: end for place, (_, end) in spans(self.connection, targets).items()}
        self.ledger.begin(letters, ends)
        self._started = self._started or time.monotonic()
        taken: dict[int, Runs] = {}
        for message, letter in chunk:
            self._produce(message, letter, taken)
        while self._producer.flush(0.5):
            pass
        if self.error is None:  # else the next redrive checks which of them were stored
            self.ledger.end(taken)

    def _target(self, letter: Letter) -> Partition:
        """Its original partition; a topic recreated with fewer partitions gets another."""
        return letter.topic, letter.partition % self._partitions[letter.topic]

    def _produce(self, message: Message, letter: Letter, taken: dict[int, Runs]) -> None:
        partition, offset = message.partition() or 0, message.offset() or 0

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            if error is None:
                taken.setdefault(partition, Runs()).add(offset, offset)
                self.sent += 1
            else:
                self.failed += 1
                self.error = self.error or error

        topic, target = self._target(letter)
        headers = [
            *letter.headers,
            (REDRIVEN, b"%d" % (letter.redriven + 1)),
            (FROM_HEADER, f"{self.dlq}/{partition}/{offset}".encode()),
        ]
        self._producer.produce(topic, message.value(), message.key(), target, on_delivery=on_delivery, headers=headers)


def _show(sending: Redrive, dry_run: bool, output: Format) -> None:
    rows = [
        {"topic": topic, "group": group, "reason": reason, "records": count}
        for (topic, group, reason), count in sorted(sending.counts.items())
    ]
    skipped = {reason: count for reason, count in sending.skipped.items() if count}
    if output is Format.JSON:
        show_json({"dry_run": dry_run, "sent": sending.sent, "letters": rows, "skipped": skipped})
        return
    if rows:
        show_table({key: key.upper() for key in ("topic", "group", "reason", "records")}, rows, "")
        print()
    if skipped:
        print("left alone: " + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()))
    if dry_run:
        print(f"{sum(sending.counts.values()):,} would be sent back (--dry-run)")
    else:
        print(f"{sending.sent:,} sent back")
