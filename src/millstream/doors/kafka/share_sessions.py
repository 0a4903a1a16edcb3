"""Share sessions (KIP-932): the partitions that a member of a share group fetches from, and its seat in the queue.

    epoch 0       opens a session with the named partitions, and closes the member's previous session
    epoch 1, 2…   counts the requests; a request may add and forget partitions
    epoch -1      applies the last acknowledgements, and closes the session

A session releases its leases when it closes, or when the connection that used it last closes. So a dead worker blocks
its records no longer than its sockets live.

Sessions, sessions per connection, partitions per session and all partitions are bounded. At a bound the broker refuses
the new session and keeps the old ones, because workers hold their leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

if TYPE_CHECKING:
    from millstream.broker.groups.queue.share_fetch import ShareFetch, TopicIdPartition
    from millstream.broker.groups.queue.verbs import Member
    from millstream.broker.session import Queue, Session, ShareGroup
    from millstream.doors.kafka.context import Context
    from millstream.doors.outbox import Chunk

logger = logging.getLogger(__name__)

SESSIONS_MAX = 10_000
CONNECTION_SESSIONS_MAX = 16
SESSION_PARTITIONS_MAX = 20_000
PARTITIONS_MAX = 200_000
FIRST_EPOCH = 0
FINAL_EPOCH = -1

Key = tuple[str, str, str]
"""Group, member, and the node id of the relaying broker, or empty (`share_relay.py`)."""


class ShareSession:
    __slots__ = ("epoch", "fetch", "group", "key", "owner", "places", "queue", "seat")

    def __init__(self, key: Key, group: ShareGroup, queue: Queue, seat: Member, owner: Context) -> None:
        self.key = key
        self.group = group
        self.queue = queue
        self.seat = seat
        self.owner = owner
        """The connection that used it last."""
        self.epoch = 1
        self.places: dict[TopicIdPartition, None] = {}
        """In fetch order."""
        self.fetch: ShareFetch | None = None
        """The fetch in progress."""

    def rotate(self, served: Iterable[TopicIdPartition]) -> None:
        """Moves partitions that gave records to the end, so that none starves."""
        for place in served:
            if place in self.places:
                del self.places[place]
                self.places[place] = None

    def lock_ms(self, client: Session, places: Iterable[TopicIdPartition]) -> int:
        """The shortest lease of these partitions. Renewals last as long, so an answer without new leases has it too."""
        return client.lease_ms(self.queue, {topic_id for topic_id, _ in places})


class ShareSessions:
    def __init__(self) -> None:
        self._sessions: dict[Key, ShareSession] = {}
        self._partitions = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, group_id: str | None, member_id: str | None, context: Context) -> ShareSession:
        key = _key(group_id, member_id, context)
        group = context.session.share_group(key[0], key[1])
        known = self._sessions.get(key)
        if known is not None and known.owner.session.principal != context.session.principal:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self.close(known)
        if len(self._sessions) >= SESSIONS_MAX or len(context.share_keys) >= CONNECTION_SESSIONS_MAX:
            raise RequestError(Code.SHARE_SESSION_LIMIT_REACHED)
        session = ShareSession(key, group, group.queue(), group.take_seat(key[1], key[2]), context)
        self._sessions[key] = session
        context.share_keys.add(key)
        return session

    def find(self, group_id: str | None, member_id: str | None, epoch: int, context: Context) -> ShareSession:
        """The session of a request that has its next epoch."""
        key = _key(group_id, member_id, context)
        context.session.check_share(key[0])
        session = self._sessions.get(key)
        if session is not None and session.owner.session.principal != context.session.principal:
            raise RequestError(Code.SHARE_SESSION_NOT_FOUND)
        if session is not None and not session.group.has_seat(session.key[1], session.seat, session.key[2]):
            self.close(session)  # its member left the group or timed out
            session = None
        if session is None:
            raise RequestError(Code.SHARE_SESSION_NOT_FOUND)
        if epoch != FINAL_EPOCH:
            if epoch != session.epoch:
                raise RequestError(
                    Code.INVALID_SHARE_SESSION_EPOCH, f"the session's next epoch is {session.epoch}, not {epoch}"
                )
            session.epoch = session.epoch % 0x7FFF_FFFF + 1
        if session.owner is not context:
            session.owner.share_keys.discard(session.key)
            session.owner = context
            context.share_keys.add(session.key)
        return session

    def change(
        self, session: ShareSession, added: Iterable[TopicIdPartition], forgotten: Iterable[TopicIdPartition]
    ) -> None:
        """Forgets a partition that is in both lists: the request only acknowledges its last records."""
        before = len(session.places)
        for place in added:
            session.places.setdefault(place)
        for place in forgotten:
            session.places.pop(place, None)
        self._partitions += len(session.places) - before
        if len(session.places) > SESSION_PARTITIONS_MAX or self._partitions > PARTITIONS_MAX:
            self.close(session)
            raise RequestError(Code.SHARE_SESSION_LIMIT_REACHED, "the share sessions hold too many partitions")

    def close(self, session: ShareSession | None) -> None:
        if session is None or self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        self._partitions -= len(session.places)
        session.owner.share_keys.discard(session.key)
        if session.fetch is not None:
            session.fetch.cancel()
        session.group.leave_seat(session.key[1], session.seat, session.key[2])

    def disconnected(self, context: Context) -> None:
        for key in list(context.share_keys):
            self.close(self._sessions.get(key))
        context.is_gone = True
        for relay in context.relays.values():
            relay.close()

    def answer(
        self, work: Coroutine[Any, Any, list[Chunk]], refuse: Callable[[RequestError], list[Chunk]]
    ) -> Promise[list[Chunk]]:
        """Runs `work` in a task; answers in any case."""
        promise: Promise[list[Chunk]] = Promise()

        async def run() -> None:
            try:
                chunks = await work
            except RequestError as error:
                chunks = refuse(error)
            except Exception:
                logger.exception("a share request failed")
                chunks = refuse(RequestError(Code.UNKNOWN_SERVER_ERROR))
            promise.settle(chunks)

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return promise


def _key(group_id: str | None, member_id: str | None, context: Context) -> Key:
    if not group_id or not member_id:
        raise RequestError(Code.INVALID_REQUEST, "a share session needs a group id and a member id")
    return group_id, member_id, context.via
