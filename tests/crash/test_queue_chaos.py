"""A queue under workers that crash, hang, release and reject, and a broker that is killed: every record ends done or
dead, none both, none neither. `make soak` runs it at full size.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from tests import confluent
from tests.crash.queue_worker import LEASE_SECONDS
from tests.serving import ServedBroker

KILLS = int(os.environ.get("SOAK_BROKER_KILLS", "3"))
RECORDS = int(os.environ.get("SOAK_RECORDS", "3000"))
WORKERS = 8
PARTITIONS = 4
TOPIC, GROUP = "jobs", "workers"
SECONDS_MAX = 100 + RECORDS // 200
WORKER = Path(__file__).with_name("queue_worker.py")

Place = tuple[int, int]


class Workers:
    def __init__(self, bootstrap: str, folder: Path) -> None:
        self._bootstrap = bootstrap
        self._folder = folder
        self._started = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def keep_up(self) -> None:
        """Those that crashed are replaced."""
        self._processes = [process for process in self._processes if process.poll() is None]
        while len(self._processes) < WORKERS:
            self._started += 1
            log = self._folder / f"worker-{self._started}.log"
            command = [sys.executable, str(WORKER), self._bootstrap, TOPIC, GROUP, str(self._started), str(log)]
            self._processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def crashes(self) -> int:
        return self._started - WORKERS

    def confirmed(self) -> dict[str, list[Place]]:
        found: dict[str, list[Place]] = {"accepted": [], "rejected": []}
        for log in self._folder.glob("worker-*.log"):
            for line in log.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    fate, partition, offset = line.split()
                    found[fate].append((int(partition), int(offset)))
        return found


def figures(broker: ServedBroker) -> Counter[str]:
    """The broker's own counts of the queue, over all partitions."""
    with urllib.request.urlopen(f"http://{broker.http}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("millstream_queue_") and f'group="{GROUP}"' in line:
            found[line.partition("{")[0].removeprefix("millstream_queue_")] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
    return found


def prepare(broker: ServedBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    topics = [NewTopic(TOPIC, num_partitions=PARTITIONS, replication_factor=1)]
    for future in admin.create_topics(topics).values():
        future.result(30)
    settings = {"share.auto.offset.reset": "earliest", "share.record.lock.duration.ms": str(int(LEASE_SECONDS * 1000))}
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, GROUP, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.address, "enable.idempotence": True, "batch.num.messages": 50})
    for number in range(RECORDS):
        while True:
            try:
                producer.produce(TOPIC, b"%d" % number, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0


def dead_letters(broker: ServedBroker) -> list[Place]:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "reader", "log_level": 0})
    known = consumer.list_topics("__dlq__", timeout=30).topics["__dlq__"].partitions
    places: list[Place] = []
    for index in known:
        end = consumer.get_watermark_offsets(TopicPartition("__dlq__", index), timeout=30)[1]
        consumer.assign([TopicPartition("__dlq__", index, 0)])
        at = 0
        while at < end:
            if (message := consumer.poll(5)) is not None:
                assert message.error() is None
                headers = dict(confluent.headers(message))
                places.append((int(headers["millstream-dead-partition"]), int(headers["millstream-dead-offset"])))
                at = confluent.offset(message) + 1
    consumer.close()
    return places


@pytest.mark.timeout(SECONDS_MAX + 60)
def test_every_record_ends_done_or_dead_whatever_workers_and_kills_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(4)
    kills = 0
    with ServedBroker(tmp_path / "data") as broker:
        prepare(broker)
        workers = Workers(broker.address, tmp_path)
        deadline = time.monotonic() + SECONDS_MAX
        try:
            while True:
                assert time.monotonic() < deadline, f"not done in {SECONDS_MAX} s: {figures(broker)}"
                workers.keep_up()
                time.sleep(random.uniform(0.05, 0.3))
                now = figures(broker)
                ended = now["done_total"] + now["dead_total"]
                if kills < KILLS and ended >= RECORDS * kills / KILLS:
                    time.sleep(random.uniform(0, 0.2))
                    broker.kill()
                    kills += 1
                    broker.start()
                elif ended == RECORDS:
                    break
        finally:
            workers.stop()
        last = figures(broker)
        letters = dead_letters(broker)
    confirmed = workers.confirmed()
    with capsys.disabled():
        print(
            f"\nqueue: {RECORDS} records, {kills} kills of the broker, {workers.crashes} crashes of {WORKERS} workers, "
            f"{int(last['redeliveries_total'])} redeliveries; done {int(last['done_total'])}, "
            f"dead {int(last['dead_total'])}, confirmed acceptances {len(confirmed['accepted'])}"
        )
    assert kills == KILLS
    assert (last["available"], last["leased"], last["waiting"]) == (0, 0, 0), "a record is neither done nor dead"
    assert len(letters) == len(set(letters)) == last["dead_total"], "a dead letter is missing or there twice"
    assert set(confirmed["accepted"]).isdisjoint(letters), "a record is both done and dead"
    assert len(confirmed["accepted"]) == len(set(confirmed["accepted"])), "a record was accepted twice"
    assert set(confirmed["rejected"]) <= set(letters), "a rejected record is not dead"
    assert last["done_total"] + last["dead_total"] == RECORDS
