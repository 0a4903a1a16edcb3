"""One Flume client: its seven requests, over its session with the broker.

The first record for a topic creates it, with `flume_partitions` partitions. A group of this door is an ordinary classic
group to which the broker assigns partitions (range), so Kafka's tools can list and reset it.

Flume's own consumer joins once, sends heartbeats and commits; it never rejoins. So a join returns at once and waits for
no other member, and a member with an old generation stays (`broker/groups/stream/classic.py`, rules 7 and 8).

Flume's OffsetCommit names neither member nor generation. The connection supplies both: the member id of its last join
or heartbeat, and that request's generation. So an expelled member cannot commit, and no member can commit a partition
that is now assigned to another member. A connection that is no member of the group may commit only while the group has
no members.

A request that cannot be decoded gets ErrUnknown; the connection continues, because its frame is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.broker.groups.stream.classic_member import Join
from millstream.broker.groups.stream.offsets import PartitionCommit, TopicCommit
from millstream.broker.groups.stream.plan import PROTOCOL, encode_subscription
from millstream.broker.session import Partition, Topic
from millstream.broker.settings import check_name
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.doors.engine.connection import Connection
from millstream.doors.framed.door import FramedDoor
from millstream.doors.framed.protocol import Answer, FramedProtocol, Large
from millstream.doors.message_size import one_mebibyte
from millstream.security.rights import Kind, Operation
from millstream.wire import flume
from millstream.wire.flume import Error

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

FETCH_BYTES_MAX = 8 << 20
"""Limit of one response, whatever the client asks for."""
SESSION_MS = 10_000
"""Flume's own default, for members that name no timeout."""
MEMBERSHIPS_MAX = 1000
"""Groups that one connection can be a member of."""

_ERRORS = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: Error.TOPIC_NOT_FOUND,
    Code.OFFSET_OUT_OF_RANGE: Error.OFFSET_OUT_OF_RANGE,
    Code.UNKNOWN_MEMBER_ID: Error.UNKNOWN_MEMBER,
    Code.ILLEGAL_GENERATION: Error.STALE_GENERATION,
    Code.REBALANCE_IN_PROGRESS: Error.REBALANCE_NEEDED,
}
_PRODUCED = flume.PRODUCED.pack


class FlumeProtocol(FramedProtocol):
    __slots__ = ("_changes", "_config", "_known", "_memberships", "_session")

    def __init__(self, door: FramedDoor, connection: Connection) -> None:
        super().__init__(door, connection)
        self._config = door.config
        self._session = door.open_session(self.peer, client_id="member")
        self._memberships: dict[str, tuple[str, int]] = {}
        """Member id and generation, by group."""
        self._known: tuple[flume.ProduceTo, list[Partition]] | None = None
        """The topic of the last record, valid while `_changes` is current: most clients use one topic."""
        self._changes = 0

    def overlaps(self, frame: memoryview) -> bool:
        return len(frame) > 5 and frame[4] == 0 and frame[5] == flume.PRODUCE

    def handle(self, frame: memoryview) -> Answer:
        known = self._known
        if known is not None and self._changes == self._session.changes:
            fields = known[0].decode(frame)
            if fields is not None:
                request_id, number, record_key, payload = fields
                if number == flume.BY_KEY:
                    number = flume.partition_of(record_key, len(known[1]))
                if 0 <= number < len(known[1]):
                    self._append(request_id, known[1][number], record_key, payload)
                    return None
        key, request_id = flume.peek(frame)
        try:
            if key == flume.PRODUCE:
                return self._produce(request_id, *flume.decode_produce(frame))
            request = flume.decode(key, frame)
        except ProtocolError as error:
            self._door.metrics.request_errors += 1
            refusals.warning("a request from %s was refused: %s", self.peer, error)
            return flume.encode_refused(key, request_id, Error.UNKNOWN)
        return _HANDLERS[key](self, request_id, request)

    # -- records -----------------------------------------------------------------------------------------------------

    def _produce(self, request_id: int, name: str, partition: int, key: bytes, payload: bytes) -> Answer:
        try:
            topic = self._session.find(name, Operation.WRITE)
            if topic is None:
                return self.run(self._create(request_id, name, partition, key, payload))
            number = _choose(topic, partition, key)
        except RequestError as error:
            return self._refused_produce(request_id, error, partition)
        self._known = flume.ProduceTo(name), topic.partitions
        self._changes = self._session.changes
        self._append(request_id, topic.partitions[number], key or None, payload)
        return None

    async def _create(self, request_id: int, name: str, partition: int, key: bytes, payload: bytes) -> bytes:
        """Appends the first record of a topic. The client's later requests wait for it."""
        config = self._config
        try:
            topic = await self._session.ensure_topic(
                name, Operation.WRITE, config.flume_partitions, one_mebibyte(config)
            )
        except RequestError as error:
            return self._refused_produce(request_id, error)
        try:
            number = _choose(topic, partition, key)
        except RequestError as error:
            return self._refused_produce(request_id, error, partition)
        try:
            offset = await self._session.inlet(topic.partitions[number]).put(payload, key or None)
        except RequestError as error:
            return self._refused_produce(request_id, error)
        return flume.encode_produced(request_id, number, offset)

    def _append(self, request_id: int, partition: Partition, key: bytes | None, payload: bytes) -> None:
        inlet = partition.inlet or self._session.inlet(partition)
        number, slot = partition.index, self.reserve()

        def settled(offset: int, error: BaseException | None) -> None:
            if error is None:
                self.fill(slot, _PRODUCED(18, request_id, number, offset, 0))
            else:
                self.fill(slot, self._refused_produce(request_id, error))

        inlet.put_then(settled, payload, key)
        if inlet.is_full:
            self.slow_down = True

    def _fetch(self, request_id: int, request: flume.Fetch) -> Answer:
        bytes_max = min(request.bytes_max, FETCH_BYTES_MAX) if request.bytes_max > 0 else FETCH_BYTES_MAX
        room = max(bytes_max, self._config.message_bytes_max)
        return Large(room, lambda: self.run(self._read(request_id, request, bytes_max)))

    async def _read(self, request_id: int, request: flume.Fetch, bytes_max: int) -> bytes:
        try:
            partition = self._partition(request.topic, request.partition)
            taken = await self._session.read(partition, request.offset, bytes_max, head_bytes=flume.RECORD_HEAD_BYTES)
        except RequestError as error:
            return self._refused(request_id, flume.encode_fetched, error)
        return flume.encode_fetched(
            request_id, Error.NONE, [(each.offset, each.value or b"") for each in taken.records]
        )

    def _partition(self, name: str, number: int) -> Partition:
        topic = self._session.topic(name, Operation.READ)
        if not 0 <= number < len(topic.partitions):
            raise RequestError(Code.INVALID_PARTITIONS)
        return topic.partitions[number]

    # -- groups ------------------------------------------------------------------------------------------------------

    def _join_group(self, request_id: int, request: flume.JoinGroup) -> Answer:
        try:
            for name in request.topics:
                check_name(name)
                self._session.check(Operation.READ, Kind.TOPIC, name)
        except RequestError as error:
            return self._refused(request_id, flume.encode_joined, error)
        config = self._config
        session_ms = request.session_ms if request.session_ms > 0 else SESSION_MS
        session_ms = min(max(session_ms, config.session_timeout_min_ms), config.session_timeout_max_ms)
        join = Join(
            group_id=request.group,
            member_id=request.member,
            instance_id=None,
            client_id="",
            client_host="",
            session_ms=session_ms,
            rebalance_ms=session_ms,
            protocol_type="consumer",
            protocols=((PROTOCOL, encode_subscription(request.topics)),),
            planned=True,
        )

        async def work() -> bytes:
            await self._session.coordinate(request.group)
            joined = await self._session.join(join)
            self._remember(request.group, joined.member_id, joined.generation)
            members = sorted(member for member, _, _ in joined.members)
            return flume.encode_joined(
                request_id, Error.NONE, joined.generation, joined.leader, joined.member_id, members
            )

        return self._run(request_id, flume.encode_joined, work())

    def _leave_group(self, request_id: int, request: flume.LeaveGroup) -> Answer:
        try:
            [code] = self._session.leave(request.group, [(request.member, None)])
        except RequestError as error:
            return self._refused(request_id, flume.encode_error, error)
        if code == Code.UNKNOWN_MEMBER_ID:
            code = Code.NONE  # an unknown member has already left
        if self._memberships.get(request.group, ("", -1))[0] == request.member:
            del self._memberships[request.group]
        return flume.encode_error(request_id, _error(code))

    def _heartbeat(self, request_id: int, request: flume.Heartbeat) -> Answer:
        try:
            self._session.heartbeat(request.group, request.member, None, request.generation)
        except RequestError as error:
            if error.code == Code.REBALANCE_IN_PROGRESS:
                self._remember(request.group, request.member, request.generation)
            return self._refused(request_id, flume.encode_error, error)
        self._remember(request.group, request.member, request.generation)
        return flume.encode_error(request_id, Error.NONE)

    def _remember(self, group: str, member: str, generation: int) -> None:
        if len(self._memberships) < MEMBERSHIPS_MAX or group in self._memberships:
            self._memberships[group] = member, generation

    def _offset_commit(self, request_id: int, request: flume.OffsetCommit) -> Answer:
        member, generation = self._memberships.get(request.group, ("", -1))
        commits = [TopicCommit(request.topic, [PartitionCommit(request.partition, request.offset)])]

        async def work() -> bytes:
            if request.offset < 0:
                raise RequestError(Code.OFFSET_OUT_OF_RANGE)
            if self._session.find(request.topic, Operation.READ) is None:
                check_name(request.topic)
            else:
                self._partition(request.topic, request.partition)
            await self._session.coordinate(request.group)
            [[code]] = await self._session.commit(request.group, member, None, generation, commits, may_be_missing=True)
            return flume.encode_error(request_id, _error(code))

        return self._run(request_id, flume.encode_error, work())

    def _offset_fetch(self, request_id: int, request: flume.OffsetFetch) -> Answer:
        async def work() -> bytes:
            self._session.check(Operation.DESCRIBE, Kind.TOPIC, request.topic)
            await self._session.coordinate(request.group, Operation.DESCRIBE)
            [fetched] = self._session.committed(request.group, [(request.topic, [request.partition])])
            [(_, committed, _)] = fetched.partitions
            offset = committed.offset if committed is not None else flume.NO_OFFSET
            return flume.encode_offset(request_id, Error.NONE, offset)

        return self._run(request_id, flume.encode_offset, work())

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _run(
        self, request_id: int, encode: Callable[[int, int], bytes], work: Coroutine[Any, Any, bytes]
    ) -> Promise[bytes]:
        async def answer() -> bytes:
            try:
                return await work
            except RequestError as error:
                return self._refused(request_id, encode, error)

        return self.run(answer())

    def _refused(self, request_id: int, encode: Callable[[int, int], bytes], error: RequestError) -> bytes:
        self._door.metrics.request_errors += 1
        return encode(request_id, _error(error.code))

    def _refused_produce(self, request_id: int, error: BaseException, partition: int = -1) -> bytes:
        self._door.metrics.request_errors += 1
        if isinstance(error, RequestError):
            return flume.encode_produced(request_id, partition, -1, _error(error.code))
        logger.error("unexpected error while storing a record from %s", self.peer, exc_info=error)
        return flume.encode_produced(request_id, -1, -1, Error.UNKNOWN)


def _choose(topic: Topic, partition: int, key: bytes) -> int:
    count = len(topic.partitions)
    if partition == flume.BY_KEY:
        return flume.partition_of(key, count)
    if not 0 <= partition < count:
        raise RequestError(Code.INVALID_PARTITIONS)
    return partition


def _error(code: Code) -> int:
    return Error.NONE if code == Code.NONE else _ERRORS.get(code, Error.UNKNOWN)


_HANDLERS: dict[int, Callable[[FlumeProtocol, int, Any], Answer]] = {
    flume.FETCH: FlumeProtocol._fetch,
    flume.JOIN_GROUP: FlumeProtocol._join_group,
    flume.LEAVE_GROUP: FlumeProtocol._leave_group,
    flume.HEARTBEAT: FlumeProtocol._heartbeat,
    flume.OFFSET_COMMIT: FlumeProtocol._offset_commit,
    flume.OFFSET_FETCH: FlumeProtocol._offset_fetch,
}
