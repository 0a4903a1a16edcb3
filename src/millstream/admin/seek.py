"""Moves a group to a position in a topic: committed offsets of a consumer group, the start of a queue.

A queue that moves loses its record states in the topic. The broker refuses to move a group that has members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millstream.admin.connection import Connection
from millstream.admin.failure import explain
from millstream.admin.groups import committed
from millstream.admin.position import Position, TopicPartition, resolve
from millstream.admin.queues import require
from millstream.admin.share_groups import ShareGroup, ShareGroups


class Move(NamedTuple):
    """Of one partition."""

    topic: str
    partition: int
    before: int | None
    after: int


def seek_group(
    connection: Connection, name: str, topic: str, to: Position, *, partition: int | None = None, dry_run: bool = False
) -> list[Move]:
    """A consumer group or a share group; one partition or all of them."""
    numbers = connection.partitions(topic, partition)
    shared = ShareGroups(connection).group(name)
    if shared is not None:
        return _seek_share_group(connection, shared, topic, to, numbers, dry_run)

    def commit(targets: dict[TopicPartition, int]) -> None:
        _commit(connection, name, targets)

    return _move(connection, topic, to, numbers, committed(connection, name), None if dry_run else commit)


def seek_queue(
    connection: Connection, name: str, topic: str, to: Position, *, partition: int | None = None, dry_run: bool = False
) -> list[Move]:
    group = require(connection, name)
    return _seek_share_group(connection, group, topic, to, connection.partitions(topic, partition), dry_run)


def purge(connection: Connection, name: str, topic: str, *, dry_run: bool = False) -> int:
    """Marks all current records of a topic as done for a queue; returns how many were not, at most."""
    moves = seek_queue(connection, name, topic, Position.parse("end"), dry_run=dry_run)
    return sum(move.after - move.before for move in moves if move.before is not None)


def _seek_share_group(
    connection: Connection, group: ShareGroup, topic: str, to: Position, numbers: list[int], dry_run: bool
) -> list[Move]:
    starts = {where: start for where, (start, _) in group.offsets().items()}
    return _move(connection, topic, to, numbers, starts, None if dry_run else group.seek)


def _move(
    connection: Connection,
    topic: str,
    to: Position,
    numbers: list[int],
    now: dict[TopicPartition, int],
    write: Callable[[dict[TopicPartition, int]], None] | None,
) -> list[Move]:
    targets = resolve(connection, to, [(topic, number) for number in numbers], base=now)
    if write is not None:
        write(targets)
    return [Move(topic, number, now.get((topic, number)), targets[topic, number]) for number in numbers]


def _commit(connection: Connection, name: str, targets: dict[TopicPartition, int]) -> None:
    import confluent_kafka

    offsets = [confluent_kafka.TopicPartition(*where, offset) for where, offset in targets.items()]
    request = confluent_kafka.ConsumerGroupTopicPartitions(name, offsets)
    answer = connection.settle(connection.admin.alter_consumer_group_offsets([request])[name], name)
    for where in answer.topic_partitions:
        if where.error is not None:
            raise explain(where.error, connection.address, f"{name} in {where.topic} partition {where.partition}")
