"""ShareAcknowledge (key 79), versions 1 to 2.

Acknowledges leased records (KIP-932): accept, release, reject, gap, or (version 2, KIP-1222) renew. Durable when
answered. Acknowledgements of one partition are atomic. Epoch -1 closes the session. A request that names more than
20,000 partitions, the bound of a session, is refused (INVALID_REQUEST).
Gaps: none.
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka import large_request, share_answers, share_relay
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.large_request import BYTES_LIGHT
from millstream.doors.kafka.share_answers import Refusals
from millstream.doors.kafka.share_sessions import FINAL_EPOCH, FIRST_EPOCH, SESSION_PARTITIONS_MAX, ShareSession
from millstream.doors.kafka.turns import LIGHT_ITEMS, aside
from millstream.doors.outbox import Chunk
from millstream.wire.kafka import share
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.share import ShareAcknowledgeRequest

KEY = 79
VERSIONS = (1, 2)
FLEXIBLE_FROM = 0


def answer(reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]] | Promise[list[Chunk] | None]:
    if reader.end - reader.position > BYTES_LIGHT:
        return large_request.answer(reader, True, context, partial(_answer_large, context))
    return _answer(share.decode_acknowledge(reader, context.version), reader, context)


async def _answer_large(context: Context, reader: Reader) -> list[Chunk]:
    request = await aside(share.decode_acknowledge, reader, context.version)
    if len(request.acknowledged) > SESSION_PARTITIONS_MAX:
        detail = f"a request may name {SESSION_PARTITIONS_MAX} partitions"
        head = share.encode_acknowledge_head(context.version, Code.INVALID_REQUEST, detail, 0, 0)
        return [head + share.END_OF_ANSWER]
    if context.is_gone:
        return []
    answered = _answer(request, reader, context)
    return await answered if isinstance(answered, Promise) else answered


def _answer(request: ShareAcknowledgeRequest, reader: Reader, context: Context) -> list[Chunk] | Promise[list[Chunk]]:
    version = context.version

    def refuse(error: RequestError) -> list[Chunk]:
        return [share.encode_acknowledge_head(version, error.code, error.detail, 0, 0) + share.END_OF_ANSWER]

    passed_on = share_relay.pass_on(request.group_id, reader, 0, context, refuse)
    if passed_on is not None:
        return passed_on
    try:
        if request.session_epoch == FIRST_EPOCH:
            raise RequestError(Code.INVALID_SHARE_SESSION_EPOCH, "only a fetch opens a share session")
        session = context.shares.find(request.group_id, request.member_id, request.session_epoch, context)
    except RequestError as error:
        return refuse(error)
    return context.shares.answer(_acknowledge(request, session, version, context), refuse)


async def _acknowledge(
    request: ShareAcknowledgeRequest, session: ShareSession, version: int, context: Context
) -> list[Chunk]:
    answers, refusals = await share_answers.read(request.acknowledged, request.is_renewal)
    promises = await share_answers.acknowledge(session, answers, context.session)
    refusals.update(await share_answers.settle(promises))
    if request.session_epoch == FINAL_EPOCH:
        session.queue.give_back(session.seat)  # leases without an acknowledgement were never processed
        context.shares.close(session)
    lock_ms = session.lock_ms(context.session, request.acknowledged)
    if len(refusals) <= LIGHT_ITEMS:
        return [_encode(version, refusals, lock_ms, context.session.node_id)]
    return [await aside(_encode, version, refusals, lock_ms, context.session.node_id)]


def _encode(version: int, refusals: Refusals, lock_ms: int, node_id: int) -> bytes:
    """Runs in any thread."""
    by_topic: dict[UUID, list[tuple[int, RequestError | None]]] = {}
    for (topic, index), refusal in refusals.items():
        by_topic.setdefault(topic, []).append((index, refusal))
    run = [share.encode_acknowledge_head(version, Code.NONE, None, lock_ms, len(by_topic))]
    for topic, partitions in by_topic.items():
        run.append(share.encode_topic(topic, len(partitions)))
        for index, refusal in partitions:
            code, detail = (Code.NONE, None) if refusal is None else (refusal.code, refusal.detail)
            run.append(share.encode_acknowledged(index, code, detail, node_id))
        run.append(share.END)
    run.append(share.END_OF_ANSWER)
    return b"".join(run)
