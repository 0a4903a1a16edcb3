"""`millstream consume`: records of one or more topics, to standard output.

Without a group the partitions are read directly from the requested position, and nothing is committed. With a group
the partitions are shared with its other members, reading continues at the committed offsets, and the offset of a record
is committed only after the record was written to standard output.
"""

from __future__ import annotations

import base64
import enum
import json
import select
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.admin.failure import Failure, explain
from millstream.admin.position import Kind, Position, TopicPartition, resolve
from millstream.cli import hush
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.position import parse_position
from millstream.cli.template import Render, compile_template

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

CHUNK_RECORDS = 1000
WAIT_SECONDS = 0.1


class Shape(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def consume(
    topics: Annotated[list[str], typer.Argument(show_default=False)],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="POSITION",
            help="start, end, an offset, a time (ISO or @ms), -N for the last N, or group: where the group left off.",
            show_default="end; group with --group; start with --until-end",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Exit after this many records.")] = None,
    template: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="%t topic %p partition %o offset %T time %k key %v value %h headers; or luxun-pack.",
        ),
    ] = r"%v\n",
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Exit before the values exceed this many bytes; one is always shown.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Read as a member of this group.")] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Start of --partition; the same as --from OFFSET.")] = None,
    until_end: Annotated[bool, typer.Option("--until-end", "-e", help="Exit at the end of the topic.")] = False,
    output: Annotated[Shape, typer.Option("--output", "-o", help="json: one object per line.")] = Shape.TEXT,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Read records, and wait for more until Ctrl-C, --count or --until-end."""
    if offset is not None and (partition is None or from_ is not None):
        raise typer.BadParameter("--offset goes with --partition, and not with --from")
    if group is not None and partition is not None:
        raise typer.BadParameter("a group assigns its partitions itself: leave out --partition or --group")
    start = from_ or (str(offset) if offset is not None else "group" if group else "start" if until_end else "end")
    if start == "group" and group is None:
        raise typer.BadParameter("--from group needs --group")
    position = Position(Kind.START) if start == "group" else parse_position(start)
    if group is not None and position.kind not in (Kind.START, Kind.END):
        raise typer.BadParameter(f"a group continues where it left off; move it with `millstream group seek {group}`")
    render = render_json if output is Shape.JSON else compile_template(template)

    connection = Connection(broker)
    for topic in topics:
        connection.topic(topic)
    reading = Reading(connection, render, count, until_end, max_bytes)
    if group is None:
        reading.open_directly(topics, partition, position)
    else:
        reading.open_group(topics, group, position)
    if start == "end" and sys.stderr.isatty():
        print("waiting for new records; --from start shows existing ones", file=sys.stderr)
    try:
        reading.run()
    except BrokenPipeError:
        hush()
    finally:
        reading.close()


def render_json(message: Message) -> bytes:
    headers: Any = message.headers() or []
    record = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": message.timestamp()[1],
        "key": text_of(message.key()),
        "value": text_of(message.value()),
        "headers": [[name, text_of(value)] for name, value in headers],
    }
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def text_of(value: bytes | None) -> object:
    """JSON has no bytes: a value that is not UTF-8 is base64, marked so that it cannot be taken for text."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


@dataclass(slots=True)
class Reading:
    connection: Connection
    render: Render
    left: int | None
    until_end: bool
    left_bytes: int | None = None
    assigned: set[TopicPartition] | None = None
    """None: no assignment yet."""
    finished: set[TopicPartition] = field(default_factory=set)
    grouped: bool = False
    has_written: bool = False
    is_full: bool = False
    consumer: Consumer = field(init=False)

    def open_directly(self, topics: list[str], partition: int | None, position: Position) -> None:
        import confluent_kafka

        wanted = [(topic, number) for topic in topics for number in self.connection.partitions(topic, partition)]
        offsets = resolve(self.connection, position, wanted)
        if position.kind is Kind.OFFSET and offsets and all(end < position.number for end in offsets.values()):
            behind = ", ".join(f"{topic} partition {number} ends at {end}" for (topic, number), end in offsets.items())
            print(f"no partition has offset {position.number}: {behind}; reading from there", file=sys.stderr)
        self.assigned = set(offsets)
        self.consumer = self._consumer(self.connection.client_id, "error")
        self.consumer.assign([confluent_kafka.TopicPartition(*where, offset) for where, offset in offsets.items()])

    def open_group(self, topics: list[str], group: str, position: Position) -> None:
        self.grouped = True
        self.consumer = self._consumer(group, "latest" if position.kind is Kind.END else "earliest")

        def on_assign(consumer: Consumer, partitions: list[Any]) -> None:
            self.assigned = {(where.topic, where.partition) for where in partitions}

        self.consumer.subscribe(topics, on_assign=on_assign)

    def run(self) -> None:
        while self.left is None or self.left > 0:
            chunk = CHUNK_RECORDS if self.left is None else min(self.left, CHUNK_RECORDS)
            messages = self.consumer.consume(chunk, WAIT_SECONDS)
            records = [message for message in messages if not self._is_event(message)]
            if records:
                self._write(self._within_bytes(records))
                if self.is_full:
                    return
            elif _reader_left():
                return
            if self.until_end and self.assigned is not None and self.assigned <= self.finished:
                return

    def close(self) -> None:
        self.consumer.close()

    def _consumer(self, group: str, reset: str) -> Consumer:
        return self.connection.consumer(
            {
                "group.id": group,
                "auto.offset.reset": reset,
                "enable.auto.commit": self.grouped,
                "enable.auto.offset.store": False,
                "enable.partition.eof": self.until_end,
                "session.timeout.ms": 10_000,
                "fetch.queue.backoff.ms": 20,
                # The end of a partition is an empty response, which the broker delays by this time.
                "fetch.wait.max.ms": 20 if self.until_end else 500,
            }
        )

    def _is_event(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return False
        if error.code() == error._PARTITION_EOF:
            self.finished.add((message.topic() or "", message.partition() or 0))
            return True
        if error.code() == error._AUTO_OFFSET_RESET:
            where = f"{message.topic()} partition {message.partition()}"
            raise Failure(f"records of {where} were removed before they were read; start again with --from start")
        if not error.retriable():
            raise self._explain(error)
        return True

    def _within_bytes(self, records: list[Message]) -> list[Message]:
        """The records that fit into --max-bytes; the first always does."""
        if self.left_bytes is None:
            return records
        for at, message in enumerate(records):
            size = len(message.value() or b"")
            if size > self.left_bytes and (at or self.has_written):
                self.is_full = True
                return records[:at]
            self.left_bytes -= size
            self.has_written = True
            if self.left_bytes <= 0:
                self.is_full = True
                return records[: at + 1]
        return records

    def _write(self, records: list[Message]) -> None:
        out = sys.stdout.buffer
        out.write(b"".join([self.render(message) for message in records]))
        out.flush()
        if self.left is not None:
            self.left -= len(records)
        if self.grouped:
            self._store(records)

    def _store(self, records: list[Message]) -> None:
        import confluent_kafka

        ends = {(message.topic() or "", message.partition() or 0): (message.offset() or 0) + 1 for message in records}
        for (topic, partition), offset in ends.items():
            try:
                self.consumer.store_offsets(offsets=[confluent_kafka.TopicPartition(topic, partition, offset)])
            except confluent_kafka.KafkaException:
                # A rebalance revoked the partition: its new owner reads these records again.
                continue

    def _explain(self, error: KafkaError) -> Failure:
        return explain(error, self.connection.address)


def _reader_left() -> bool:
    """Whether the reader of our output is gone. Without records to write, no write error reveals it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
