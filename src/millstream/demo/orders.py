"""Orders in and out over real clients, with a `kill -9` of the broker in the middle.

Every acknowledged record must survive: once, at its offset, and in the order of its key.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from millstream.demo.broker import Broker
from millstream.demo.report import Report

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 6
CUSTOMERS = 500
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS_PER_COMPRESSION = 20_000
RECORDS_UNDER_FIRE = 100_000
IN_FLIGHT_MAX = 5000
"""Low enough that answers arrive while records still go out."""
LINES = 200_000


@dataclass
class Ledger:
    """The records sent, acknowledged and read; a record's value holds its number."""

    sent: int = 0
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    read: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    """(partition, offset, key, number), as received."""

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
    # In the middle: some acknowledgements have arrived, some never will.
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
    from confluent_kafka import Consumer, KafkaError, KafkaException

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

    def commit() -> bool:
        try:
            consumer.commit(asynchronous=False)
        except KafkaException as error:
            code = error.args[0].code()
            if code in (KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION):
                return False
            if code != KafkaError._NO_OFFSET:  # nothing new to commit
                raise
        return True

    def give_up(*_: object) -> None:
        commit()  # or the other member would read the same records again

    consumer.subscribe([TOPIC], on_revoke=give_up)
    deadline = time.monotonic() + 20
    while not enough.is_set() and time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is None or message.error() is not None:
            continue
        value = message.value() or b""
        share.append((message.partition(), message.offset(), message.key(), number_of(value)))
        if sum(map(len, shares)) >= total:
            enough.set()
    while not commit() and time.monotonic() < deadline:
        consumer.poll(0.1)  # until the rebalance ends
    consumer.close()


def lag(broker: Broker) -> int:
    return int(json.loads(broker.command("group", "describe", GROUP, "--output", "json"))["lag"])


def metrics(broker: Broker) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{broker.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def is_lag(name: str) -> bool:
    return name.startswith("kafka_consumergroup_lag{") and f'"{GROUP}"' in name


def run(broker: Broker, report: Report) -> None:
    ledger = Ledger()
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
        behind = sum(value for name, value in figures.items() if is_lag(name))
        say(f"{len(figures):,} figures at {broker.http}/metrics")
        report.expect("lag of the group, by /metrics", 0, int(behind))
        report.expect("lag of the group, by `group describe`", 0, lag(broker))
