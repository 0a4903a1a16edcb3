"""The state of a queue as the page `/queues` shows it; `millstream queue` reads it there."""

from __future__ import annotations

from typing import Any

from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue

RUNS_MAX = 20
"""Runs of records that are available next: enough to peek at."""
MEMBERS_MAX = 1_000


def report(queue: Queue) -> dict[str, Any]:
    members = list(queue.members.values())
    partitions = sorted(queue.partitions(), key=lambda each: (each.topic.name, each.index))
    return {
        "group": queue.id,
        "settings": dict(queue.overrides),
        "member_count": len(members),
        "members": [{"member": each.name, "leased": each.leases} for each in members[:MEMBERS_MAX]],
        "partitions": [_partition(each) for each in partitions],
    }


def _partition(partition: QueuePartition) -> dict[str, Any]:
    return {
        "topic": partition.topic.name,
        "partition": partition.index,
        **partition.figures()._asdict(),
        "end": partition.log.high_watermark,
        "ahead": partition.ahead(RUNS_MAX),
    }
