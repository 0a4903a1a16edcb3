"""Produce (key 0), versions 3 to 13.

Appends batches to the log unchanged. With `flush=always` (the default) the broker answers after the sync, for acks=1
and acks=all alike. Requests on one connection overlap, so that many share a sync. The broker does not answer acks=0. An
error names the invalid records (KIP-467): records whose timestamp, by the batch header, is out of the topic's bounds,
and records without a key in a compacted topic. Produce creates no topics: Metadata does.
Gaps: no transactions; exactly one batch per partition and request, as the protocol has required since version 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

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
    waiting = _append_all(request.data, request.acks, context, answers)
    if request.acks == 0:
        _check_unanswered(answers)
        return None
    if len(request.data) == 1 and request.acks in (-1, 1):
        context.single = request.data[0]
    return _Waiting(version, answers, waiting).promise if waiting else [produce.encode(answers, version)]


async def _answer_large(context: Context, reader: Reader) -> list[Chunk] | None:
    version = context.version
    request = await aside(produce.decode, reader, version)
    answers: list[PartitionAnswer] = []
    waiting: list[_Unsynced] = []
    async for data in in_turns(request.data):
        waiting += _append_all((data,), request.acks, context, answers)
    context.slow_down = False  # it is parked already
    if request.acks == 0:
        try:
            _check_unanswered(answers)
        finally:
            await aside(let_go, request.data, waiting, answers)
        return None
    async for at, topic, partition, header, promise in in_turns(waiting):
        if not promise.done:
            with suppress(Exception):  # see `answered`
                await promise
        answers[at] = answered(topic, partition, header, promise)
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

    def __init__(self, version: int, answers: list[PartitionAnswer], waiting: list[_Unsynced]) -> None:
        self.version = version
        self.answers = answers
        self.count = len(waiting)
        self.promise: Promise[list[Chunk]] = Promise()
        for at, topic, partition, header, synced in waiting:
            synced.then(partial(self.one_done, at, topic, partition, header))

    def one_done(
        self, at: int, topic: str | UUID, partition: int, header: BatchHeader, promise: Promise[Appended]
    ) -> None:
        self.answers[at] = answered(topic, partition, header, promise)
        self.count -= 1
        if self.count == 0:
            self.promise.settle([produce.encode(self.answers, self.version)])


_PENDING = PartitionAnswer("", -1, 0)
_Unsynced = tuple[int, str | UUID, int, BatchHeader, Promise[Appended]]
"""Index of the answer, topic, partition, header and result of a batch that waits for a sync."""


def _append_all(
    items: Iterable[PartitionData], acks: int, context: Context, answers: list[PartitionAnswer]
) -> list[_Unsynced]:
    """Adds an answer for each partition; returns the batches that wait for a sync."""
    waiting: list[_Unsynced] = []
    if acks not in (-1, 0, 1):
        answers += [refused(data.topic, data.partition, RequestError(Code.INVALID_REQUIRED_ACKS)) for data in items]
        return waiting
    for data in items:
        try:
            header, promise = _append(data, context)
        except RequestError as error:
            answers.append(refused(data.topic, data.partition, error))
            continue
        if promise.done:
            answers.append(answered(data.topic, data.partition, header, promise))
        else:
            waiting.append((len(answers), data.topic, data.partition, header, promise))
            answers.append(_PENDING)
    return waiting


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


def answered(topic: str | UUID, partition: int, header: BatchHeader, promise: Promise[Appended]) -> PartitionAnswer:
    if promise.error is not None:
        return refused(topic, partition, promise.error)
    appended = promise.value()
    append_time = header.max_timestamp if header.attributes & 0x08 else -1
    return PartitionAnswer(topic, partition, 0, appended.base_offset, append_time, appended.log_start)


def refused(topic: str | UUID, partition: int, error: BaseException) -> PartitionAnswer:
    code = error.code if isinstance(error, RequestError) else Code.UNKNOWN_SERVER_ERROR
    records = error.records if isinstance(error, RecordsRefused) else ()
    return PartitionAnswer(topic, partition, int(code), message=str(error), records=records)
