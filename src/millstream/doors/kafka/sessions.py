"""Fetch sessions (KIP-227): the broker remembers a consumer's partitions, so that a fetch need not repeat them.

A session is a set of partitions with their positions, and belongs to the principal that started it. A full request
(epoch 0) starts a session. An incremental request names only changes, and its answer has only changed partitions: with
records, an error, or a new log start or high watermark. Epochs count the requests. A wrong epoch means that an answer
was lost; the client starts a new session.

The number of sessions and the number of their partitions are bounded. At a bound the broker evicts the least recently
used session, and its client starts a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeVar
from uuid import UUID

from millstream.broker.fetch import Fetched, Wanted
from millstream.core.errors import Code, RequestError
from millstream.security.principal import ANONYMOUS, Principal
from millstream.wire.kafka.fetch import FetchRequest

SESSIONS_MAX = 1000
SESSION_PARTITIONS_MAX = 20_000
PARTITIONS_MAX = 200_000
"""Of all sessions: some 80 MB."""
NO_SESSION = 0
FINAL_EPOCH = -1
FULL_EPOCH = 0

Topic = str | UUID
SessionPartition = tuple[Topic, int]
T = TypeVar("T")


class FetchSession:
    __slots__ = ("counted", "epoch", "id", "known", "principal", "wanted")

    def __init__(self, session_id: int, principal: Principal) -> None:
        self.id = session_id
        self.principal = principal
        self.epoch = 1
        self.wanted: dict[SessionPartition, Wanted] = {}
        self.known: dict[SessionPartition, tuple[int, int]] = {}
        """High watermark and log start in the last answer."""
        self.counted = 0
        """The number of partitions that `FetchSessions` counts for it."""

    def update(self, request: FetchRequest) -> None:
        for topic, partitions in request.forgotten:
            for index in partitions:
                self.wanted.pop((topic, index), None)
                self.known.pop((topic, index), None)
        for wanted in all_wanted(request):
            self.wanted[wanted.topic, wanted.partition] = wanted
        if len(self.wanted) > SESSION_PARTITIONS_MAX:
            raise RequestError(Code.INVALID_REQUEST, f"a session may hold {SESSION_PARTITIONS_MAX} partitions")

    def news(self, fetched: Sequence[Fetched]) -> list[Fetched]:
        """The changed partitions of a read. Partitions with records go last in the next fetch, so that none starves."""
        told = []
        for one in fetched:
            place = (one.wanted.topic, one.wanted.partition)
            now = (one.high_watermark, one.log_start)
            if one.slice.size or one.code != Code.NONE or self.known.get(place) != now:
                told.append(one)
                self.known[place] = now
            if one.slice.size and place in self.wanted:
                self.wanted[place] = self.wanted.pop(place)
        return told


class FetchSessions:
    def __init__(self) -> None:
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()
        self._next_id = 1
        self._partitions = 0

    def open(self, request: FetchRequest, principal: Principal = ANONYMOUS) -> FetchSession | None:
        """The updated session of a request; None if the client wants no session."""
        found = self._sessions.get(request.session_id)
        if found is not None and found.principal != principal:
            found = None
        if request.session_epoch in (FINAL_EPOCH, FULL_EPOCH):
            if found is not None:
                self._drop(found.id)
            if request.session_epoch == FINAL_EPOCH:
                return None
            session = self._create(principal)
        else:
            if found is None:
                raise RequestError(Code.FETCH_SESSION_ID_NOT_FOUND)
            if request.session_epoch != found.epoch:
                raise RequestError(Code.INVALID_FETCH_SESSION_EPOCH)
            session = found
            session.epoch = session.epoch % 0x7FFF_FFFF + 1
            self._sessions.move_to_end(session.id)
        try:
            session.update(request)
        except RequestError:
            self._drop(session.id)
            raise
        self._count(session)
        return session

    def add(self, session: FetchSession, part: FetchRequest) -> None:
        """Adds a part of a large request, whose partitions `open` did not get."""
        try:
            session.update(part)
        except RequestError:
            self._drop(session.id)
            raise
        if self._sessions.get(session.id) is session:  # it may have been evicted meanwhile
            self._count(session)

    def _count(self, session: FetchSession) -> None:
        self._partitions += len(session.wanted) - session.counted
        session.counted = len(session.wanted)
        while self._partitions > PARTITIONS_MAX and len(self._sessions) > 1:
            self._drop(next(iter(self._sessions)))

    def _drop(self, session_id: int) -> None:
        dropped = self._sessions.pop(session_id, None)
        if dropped is not None:
            self._partitions -= dropped.counted

    def _create(self, principal: Principal) -> FetchSession:
        while len(self._sessions) >= SESSIONS_MAX:
            self._drop(next(iter(self._sessions)))
        session = FetchSession(self._next_id, principal)
        self._next_id = self._next_id % 0x7FFF_FFFF + 1
        self._sessions[session.id] = session
        return session


def in_parts(request: FetchRequest, size: int) -> Iterator[FetchRequest]:
    """Splits a request into requests of about `size` partitions that together change a session in the same way."""
    for forgotten in _parts(request.forgotten, size):
        yield request._replace(topics=[], forgotten=forgotten)
    for topics in _parts(request.topics, size):
        yield request._replace(topics=topics, forgotten=[])


def _parts(named: list[tuple[Topic, list[T]]], size: int) -> Iterator[list[tuple[Topic, list[T]]]]:
    part: list[tuple[Topic, list[T]]] = []
    count = 0
    for topic, partitions in named:
        for start in range(0, len(partitions), size):
            piece = partitions[start : start + size]
            part.append((topic, piece))
            count += len(piece)
            if count >= size:
                yield part
                part, count = [], 0
    if part:
        yield part


def all_wanted(request: FetchRequest) -> list[Wanted]:
    return [Wanted(topic, *partition) for topic, partitions in request.topics for partition in partitions]
