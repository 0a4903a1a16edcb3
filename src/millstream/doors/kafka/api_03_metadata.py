"""Metadata (key 3), versions 0 to 13.

Brokers, topics and partitions. Where brokers share a store any of them takes any request: the partitions are shared out
between those that are alive. Creates a missing topic if the client allows it and the broker's `auto_create_topics`
is on, but none of Kafka's internal ones. Authorized operations, where the client asks for them, are all there are.
Gaps: none.
"""

from __future__ import annotations

from uuid import UUID

from millstream.broker.topics import Topic
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import LIGHT_ITEMS, aside, in_turns
from millstream.doors.outbox import Chunk
from millstream.errors import Code, RequestError
from millstream.promise import Promise
from millstream.wire.kafka import metadata
from millstream.wire.kafka.metadata import INTERNAL_TOPICS, BrokerEntry, MetadataRequest, TopicEntry
from millstream.wire.kafka.primitives import Reader

KEY = 3
VERSIONS = (0, 13)
FLEXIBLE_FROM = metadata.FLEXIBLE_FROM
NO_ID = UUID(int=0)


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    request = metadata.decode(reader, context.version)
    if request.topics is not None:  # once is enough, however often a topic is named
        request = request._replace(topics=list(dict.fromkeys(request.topics)))
    topics = context.broker.topics
    missing = [
        name
        for topic_id, name in request.topics or ()
        if name is not None and topic_id == NO_ID and topics.get(name) is None and name not in INTERNAL_TOPICS
    ]
    if not (request.allow_auto_create and topics.auto_create):
        missing = []
    if not missing and len(request.topics or ()) <= LIGHT_ITEMS:
        entries = [_find(*each, context, {}) for each in request.topics or ()]
        if request.topics is None:
            entries = [_entry(topic) for topic in topics]
        return [_encode(request, context, context.version, entries)]
    created: Promise[list[Chunk]] = Promise()
    context.broker.in_background(_create_and_answer(request, missing, context, context.version, created))
    return created


async def _create_and_answer(
    request: MetadataRequest, missing: list[str], context: Context, version: int, created: Promise[list[Chunk]]
) -> None:
    refused: dict[str, Code] = {}
    async for name in in_turns(missing):
        try:
            await context.broker.topics.ensure(name)
        except RequestError as error:
            refused[name] = error.code
    entries = [_find(*each, context, refused) async for each in in_turns(request.topics or ())]
    created.settle([await aside(_encode, request, context, version, entries)])


def _encode(request: MetadataRequest, context: Context, version: int, entries: list[TopicEntry]) -> bytes:
    broker = context.broker
    brokers = [BrokerEntry(*node) for node in broker.nodes(context.local_host, context.local_port)]
    asked = request.cluster_operations, request.topic_operations
    return metadata.encode(version, brokers, broker.cluster_id, brokers[0].node_id, entries, *asked)


def _find(topic_id: UUID, name: str | None, context: Context, refused: dict[str, Code]) -> TopicEntry:
    topics = context.broker.topics
    if topic_id != NO_ID:
        topic = topics.by_id(topic_id)
        return _entry(topic) if topic else TopicEntry(Code.UNKNOWN_TOPIC_ID, None, topic_id, 0)
    topic = topics.get(name) if name is not None else None
    if topic is not None:
        return _entry(topic)
    return TopicEntry(refused.get(name or "", Code.UNKNOWN_TOPIC_OR_PARTITION), name, NO_ID, 0)


def _entry(topic: Topic) -> TopicEntry:
    return TopicEntry(Code.NONE, topic.name, topic.id, topic.partition_count)
