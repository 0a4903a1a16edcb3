"""Comet's ten calls, over a session with the broker.

Rules
-----
1. An error is a sentence in the `error` field. The four that Comet's clients know keep Comet's words (`error_text`).
2. A record without a key has an empty key, a deleted one (a tombstone) an empty value: proto3 has no null bytes.
3. Comet's timestamps are nanoseconds, the log's are milliseconds: an answer has the milliseconds as nanoseconds, and
   Replicate stores the milliseconds of its timestamps.
4. An answer has at most `ANSWER_BYTES_MAX`, so that clients with gRPC's default limit accept it. If a record is
   available, it has at least one.
5. The session and the append gate decide that this broker does not lead a partition (NOT_LEADER_OR_FOLLOWER). Only
   `_not_leader` makes Comet's answer of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from millstream.broker.groups.stream.polling import Size
from millstream.broker.outlet import RECORDS_MAX, fit
from millstream.broker.session import Inlet, Session, Topic
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.message_size import GRPC_BYTES_MAX, one_grpc_message
from millstream.log.answers import Appended
from millstream.records.record import Record
from millstream.security.rights import Operation
from millstream.wire import comet

ANSWER_BYTES_MAX = GRPC_BYTES_MAX - (64 << 10)
HEAD_BYTES = 48
"""Of a Message, besides its key, value and topic: tags, lengths and numbers."""
ELEMENTS_MAX = 10_000
"""Records or topic names of one request."""
DEFAULT_RECORDS = 100
NS_PER_MS = 1_000_000
NS_MAX = (1 << 63) - 1
PARTITIONS_A_TURN = 2_000
"""Described in one turn of the event loop; each takes some 2 microseconds."""
TURNS_MAX = 20_000
"""Topics whose round-robin position is remembered."""

Handler = Callable[[Session, Any], Awaitable[Any]]
Row = tuple[int, int, bytes | None, bytes, tuple[()]]


class Service:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._turns: dict[UUID, int] = {}
        """Where the next record without a key goes, by topic."""
        self.handlers: Mapping[str, Handler] = {
            "CreateTopic": self._create_topic,
            "DeleteTopic": self._delete_topic,
            "ListTopics": self._list_topics,
            "GetMetadata": self._get_metadata,
            "Produce": self._produce,
            "Consume": self._consume,
            "Subscribe": self._subscribe,
            "Poll": self._poll,
            "Unsubscribe": self._unsubscribe,
            "Replicate": self._replicate,
        }

    # Topics

    async def _create_topic(self, session: Session, request: Any) -> Any:
        settings = one_grpc_message(self._config)
        await session.admin.create_topic(
            request.name, request.partitions, settings, False, replication_factor=request.replication_factor
        )
        return comet.METHODS["CreateTopic"].response(success=True)

    async def _delete_topic(self, session: Session, request: Any) -> Any:
        await session.admin.delete_topic(request.name)
        return comet.METHODS["DeleteTopic"].response(success=True)

    async def _list_topics(self, session: Session, request: Any) -> Any:
        response = comet.METHODS["ListTopics"].response()
        async for topic in _in_turns(session.topics()):
            factor = len(session.leaderships(topic.id)[0].replicas)
            response.topics.add(name=topic.name, partitions=topic.partition_count, replication_factor=factor)
        return response

    async def _get_metadata(self, session: Session, request: Any) -> Any:
        response = comet.METHODS["GetMetadata"].response()
        brokers = {node_id: each.id for node_id, each in session.registered("comet").items()}
        for each in session.registered("comet").values():
            response.brokers.add(id=each.id, address=each.address)
        own = brokers[session.node_id]
        async for topic in _in_turns(_named(session, request.topics) if request.topics else session.topics()):
            leaderships = session.leaderships(topic.id)
            described = response.topics.add(name=topic.name, replication_factor=len(leaderships[0].replicas))
            for number in range(topic.partition_count):
                leadership = leaderships[number % len(leaderships)]
                # A leader without this door is not among the brokers; any broker of a shared store can replace it.
                leader = brokers.get(leadership.leader, own)
                replicas = [brokers[node_id] for node_id in leadership.replicas if node_id in brokers] or [leader]
                described.partitions.add(id=number, leader_broker_id=leader, replica_broker_ids=replicas)
        return response

    # Records

    async def _produce(self, session: Session, request: Any) -> Any:
        topic = session.topic(request.topic, Operation.WRITE)
        numbers, rows = self._by_partition(topic, request)
        appended: dict[int, list[tuple[int, Promise[Appended]]]] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        inlets: dict[int, Inlet] = {}
        number = -1
        try:
            for number in rows:
                inlets[number] = session.inlet(session.partition(topic.name, number, Operation.WRITE))
            parts = {number: inlets[number].split(of_partition, request.size) for number, of_partition in rows.items()}
            for number, of_partition in parts.items():
                appended[number] = inlets[number].put_parts(of_partition)
            for batches in appended.values():
                for _, promise in batches:
                    if not promise.done:
                        with contextlib.suppress(Exception):  # `value` raises it, when all are done
                            await promise
            for number, batches in appended.items():
                spans[number] = [(promise.value().base_offset, count) for count, promise in batches]
        except RequestError as error:
            if error.code != Code.NOT_LEADER_OR_FOLLOWER:
                raise
            return _not_leader(session, topic, number)
        results = {
            number: [each for span in of_one for each in comet.encode_results(number, *span)]
            for number, of_one in spans.items()
        }
        if len(results) == 1:
            return b"".join(*results.values())
        in_order = {number: iter(of_one) for number, of_one in results.items()}
        return b"".join([next(in_order[number]) for number in numbers])

    def _by_partition(self, topic: Topic, request: comet.Produce) -> tuple[list[int], dict[int, list[Row]]]:
        """The partition of each record, and the rows of each partition."""
        count = topic.partition_count
        if request.is_one and request.rows and 0 <= request.numbers[0] < count:
            return request.numbers, {request.numbers[0]: request.rows}
        turn = self._turns.get(topic.id, 0)
        numbers: list[int] = []
        rows: dict[int, list[Row]] = {}
        for number, row in zip(request.numbers, request.rows, strict=True):
            if number < 0 and row[2] is not None:
                number = zlib.crc32(row[2]) % count
            elif number < 0:
                number, turn = turn % count, turn + 1
            elif number >= count:
                raise _invalid_partition(topic, number)
            numbers.append(number)
            rows.setdefault(number, []).append(row)
        if turn:
            if len(self._turns) >= TURNS_MAX:
                self._turns.clear()
            self._turns[topic.id] = turn % count
        return numbers, rows

    async def _consume(self, session: Session, request: Any) -> Any:
        topic = session.topic(request.topic, Operation.READ)
        if not 0 <= request.partition < topic.partition_count:
            raise _invalid_partition(topic, request.partition)
        partition = session.partition(topic.name, request.partition, Operation.READ)
        head_bytes = HEAD_BYTES + len(topic.name)
        try:
            taken = await session.read(
                partition,
                request.offset,
                ANSWER_BYTES_MAX,
                head_bytes=head_bytes,
                count_max=_records_max(request.max_records),
            )
        except RequestError as error:
            if error.code != Code.OFFSET_OUT_OF_RANGE:
                raise
            log = partition.log
            detail = (
                f"offset {request.offset} is out of range: {topic.name}-{partition.index} begins at {log.start} and "
                f"ends at {log.high_watermark}"
            )
            raise RequestError(error.code, detail) from error
        records, _, _ = fit(taken, ANSWER_BYTES_MAX, head_bytes, needs_one=True)
        response = comet.METHODS["Consume"].response()
        _add(response.messages, topic.name, partition.index, records)
        return response

    async def _replicate(self, session: Session, request: Any) -> Any:
        records = [
            Record(each.offset, each.timestamp // NS_PER_MS, each.key or None, each.value) for each in request.records
        ]
        await session.peers.replicate(request.topic, request.partition, records, one_grpc_message(self._config))
        return comet.METHODS["Replicate"].response(success=True)

    # Groups

    async def _subscribe(self, session: Session, request: Any) -> Any:
        subscribed = await session.subscribe(request.topic, request.group)
        return comet.METHODS["Subscribe"].response(
            member_id=subscribed.member_id, partitions=subscribed.partitions, generation=subscribed.generation
        )

    async def _poll(self, session: Session, request: Any) -> Any:
        size = Size(_records_max(request.max_records), ANSWER_BYTES_MAX, HEAD_BYTES + len(request.topic))
        answer = await session.poll(request.topic, request.group, request.member_id, size)
        response = comet.METHODS["Poll"].response(rebalance=answer.rebalance, generation=answer.generation)
        for number, records in answer.records:
            _add(response.messages, request.topic, number, records)
        return response

    async def _unsubscribe(self, session: Session, request: Any) -> Any:
        await session.unsubscribe(request.topic, request.group, request.member_id)
        return comet.METHODS["Unsubscribe"].response(success=True)


def error_text(error: RequestError, request: Any) -> str:
    """The words of an error for a request."""
    name = getattr(request, "topic", None) or getattr(request, "name", "")
    if error.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        return f"topic not found: {name}"
    if error.code == Code.TOPIC_ALREADY_EXISTS:
        return f"topic already exists: {name}"
    if error.code == Code.UNKNOWN_MEMBER_ID:
        return f"member {request.member_id} not found in group {name}/{request.group}"
    return error.detail


def _not_leader(session: Session, topic: Topic, number: int) -> Any:
    leaderships = session.leaderships(topic.id)
    leader = leaderships[number % len(leaderships)].leader
    registered = session.registered("comet").get(leader)
    name = registered.id if registered is not None else str(leader)
    return comet.METHODS["Produce"].response(
        error=f"not leader for partition {number}, leader is {name}", leader_broker_id=name
    )


def _invalid_partition(topic: Topic, number: int) -> RequestError:
    detail = f"invalid partition {number}: topic {topic.name} has {topic.partition_count}"
    return RequestError(Code.INVALID_PARTITIONS, detail)


def _records_max(wanted: int) -> int:
    return min(wanted, RECORDS_MAX) if wanted > 0 else DEFAULT_RECORDS


def _add(messages: Any, topic: str, partition: int, records: Iterable[Record]) -> None:
    add = messages.add
    for each in records:
        timestamp = min(max(each.timestamp, 0) * NS_PER_MS, NS_MAX)
        add(
            offset=each.offset,
            key=each.key or b"",
            value=each.value or b"",
            timestamp=timestamp,
            partition=partition,
            topic=topic,
        )


def _named(session: Session, names: Iterable[str]) -> list[Topic]:
    """The topics of these names that exist, and that the client may describe."""
    found = []
    for name in dict.fromkeys(names):
        with contextlib.suppress(RequestError):
            topic = session.find(name, Operation.DESCRIBE)
            if topic is not None:
                found.append(topic)
    return found


async def _in_turns(topics: Sequence[Topic]) -> AsyncIterator[Topic]:
    """Topics, with other work between some of them: an answer may have thousands."""
    room = PARTITIONS_A_TURN
    for topic in topics:
        room -= 1 + topic.partition_count
        if room <= 0:
            await asyncio.sleep(0)
            room = PARTITIONS_A_TURN
        yield topic
