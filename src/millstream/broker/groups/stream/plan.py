"""Assignments by the broker for a classic group, encoded as leaders do (ConsumerProtocolAssignment).

The group's protocol names the rule: `range` or `roundrobin`. `roundrobin` sorts the ids of the n members that read a
topic, and gives partition p to the member at p mod n.

    int16 version, int32 count of topics, each: int16 length and name, int32 count and int32 partitions; int32 user data

So Kafka's tools see a group of planned members like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from millstream.broker.groups.stream.assignors import Wants, range_
from millstream.broker.groups.stream.classic_member import Member, choose_protocol
from millstream.broker.groups.stream.subscription import FieldReader
from millstream.broker.groups.view import TopicsView

PROTOCOL = "range"
ROUND_ROBIN = "roundrobin"


def plan(members: Sequence[Member], topics: TopicsView) -> Mapping[str, bytes]:
    """Omits missing topics; their creation triggers a rebalance."""
    return plan_round_robin(members, topics) if choose_protocol(members) == ROUND_ROBIN else plan_range(members, topics)


def plan_round_robin(members: Sequence[Member], topics: TopicsView) -> Mapping[str, bytes]:
    target: dict[str, list[tuple[str, int]]] = {member.id: [] for member in members}
    for name, in_line in readers(members).items():
        topic = topics.get(name)
        for number in range(topic.partition_count if topic is not None else 0):
            target[in_line[number % len(in_line)]].append((name, number))
    return {member: encode_assignment(mine) for member, mine in target.items()}


def readers(members: Iterable[Member]) -> dict[str, list[str]]:
    """The ids of the members that read each topic, in order."""
    found: dict[str, list[str]] = {}
    for member in members:
        for name in member.topics(ROUND_ROBIN) or ():
            found.setdefault(name, []).append(member.id)
    return {name: sorted(ids) for name, ids in found.items()}


def plan_range(members: Sequence[Member], topics: TopicsView) -> Mapping[str, bytes]:
    names: dict[UUID, str] = {}
    counts: dict[UUID, int] = {}
    wants = {}
    for member in members:
        wanted = set()
        for name in member.topics(PROTOCOL) or ():
            topic = topics.get(name)
            if topic is not None:
                names[topic.id], counts[topic.id] = name, topic.partition_count
                wanted.add(topic.id)
        wants[member.id] = Wants(frozenset(wanted), frozenset(), member.instance_id or member.id)
    target = range_(wants, counts)
    return {
        member: encode_assignment([(names[topic], number) for topic, number in mine]) for member, mine in target.items()
    }


def owners(members: Iterable[Member]) -> dict[tuple[str, int], str]:
    """The member id for each assigned partition."""
    assignments = [(member.id, decode_assignment(member.assignment)) for member in members]
    return {place: member_id for member_id, found in assignments if found is not None for place in found[0]}


def encode_subscription(topics: Iterable[str]) -> bytes:
    """The metadata of a consumer's JoinGroup, version 0."""
    names = sorted(set(topics))
    return struct.pack(">hi", 0, len(names)) + b"".join(map(_string, names)) + struct.pack(">i", -1)


def encode_assignment(partitions: Iterable[tuple[str, int]]) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        by_topic.setdefault(topic, []).append(number)
    body = struct.pack(">hi", 0, len(by_topic))
    for topic, numbers in by_topic.items():
        body += _string(topic) + struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)
    return body + struct.pack(">i", -1)


def decode_assignment(data: bytes) -> tuple[set[tuple[str, int]], bytes] | None:
    """Partitions and user data. Empty bytes mean no partitions; None: the bytes are malformed."""
    if not data:
        return set(), b""
    fields = FieldReader(data)
    try:
        fields.int16()
        return set(fields.partitions()), fields.nullable_bytes()
    except ValueError:
        return None


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">h", len(data)) + data
