"""Share groups (KIP-932) with unmodified share consumers: many workers on one topic, record by record."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import DeserializingShareConsumer, KafkaError, Message, Producer, ShareConsumer
from confluent_kafka.serialization import SerializationContext, StringDeserializer

from tests import confluent
from tests.compat import share_workers
from tests.compat.share_workers import (
    ACCEPT,
    REJECT,
    RELEASE,
    Worker,
    all_of,
    configure,
    counts,
    create_topic,
    explicit,
    produce,
    quiet,
    values,
    wait_for,
    wait_until_compacted,
)
from tests.serving import ServedBroker

Unique = Callable[[str], str]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


class Place:
    """A topic with records and a group that reads it from its start."""

    def __init__(self, broker: ServedBroker, unique: Unique, count: int, partitions: int = 1, **settings: str) -> None:
        self.address = broker.address
        self.topic, self.group, self.dead = unique("jobs"), unique("workers"), unique("dead")
        create_topic(self.address, self.topic, partitions)
        configure(self.address, self.group, errors__deadletterqueue__topic__name=self.dead, **settings)
        self.records = numbers(count)
        produce(self.address, self.topic, self.records, partitions)

    def worker(self, **config: Any) -> Worker:
        return Worker(self.address, self.group, self.topic, **config)

    def explicit(self, **config: Any) -> Worker:
        return explicit(self.address, self.group, self.topic, **config)

    def finds_nothing(self) -> bool:
        with self.worker() as worker:
            for _ in range(4):
                worker.poll(0.3)
            return not worker.seen


def test_polling_on_accepts_what_came_before(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 100, partitions=3)
    with place.worker() as worker:
        taken = worker.take(100)
        assert values(taken) == place.records and counts(taken) == {1}
        assert worker.poll(0.2) == []
    assert place.finds_nothing()


def test_closing_releases_what_was_neither_committed_nor_polled_past(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 20)
    with place.worker() as worker:
        worker.take(20)
        worker.commit()
    produce(place.address, place.topic, numbers(5, first=20))
    for _ in range(2):
        with place.worker() as worker:
            taken = worker.take(5)
            assert values(taken) == numbers(5, first=20) and counts(taken) == {1}, "as in Kafka, not a delivery"
    with place.explicit() as worker:
        taken = worker.take(5)
        assert counts(taken) == {1}
        worker.answer(taken, ACCEPT)  # sent by closing
    assert place.finds_nothing()


def test_what_is_released_comes_again_with_a_rising_count_and_dies_in_the_end(
    broker: ServedBroker, unique: Unique
) -> None:
    place = Place(broker, unique, 6)
    with place.explicit() as worker:
        first = worker.take(6)
        worker.answer(first[:3], ACCEPT)
        worker.answer(first[3:5], RELEASE)
        worker.answer(first[5:], REJECT)
        worker.commit()
        for attempt in (2, 3, 4, 5):
            again = worker.take(2)
            assert values(again) == numbers(2, first=3) and counts(again) == {attempt}
            worker.answer(again, RELEASE)
            worker.commit()
        letters = all_of(place.address, place.dead, 3)
        assert values(letters) == numbers(3, first=3)
        for letter in letters:
            headers = dict(confluent.headers(letter))
            assert headers["millstream-dead-topic"] == place.topic.encode()
            assert headers["millstream-dead-group"] == place.group.encode()
            assert headers["millstream-dead-offset"] == b"%d" % int(confluent.value(letter))
            rejected = letter.value() == numbers(1, first=5)[0]
            assert headers["millstream-dead-attempts"] == (b"1" if rejected else b"5")
        assert worker.poll(0.3) == []
    assert place.finds_nothing()


def test_acknowledgements_ride_on_the_next_poll(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 10)
    told: dict[int, object] = {}
    with place.explicit() as worker:

        def on_commit(offsets: dict[Any, set[int]], error: object) -> None:
            told.update((offset, error) for group in offsets.values() for offset in group)

        worker.consumer.set_acknowledgement_commit_callback(on_commit)
        for message in worker.take(10):
            worker.consumer.acknowledge_offset(place.topic, 0, confluent.offset(message), ACCEPT)
        wait_for(lambda: worker.poll(0.1) == [] and len(told) == 10, "word of ten acknowledgements")
        assert set(told.values()) == {None}
    assert place.finds_nothing()


def test_a_lease_that_runs_out_cannot_be_acknowledged_and_goes_to_another(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 4, share__record__lock__duration__ms="1000")
    with place.explicit() as slow, place.explicit() as quick:
        late = slow.take(4)
        configure(place.address, place.group, share__record__lock__duration__ms="30000")  # for the next lease
        taken = quick.take(4)
        assert values(taken) == place.records and counts(taken) == {2}
        slow.answer(late, ACCEPT)
        [error] = slow.consumer.commit_sync(20).values()
        assert error is not None and error.args[0].code() == KafkaError.INVALID_RECORD_STATE
        quick.answer(taken, ACCEPT)
        quick.commit()
    assert place.finds_nothing()


def test_consumers_share_a_topic_and_nothing_comes_twice(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 0, partitions=2)
    wanted = numbers(4000)
    done = threading.Event()

    def work(worker: Worker) -> list[Message]:
        while not done.is_set():
            worker.poll(0.1)
            if sum(len(each.seen) for each in workers) >= len(wanted):
                done.set()
        worker.commit()
        return worker.seen

    workers = [place.worker(max__poll__records=50) for _ in range(3)]
    for worker in workers:  # none is late
        produce(place.address, place.topic, [b"first"], 2)
        worker.take(1)
        worker.commit()
        worker.seen.clear()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, worker) for worker in workers]
        produce(place.address, place.topic, wanted, 2, **{"batch.num.messages": 40})
        seen = [each.result(40) for each in running]
    for worker in workers:
        worker.close()
    assert values(message for some in seen for message in some) == wanted
    assert all(some for some in seen), [len(some) for some in seen]
    assert counts(message for some in seen for message in some) == {1}
    assert place.finds_nothing()


def test_workers_share_one_large_batch(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 0)
    wanted = numbers(1000)
    produce(place.address, place.topic, wanted, **{"linger.ms": 1000})
    with place.worker(max__poll__records=10) as one, place.worker(max__poll__records=10) as other:
        assert len(one.take(10)) == len(other.take(10)) == 10
        while len(one.seen) + len(other.seen) < 1000:
            one.poll(0.2)
            other.poll(0.2)
        one.commit()
        other.commit()
        assert values(one.seen + other.seen) == wanted
        assert min(len(one.seen), len(other.seen)) > 300
    assert place.finds_nothing()


DIES = """
import sys, time
from confluent_kafka import ShareConsumer
consumer = ShareConsumer({"bootstrap.servers": sys.argv[1], "group.id": sys.argv[2]})
consumer.subscribe([sys.argv[3]])
while not (messages := list(consumer.poll(1.0))):
    pass
print(len(messages), flush=True)
time.sleep(60)
"""


def test_what_a_killed_consumer_had_goes_to_another_at_once(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 30)
    command = [sys.executable, "-c", DIES, place.address, place.group, place.topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as dying:
        assert dying.stdout is not None
        taken = int(dying.stdout.readline())
        with place.worker() as heir:
            assert len(heir.poll(0.5)) == 30 - taken
            dying.kill()
            dying.wait(10)
            started = time.monotonic()
            again = heir.take(taken)
            assert time.monotonic() - started < 10, "the lease is 30 s long"
            assert counts(again) == {2}
            assert values(heir.seen) == place.records
            heir.commit()
    assert place.finds_nothing()


def test_nothing_is_lost_or_repeated_when_the_broker_dies_and_comes_back(
    own_broker: ServedBroker, unique: Unique
) -> None:
    place = Place(own_broker, unique, 0, partitions=2)
    wanted = numbers(300)
    produce(place.address, place.topic, wanted, 2, **{"batch.num.messages": 5})
    committed: Counter[bytes] = Counter()
    deadline = time.monotonic() + 60
    with place.worker(max__poll__records=20) as worker:
        for goal in (60, 120, 180, 300):
            while len(committed) < goal:
                assert time.monotonic() < deadline, f"{len(committed)} of {goal} records after a restart"
                messages = worker.poll(0.5)
                results = worker.consumer.commit_sync(10)
                # Records whose commit failed are available again.
                failed = {(where.topic, where.partition) for where, error in results.items() if error is not None}
                committed.update(
                    confluent.value(message)
                    for message in messages
                    if (message.topic(), message.partition()) not in failed
                )
            if goal < 300:
                worker.take(1)  # and more: they are leased when the broker dies
                own_broker.kill()
                own_broker.start()
    assert sorted(committed) == wanted
    assert max(committed.values()) == 1, "what was committed must not come again"


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_and_many_partitions(codec: str, broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 0, partitions=4)
    wanted = [number * 20 for number in numbers(400)]
    produce(place.address, place.topic, wanted, 4, **{"compression.type": codec})
    with place.worker() as worker:
        assert values(worker.take(400)) == wanted
        assert {message.partition() for message in worker.seen} == {0, 1, 2, 3}
        worker.commit()
    assert place.finds_nothing()


def test_gaps_that_compaction_left_are_passed_over(tmp_path: Path, unique: Unique) -> None:
    config = tmp_path / "millstream.toml"
    config.write_text("housekeeping_interval_ms = 100\n")
    with ServedBroker(tmp_path / "data", "--config", str(config)) as served:
        topic, group = unique("compacted"), unique("workers")
        settings = {"segment__bytes": "4000", "min__cleanable__dirty__ratio": "0.01"}
        create_topic(served.address, topic, 1, cleanup__policy="compact", **settings)
        configure(served.address, group)
        producer = Producer({"bootstrap.servers": served.address, "linger.ms": 20}, logger=quiet)
        for number in range(600):
            producer.produce(topic, b"%06d" % number, key=b"%d" % (number if number % 3 == 0 else -1))
            if number % 10 == 9:
                producer.flush(10)
        assert producer.flush(20) == 0
        kept = wait_until_compacted(served.address, topic)
        with Worker(served.address, group, topic) as worker:
            taken = worker.take(len(kept))
            assert [message.offset() for message in sorted(taken, key=confluent.offset)] == kept
            worker.commit()
        with Worker(served.address, group, topic) as worker:
            assert worker.poll(0.5) == []


class Deserializing(Worker):
    def _make(self, config: dict[str, Any]) -> ShareConsumer:
        def strict(value: bytes, context: SerializationContext) -> object:
            return json.loads(value)

        config |= {"key.deserializer": StringDeserializer("utf_8"), "value.deserializer": strict}
        return DeserializingShareConsumer(config)


def test_a_deserializing_consumer_rejects_what_it_cannot_read(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 0)
    produce(place.address, place.topic, [b'{"n": 1}', b"not json", b'{"n": 2}'])
    worker = Deserializing(place.address, place.group, place.topic, share__acknowledgement__mode="explicit")
    with worker:
        messages: list[Any] = []

        def poll() -> bool:
            messages.extend(worker.consumer.poll(0.5))
            return len(messages) == 3

        wait_for(poll, "three records")
        for message in messages:
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._VALUE_DESERIALIZATION
            worker.consumer.acknowledge(message, ACCEPT if error is None else REJECT)
        assert [message.value() for message in messages if message.error() is None] == [{"n": 1}, {"n": 2}]
        assert [message.key() for message in messages] == ["key-0", b"key-1", "key-2"]
        worker.commit()
    [letter] = all_of(place.address, place.dead, 1)
    assert letter.value() == b"not json"


def test_groups_do_not_disturb_each_other(broker: ServedBroker, unique: Unique) -> None:
    place, others = Place(broker, unique, 50), unique("others")
    configure(place.address, others)
    with place.worker() as worker, Worker(place.address, others, place.topic) as other:
        assert values(worker.take(50)) == values(other.take(50)) == place.records
        worker.commit()
        other.commit()


def test_large_empty_and_missing_values(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, 0)
    large = bytes(range(256)) * 3600
    producer = Producer({"bootstrap.servers": place.address, "message.max.bytes": 1_000_000}, logger=quiet)
    for value in (large, b"", None, large, b"\0", large):
        producer.produce(place.topic, value, headers=[("kind", b"odd"), ("nothing", None)])
    assert producer.flush(20) == 0
    with place.worker() as worker:
        found = sorted(worker.take(6), key=confluent.offset)
        assert [message.value() for message in found] == [large, b"", None, large, b"\0", large]
        assert all(message.headers() == [("kind", b"odd"), ("nothing", None)] for message in found)
        worker.commit()
    assert place.finds_nothing()


def test_a_worker_changes_what_it_reads(broker: ServedBroker, unique: Unique) -> None:
    place, other = Place(broker, unique, 5), unique("more-jobs")
    create_topic(place.address, other)
    produce(place.address, other, numbers(5, first=100))
    configure(place.address, place.group, share__heartbeat__interval__ms="200")
    with place.worker() as worker:
        assert values(worker.take(5)) == numbers(5)
        worker.commit()
        worker.consumer.subscribe([other])
        assert values(worker.take(5)) == numbers(5, first=100)
        worker.commit()
        produce(place.address, place.topic, numbers(1, first=5))
        assert worker.poll(1.0) == []
        worker.consumer.subscribe([place.topic, other])
        assert values(worker.take(1)) == numbers(1, first=5)
        worker.commit()


def test_a_new_group_begins_at_the_end_unless_told_otherwise(broker: ServedBroker, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    create_topic(broker.address, topic)
    produce(broker.address, topic, numbers(5))
    later = itertools.count(5)

    def sees_a_later_one() -> bool:
        """There is no event for the group's start; once started, it delivers new records."""
        produce(broker.address, topic, numbers(1, first=next(later)))
        return bool(worker.poll(0.5))

    with Worker(broker.address, group, topic) as worker:
        wait_for(sees_a_later_one, "a record")
        assert not set(values(worker.seen)) & set(numbers(5))


def test_a_topic_that_grows_is_read_to_its_new_partitions(own_broker: ServedBroker, unique: Unique) -> None:
    from confluent_kafka.admin import NewPartitions

    topic, group = unique("jobs"), unique("workers")
    create_topic(own_broker.address, topic)
    configure(own_broker.address, group, share__heartbeat__interval__ms="200")
    with Worker(own_broker.address, group, topic) as worker:
        assert worker.poll(0.5) == []
        client = share_workers.admin(own_broker.address)
        client.create_partitions([NewPartitions(topic, 3)])[topic].result(20)
        produce(own_broker.address, topic, numbers(30), 3)
        assert values(worker.take(30)) == numbers(30)
