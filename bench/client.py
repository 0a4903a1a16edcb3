"""The librdkafka side: topics, and a batched producer that does not stand in the broker's way.

Records go in by `produce_batch` (one call into C per few thousand records) because one Python call per record would
make the client the limit at 100 B. Payloads are random bytes made ahead, so that nothing compresses and nothing is
generated while the clock runs.
"""

from __future__ import annotations

import os
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SECONDS_MAX = 120.0
PAYLOADS = 512
CALL_BYTES = 4 << 20
"""Payload bytes per `produce_batch` call: four full batches."""
QUEUE_BYTES = 48 << 20
"""Payload that may wait in the client: enough to keep five requests in flight, with more being built behind them."""

SETTINGS: dict[str, Any] = {
    "acks": 1,
    "batch.size": 1_000_000,
    "batch.num.messages": 1_000_000,
    "linger.ms": 20,
    "compression.type": "none",
    "queue.buffering.max.messages": 2_000_000,
    "queue.buffering.max.kbytes": 256 << 10,
    "message.timeout.ms": int(SECONDS_MAX * 1000),
    "socket.send.buffer.bytes": 1 << 20,
}
QUIET: dict[str, Any] = {"log_level": 2, "log.connection.close": False}
"""Every sample ends with its broker going away, which librdkafka would report each time."""


def create_topic(bootstrap: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    created = admin.create_topics([NewTopic(topic, partitions, 1)], request_timeout=30)
    for future in created.values():
        future.result(30)


class Feeder:
    """Produces a known number of records of one size to partition 0 and makes sure that they arrived."""

    def __init__(self, bootstrap: str, topic: str, record_bytes: int, **settings: Any) -> None:
        self.bootstrap, self.topic, self.record_bytes = bootstrap, topic, record_bytes
        self.producer = Producer({"bootstrap.servers": bootstrap, **SETTINGS, **QUIET, **settings})
        values = [os.urandom(record_bytes) for _ in range(PAYLOADS)]
        self.call_records = max(1, CALL_BYTES // record_bytes)
        self.messages = [{"value": values[i % PAYLOADS]} for i in range(self.call_records)]
        self.sent = 0

    def feed(self, records: int) -> float:
        """Seconds from the first record to the last acknowledgement."""
        start = time.perf_counter()
        deadline = start + SECONDS_MAX
        left = records
        while left:
            messages = self.messages if left >= self.call_records else self.messages[:left]
            self._await_room(len(messages), deadline)
            if self.producer.produce_batch(self.topic, messages, partition=0) != len(messages):
                raise RuntimeError("librdkafka refused records although its queue has room")
            left -= len(messages)
        if self.producer.flush(max(0.1, deadline - time.perf_counter())):
            raise RuntimeError(f"{len(self.producer)} records were not acknowledged in {SECONDS_MAX} s")
        self.sent += records
        return time.perf_counter() - start

    def _await_room(self, records: int, deadline: float) -> None:
        while len(self.producer) + records > QUEUE_BYTES // self.record_bytes:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the broker took no records for {SECONDS_MAX} s")
            self.producer.poll(0.002)

    def check_arrived(self) -> None:
        """A fast broker that loses records is not fast."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "bench", **QUIET})
        low, high = consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=30)
        consumer.close()
        if high - low != self.sent:
            raise RuntimeError(f"{self.sent} records were acknowledged, the broker has {high - low}")

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.close()
