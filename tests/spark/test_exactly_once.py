"""Two pipelines, three kinds of sink, and a driver and tasks that are killed at random moments, over and over."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable

from tests.dice import dice  # noqa: F401  (a fixture)
from tests.serving import ServedBroker

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "jobs" / "pipelines.py"
RECORDS = 20_000
"""To begin with."""
TRICKLE_RECORDS, TRICKLE_SECONDS = 50, 0.5
KEYS = 100
DRIVER_KILLS = TASK_KILLS = int(os.environ.get("SOAK_KILLS", "2"))
"""At least so many of each: `make soak` has twelve and twelve, which takes some minutes."""
ROUND_SECONDS_MAX = 120.0

DECODED = """
name = "decoded"
rows_per_batch = 2000
trigger = "0 seconds"
[source]
topic = "TOPIC"
name = "events"
schema = "id LONG, key LONG"
[[step]]
name = "per_key"
sql = "SELECT key, count(*) AS hits, sum(id) AS ids FROM events GROUP BY key"
[[sink]]
from = "events"
lake = "decoded"
[[sink]]
from = "per_key"
table = "sqlite:hits.db"
name = "hits"
key = ["key"]
"""
MOVED = """
name = "moved"
rows_per_batch = 2000
trigger = "0 seconds"
[source]
topic = "TOPIC"
name = "events"
format = "bytes"
[[sink]]
from = "events"
lake = "moved"
[[sink]]
id = "parquet"
from = "events"
lake = "parquet"
format = "parquet"
"""


class Driver:
    """One life of the process that runs both pipelines."""

    def __init__(self, broker: str, mode: str, files: list[Path], directory: Path) -> None:
        command = [sys.executable, str(JOB), broker, "local[2,8]", mode, *map(str, files)]
        self._errors = (directory / "driver.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=directory, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True
        )
        self.batches = 0
        self.at_work = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.batches += 1
                self.at_work.set()
        self.at_work.set()

    def workers(self) -> Iterator[psutil.Process]:
        """The Python processes that run tasks."""
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # the driver may end just now
            children = psutil.Process(self.process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                if any("pyspark.daemon" in part for part in child.cmdline()) and not child.children():
                    yield child

    def wait(self) -> int:
        """For its end, which may take as long as it comes forward; gives the exit code."""
        seen, deadline = -1, 0.0
        while self.process.poll() is None:
            if self.batches > seen:
                seen, deadline = self.batches, time.monotonic() + ROUND_SECONDS_MAX
            assert time.monotonic() < deadline, f"no batch after {seen} in {ROUND_SECONDS_MAX:g} s: {self.said()}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        return self.process.returncode

    def said(self) -> str:
        return Path(self._errors.name).read_text()[-3000:]

    def kill(self, *, only_python: bool) -> None:
        if only_python:
            self.process.kill()
            self.process.wait()
        # The JVM ends by itself when its parent is gone, but a new one must not wait for that.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        self._errors.close()


@pytest.mark.xdist_group("exactly-once")
@pytest.mark.timeout(600 + 90 * DRIVER_KILLS)  # by far: the less a machine gives, the more records come meanwhile
def test_lake_and_table_have_every_record_once_after_kills_at_random_moments(
    broker: ServedBroker,
    unique: Callable[[str], str],
    tmp_path: Path,
    dice: random.Random,  # noqa: F811
) -> None:
    topic = unique("events")
    trickle = Trickle(broker, topic)
    files = []
    for name, text in (("decoded", DECODED), ("moved", MOVED)):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(text.replace("TOPIC", topic))
    driver_kills = task_kills = batches = 0
    while driver_kills < DRIVER_KILLS or task_kills < TASK_KILLS:
        driver = Driver(broker.address, "on", files, tmp_path)
        try:
            assert driver.at_work.wait(ROUND_SECONDS_MAX), driver.said()
            assert driver.process.poll() is None, driver.said()
            until = time.monotonic() + dice.uniform(0.1, 2.0)
            while time.monotonic() < until:
                time.sleep(dice.uniform(0.05, 0.4))
                workers = list(driver.workers())
                if workers and dice.random() < 0.7:
                    with suppress(psutil.NoSuchProcess):
                        dice.choice(workers).kill()
                        task_kills += 1
        finally:
            driver.kill(only_python=dice.random() < 0.5)
        driver_kills += 1
        batches += driver.batches
        assert driver_kills < 4 * DRIVER_KILLS
    values = trickle.stop()
    last = Driver(broker.address, "once", files, tmp_path)
    try:
        assert last.wait() == 0, last.said()
    finally:
        last.kill(only_python=False)
    batches += last.batches
    print(f"\nrecords {len(values)}, driver kills {driver_kills}, task kills {task_kills}, batches seen {batches}")
    assert_everything_once(tmp_path, values)


class Trickle:
    """Records from a producer that does not stop before it is told to: every life of the driver has work."""

    def __init__(self, broker: ServedBroker, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": broker.address})
        for made in admin.create_topics([NewTopic(topic, 4), NewTopic(f"{topic}.dead", 1)]).values():
            made.result()
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 10, "compression.type": "lz4"})
        self._values: list[bytes] = []
        self._stopping = threading.Event()
        self._send(RECORDS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _send(self, count: int) -> None:
        for number in range(len(self._values), len(self._values) + count):
            self._values.append(json.dumps({"id": number, "key": number * 7919 % KEYS}).encode())
            self._producer.produce(self._topic, self._values[-1], partition=number % 4)
        assert self._producer.flush(30) == 0

    def _run(self) -> None:
        while not self._stopping.wait(TRICKLE_SECONDS):
            self._send(TRICKLE_RECORDS)

    def stop(self) -> list[bytes]:
        """All that was sent."""
        self._stopping.set()
        self._thread.join()
        return self._values


def assert_everything_once(directory: Path, values: list[bytes]) -> None:
    decoded = DeltaTable(directory / "decoded").to_pyarrow_table(columns=["id"]).column("id").to_pylist()
    assert summary(decoded) == summary(range(len(values)))
    moved = DeltaTable(directory / "moved").to_pyarrow_table(columns=["value"]).column("value").to_pylist()
    assert summary(moved) == summary(values)
    import pyarrow.dataset as ds

    parquet = ds.dataset(directory / "parquet", format="parquet", partitioning="hive")
    assert summary(parquet.to_table(columns=["value"]).column("value").to_pylist()) == summary(values)
    hits: Counter[int] = Counter()
    ids: Counter[int] = Counter()
    for value in values:
        event = json.loads(value)
        hits[event["key"]] += 1
        ids[event["key"]] += event["id"]
    with sqlite3.connect(directory / "hits.db") as database:
        rows = database.execute("SELECT key, hits, ids FROM hits").fetchall()
    assert {key: (count, total) for key, count, total in rows} == {key: (hits[key], ids[key]) for key in hits}


def summary(items: object) -> tuple[int, int, int]:
    """How many, how many different, and which: small enough to read where it differs."""
    counted = Counter(items)  # type: ignore[call-overload]
    return counted.total(), len(counted), hash(frozenset(counted))
