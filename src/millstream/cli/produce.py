"""`millstream produce`: records from arguments, or one record per line from standard input or a file.

Input is read in chunks of any size (a pipe's 64 KiB, a terminal's one line), and each chunk is handed to librdkafka as
a whole. Deliveries are counted by their failures: librdkafka calls back only for those, and once its queue is empty
all other records are acknowledged. So a record costs no Python call of its own, and a million small lines take
little over a second.

Order is kept: a chunk is queued only if there is room for all of it. Otherwise later records could overtake a record
that is refused in the middle of a chunk.

A delay is a header with the time at which queues may deliver the record; stream consumers see the record at once. The
delay counts from the reading of the line, not from the start of the command.

If records wait for longer than a moment, the broker's reason is shown (`stall.py`).
"""

from __future__ import annotations

import enum
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.admin.failure import Failure, explain
from millstream.cli.connection import DEFAULT_BROKER, INT32_MAX, BrokerOption, Connection
from millstream.cli.moment import duration_ms, moment_ms
from millstream.cli.progress import Progress
from millstream.cli.stall import Stall

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

READ_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20
QUEUED_RECORDS_MAX = 400_000
QUEUED_BYTES_MAX = 256 << 20
DELIVER_AT = "millstream-deliver-at"


class Compression(enum.StrEnum):
    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Acks(enum.StrEnum):
    ALL = "all"
    ONE = "1"
    NONE = "0"


def produce(
    topic: Annotated[str, typer.Argument(show_default=False)],
    values: Annotated[list[str] | None, typer.Argument(help="One record each; without any, one per line read.")] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The key of every record.")] = None,
    header: Annotated[list[str] | None, typer.Option("--header", "-H", metavar="K=V", help="Repeatable.")] = None,
    partition: Annotated[int, typer.Option("--partition", "-p", min=-1, max=INT32_MAX, help="-1: by key.")] = -1,
    compression: Annotated[Compression, typer.Option("--compression", "-z", help="Of the batches.")] = Compression.NONE,
    acks: Annotated[Acks, typer.Option(help="Acknowledgement to wait for; all means durable.")] = Acks.ALL,
    file: Annotated[Path | None, typer.Option(help="Read lines from this file instead of standard input.")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Delay until queues deliver it: 30s, 10m, 2h.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time at which queues deliver it (ISO or @ms).")
    ] = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Write records: the VALUEs given, or a line a record from standard input.

    Exits with 1 if any record was not acknowledged, and says how many.
    """
    if values and file is not None:
        raise typer.BadParameter("give either values or --file, not both")
    headers = [_header(text) for text in header or []]
    due = _due(delay, at)
    connection = Connection(broker)
    producer = connection.producer(
        {
            "acks": acks.value,
            # A retry after a lost response must not store the record twice.
            "enable.idempotence": acks is Acks.ALL,
            "compression.type": compression.value,
            "linger.ms": 0 if values else 20,
            "batch.num.messages": 100_000,
            "message.max.bytes": 64 << 20,  # the broker's limit decides, not the client's
            "queue.buffering.max.messages": 2 * QUEUED_RECORDS_MAX,
            "queue.buffering.max.kbytes": 1 << 20,
            "message.timeout.ms": 30_000,
            # The time limit for the automatic creation of a missing topic.
            "topic.metadata.propagation.max.ms": 3000,
            "delivery.report.only.error": not values,
        }
    )
    sender = Sender(connection, producer, topic, key, headers, partition, due)
    if values:
        sender.send_values(values, acknowledged=acks is not Acks.NONE)
    else:
        sender.send_lines(file)


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header {text!r} is not NAME=VALUE")
    return name, value.encode("utf-8", "surrogateescape")


Due = Callable[[], int]
"""The delivery time of records that are sent now, in milliseconds since 1970."""


def _due(delay: str | None, at: str | None) -> Due | None:
    if delay is not None and at is not None:
        raise typer.BadParameter("give either --delay or --at, not both")
    if delay is not None:
        length = duration_ms(delay, "--delay")
        return lambda: _now_ms() + length
    if at is None:
        return None
    moment = moment_ms(at, "--at")
    if moment < _now_ms():
        raise typer.BadParameter(f"--at {at} is in the past; leave it out to deliver at once")
    return lambda: moment


def _now_ms() -> int:
    return int(time.time() * 1000)


class Sender:
    def __init__(
        self,
        connection: Connection,
        producer: Producer,
        topic: str,
        key: str | None,
        headers: list[tuple[str, bytes]],
        partition: int,
        due: Due | None = None,
    ) -> None:
        self._connection = connection
        self._producer = producer
        self._topic = topic
        self._key = None if key is None else key.encode("utf-8", "surrogateescape")
        self._headers: Any = headers
        self._plain_headers = headers
        self._due = due
        self._partition = partition
        self._failed = 0
        self._error: KafkaError | None = None
        self._stall = Stall(connection, topic)

    def send_values(self, values: list[str], acknowledged: bool) -> None:
        delivered: list[Message] = []

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is None:
                delivered.append(message)
            else:
                self._fail(error)

        self._set_time()
        for value in values:
            self._queue_one(value.encode("utf-8", "surrogateescape"), on_delivery)
        self._drain()
        for message in delivered:
            place = f"{self._topic} partition {message.partition()}"
            print(f"Produced to {place} at offset {message.offset()}" if acknowledged else f"Sent to {place}")
        self._finish(len(values))

    def send_lines(self, path: Path | None) -> None:
        started = time.monotonic()
        records = size = 0
        descriptor = _open(path)
        if os.isatty(descriptor):
            print("each line is a record; end with Ctrl-D", file=sys.stderr)
        with Progress(self._topic, _size(descriptor), wanted=not os.isatty(descriptor)) as progress:
            longest = 1
            for lines in _read_lines(descriptor):
                longest = max(longest, max(map(len, lines)))
                self._wait_for_room(len(lines), longest)
                self._set_time()
                if self._headers:
                    for line in lines:
                        self._queue_one(line, self._on_failure)
                else:
                    self._queue(lines)
                records += len(lines)
                size += sum(map(len, lines)) + len(lines)
                progress.update(records, size, time.monotonic() - started)
                if self._failed:
                    break
            self._drain()
        self._finish(records)
        seconds = max(time.monotonic() - started, 1e-9)
        rate = f"{size / 1e6:,.1f} MB in {seconds:.1f} s, {records / seconds:,.0f} records/s"
        print(f"Produced {records:,} record{'s' * (records != 1)} to {self._topic} ({rate})", file=sys.stderr)

    def _set_time(self) -> None:
        if self._due is not None:
            self._headers = [*self._plain_headers, (DELIVER_AT, b"%d" % self._due())]

    def _queue(self, lines: list[bytes]) -> None:
        key = self._key
        batch: list[dict[str, Any]] = (
            [{"value": line} for line in lines] if key is None else [{"value": line, "key": key} for line in lines]
        )
        taken = self._producer.produce_batch(
            self._topic, batch, partition=self._partition, on_delivery=self._on_failure
        )
        if taken < len(batch):
            for record in batch:
                if "_error" in record:
                    self._fail(record["_error"])

    def _queue_one(self, value: bytes, on_delivery: Any) -> None:
        from confluent_kafka import KafkaException

        while True:
            try:
                self._producer.produce(
                    self._topic, value, self._key, self._partition, on_delivery=on_delivery, headers=self._headers
                )
                return
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                self._fail(error.args[0])
                return

    def _wait_for_room(self, records: int, longest: int) -> None:
        limit = max(0, min(QUEUED_RECORDS_MAX, QUEUED_BYTES_MAX // longest) - records)
        self._producer.poll(0)
        while (waiting := len(self._producer)) > limit and not self._failed:
            self._stall.look(waiting)
            self._producer.poll(0.05)

    def _drain(self) -> None:
        # In slices, so that Ctrl-C takes effect; message.timeout.ms bounds the whole.
        while waiting := self._producer.flush(0.25):
            self._stall.look(waiting)

    def _on_failure(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._fail(error)

    def _fail(self, error: KafkaError) -> None:
        self._failed += 1
        self._error = self._error or error

    def _finish(self, records: int) -> None:
        if self._error is not None:
            is_late = self._error.code() == self._error._MSG_TIMED_OUT
            reason = (is_late and self._stall.reason) or explain(self._error, self._connection.address)
            raise Failure(f"{self._failed:,} of {records:,} records were not acknowledged by {self._topic}: {reason}")


def _open(path: Path | None) -> int:
    if path is None:
        return sys.stdin.fileno()
    try:
        descriptor = os.open(path, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return descriptor
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}); name another file with --file") from None


def _size(descriptor: int) -> int | None:
    """Known for a file, so that the bar can show the rest."""
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_lines(descriptor: int) -> Iterator[list[bytes]]:
    rest = b""
    while block := os.read(descriptor, READ_BYTES):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if lines:
            yield lines
        elif len(rest) > LINE_BYTES_MAX:
            raise Failure(f"a line is longer than {LINE_BYTES_MAX >> 20} MiB; is this a text file?")
    if rest:
        yield [rest]
