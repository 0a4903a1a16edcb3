"""ShareFetch (key 78), versions 1 to 2.

Applies acknowledgements, then leases records to a member of a share group (KIP-932), with their delivery counts. A long
poll waits up to the client's max.wait.ms for an available record; the broker does not read the connection meanwhile.
Under a record limit the last batch is leased to its end, unless it alone exceeds the limit or the client asks for a
strict limit (version 2, KIP-1206). Leases can be renewed (version 2, KIP-1222). A session ends with its connection and
releases its leases. A broker that is not the coordinator relays the request to it.
A request that names more than 20,000 partitions, the bound of a session, is refused (INVALID_REQUEST).
Gaps: min.bytes and the preferred batch size are ignored: one record is enough; batches are sent whole, even if few of
their records are leased.
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

from millstream.broker.groups.queue import share_fetch
from millstream.broker.groups.queue.share_fetch import Leased, ShareFetch
from millstream.broker.groups.queue.verbs import Verb
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka import large_request, share_answers, share_relay
from millstream.doors.kafka.context import Context, Wait
from millstream.doors.kafka.large_request import BYTES_LIGHT
from millstream.doors.kafka.share_answers import Refusals
from millstream.doors.kafka.share_sessions import FINAL_EPOCH, FIRST_EPOCH, SESSION_PARTITIONS_MAX, ShareSession
from millstream.doors.kafka.turns import LIGHT_ITEMS, aside
from millstream.doors.outbox import Chunk
from millstream.wire.kafka import share
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.share import PartitionAnswer, ShareFetchRequest

KEY = 78
VERSIONS = (1, 2)
FLEXIBLE_FROM = 0
WAIT_MS_MAX = 5 * 60_000
ANSWER_BYTES_MAX = 1 << 20
"""Caps the client's limit: unlike those of a plain fetch, these bytes are in memory until they are sent."""


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]] | Promise[list[Chunk] | None]:
    if reader.end - reader.position > BYTES_LIGHT:
        answered = large_request.answer(reader, True, context, partial(_answer_large, context))
        context.wait = Wait()
        return answered
    return _answer(share.decode_fetch(reader, context.version), reader, context)


async def _answer_large(context: Context, reader: Reader) -> list[Chunk]:
    request = await aside(share.decode_fetch, reader, context.version)
    if max(len(request.acknowledged), len(request.forgotten)) > SESSION_PARTITIONS_MAX:
        return _refuse(RequestError(Code.INVALID_REQUEST, f"a request may name {SESSION_PARTITIONS_MAX} partitions"))
    if context.is_gone:
        return []
    answered = _answer(request, reader, context)
    return await answered if isinstance(answered, Promise) else answered


def _answer(request: ShareFetchRequest, reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    wait_ms = min(request.wait_ms_max, WAIT_MS_MAX)
    passed_on = share_relay.pass_on(request.group_id, reader, wait_ms, context, _refuse)
    if passed_on is not None:
        return passed_on
    try:
        session = _session(request, context)
    except RequestError as error:
        return _refuse(error)
    fetch = session.fetch = _begin(request, session, context)
    context.wait = Wait(fetch.cancel, fetch.cancel)
    return context.shares.answer(_fetch(request, session, fetch, context), _refuse)


def _session(request: ShareFetchRequest, context: Context) -> ShareSession:
    shares, epoch = context.shares, request.session_epoch
    if epoch == FIRST_EPOCH:
        if any(request.acknowledged.values()):
            raise RequestError(Code.INVALID_REQUEST, "a new share session cannot acknowledge records")
        session = shares.open(request.group_id, request.member_id, context)
    else:
        session = shares.find(request.group_id, request.member_id, epoch, context)
    if epoch != FINAL_EPOCH:
        shares.change(session, request.acknowledged, request.forgotten)
    return session


def _begin(request: ShareFetchRequest, session: ShareSession, context: Context) -> ShareFetch:
    if session.fetch is not None:
        session.fetch.cancel()  # of a connection that the client abandoned
    fetches = request.session_epoch != FINAL_EPOCH and not request.is_renewal
    places = list(session.places) if fetches and request.records_max > 0 and request.bytes_max > 0 else []
    bytes_max = min(request.bytes_max, ANSWER_BYTES_MAX, max(context.unread.room, 1))
    return context.session.share_fetch(
        session.group, session.queue, session.seat, places, request.records_max, bytes_max
    )


async def _fetch(request: ShareFetchRequest, session: ShareSession, fetch: ShareFetch, context: Context) -> list[Chunk]:
    client = context.session
    answers, refusals = await share_answers.read(request.acknowledged, request.is_renewal)
    # Acknowledgements become durable while the fetch looks for records. A released record may be leased again here, but
    # only after its release is durable.
    promises = await share_answers.acknowledge(session, answers, client)
    if any(each.verb == Verb.RELEASE for said in answers.values() for each in said):
        await share_answers.settle(promises)
    wait_ms = min(request.wait_ms_max, WAIT_MS_MAX)
    try:
        leased = await fetch.run(client.clock, wait_ms, not request.is_record_limit, lambda: _parked(context))
    finally:
        if session.fetch is fetch:
            session.fetch = None
    refusals.update(await share_answers.settle(promises))
    if request.session_epoch == FINAL_EPOCH:
        session.queue.give_back(session.seat)  # leases without an acknowledgement were never processed
        context.shares.close(session)
    session.rotate(each.place for each in leased if each.taken.runs)
    if request.session_epoch != FIRST_EPOCH:
        leased = [each for each in leased if each.taken.runs or each.error is not None]
    lock_ms = min((each.lease_ms for each in leased if each.lease_ms), default=0)
    if not lock_ms:
        lock_ms = session.lock_ms(client, session.places)
    if len(leased) + len(refusals) <= LIGHT_ITEMS:
        return _encode(leased, refusals, lock_ms, client.node_id)
    return await aside(_encode, leased, refusals, lock_ms, client.node_id)


def _parked(context: Context) -> None:
    context.session.metrics.fetch_waits += 1


def _encode(leased: list[Leased], refusals: Refusals, lock_ms: int, node_id: int) -> list[Chunk]:
    """Runs in any thread."""
    by_topic: dict[UUID, list[Leased]] = {}
    known = {each.place for each in leased}
    for each in leased + [Leased(place, share_fetch.NOTHING, 0) for place in refusals if place not in known]:
        by_topic.setdefault(each.place[0], []).append(each)
    run: list[bytes] = [share.encode_fetch_head(Code.NONE, None, lock_ms, len(by_topic))]
    for topic, partitions in by_topic.items():
        run.append(share.encode_topic(topic, len(partitions)))
        for each in partitions:
            run += _encode_partition(each, refusals.get(each.place), node_id)
        run.append(share.END)
    run.append(share.END_OF_ANSWER)
    return [b"".join(run)]


def _encode_partition(leased: Leased, refusal: RequestError | None, node_id: int) -> list[bytes]:
    error, data = leased.error, leased.taken.data
    head = PartitionAnswer(
        leased.place[1],
        Code.NONE if error is None else error.code,
        None if error is None else error.detail,
        Code.NONE if refusal is None else refusal.code,
        None if refusal is None else refusal.detail,
        len(data),
    )
    return [share.encode_fetched(head, node_id), data, share.encode_acquired(leased.taken.runs)]


def _refuse(error: RequestError) -> list[Chunk]:
    return [share.encode_fetch_head(error.code, error.detail, 0, 0) + share.END_OF_ANSWER]
