"""A client under whose load things are killed, and the count afterwards of what it was told and what is there."""

from __future__ import annotations

import threading
from collections import defaultdict
from random import Random

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests import confluent

PARTITIONS = 4
TOPIC = "load"
IN_FLIGHT_MAX = 3000


def create_topic(address: str, **settings: str) -> None:
    """Setting names with underscores for dots."""
    admin = AdminClient({"bootstrap.servers": address})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, config=config)])[TOPIC].result(20)


class Load:
    """An idempotent producer that sends numbered records without a pause, and remembers what it was told."""

    def __init__(self, address: str, first: int = 0) -> None:
        self.attempted = 0
        self._first = first
        """The number of the first record: several loads must not send the same."""
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        """By partition and offset."""
        self.acknowledged_twice: list[tuple[int, int]] = []
        self.errors: list[KafkaError] = []
        self.moved = threading.Condition()
        self._random = Random(9)
        self._stopping = False
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "message.timeout.ms": 120_000,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 50,
                "retry.backoff.ms": 10,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._send, name="load")

    def _send(self) -> None:
        while not self._stopping:
            if self.attempted - len(self.acknowledged) >= IN_FLIGHT_MAX:
                self._producer.poll(0.01)
                continue
            for _ in range(20):
                value = b"%d:" % (self._first + self.attempted) + b"." * self._random.choice((10, 100, 1000))
                self._producer.produce(TOPIC, value, partition=self.attempted % PARTITIONS, on_delivery=self._delivered)
                self.attempted += 1
            self._producer.poll(0.001)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(error)
            return
        place = confluent.place(message)
        if place in self.acknowledged:
            self.acknowledged_twice.append(place)
        with self.moved:
            self.acknowledged[place] = confluent.value(message)
            self.moved.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Returns when so many more records are acknowledged."""
        target = len(self.acknowledged) + count
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.acknowledged) >= target, timeout=60), "the load stands still"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        assert self._producer.flush(60) == 0


def consume_all(address: str) -> dict[int, list[tuple[int, bytes]]]:
    """Offset and value of every record, by partition, in the order in which they came."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "check", "enable.auto.commit": False})
    partitions = [TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)]
    ends = {part.partition: consumer.get_watermark_offsets(part, timeout=10)[1] for part in partitions}
    consumer.assign(partitions)
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    left = {number for number, end in ends.items() if end}
    while left:
        first = consumer.poll(20)
        assert first is not None, f"partitions {left} do not go on"
        for message in (first, *consumer.consume(10_000, timeout=0)):  # `consume` would wait until there are so many
            found[confluent.partition(message)].append((confluent.offset(message), confluent.value(message)))
        left = {number for number in left if found[number][-1:] == [] or found[number][-1][0] + 1 < ends[number]}
    consumer.close()
    return found


def count(load: Load, found: dict[int, list[tuple[int, bytes]]], what: str) -> str:
    """Holds what the client was told against what was found, and says so in a line; raises if they differ."""
    everything = {(partition, offset): value for partition, records in found.items() for offset, value in records}
    values = [value for records in found.values() for _, value in records]
    lost = [place for place, value in load.acknowledged.items() if everything.get(place) != value]
    duplicated = len(values) - len(set(values))
    assert load.errors == [] and load.acknowledged_twice == []
    assert lost == [] and duplicated == 0, f"lost {lost[:5]}, duplicated {duplicated}"
    assert len(load.acknowledged) == load.attempted == len(values)
    for records in found.values():
        assert [offset for offset, _ in records] == list(range(len(records)))
        numbers = [int(value.split(b":")[0]) for _, value in records]
        assert numbers == sorted(numbers), "the order of each partition is kept"
    return (
        f"\n{what}, attempted {load.attempted:,}, acknowledged {len(load.acknowledged):,}, "
        f"lost {len(lost):,}, duplicated {duplicated:,}"
    )
