"""Metadata (key 3), by hand: clients request it often, and with a thousand partitions the answer is long."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from millstream.wire.kafka.operations import NOT_ASKED
from millstream.wire.kafka.primitives import Reader, array_length, i32_array, string

FLEXIBLE_FROM = 9
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""As in Kafka: clients skip these topics, and no others, in listings and patterns."""
_NO_ID = UUID(int=0)


class MetadataRequest(NamedTuple):
    topics: list[tuple[UUID, str | None]] | None
    """None: all topics."""
    allow_auto_create: bool
    cluster_operations: bool = False
    topic_operations: bool = False
    """Whether the answer lists authorized operations (from version 8)."""


class BrokerEntry(NamedTuple):
    node_id: int
    host: str
    port: int


class Leads(NamedTuple):
    """A partition's brokers."""

    leader: int
    epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class TopicEntry(NamedTuple):
    error: int
    name: str | None
    topic_id: UUID
    partition_count: int
    leads: Sequence[Leads] = ()
    """One per partition, in order; repeated cyclically if they are fewer."""
    operations: int = NOT_ASKED
    """What the client may do with it (from version 8)."""


def decode(reader: Reader, version: int) -> MetadataRequest:
    compact = version >= FLEXIBLE_FROM
    count = reader.count(compact, 2)
    topics: list[tuple[UUID, str | None]] | None = None
    if count >= 0 and not (version == 0 and count == 0):
        topics = []
        for _ in range(count):
            topic_id = reader.uuid() if version >= 10 else _NO_ID
            topics.append((topic_id, reader.string(compact)))
            if compact:
                reader.skip_tags()
    allow_auto_create = reader.boolean() if version >= 4 else True
    cluster_operations = reader.boolean() if 8 <= version <= 10 else False
    topic_operations = reader.boolean() if version >= 8 else False
    return MetadataRequest(topics, allow_auto_create, cluster_operations, topic_operations)


_PARTITION_V0 = Struct(">hii")
_PARTITION_V7 = Struct(">hiii")
_I16 = Struct(">h")
_I32 = Struct(">i")


def encode(
    version: int,
    brokers: list[BrokerEntry],
    cluster_id: str,
    controller_id: int,
    topics: list[TopicEntry],
    cluster_operations: int = NOT_ASKED,
) -> bytes:
    compact = version >= FLEXIBLE_FROM
    tags = b"\0" if compact else b""
    parts = [_I32.pack(0)] if version >= 3 else []
    parts.append(array_length(len(brokers), compact))
    for broker in brokers:
        parts += [_I32.pack(broker.node_id), string(broker.host, compact), _I32.pack(broker.port)]
        parts.append((string(None, compact) if version >= 1 else b"") + tags)
    if version >= 2:
        parts.append(string(cluster_id, compact))
    if version >= 1:
        parts.append(_I32.pack(controller_id))
    parts.append(array_length(len(topics), compact))
    for topic in topics:
        parts.append(_encode_topic(version, topic, compact))
    if 8 <= version <= 10:
        parts.append(_I32.pack(cluster_operations))
    if version >= 13:
        parts.append(_I16.pack(0))
    parts.append(tags)
    return b"".join(parts)


def _encode_topic(version: int, topic: TopicEntry, compact: bool) -> bytes:
    tags = b"\0" if compact else b""
    # An unknown topic id has no name; only version 12 and newer allow null.
    name = topic.name if topic.name is not None or version >= 12 else ""
    parts = [_I16.pack(topic.error), string(name, compact)]
    if version >= 10:
        parts.append(topic.topic_id.bytes)
    if version >= 1:
        parts.append(b"\1" if topic.name in INTERNAL_TOPICS else b"\0")
    parts.append(array_length(topic.partition_count, compact))
    offline = i32_array((), compact) if version >= 5 else b""
    leads = topic.leads
    tails = [i32_array(each.replicas, compact) + i32_array(each.in_sync, compact) + offline + tags for each in leads]
    for index in range(topic.partition_count):
        at = index % len(leads)
        if version >= 7:
            parts.append(_PARTITION_V7.pack(0, index, leads[at].leader, leads[at].epoch))
        else:
            parts.append(_PARTITION_V0.pack(0, index, leads[at].leader))
        parts.append(tails[at])
    parts.append((_I32.pack(topic.operations) if version >= 8 else b"") + tags)
    return b"".join(parts)
