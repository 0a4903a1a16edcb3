"""`make demo`: a broker, real clients, a `kill -9` in the middle, and the count of what came back.

Everything happens in a temporary directory and on free ports. Each step prints one line; the table at the end holds the
numbers, and the exit code is 0 only if every record that was acknowledged is there, once, at its offset and in order.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 6
CUSTOMERS = 500
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS_PER_COMPRESSION = 20_000
RECORDS_UNDER_FIRE = 100_000
IN_FLIGHT_MAX = 5000
"""Few enough that answers keep coming while records still go out."""
LINES = 200_000
START_SECONDS_MAX = 15.0

console = Console(highlight=False)


class Broker:
    """`millstream serve` as a process of its own, on ports that stay the same when it comes back."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] = (directory / "broker.log").open("a")
        self.kafka = self.http = "127.0.0.1:0"

    def start(self) -> float:
        """Seconds until it was ready."""
        started = time.monotonic()
        command = [sys.executable, "-m", "millstream", "serve", "--data", str(self._directory / "data")]
        command += ["--kafka", self.kafka, "--http", self.http]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=self._directory, env=environ
        )
        assert self._process.stdout is not None
        killer = threading.Timer(START_SECONDS_MAX, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line.startswith("ready "):
            raise RuntimeError(f"the broker did not start; its log:\n{(self._directory / 'broker.log').read_text()}")
        addresses = dict(part.split("=", 1) for part in line.split()[1:])
        self.kafka, self.http = addresses["kafka"], addresses["http"]
        return time.monotonic() - started

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(20)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def command(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs our own command line against this broker."""
        command = [sys.executable, "-m", "millstream", *arguments, "--broker", self.kafka]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"millstream {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout


@dataclass
class Ledger:
    """What was sent, acknowledged and read; a record's value is its number, and says who it is."""

    sent: int = 0
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    read: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    """(partition, offset, key, number), as they came."""

    def next_record(self) -> tuple[bytes, bytes]:
        number = self.sent
        self.sent += 1
        return b"customer-%03d" % (number * 7919 % CUSTOMERS), b'{"order":%08d,"item":"widget"}' % number

    def on_delivery(self, error: Any, message: Any) -> None:
        if error is None:
            self.acknowledged[number_of(message.value())] = (message.partition(), message.offset())

    def verdict(self) -> dict[str, int]:
        seen: dict[int, list[tuple[int, int]]] = {}
        last_of_key: dict[bytes, int] = {}
        out_of_order = 0
        for partition, offset, key, number in sorted(self.read):
            seen.setdefault(number, []).append((partition, offset))
            out_of_order += number < last_of_key.get(key, -1)
            last_of_key[key] = number
        return {
            "lost": sum(number not in seen for number in self.acknowledged),
            "duplicated": sum(len(places) - 1 for places in seen.values()),
            "moved": sum(place not in seen.get(number, [place]) for number, place in self.acknowledged.items()),
            "out of order": out_of_order,
        }


def number_of(value: bytes) -> int:
    return int(value[len(b'{"order":') :].partition(b",")[0])


def producer(broker: Broker, compression: str) -> Any:
    from confluent_kafka import Producer

    return Producer(
        {
            "bootstrap.servers": broker.kafka,
            "enable.idempotence": True,
            "compression.type": compression,
            "linger.ms": 5,
            "queue.buffering.max.messages": 500_000,
            "reconnect.backoff.max.ms": 200,
            "error_cb": lambda error: None,
            "log_level": 0,
        }
    )


def send(client: Any, ledger: Ledger, count: int) -> None:
    for _ in range(count):
        key, value = ledger.next_record()
        client.produce(TOPIC, value, key, on_delivery=ledger.on_delivery)
        client.poll(0)
        while len(client) > IN_FLIGHT_MAX:
            client.poll(0.01)


def send_every_compression(broker: Broker, ledger: Ledger) -> str:
    for compression in COMPRESSIONS:
        client = producer(broker, compression)
        send(client, ledger, RECORDS_PER_COMPRESSION)
        client.flush(30)
    return f"{len(ledger.acknowledged):,} records acknowledged"


def send_while_the_broker_is_killed(broker: Broker, ledger: Ledger) -> str:
    client = producer(broker, "lz4")
    before = len(ledger.acknowledged)
    sender = threading.Thread(target=send, args=(client, ledger, RECORDS_UNDER_FIRE))
    sender.start()
    # Somewhere in the middle: some answers have arrived, others never will.
    wanted = before + RECORDS_UNDER_FIRE * random.uniform(0.2, 0.5)
    while len(ledger.acknowledged) < wanted and sender.is_alive():
        time.sleep(0.001)
    broker.end(signal.SIGKILL)
    answered = len(ledger.acknowledged) - before
    seconds = broker.start()
    sender.join()
    client.flush(30)
    return f"after {answered:,} answers, back in {seconds:.2f} s"


def read_as_a_group_of_two(broker: Broker, ledger: Ledger) -> str:
    shares: list[list[tuple[int, int, bytes, int]]] = [[], []]
    enough = threading.Event()
    members = [
        threading.Thread(target=read_as_member, args=(broker, share, shares, len(ledger.acknowledged), enough))
        for share in shares
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(30)
    enough.set()
    ledger.read = shares[0] + shares[1]
    return f"{len(shares[0]):,} + {len(shares[1]):,} records read"


def read_as_member(
    broker: Broker, share: list[Any], shares: list[list[Any]], total: int, enough: threading.Event
) -> None:
    from confluent_kafka import Consumer, KafkaException

    consumer = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "cooperative-sticky",
            "error_cb": lambda error: None,
            "log_level": 0,
        }
    )

    def commit(*_: object) -> None:
        # Before a partition goes to the other member too, or that one would read its records again.
        with suppress(KafkaException):  # nothing new to commit
            consumer.commit(asynchronous=False)

    consumer.subscribe([TOPIC], on_revoke=commit)
    deadline = time.monotonic() + 20
    while not enough.is_set() and time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is None or message.error() is not None:
            continue
        value = message.value() or b""
        share.append((message.partition(), message.offset(), message.key(), number_of(value)))
        if sum(map(len, shares)) >= total:
            enough.set()
    commit()
    consumer.close()


def lag(broker: Broker) -> int:
    return int(json.loads(broker.command("group", "describe", GROUP, "--output", "json"))["lag"])


def metrics(broker: Broker) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{broker.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


class Report:
    """The lines while it runs, and the table at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        started = time.monotonic()
        outcome: list[str] = []
        with console.status(f"{title} ..."):
            yield outcome.append
        seconds = time.monotonic() - started
        console.print(f"  [green]✓[/] [bold]{title:<25}[/] [dim]{seconds:4.1f} s[/]  {''.join(outcome)}")

    def expect(self, what: str, put_in: int, came_out: int) -> None:
        self.rows.append((what, put_in, came_out))

    def show(self) -> bool:
        table = Table(title="\nWhat went in, and what came out", title_justify="left", title_style="bold")
        table.add_column("")
        for heading in ("in", "out", ""):
            table.add_column(heading, justify="right")
        for what, put_in, came_out in self.rows:
            same = put_in == came_out
            table.add_row(what, f"{put_in:,}", f"{came_out:,}", "[green]✓[/]" if same else "[red]✗[/]")
        console.print(table)
        return all(put_in == came_out for _, put_in, came_out in self.rows)


def run(broker: Broker, report: Report) -> None:
    ledger = Ledger()
    with report.step("start a broker") as say:
        seconds = broker.start()
        say(f"ready in {seconds:.2f} s on {broker.kafka}")
    with report.step("create a topic") as say:
        say(broker.command("topic", "create", TOPIC, "-p", str(PARTITIONS)).strip())
    with report.step("produce, 5 compressions") as say:
        say(send_every_compression(broker, ledger))
    with report.step("kill -9 under load") as say:
        say(send_while_the_broker_is_killed(broker, ledger))
    with report.step("consume in a group of two") as say:
        say(read_as_a_group_of_two(broker, ledger))
    report.expect("records sent, and acknowledged", ledger.sent, len(ledger.acknowledged))
    report.expect("records acknowledged, and read by the group", len(ledger.acknowledged), len(ledger.read))
    for what, count in ledger.verdict().items():
        report.expect(f"acknowledged records {what}", 0, count)

    with report.step("seq | millstream produce") as say:
        lines = "".join(f"{number}\n" for number in range(LINES))
        started = time.monotonic()
        broker.command("produce", "numbers", stdin=lines)
        rate = LINES / (time.monotonic() - started)
        back = broker.command("consume", "numbers", "--until-end")
        say(f"{LINES:,} lines, {rate:,.0f} a second")
        report.expect("lines piped in, and equal lines out", LINES, LINES if back == lines else len(back.splitlines()))
    if kcat := shutil.which("kcat"):
        with report.step("consume with kcat") as say:
            command = [kcat, "-b", broker.kafka, "-C", "-t", TOPIC, "-e", "-q", "-f", "%o\n"]
            counted = subprocess.run(command, capture_output=True, timeout=30).stdout.count(b"\n")
            say(f"{counted:,} records")
            report.expect("records acknowledged, and read by kcat", len(ledger.acknowledged), counted)
    with report.step("scrape the metrics") as say:
        figures = metrics(broker)
        behind = sum(value for name, value in figures.items() if name.startswith("kafka_consumergroup_lag{"))
        say(f"{len(figures):,} figures at {broker.http}/metrics")
        report.expect("lag of the group, by /metrics", 0, int(behind))
        report.expect("lag of the group, by `group describe`", 0, lag(broker))
    with report.step("stop the broker") as say:
        code = broker.end(signal.SIGTERM)
        say("cleanly, on SIGTERM")
        report.expect("exit code of the broker", 0, code)


def main() -> int:
    console.print("\n[bold]Millstream[/]: one log, every door\n")
    report = Report()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="millstream-demo-") as directory:
        broker = Broker(Path(directory))
        try:
            run(broker, report)
        except Exception as error:
            console.print("  [red]✗[/]", Text(str(error)))
            return 1
        finally:
            broker.close()
    good = report.show()
    verdict = "[green]Nothing acknowledged was lost.[/]" if good else "[red]The counts differ.[/]"
    console.print(f"\n{verdict} {time.monotonic() - started:.0f} s in all.")
    if good:
        console.print("Next: [bold].venv/bin/millstream serve[/], then any Kafka client on 127.0.0.1:9092\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
