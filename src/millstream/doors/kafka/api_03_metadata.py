"""Metadata (key 3), versions 0 to 13.

Lists brokers, topics and partitions. Any broker over a shared store serves any request; leaders are distributed over
the live brokers. Creates a missing topic if the client allows it and `auto_create_topics` is on, except Kafka's
internal topics. On request, lists authorized operations (KIP-430): every operation is allowed.
Gaps: none.
"""

from __future__ import annotations

from uuid import UUID

from millstream.broker.topics import Topic, Topics
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import LIGHT_BYTES, LIGHT_ITEMS, aside, in_turns
from millstream.doors.outbox import Chunk
from millstream.wire.kafka import metadata
from millstream.wire.kafka.metadata import INTERNAL_TOPICS, BrokerEntry, Leads, MetadataRequest, TopicEntry
from millstream.wire.kafka.primitives import Reader

KEY = 3
VERSIONS = (0, 13)
FLEXIBLE_FROM = metadata.FLEXIBLE_FROM
NO_ID = UUID(int=0)
LARGE_BYTES = 4 * LIGHT_BYTES
"""Larger requests may name thousands of topics, and are decoded in a thread."""


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    answered: Promise[list[Chunk]] = Promise()
    if reader.end - reader.position > LARGE_BYTES:
        owned = Reader(memoryview(bytes(reader.buffer)), reader.position)
        context.broker.in_background(_decode_and_answer(owned, context, context.version, answered))
        return answered
    request, missing = _read(reader, context.version, context.broker.topics)
    topics = context.broker.topics
    if not missing and len(request.topics or ()) <= LIGHT_ITEMS:
        entries = [_find(*each, context, {}) for each in request.topics or ()]
        if request.topics is None:
            entries = [_entry(topic, context) for topic in topics]
        return [_encode(request, context, context.version, entries)]
    context.broker.in_background(_create_and_answer(request, missing, context, context.version, answered))
    return answered


def _read(reader: Reader, version: int, topics: Topics) -> tuple[MetadataRequest, list[str]]:
    """The request, and the names of topics to create. Changes nothing; runs in any thread."""
    request = metadata.decode(reader, version)
    if request.topics is not None:  # drops duplicate names
        request = request._replace(topics=list(dict.fromkeys(request.topics)))
    if not (request.allow_auto_create and topics.auto_create):
        return request, []
    return request, [
        name
        for topic_id, name in request.topics or ()
        if name is not None and topic_id == NO_ID and topics.get(name) is None and name not in INTERNAL_TOPICS
    ]


async def _decode_and_answer(reader: Reader, context: Context, version: int, answered: Promise[list[Chunk]]) -> None:
    try:
        request, missing = await aside(_read, reader, version, context.broker.topics)
    except ProtocolError as error:
        answered.fail(error)
        return
    await _create_and_answer(request, missing, context, version, answered)


async def _create_and_answer(
    request: MetadataRequest, missing: list[str], context: Context, version: int, answered: Promise[list[Chunk]]
) -> None:
    refused: dict[str, Code] = {}
    async for name in in_turns(missing):
        try:
            await context.broker.topics.ensure(name)
        except RequestError as error:
            refused[name] = error.code
    entries = [_find(*each, context, refused) async for each in in_turns(request.topics or ())]
    answered.settle([await aside(_encode, request, context, version, entries)])


def _encode(request: MetadataRequest, context: Context, version: int, entries: list[TopicEntry]) -> bytes:
    broker = context.broker
    brokers = [BrokerEntry(*node) for node in broker.nodes(context.local_host, context.local_port)]
    asked = request.cluster_operations, request.topic_operations
    return metadata.encode(version, brokers, broker.cluster_id, brokers[0].node_id, entries, *asked)


def _find(topic_id: UUID, name: str | None, context: Context, refused: dict[str, Code]) -> TopicEntry:
    topics = context.broker.topics
    if topic_id != NO_ID:
        topic = topics.by_id(topic_id)
        return _entry(topic, context) if topic else TopicEntry(Code.UNKNOWN_TOPIC_ID, None, topic_id, 0)
    topic = topics.get(name) if name is not None else None
    if topic is not None:
        return _entry(topic, context)
    return TopicEntry(refused.get(name or "", Code.UNKNOWN_TOPIC_OR_PARTITION), name, NO_ID, 0)


def _entry(topic: Topic, context: Context) -> TopicEntry:
    leads = [Leads(*each) for each in context.broker.cluster.leaderships(topic.id)]
    return TopicEntry(Code.NONE, topic.name, topic.id, topic.partition_count, leads)
