"""Fetch (key 1), versions 4 to 18.

Returns whole batches, sent from the segment files without copying. A long poll waits up to the client's max.wait.ms for
min.bytes; the broker does not read the connection meanwhile. Supports incremental fetch sessions (KIP-227).
With isolation level read_committed, a read ends at the log's stable offset.
Gaps: no transactions, so the stable offset is the high watermark; no rack-aware reading.
"""

from __future__ import annotations

from time import monotonic
from uuid import UUID

from millstream.broker.fetch import PARTITIONS_MANY, Fetched, Wanted
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise, promised
from millstream.doors.kafka import large_request, replica_serving
from millstream.doors.kafka.context import Context, Wait
from millstream.doors.kafka.large_request import BYTES_LIGHT
from millstream.doors.kafka.sessions import FINAL_EPOCH, NO_SESSION, FetchSession, all_wanted, in_parts
from millstream.doors.kafka.turns import ITEMS_A_STEP, aside, in_steps, in_turns, let_go
from millstream.doors.outbox import Chunk, pieces
from millstream.wire.kafka import fetch, replica_fetch
from millstream.wire.kafka.fetch import FetchRequest, PartitionRead
from millstream.wire.kafka.primitives import Reader

KEY = 1
VERSIONS = (4, 18)
FLEXIBLE_FROM = fetch.FLEXIBLE_FROM
WAIT_MS_MAX = 5 * 60_000
ANSWER_BYTES_MAX = 55 << 20
"""Caps the client's limit, as in Kafka. Kafka's clients ask for 50 MiB."""


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]] | Promise[list[Chunk] | None]:
    version = context.version
    if context.via and version == replica_fetch.VERSION:
        return replica_serving.answer(reader, context)
    if reader.end - reader.position > BYTES_LIGHT:
        large = _LargeFetch(context)
        answered = large_request.answer(reader, version >= FLEXIBLE_FROM, context, large.answer)
        context.wait = Wait(large.cancel, large.finish)
        return answered
    request = fetch.decode(reader, version)
    session: FetchSession | None = None
    if version >= 7:
        try:
            session = context.sessions.open(request, context.session.principal)
        except RequestError as error:
            return _refuse(version, error)
    wanted = list(session.wanted.values()) if session is not None else all_wanted(request)
    return _fetch(request, wanted, session, context)


def _fetch(
    request: FetchRequest, wanted: list[Wanted], session: FetchSession | None, context: Context
) -> list[Chunk] | Promise[list[Chunk]]:
    version, client = context.version, context.session
    is_full = request.session_epoch <= 0
    bytes_max = min(request.bytes_max, ANSWER_BYTES_MAX, context.unread.room)
    committed = request.isolation == fetch.READ_COMMITTED
    work = context.session.fetch(wanted, min(request.bytes_min, max(bytes_max, 1)), bytes_max, committed)
    if work.run(client.clock, min(request.wait_ms_max, WAIT_MS_MAX)):
        return _encode(work.answer.value(), session, is_full, version)
    client.metrics.fetch_waits += 1
    parked: Promise[list[Chunk]] = Promise()
    context.wait = Wait(work.cancel, work.finish)

    def wake(done: Promise[list[Fetched]]) -> None:
        context.began = monotonic()
        if len(wanted) <= PARTITIONS_MANY:
            parked.settle(_encode(done.value(), session, is_full, version))
        else:
            promised(_encode_large(done.value(), session, is_full, version)).then(parked.follow)

    work.answer.then(wake)
    return parked


def _refuse(version: int, error: RequestError) -> list[Chunk]:
    return [fetch.encode_head(version, error.code, NO_SESSION, 0) + fetch.end_of_structure(version)]


class _LargeFetch:
    """A request that is decoded in a thread. Its client may disconnect before the read begins."""

    __slots__ = ("_context", "_is_over")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_over = False

    def cancel(self) -> None:
        self._is_over = True

    finish = cancel

    async def answer(self, reader: Reader) -> list[Chunk]:
        context, version = self._context, self._context.version
        request, wanted, parts = await aside(_read, reader, version)
        session: FetchSession | None = None
        if version >= 7:
            try:
                session = context.sessions.open(request, context.session.principal)
                if session is not None:
                    async for part in in_turns(parts):
                        context.sessions.add(session, part)
                    wanted = list(session.wanted.values())
            except RequestError as error:
                return _refuse(version, error)
        if context.is_gone:
            return []
        if self._is_over:
            request = request._replace(wait_ms_max=0)
        answered = _fetch(request, wanted, session, context)
        chunks = await answered if isinstance(answered, Promise) else answered
        await aside(let_go, wanted)
        return chunks


def _read(reader: Reader, version: int) -> tuple[FetchRequest, list[Wanted], list[FetchRequest]]:
    """The request without partitions; all of them for no session; parts for a session. Runs in any thread."""
    request = fetch.decode(reader, version)
    without = request._replace(topics=[], forgotten=[])
    if request.session_epoch == FINAL_EPOCH:
        return without, all_wanted(request), []
    return without, [], list(in_parts(request, ITEMS_A_STEP))


async def _encode_large(
    fetched: list[Fetched], session: FetchSession | None, is_full: bool, version: int
) -> list[Chunk]:
    if session is not None:
        news: list[Fetched] = []
        async for part in in_turns(in_steps(fetched)):
            news += session.news(part)
        fetched, rest = (fetched, news) if is_full else (news, fetched)
    else:
        rest = []
    chunks = await aside(_encode_told, fetched, session, version)
    await aside(let_go, fetched, rest)
    return chunks


def _encode(fetched: list[Fetched], session: FetchSession | None, is_full: bool, version: int) -> list[Chunk]:
    if session is not None:
        news = session.news(fetched)
        fetched = fetched if is_full else news
    return _encode_told(fetched, session, version)


def _encode_told(fetched: list[Fetched], session: FetchSession | None, version: int) -> list[Chunk]:
    """Runs in any thread."""
    by_topic: dict[str | UUID, list[Fetched]] = {}
    for one in fetched:
        by_topic.setdefault(one.wanted.topic, []).append(one)
    tags = fetch.end_of_structure(version)
    chunks: list[Chunk] = []
    run = [fetch.encode_head(version, Code.NONE, session.id if session is not None else NO_SESSION, len(by_topic))]
    for topic, partitions in by_topic.items():
        run.append(fetch.encode_topic(version, topic, len(partitions)))
        for one in partitions:
            read = PartitionRead(
                one.wanted.partition, one.code, one.high_watermark, one.stable, one.log_start, one.slice.size
            )
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
