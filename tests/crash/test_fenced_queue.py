"""A broker that stands still for longer than its lease: the other has its queues, and it finds out when it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.serving import ServedBroker

LEASE_MS = 12_000
"""One test waits for its end. It is long because a broker on a busy machine must not lose it."""
RECORDS = 100


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ServedBroker, ServedBroker]]:
    """Start the second broker when the first is stopped: until then no broker can take its groups."""
    (tmp_path / "millstream.toml").write_text(f"lease_ms = {LEASE_MS}\nflowmq_unacknowledged_max = 20\n")
    store = f"sqlite:{tmp_path / 'store.db'}"
    flags = ["--flowmq", "127.0.0.1:0", "--config", str(tmp_path / "millstream.toml"), "--node-id"]
    with ServedBroker(tmp_path / "1", *flags, "1", store=store) as one, contextlib.ExitStack() as later:
        two = ServedBroker(tmp_path / "2", *flags, "2", store=store)
        later.push(two)
        yield one, two


def subscribed(address: str, topic: str, group: str) -> FlowmqClient:
    """To a broker that may not know yet that the group is free."""
    deadline = time.monotonic() + 60
    while True:
        client = FlowmqClient(address)
        try:
            client.subscribe(topic, group)
            return client
        except FlowmqError:
            client.close()
            assert time.monotonic() < deadline
            time.sleep(0.1)


def work(client: FlowmqClient, count: int, seconds: float) -> list[bytes]:
    """What it was given, so many at most, and had its acknowledgement confirmed for; until nothing comes for a while,
    or the connection ends.
    """
    confirmed: list[bytes] = []
    try:
        while len(confirmed) < count:
            message = client.next(seconds)
            client.ack(message)
            confirmed.append(message.payload)
    except (TimeoutError, ConnectionError, FlowmqError):
        pass
    return confirmed


def stand_still(broker: ServedBroker, file: Path) -> None:
    """Stops a process outside a transaction: a stopped holder of SQLite's lock would block all others."""
    while True:
        os.kill(broker.pid, signal.SIGSTOP)
        while psutil.Process(broker.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        with contextlib.closing(sqlite3.connect(file, timeout=1, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
                other.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(broker.pid, signal.SIGCONT)
        time.sleep(0.01)


def test_no_record_is_confirmed_by_both_when_one_stood_still(
    pair: tuple[ServedBroker, ServedBroker], tmp_path: Path
) -> None:
    one, two = pair
    with FlowmqClient(one.doors["flowmq"]) as old:
        old.create_topic("jobs")
        old.subscribe("jobs", "workers")
        for number in range(RECORDS):
            old.publish("jobs", b"%d" % number)
        before = [old.next() for _ in range(3)]
        for message in before:
            old.ack(message)
        stand_still(one, tmp_path / "store.db")
        try:
            two.start()
            new = subscribed(two.doors["flowmq"], "jobs", "workers")
        finally:
            os.kill(one.pid, signal.SIGCONT)
        with new:
            theirs, ours = work(new, RECORDS - len(before), 20), work(old, RECORDS, 2)
        assert ours == [], "they were given to the other broker's subscriber by then"
        assert sorted(theirs + [message.payload for message in before]) == sorted(b"%d" % n for n in range(RECORDS))
        with FlowmqClient(one.doors["flowmq"]) as late, pytest.raises(FlowmqError, match="broker 2 on 127"):
            late.subscribe("jobs", "workers")
