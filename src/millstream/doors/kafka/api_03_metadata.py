"""Metadata (key 3), versions 0 to 13.

Lists brokers, topics and partitions. Any broker over a shared store serves any request; leaders are distributed over
the live brokers. Creates a missing topic if the client allows it and `auto_create_topics` is on, except Kafka's
internal topics. On request, lists authorized operations (KIP-430).
Gaps: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise, promised
from millstream.doors.kafka.api_60_describe_cluster import cluster_operations
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import LIGHT_BYTES, LIGHT_ITEMS, aside, in_turns
from millstream.doors.outbox import Chunk
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka import metadata
from millstream.wire.kafka.metadata import INTERNAL_TOPICS, BrokerEntry, Leads, MetadataRequest, TopicEntry
from millstream.wire.kafka.operations import NOT_ASKED
from millstream.wire.kafka.primitives import Reader

if TYPE_CHECKING:
    from millstream.broker.session import Session, Topic

KEY = 3
VERSIONS = (0, 13)
FLEXIBLE_FROM = metadata.FLEXIBLE_FROM
NO_ID = UUID(int=0)
LARGE_BYTES = 4 * LIGHT_BYTES
"""Larger requests may name thousands of topics, and are decoded in a thread."""


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    if reader.end - reader.position > LARGE_BYTES:
        owned = Reader(memoryview(bytes(reader.buffer)), reader.position)
        return promised(_decode_and_answer(owned, context, context.version))
    request, missing = _read(reader, context.version, context.session)
    if not missing and len(request.topics or ()) <= LIGHT_ITEMS:
        entries = [_find(*each, context, request, {}) for each in request.topics or ()]
        if request.topics is None:
            entries = [_entry(topic, context, request) for topic in context.session.topics()]
        return [_encode(request, context, context.version, entries)]
    return promised(_create_and_answer(request, missing, context, context.version))


def _read(reader: Reader, version: int, session: Session) -> tuple[MetadataRequest, list[str]]:
    """The request, and the names of topics to create. Changes nothing; runs in any thread."""
    request = metadata.decode(reader, version)
    if request.topics is not None:  # drops duplicate names
        request = request._replace(topics=list(dict.fromkeys(request.topics)))
    if not request.allow_auto_create:
        return request, []
    named = (
        name
        for topic_id, name in request.topics or ()
        if name is not None and topic_id == NO_ID and name not in INTERNAL_TOPICS
    )
    return request, session.missing_topics(named)


async def _decode_and_answer(reader: Reader, context: Context, version: int) -> list[Chunk]:
    request, missing = await aside(_read, reader, version, context.session)
    return await _create_and_answer(request, missing, context, version)


async def _create_and_answer(
    request: MetadataRequest, missing: list[str], context: Context, version: int
) -> list[Chunk]:
    refused: dict[str, Code] = {}
    async for name in in_turns(missing):
        try:
            await context.session.ensure_topic(name, Operation.DESCRIBE)
        except RequestError as error:
            refused[name] = error.code
    entries = [_find(*each, context, request, refused) async for each in in_turns(request.topics or ())]
    return [await aside(_encode, request, context, version, entries)]


def _encode(request: MetadataRequest, context: Context, version: int, entries: list[TopicEntry]) -> bytes:
    session = context.session
    brokers = [BrokerEntry(*node) for node in session.nodes(context.local_host, context.local_port)]
    operations = cluster_operations(request.cluster_operations, context)
    return metadata.encode(version, brokers, session.cluster_id, brokers[0].node_id, entries, operations)


def _find(
    topic_id: UUID, name: str | None, context: Context, request: MetadataRequest, refused: dict[str, Code]
) -> TopicEntry:
    session = context.session
    key = topic_id if topic_id != NO_ID else name or ""
    try:
        return _entry(session.topic(key, Operation.DESCRIBE), context, request)
    except RequestError as error:
        if isinstance(key, UUID):
            return TopicEntry(error.code, None, topic_id, 0)
        is_hidden = error.code == Kind.TOPIC.refusal
        operations = _operations(key, context, request) if not is_hidden else NOT_ASKED
        return TopicEntry(refused.get(key, error.code), name, NO_ID, 0, operations=operations)


def _entry(topic: Topic, context: Context, request: MetadataRequest) -> TopicEntry:
    leads = [Leads(*each) for each in context.session.leaderships(topic.id)]
    operations = _operations(topic.name, context, request)
    return TopicEntry(Code.NONE, topic.name, topic.id, topic.partition_count, leads, operations)


def _operations(topic: str, context: Context, request: MetadataRequest) -> int:
    return context.session.operations(Kind.TOPIC, topic) if request.topic_operations else NOT_ASKED
