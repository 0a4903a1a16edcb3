"""Workers of a share group that hang, release, reject and vanish at random, under a broker that is killed again and
again: every record ends done or dead, none both, none neither.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

from confluent_kafka import KafkaException, Message

from tests.compat import raw
from tests.compat.raw import Raw
from tests.compat.share_workers import ACCEPT, REJECT, RELEASE, configure, create_topic, explicit, produce, whole
from tests.serving import ServedBroker

RECORDS = int(os.environ.get("SHARE_RECORDS", "3000"))
KILLS = int(os.environ.get("SHARE_KILLS", "4"))
WORKERS = 4
PARTITIONS = 2
SECONDS_MAX = 90 + RECORDS / 100


class Tally:
    """What the workers know. A commit whose answer was lost may have been made or not: it counts as sent only."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: set[bytes] = set()
        self.accepted: Counter[bytes] = Counter()
        self.rejected: set[bytes] = set()
        self.crashes = self.late = 0


class Careless(threading.Thread):
    def __init__(self, broker: ServedBroker, tally: Tally, done: threading.Event, seed: int) -> None:
        super().__init__()
        self._broker, self._tally, self._done = broker, tally, done
        self._random = random.Random(seed)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._done.is_set():
                self._work_until_it_crashes()
        except BaseException as error:
            self.error = error
            self._done.set()

    def _work_until_it_crashes(self) -> None:
        with explicit(self._broker.address, "workers", "jobs", max__poll__records=20) as worker:
            while not self._done.is_set():
                messages = worker.poll(0.3)
                if messages and self._random.random() < 0.03:
                    self._tally.crashes += 1
                    return  # without a word about what it has
                if messages and self._random.random() < 0.03:
                    self._tally.late += 1
                    time.sleep(1.2)  # its leases end meanwhile
                verbs = self._random.choices([ACCEPT, RELEASE, REJECT], [85, 13, 2], k=len(messages))
                said = list(zip(messages, verbs, strict=True))
                with self._tally.lock:
                    self._tally.sent.update(each.value() for each, verb in said if verb == ACCEPT)
                for message, verb in said:
                    worker.answer([message], verb)
                try:
                    results = worker.consumer.commit_sync(10)
                except KafkaException:
                    continue
                settled = {(where.topic, where.partition) for where, error in results.items() if error is None}
                self._count(said, settled)

    def _count(self, said: list[tuple[Message, int]], settled: set[tuple[str, int]]) -> None:
        with self._tally.lock:
            for message, verb in said:
                if (message.topic(), message.partition()) in settled:
                    if verb == ACCEPT:
                        self._tally.accepted[message.value()] += 1
                    elif verb == REJECT:
                        self._tally.rejected.add(message.value())


def left(broker: ServedBroker) -> int:
    """Records of the group that are neither done nor dead."""
    with Raw(broker.address) as connection:
        [group] = connection.ask(raw.request(90, 1, {"groups": [{"group_id": "workers", "topics": None}]})).groups
    return sum(each.lag for topic in group.topics for each in topic.partitions)


@pytest.mark.slow
def test_every_record_ends_done_or_dead_none_both_none_neither(tmp_path: Path) -> None:
    tally, done = Tally(), threading.Event()
    wanted = [b"%07d" % number for number in range(RECORDS)]
    with ServedBroker(tmp_path / "data") as broker:
        create_topic(broker.address, "jobs", PARTITIONS)
        configure(broker.address, "workers", share__record__lock__duration__ms="1000")
        produce(broker.address, "jobs", wanted, PARTITIONS, **{"batch.num.messages": 7})
        workers = [Careless(broker, tally, done, seed) for seed in range(WORKERS)]
        for worker in workers:
            worker.start()
        started = time.monotonic()
        try:
            for number in range(1, KILLS + 1):
                goal = RECORDS * number // (KILLS + 1)
                while len(tally.accepted) < goal and not done.is_set():
                    assert time.monotonic() - started < SECONDS_MAX, f"{len(tally.accepted)} of {goal}"
                    time.sleep(0.01)
                broker.kill()
                broker.start()
            while (unfinished := left(broker)) and not done.is_set():
                assert time.monotonic() - started < SECONDS_MAX, f"{unfinished} records are left"
                time.sleep(0.1)
        finally:
            done.set()
            for worker in workers:
                worker.join(60)
        assert [worker.error for worker in workers if worker.error is not None] == []
        dead = Counter(letter.value() for letter in whole(broker.address, "__dlq__"))
    took = time.monotonic() - started
    print(
        f"\n{RECORDS} records, {KILLS} kills, {tally.crashes} vanished and {tally.late} late workers in {took:.0f} s: "
        f"{len(tally.accepted)} known to be done, {len(dead)} dead, {len(tally.rejected)} of them rejected"
    )
    assert max(dead.values(), default=0) <= 1, "one dead letter at most"
    assert max(tally.accepted.values()) == 1, "what was accepted does not come again"
    assert not set(tally.accepted) & set(dead), "done and dead"
    assert tally.rejected <= set(dead)
    assert set(wanted) == tally.sent | set(dead), "neither done nor dead"
