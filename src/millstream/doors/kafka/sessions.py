"""Fetch sessions (KIP-227): the broker remembers what a consumer reads, so that it need not say it with every fetch.

A session is a set of partitions with their positions. A full request (epoch 0) starts one; an incremental request
names only what changed, and its answer holds only partitions with news: records, an error, or a moved start or end.
Epochs count the requests; one out of line means that an answer was lost, and the client starts over.

The number of sessions is bounded, and so is the number of partitions in all of them. At the bound the longest unused
one goes, and its client starts over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeVar
from uuid import UUID

from millstream.broker.fetch import Fetched, Wanted
from millstream.core.errors import Code, RequestError
from millstream.wire.kafka.fetch import FetchRequest

SESSIONS_MAX = 1000
SESSION_PARTITIONS_MAX = 20_000
PARTITIONS_MAX = 200_000
"""Over all sessions: some 80 MB."""
NO_SESSION = 0
FINAL_EPOCH = -1
FULL_EPOCH = 0

Topic = str | UUID
Place = tuple[Topic, int]
T = TypeVar("T")


class FetchSession:
    __slots__ = ("counted", "epoch", "id", "known", "wanted")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.wanted: dict[Place, Wanted] = {}
        self.known: dict[Place, tuple[int, int]] = {}
        """High watermark and log start as the client was last told."""
        self.counted = 0
        """How many of its partitions the table of sessions has counted."""

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
        """What of a read is worth telling. Partitions with records go to the end of the line, so that none starves."""
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

    def open(self, request: FetchRequest) -> FetchSession | None:
        """The session that a request belongs to, brought up to date; None if the client wants none."""
        if request.session_epoch == FINAL_EPOCH:
            self._drop(request.session_id)
            return None
        if request.session_epoch == FULL_EPOCH:
            self._drop(request.session_id)
            session = self._create()
        else:
            found = self._sessions.get(request.session_id)
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
        """A part of a request that is too large to be taken at once; `open` was given one without partitions."""
        try:
            session.update(part)
        except RequestError:
            self._drop(session.id)
            raise
        if self._sessions.get(session.id) is session:  # another may have taken its room meanwhile
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

    def _create(self) -> FetchSession:
        while len(self._sessions) >= SESSIONS_MAX:
            self._drop(next(iter(self._sessions)))
        session = FetchSession(self._next_id)
        self._next_id = self._next_id % 0x7FFF_FFFF + 1
        self._sessions[session.id] = session
        return session


def in_parts(request: FetchRequest, size: int) -> Iterator[FetchRequest]:
    """Requests of about so many partitions each that change a session as this one does, one after the other."""
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
