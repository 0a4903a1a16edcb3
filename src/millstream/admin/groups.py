"""Consumer groups and share groups: which there are, how far each is, and its members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure
from millstream.admin.position import TopicPartition, spans
from millstream.admin.share_groups import ShareGroups

if TYPE_CHECKING:
    from confluent_kafka.admin import ConsumerGroupDescription


def list_groups(connection: Connection) -> list[dict[str, str]]:
    listing = connection.settle(connection.admin.list_consumer_groups())
    rows = [
        {"group": group.group_id, "state": _word(group, "state"), "protocol": _word(group, "type")}
        for group in listing.valid
    ]
    rows += [
        {"group": name, "state": state, "protocol": "share"} for name, state in ShareGroups(connection).states().items()
    ]
    return sorted(rows, key=lambda row: row["group"])


def describe(connection: Connection, name: str) -> dict[str, Any]:
    """A consumer group, its partitions and its members."""
    group = _description(connection, name)
    offsets = committed(connection, name)
    owners = {
        (where.topic, where.partition): member
        for member in group.members
        for where in member.assignment.topic_partitions
    }
    held = spans(connection, _existing(connection, sorted({*offsets, *owners})))
    lags = {where: max(0, end - offsets[where]) for where, (_, end) in held.items() if where in offsets}
    partitions = [
        {
            "topic": where[0],
            "partition": where[1],
            "committed": offsets.get(where),
            "end": end,
            "lag": lags.get(where),
            "member": owners[where].member_id if where in owners else None,
        }
        for where, (_, end) in sorted(held.items())
    ]
    members = [
        {
            "member": member.member_id,
            "client": member.client_id,
            "host": member.host.removeprefix("/"),
            "instance": member.group_instance_id,
            "partitions": len(member.assignment.topic_partitions),
        }
        for member in group.members
    ]
    return {
        "group": name,
        "state": _word(group, "state"),
        "protocol": _word(group, "type"),
        "assignor": group.partition_assignor or None,
        "lag": sum(lags.values()),
        "partitions": partitions,
        "members": members,
    }


def committed(connection: Connection, name: str) -> dict[TopicPartition, int]:
    """The committed offsets of a consumer group."""
    from confluent_kafka import ConsumerGroupTopicPartitions

    request = ConsumerGroupTopicPartitions(name)
    answer = connection.settle(connection.admin.list_consumer_group_offsets([request])[name], name)
    return {(where.topic, where.partition): where.offset for where in answer.topic_partitions if where.offset >= 0}


def _word(group: Any, attribute: str) -> str:
    """`ConsumerGroupState.PREPARING_REBALANCING` as `preparing-rebalancing`; older clients may lack the attribute."""
    value = getattr(group, attribute, None)
    return value.name.lower().replace("_", "-") if value is not None else "unknown"


def _description(connection: Connection, name: str) -> ConsumerGroupDescription:
    listing = connection.settle(connection.admin.list_consumer_groups())
    # A broker describes a missing group as dead; a user who mistyped the name needs to know that.
    if name not in {group.group_id for group in listing.valid}:
        raise Failure(f"there is no group {name}; `millstream group list` shows the groups")
    group: ConsumerGroupDescription = connection.settle(connection.admin.describe_consumer_groups([name])[name], name)
    return group


def _existing(connection: Connection, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Without partitions of deleted topics, for which the group may still have offsets."""
    topics = connection.metadata().topics
    return [where for where in partitions if where[0] in topics and where[1] in topics[where[0]].partitions]
