"""Fetch sessions: what is remembered, what counts as news, and who goes when all places are taken."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.fetch import EMPTY, Fetched, Wanted
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import sessions
from millstream.doors.kafka.sessions import FetchSession, FetchSessions
from millstream.log.slice import Slice
from millstream.security.principal import ANONYMOUS
from millstream.wire.kafka.fetch import FetchRequest, PartitionFetch


def request(
    session: tuple[int, int] = (0, 0), *partitions: int, forgotten: tuple[int, ...] = (), topic: Any = "orders"
) -> FetchRequest:
    wanted = [PartitionFetch(index, -1, 0, 1000) for index in partitions]
    return FetchRequest(0, 1, 1000, 0, *session, [(topic, wanted)], [(topic, list(forgotten))])


def places(session: FetchSession | None) -> list[int]:
    assert session is not None
    return [partition for _, partition in session.wanted]


def test_a_session_remembers_what_was_asked_for() -> None:
    table = FetchSessions()
    first = table.open(request((0, 0), 0, 1, 2))
    assert first is not None and places(first) == [0, 1, 2]
    again = table.open(request((first.id, 1), 3, forgotten=(0,)))
    assert again is first and places(again) == [1, 2, 3]


def test_epochs_count_the_requests_and_a_wrong_one_is_refused() -> None:
    table = FetchSessions()
    session = table.open(request((0, 0), 0))
    assert session is not None
    for epoch in (1, 2, 3):
        assert table.open(request((session.id, epoch))) is session
    for epoch in (3, 5, 1):
        with pytest.raises(RequestError) as caught:
            table.open(request((session.id, epoch)))
        assert caught.value.code == Code.INVALID_FETCH_SESSION_EPOCH
    session.epoch = 0x7FFF_FFFF
    assert table.open(request((session.id, 0x7FFF_FFFF))) is session
    assert session.epoch == 1, "0 would mean a new session"


def test_a_session_that_is_not_known_is_refused_and_one_that_is_closed_is_gone() -> None:
    table = FetchSessions()
    session = table.open(request((0, 0), 0))
    assert session is not None
    assert table.open(request((session.id, -1))) is None
    with pytest.raises(RequestError) as caught:
        table.open(request((session.id, 1)))
    assert caught.value.code == Code.FETCH_SESSION_ID_NOT_FOUND


def test_starting_over_replaces_the_old_session() -> None:
    table = FetchSessions()
    old = table.open(request((0, 0), 0))
    assert old is not None
    new = table.open(request((old.id, 0), 1))
    assert new is not None and new.id != old.id and places(new) == [1]
    with pytest.raises(RequestError):
        table.open(request((old.id, 1)))


def test_when_all_places_are_taken_the_longest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 3)
    table = FetchSessions()
    opened = [table.open(request((0, 0), 0)) for _ in range(3)]
    first, second, third = (session.id for session in opened if session is not None)
    table.open(request((first, 1)))
    table.open(request((0, 0), 0))
    assert table.open(request((first, 2))) is not None and table.open(request((third, 1))) is not None
    with pytest.raises(RequestError):
        table.open(request((second, 1)))


def test_a_session_of_too_many_partitions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSION_PARTITIONS_MAX", 5)
    with pytest.raises(RequestError) as caught:
        FetchSessions().open(request((0, 0), *range(6)))
    assert caught.value.code == Code.INVALID_REQUEST


def test_all_sessions_together_remember_a_bounded_number_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PARTITIONS_MAX", 10)
    table = FetchSessions()
    opened = [table.open(request((0, 0), *range(4))) for _ in range(5)]
    remembered = 0
    for session in opened:
        assert session is not None
        try:
            table.open(request((session.id, 1)))
        except RequestError:
            continue
        remembered += len(session.wanted)
    assert remembered == 8


def fetched(partition: int, size: int = 0, high_watermark: int = 0, start: int = 0, code: Code = Code.NONE) -> Fetched:
    wanted = Wanted("orders", partition, -1, 0, 1000)
    return Fetched(
        wanted, code, high_watermark, high_watermark, start, Slice(size, 0, data=bytes(size)) if size else EMPTY
    )


def told(session: FetchSession, *read: Fetched) -> list[int]:
    return [one.wanted.partition for one in session.news(list(read))]


def test_news_are_records_errors_and_moved_ends() -> None:
    session = FetchSession(1, ANONYMOUS)
    session.update(request((0, 0), 0, 1, 2))
    assert told(session, fetched(0), fetched(1), fetched(2)) == [0, 1, 2], "all is new at first"
    assert told(session, fetched(0), fetched(1), fetched(2)) == []
    assert told(session, fetched(0, high_watermark=5), fetched(1, start=3), fetched(2)) == [0, 1]
    assert told(
        session, fetched(0, high_watermark=5), fetched(1, start=3), fetched(2, code=Code.OFFSET_OUT_OF_RANGE)
    ) == [2]
    assert told(session, fetched(0, size=9, high_watermark=5), fetched(1, start=3)) == [0]


def test_a_partition_that_had_records_goes_to_the_end_of_the_line() -> None:
    session = FetchSession(1, ANONYMOUS)
    session.update(request((0, 0), 0, 1, 2))
    session.news([fetched(0, size=9), fetched(1), fetched(2)])
    assert places(session) == [1, 2, 0]
