"""Fetch (key 1), versions 4 to 18.

Whole batches from each partition, cut at batch boundaries, sent from the segment files without copying. Waits up to the
client's max.wait.ms for min.bytes; in the meantime the connection is not read. Incremental sessions are served.
Gaps: no transactions, so both isolation levels read the same; no rack-aware reading.
"""

from __future__ import annotations

from time import monotonic
from uuid import UUID

from millstream.broker.fetch import Fetched, Wanted
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context, Wait
from millstream.doors.kafka.sessions import NO_SESSION, FetchSession, all_wanted
from millstream.doors.outbox import Chunk, pieces
from millstream.wire.kafka import fetch
from millstream.wire.kafka.fetch import FetchRequest, PartitionRead
from millstream.wire.kafka.primitives import Reader

KEY = 1
VERSIONS = (4, 18)
FLEXIBLE_FROM = fetch.FLEXIBLE_FROM
WAIT_MS_MAX = 5 * 60_000
ANSWER_BYTES_MAX = 55 << 20
"""Whatever the client allows; as in Kafka, whose clients ask for 50 MiB."""


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    version = context.version
    request = fetch.decode(reader, version)
    session: FetchSession | None = None
    if version >= 7:
        try:
            session = context.sessions.open(request)
        except RequestError as error:
            return [fetch.encode_head(version, error.code, NO_SESSION, 0) + fetch.end_of_structure(version)]
    wanted = list(session.wanted.values()) if session is not None else all_wanted(request)
    return _fetch(request, wanted, session, context)


def _fetch(
    request: FetchRequest, wanted: list[Wanted], session: FetchSession | None, context: Context
) -> list[Chunk] | Promise[list[Chunk]]:
    version, broker = context.version, context.broker
    is_full = request.session_epoch <= 0
    bytes_max = min(request.bytes_max, ANSWER_BYTES_MAX, context.unread.room)
    work = broker.fetch(wanted, min(request.bytes_min, max(bytes_max, 1)), bytes_max)
    if work.run(broker.clock, min(request.wait_ms_max, WAIT_MS_MAX)):
        return _encode(work.answer.value(), session, is_full, version)
    broker.metrics.fetch_waits += 1
    parked: Promise[list[Chunk]] = Promise()
    context.wait = Wait(work.cancel, work.finish)

    def wake(done: Promise[list[Fetched]]) -> None:
        context.began = monotonic()
        parked.settle(_encode(done.value(), session, is_full, version))

    work.answer.then(wake)
    return parked


def _encode(fetched: list[Fetched], session: FetchSession | None, is_full: bool, version: int) -> list[Chunk]:
    if session is not None:
        news = session.news(fetched)
        fetched = fetched if is_full else news
    by_topic: dict[str | UUID, list[Fetched]] = {}
    for one in fetched:
        by_topic.setdefault(one.wanted.topic, []).append(one)
    tags = fetch.end_of_structure(version)
    chunks: list[Chunk] = []
    run = [fetch.encode_head(version, Code.NONE, session.id if session is not None else NO_SESSION, len(by_topic))]
    for topic, partitions in by_topic.items():
        run.append(fetch.encode_topic(version, topic, len(partitions)))
        for one in partitions:
            read = PartitionRead(one.wanted.partition, one.code, one.high_watermark, one.log_start, one.slice.size)
            run.append(fetch.encode_partition(version, read))
            if one.slice.size:
                records = pieces(one.slice)
                if isinstance(records, bytes):
                    run.append(records)
                else:
                    chunks += [b"".join(run), records]
                    run = []
            run.append(tags)
        run.append(tags)
    run.append(tags)
    rest = b"".join(run)
    if rest:
        chunks.append(rest)
    return chunks
