"""Produce (key 0), versions 3 to 13.

Appends batches to the log unchanged. With `flush=always` (the default) the broker answers after the sync, for acks=1
and acks=all alike. Requests on one connection overlap, so that many share a sync. The broker does not answer acks=0. An
error names the invalid records (KIP-467): records whose timestamp, by the batch header, is out of the topic's bounds,
and records without a key in a compacted topic. Produce creates no topics: Metadata does.
Gaps: no transactions; exactly one batch per partition and request, as the protocol has required since version 3.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from millstream.broker.record_rules import RecordsRefused
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka import large_request
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.large_request import PARTITIONS_LIGHT
from millstream.doors.kafka.turns import aside, in_turns, let_go
from millstream.doors.outbox import Chunk
from millstream.log.answers import Appended
from millstream.records.batch import BatchHeader
from millstream.security.rights import Operation
from millstream.wire.kafka import produce
from millstream.wire.kafka.primitives import ManyItems, Reader
from millstream.wire.kafka.produce import PartitionAnswer, PartitionData

if TYPE_CHECKING:
    from millstream.broker.session import Partition

KEY = 0
VERSIONS = (3, 13)
FLEXIBLE_FROM = produce.FLEXIBLE_FROM


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]] | Promise[list[Chunk] | None] | None:
    version = context.version
    try:
        request = produce.decode(reader, version, PARTITIONS_LIGHT)
    except ManyItems:
        large = large_request.answer(reader, version >= FLEXIBLE_FROM, context, partial(_answer_large, context))
        context.slow_down = True  # parks the connection: later requests append behind these batches
        return large
    answers: list[PartitionAnswer] = []
    waiting = _Waiting(version, answers)
    for data in request.data:
        if request.acks not in (-1, 0, 1):
            answers.append(refused(data, RequestError(Code.INVALID_REQUIRED_ACKS)))
            continue
        try:
            header, promise = _append(data, context)
        except RequestError as error:
            answers.append(refused(data, error))
            continue
        if promise.done:
            answers.append(answered(data, header, promise))
        else:
            at = len(answers)
            answers.append(_PENDING)
            waiting.count += 1
            promise.then(partial(waiting.one_done, at, PartitionData(data.topic, data.partition, None), header))
    if request.acks == 0:
        _check_unanswered(answers)
        return None
    if len(request.data) == 1 and request.acks in (-1, 1):
        context.single = request.data[0]
    if waiting.count == 0:
        return [produce.encode(answers, version)]
    return waiting.promise


async def _answer_large(context: Context, reader: Reader) -> list[Chunk] | None:
    version = context.version
    request = await aside(produce.decode, reader, version)
    answers: list[PartitionAnswer] = []
    waiting: list[tuple[int, PartitionData, BatchHeader, Promise[Appended]]] = []
    async for data in in_turns(request.data):
        if request.acks not in (-1, 0, 1):
            answers.append(refused(data, RequestError(Code.INVALID_REQUIRED_ACKS)))
            continue
        try:
            header, promise = _append(data, context)
        except RequestError as error:
            answers.append(refused(data, error))
            continue
        if promise.done:
            answers.append(answered(data, header, promise))
        else:
            waiting.append((len(answers), data, header, promise))
            answers.append(_PENDING)
    context.slow_down = False  # it is parked already
    if request.acks == 0:
        try:
            _check_unanswered(answers)
        finally:
            await aside(let_go, request.data, waiting, answers)
        return None
    async for at, data, header, promise in in_turns(waiting):
        if not promise.done:
            with suppress(Exception):  # see `answered`
                await promise
        answers[at] = answered(data, header, promise)
    encoded = await aside(produce.encode, answers, version)
    await aside(let_go, request.data, waiting, answers)
    return [encoded]


def _check_unanswered(answers: list[PartitionAnswer]) -> None:
    failed = next((one for one in answers if one.error), None)
    if failed is not None:
        # acks=0 has no answer that could carry the error. As in Kafka, the connection is closed.
        raise ProtocolError(f"a batch sent with acks=0 was refused: {failed.message}")


class _Waiting:
    """The answer to one request while some of its partitions wait for a sync."""

    __slots__ = ("answers", "count", "promise", "version")

    def __init__(self, version: int, answers: list[PartitionAnswer]) -> None:
        self.version = version
        self.answers = answers
        self.count = 0
        self.promise: Promise[list[Chunk]] = Promise()

    def one_done(self, at: int, data: PartitionData, header: BatchHeader, promise: Promise[Appended]) -> None:
        self.answers[at] = answered(data, header, promise)
        self.count -= 1
        if self.count == 0:
            self.promise.settle([produce.encode(self.answers, self.version)])


_PENDING = PartitionAnswer("", -1, 0)


def _append(data: PartitionData, context: Context) -> tuple[BatchHeader, Promise[Appended]]:
    partition = context.session.partition(data.topic, data.partition, Operation.WRITE)
    if data.records is None:
        raise RequestError(Code.INVALID_RECORD, "the request has no batch for this partition")
    return append(partition, data.records, context)


def append(partition: Partition, records: memoryview, context: Context) -> tuple[BatchHeader, Promise[Appended]]:
    session = context.session
    header, promise = partition.append(records, session.clock)
    if not promise.done and partition.log.unsynced_bytes > session.config.partition_unsynced_bytes_max:
        context.slow_down = True
    metrics = session.metrics
    metrics.batches_in += 1
    metrics.records_in += header.count
    return header, promise


def answered(data: PartitionData, header: BatchHeader, promise: Promise[Appended]) -> PartitionAnswer:
    if promise.error is not None:
        return refused(data, promise.error)
    appended = promise.value()
    append_time = header.max_timestamp if header.attributes & 0x08 else -1
    return PartitionAnswer(data.topic, data.partition, 0, appended.base_offset, append_time, appended.log_start)


def refused(data: PartitionData, error: BaseException) -> PartitionAnswer:
    code = error.code if isinstance(error, RequestError) else Code.UNKNOWN_SERVER_ERROR
    records = error.records if isinstance(error, RecordsRefused) else ()
    return PartitionAnswer(data.topic, data.partition, int(code), message=str(error), records=records)
