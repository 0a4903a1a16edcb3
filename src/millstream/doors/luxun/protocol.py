"""One Luxun client: the calls of its queue service, over its session with the broker.

A topic has one partition here: the first item creates it, and the door refuses topics with more, because an index does
not name a partition. A read with a fanout id moves that id's cursor (`broker/groups/cursor.py`); a read by index moves
nothing. A read or a deletion first passes the read barrier (`read_barrier.py`): it sees every oneway item that the door
has received.

An invalid request gets an error in its result. Undecodable arguments, or an unknown method, get Thrift's own exception.
Bytes that are no Thrift message close the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from millstream.broker.outlet import RECORDS_MAX
from millstream.broker.session import Inlet, Partition, Topic
from millstream.broker.settings import check_name
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.doors.engine.connection import Connection
from millstream.doors.framed.door import FramedDoor
from millstream.doors.framed.protocol import Answer, FramedProtocol, Large
from millstream.doors.luxun.connection import LuxunConnection
from millstream.doors.luxun.password import Password
from millstream.doors.luxun.read_barrier import Appends, ReadBarrier
from millstream.doors.message_size import one_mebibyte
from millstream.records.record import Record
from millstream.security.rights import Kind, Operation
from millstream.wire import luxun, thrift
from millstream.wire.luxun import ErrorCode, Failure, ResultCode

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

FETCH_BYTES_MAX = 8 << 20
"""Limit of one response, whatever the client asks for."""

_PRODUCE_START = b"\x80\x01\x00\x01\x00\x00\x00\x07produce"
_ASYNC_PRODUCE_STARTS = tuple(
    b"\x80\x01\x00" + bytes([kind]) + b"\x00\x00\x00\x0casyncProduce" for kind in (thrift.ONEWAY, thrift.CALL)
)
_ERRORS = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.TOPIC_NOT_EXIST,
    Code.OFFSET_OUT_OF_RANGE: ErrorCode.INDEX_OUT_OF_BOUNDS,
    Code.INVALID_TOPIC_EXCEPTION: ErrorCode.INVALID_TOPIC,
    Code.INVALID_PARTITIONS: ErrorCode.INVALID_TOPIC,
    Code.MESSAGE_TOO_LARGE: ErrorCode.MESSAGE_SIZE_TOO_LARGE,
}


class LuxunProtocol(FramedProtocol):
    __slots__ = ("_barrier", "_changes", "_config", "_known", "_password", "_session", "creates")

    _connection: LuxunConnection

    def __init__(self, door: FramedDoor, password: Password, barrier: ReadBarrier, connection: Connection) -> None:
        super().__init__(door, connection)
        self._config = door.config
        self._session = door.open_session(self.peer)
        self._known: tuple[str, Inlet] | None = None
        """The topic of the last item, valid while `_changes` is current."""
        self._changes = 0
        self._password = password
        self._barrier = barrier
        self.creates = False
        """Whether it appends the first item of a topic; its other requests wait for that."""

    def closed(self) -> None:
        self._barrier.forget(self._connection)
        super().closed()

    def overlaps(self, frame: memoryview) -> bool:
        start = bytes(frame[4:24])
        return start.startswith(_PRODUCE_START) or start in _ASYNC_PRODUCE_STARTS

    def handle(self, frame: memoryview) -> Answer:
        name, kind, sequence_id, body = thrift.Reader(frame, 4).message()
        known = _CALLS.get(name)
        if known is None:
            text = f"there is no method {name}; the service is {luxun.IDL.name}"
            return self._exception(name, sequence_id, thrift.UNKNOWN_METHOD, text)
        if kind not in (thrift.CALL, thrift.ONEWAY):
            return self._exception(name, sequence_id, thrift.INVALID_MESSAGE_TYPE, f"a message of type {kind}")
        decode, call = known
        try:
            request = decode(body)
        except ProtocolError as error:
            if name == luxun.ASYNC_PRODUCE:
                raise  # a oneway call has no response
            return self._exception(name, sequence_id, thrift.PROTOCOL_ERROR, str(error))
        return call(self, sequence_id, request)

    # -- items in ----------------------------------------------------------------------------------------------------

    def _produce(self, sequence_id: int, request: luxun.Produce) -> Answer:
        return self._append(luxun.PRODUCE, sequence_id, request)

    def _async_produce(self, sequence_id: int, request: luxun.Produce) -> Answer:
        """Sends no response, but keeps its place in line: a later read on this connection sees the item."""
        return self._append(luxun.ASYNC_PRODUCE, sequence_id, request)

    def _append(self, call: str, sequence_id: int, request: luxun.Produce) -> Answer:
        oneway = self._barrier.began(request.topic, self._connection) if call == luxun.ASYNC_PRODUCE else None
        try:
            inlet = self._inlet(request.topic)
        except Exception as error:  # after any error, no read may wait for this item
            if oneway is not None:
                self._barrier.ended(request.topic, oneway)
            self.fill(self.reserve(), self._refused_item(call, sequence_id, error))
            return None
        if inlet is None:
            self.creates = True
            return self.run(self._create(call, sequence_id, bytes(request.item), request.topic, oneway))
        self._put(call, sequence_id, request.item, request.topic, inlet, oneway)
        return None

    def _inlet(self, name: str) -> Inlet | None:
        known = self._known
        if known is not None and known[0] == name and self._changes == self._session.changes:
            return known[1]
        topic = self._session.find(name, Operation.WRITE)
        if topic is None:
            return None
        inlet = self._session.inlet(_single(topic).partitions[0])
        self._known, self._changes = (name, inlet), self._session.changes
        return inlet

    async def _create(self, call: str, sequence_id: int, item: bytes, name: str, oneway: Appends | None) -> bytes:
        """Appends the first item of a topic. The client's later requests wait for it."""
        try:
            check_name(name)
            settings = one_mebibyte(self._config)
            topic = _single(await self._session.ensure_topic(name, Operation.WRITE, 1, settings))
            index = await self._session.inlet(topic.partitions[0]).put(item)
        except RequestError as error:
            return self._refused_item(call, sequence_id, error)
        finally:
            self.creates = False
            if oneway is not None:
                self._barrier.ended(name, oneway)
        return _produced(call, sequence_id, index)

    def _put(
        self, call: str, sequence_id: int, item: memoryview, topic: str, inlet: Inlet, oneway: Appends | None
    ) -> None:
        slot = self.reserve()

        def settled(index: int, error: BaseException | None) -> None:
            if oneway is not None:
                self._barrier.ended(topic, oneway)
            if error is None:
                self.fill(slot, _produced(call, sequence_id, index))
            else:
                self.fill(slot, self._refused_item(call, sequence_id, error))

        inlet.put_then(settled, item)
        if inlet.is_full:
            self.slow_down = True

    def _refused_item(self, call: str, sequence_id: int, error: BaseException) -> bytes:
        answer = self._refused(call, sequence_id, error)
        if call == luxun.PRODUCE:
            return answer
        refusals.warning("oneway item from %s refused: %s", self.peer, error)
        return b""

    # -- items out ---------------------------------------------------------------------------------------------------

    def _consume(self, sequence_id: int, request: luxun.Consume) -> Answer:
        try:
            topic = self._session.find(request.topic, Operation.READ)
            if request.fanout_id:
                self._session.check(Operation.READ, Kind.GROUP, request.fanout_id)
        except RequestError as error:
            return self._refused(luxun.CONSUME, sequence_id, error)
        if self._is_far_behind(request, topic) or self._barrier.is_clear(request.topic, self._connection):
            return self._consume_now(sequence_id, request)

        async def work() -> bytes:
            if not await self._pass_barrier(request.topic):
                return b""
            answer = self._consume_now(sequence_id, request)
            made = answer.make() if isinstance(answer, Large) else answer
            return await made if isinstance(made, Promise) else made

        return Large(max(FETCH_BYTES_MAX, self._config.message_bytes_max), lambda: self.run(work()))

    def _consume_now(self, sequence_id: int, request: luxun.Consume) -> bytes | Large:
        try:
            topic = self._topic(request.topic, Operation.READ)
        except RequestError as error:
            return self._refused(luxun.CONSUME, sequence_id, error)
        log = topic.partitions[0].log
        if log.high_watermark == log.start:
            empty = Failure(ErrorCode.TOPIC_IS_EMPTY, f"topic {topic.name} is empty", ResultCode.TRY_LATER)
            return luxun.encode_failure(luxun.CONSUME, sequence_id, empty)
        if self._is_at_end(request, topic):
            return _all_consumed(sequence_id)
        bytes_max = min(max(request.fetch_bytes_max, 0), FETCH_BYTES_MAX)
        count_max = 1 if request.fetch_bytes_max <= 0 else None

        async def work() -> bytes:
            try:
                if request.fanout_id:
                    await self._session.coordinate(request.fanout_id)
                    records = await self._session.read_cursor(request.fanout_id, topic, bytes_max, count_max)
                else:
                    here = self._topic(request.topic, Operation.READ)  # it may have been deleted meanwhile
                    first = here.partitions[0]
                    taken = await self._session.read(first, request.start_index, bytes_max, count_max=count_max)
                    records = taken.records
            except RequestError as error:
                return self._refused(luxun.CONSUME, sequence_id, error)
            return _consumed(sequence_id, records)

        return Large(max(bytes_max, topic.settings.message_bytes_max), lambda: self.run(work()))

    def _is_far_behind(self, request: luxun.Consume, topic: Topic | None) -> bool:
        """Whether the response ends before the end of the log, so that items in flight cannot change it."""
        if topic is None or len(topic.partitions) != 1:
            return False
        ahead = 1 if request.fetch_bytes_max <= 0 else RECORDS_MAX
        last = topic.partitions[0].log.high_watermark - ahead
        if not request.fanout_id:
            return request.start_index <= last
        try:
            return self._session.cursor_position(request.fanout_id, topic) <= last
        except RequestError:  # another broker has the cursor
            return False

    def _is_at_end(self, request: luxun.Consume, topic: Topic) -> bool:
        """Whether it is certain, without waiting, that no item can be read."""
        end = topic.partitions[0].log.high_watermark
        if not request.fanout_id:
            return request.start_index == end
        try:
            return self._session.cursor_position(request.fanout_id, topic) >= end
        except RequestError:  # another broker has the cursor; the read finds out which
            return False

    def _find(self, sequence_id: int, request: luxun.Find) -> Answer:
        async def work() -> bytes:
            if not await self._pass_barrier(request.topic):
                return b""
            try:
                partition = self._topic(request.topic, Operation.DESCRIBE).partitions[0]
                index, timestamp = await self._closest(partition, request.timestamp)
            except RequestError as error:
                return self._refused(luxun.FIND, sequence_id, error)
            if index is None:
                empty = Failure(ErrorCode.TOPIC_IS_EMPTY, f"topic {request.topic} is empty")
                return luxun.encode_failure(luxun.FIND, sequence_id, empty)
            return luxun.encode_found(sequence_id, index, timestamp)

        return self.run(work())

    async def _closest(self, partition: Partition, timestamp: int) -> tuple[int | None, int | None]:
        """The first index at or after a time, or the one before it if that is closer. LATEST_TIME gives the next index.

        With ordered timestamps that is the closest item of all. With unordered ones only a full read would find it.
        """
        log = partition.log
        if timestamp == luxun.EARLIEST_TIME:
            return log.start, await self._time_of(partition, log.start)
        if timestamp == luxun.LATEST_TIME:
            return log.high_watermark, await self._time_of(partition, log.high_watermark - 1)
        if log.high_watermark == log.start:
            return None, None
        after = await log.find_time(timestamp)
        if after is None:
            return log.high_watermark - 1, await self._time_of(partition, log.high_watermark - 1)
        before = await self._time_of(partition, after.offset - 1)
        if before is not None and timestamp - before <= after.timestamp - timestamp:
            return after.offset - 1, before
        return after.offset, after.timestamp

    async def _time_of(self, partition: Partition, index: int) -> int | None:
        if not partition.log.start <= index < partition.log.high_watermark:
            return None
        taken = await self._session.read(partition, index, 0, count_max=1)
        return taken.records[0].timestamp if taken.records else None

    def _get_size(self, sequence_id: int, request: luxun.GetSize) -> Answer:
        async def work() -> bytes:
            if not await self._pass_barrier(request.topic):
                return b""
            try:
                topic = self._topic(request.topic, Operation.DESCRIBE)
                first = topic.partitions[0].log.start
                if request.fanout_id:
                    await self._session.coordinate(request.fanout_id, Operation.DESCRIBE)
                    first = self._session.cursor_position(request.fanout_id, topic)
            except RequestError as error:
                return self._refused(luxun.GET_SIZE, sequence_id, error)
            return luxun.encode_size(sequence_id, max(topic.partitions[0].log.high_watermark - first, 0))

        return self.run(work())

    # -- the read barrier --------------------------------------------------------------------------------------------

    async def _pass_barrier(self, topic: str) -> bool:
        """Whether the client still wants a response: an abandoned read must not move a cursor.

        A client that hangs up may still take its response, so the read continues. If the barrier then times out, the
        connection of that client closes: each of its later requests would wait as long again.
        """
        barrier, connection = self._barrier, self._connection
        is_passed = barrier.is_clear(topic, connection) or await barrier.passed(topic, connection)
        if connection.hung_up and not is_passed:
            connection.close()
        return not connection.closed

    # -- topics ------------------------------------------------------------------------------------------------------

    def _delete_topic(self, sequence_id: int, request: luxun.DeleteTopic) -> Answer:
        async def work() -> bytes:
            if not await self._password.admits(request.password):
                failure = Failure(ErrorCode.AUTHENTICATION_FAILURE, "the password is wrong")
                self._door.metrics.request_errors += 1
                return luxun.encode_failure(luxun.DELETE_TOPIC, sequence_id, failure)
            if not await self._pass_barrier(request.topic):
                return b""
            try:
                topic = self._session.find(request.topic, Operation.DELETE)
                if topic is not None:  # for a missing topic Luxun returns SUCCESS
                    await self._session.admin.delete_topic(_single(topic).name)
            except RequestError as error:
                if error.code != Code.UNKNOWN_TOPIC_OR_PARTITION:  # another client was faster
                    return self._refused(luxun.DELETE_TOPIC, sequence_id, error)
            return luxun.encode_deleted(sequence_id)

        return self.run(work())

    def _topic(self, name: str, operation: Operation) -> Topic:
        topic = self._session.find(name, operation)
        if topic is None:
            check_name(name)
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} does not exist")
        topic.partitions[0].log.damage.check_lost()
        return _single(topic)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refused(self, call: str, sequence_id: int, error: BaseException) -> bytes:
        self._door.metrics.request_errors += 1
        if isinstance(error, RequestError):
            failure = Failure(_ERRORS.get(error.code, ErrorCode.INTERNAL_ERROR), error.detail)
        else:
            logger.error("request %s from %s failed", call, self.peer, exc_info=error)
            failure = Failure(ErrorCode.INTERNAL_ERROR, Code.UNKNOWN_SERVER_ERROR.text)
        return luxun.encode_failure(call, sequence_id, failure)

    def _exception(self, name: str, sequence_id: int, kind: int, text: str) -> bytes:
        self._door.metrics.request_errors += 1
        return thrift.exception(name, sequence_id, kind, text)


def _consumed(sequence_id: int, records: list[Record]) -> bytes:
    if not records:
        return _all_consumed(sequence_id)
    return luxun.encode_consumed(sequence_id, [each.value or b"" for each in records], records[-1].offset)


def _all_consumed(sequence_id: int) -> bytes:
    text = "all messages have been consumed; try later"
    failure = Failure(ErrorCode.ALL_MESSAGE_CONSUMED, text, ResultCode.TRY_LATER)
    return luxun.encode_failure(luxun.CONSUME, sequence_id, failure)


def _produced(call: str, sequence_id: int, index: int) -> bytes:
    return luxun.encode_produced(sequence_id, index) if call == luxun.PRODUCE else b""


def _single(topic: Topic) -> Topic:
    if len(topic.partitions) > 1:
        raise RequestError(
            Code.INVALID_PARTITIONS,
            f"topic {topic.name} has {len(topic.partitions)} partitions, and an index is for topics with one: "
            "read it through another door, or use another topic here",
        )
    return topic


_CALLS: dict[str, tuple[Callable[[thrift.Reader], Any], Callable[[LuxunProtocol, int, Any], Answer]]] = {
    luxun.PRODUCE: (luxun.decode_produce, LuxunProtocol._produce),
    luxun.ASYNC_PRODUCE: (luxun.decode_produce, LuxunProtocol._async_produce),
    luxun.CONSUME: (luxun.decode_consume, LuxunProtocol._consume),
    luxun.FIND: (luxun.decode_find, LuxunProtocol._find),
    luxun.DELETE_TOPIC: (luxun.decode_delete_topic, LuxunProtocol._delete_topic),
    luxun.GET_SIZE: (luxun.decode_get_size, LuxunProtocol._get_size),
}
