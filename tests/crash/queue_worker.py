"""A worker that cannot be trusted: it accepts, releases, rejects, hangs past its leases, and crashes, at random.

    python queue_worker.py BOOTSTRAP TOPIC GROUP SEED LOG

It writes a line for each record whose acceptance or rejection the broker has confirmed, before it takes the next ones.
"""

from __future__ import annotations

import os
import sys
import time
from random import Random

from confluent_kafka import AcknowledgeType, KafkaException, ShareConsumer

LEASE_SECONDS = 2.0
HANG, CRASH = 0.02, 0.05
"""Per batch."""
RELEASE, REJECT = 0.03, 0.01
"""Per record."""


def main(bootstrap: str, topic: str, group: str, seed: str, path: str) -> None:
    random = Random(int(seed))
    consumer = ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": 100,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    with open(path, "a", buffering=1) as log:
        while True:
            try:
                work(consumer, random, log)
            except KafkaException:
                time.sleep(0.05)  # the broker is being killed: nothing was confirmed, so nothing is written


def work(consumer: ShareConsumer, random: Random, log: object) -> None:
    messages = [message for message in consumer.poll(0.5) if message.error() is None]
    if not messages:
        return
    fates = {}
    for message in messages:
        roll = random.random()
        fate = AcknowledgeType.ACCEPT
        if roll < RELEASE:
            fate = AcknowledgeType.RELEASE
        elif roll < RELEASE + REJECT:
            fate = AcknowledgeType.REJECT
        fates[message.partition(), message.offset()] = fate
        consumer.acknowledge(message, fate)
    roll = random.random()
    if roll < CRASH:
        os._exit(1)
    if roll < CRASH + HANG:
        time.sleep(LEASE_SECONDS * 1.5)
    confirmed = consumer.commit_sync(10.0)
    good = {place.partition for place, error in confirmed.items() if error is None}
    lines = [
        f"{'accepted' if fate == AcknowledgeType.ACCEPT else 'rejected'} {partition} {offset}\n"
        for (partition, offset), fate in fates.items()
        if partition in good and fate != AcknowledgeType.RELEASE
    ]
    log.write("".join(lines))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(*sys.argv[1:])
