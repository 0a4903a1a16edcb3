"""Exclusive groups behave the same over an embedded broker and over a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream as package
from millstream import Millstream, MillstreamError, NotActive, RequestError, Unsupported
from millstream.client import remote_exclusive
from millstream.core.errors import Code
from millstream.testing.broker_thread import BrokerThread

SECONDS = 20.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  (of another thread, too)
            await asyncio.sleep(0.01)


async def test_a_commit_never_moves_a_position_back(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.send_many([(topic, b"%d" % number) for number in range(4)])
    async with ms.exclusive(topic, group=group) as ledger:
        events = [await ledger.receive(SECONDS) for _ in range(3)]
        first, second, third = [event for event in events if event is not None]
        await third.commit()
        await first.commit()
        await asyncio.gather(third.commit(), second.commit(), first.commit())
    async with ms.exclusive(topic, group=group) as ledger:
        event = await ledger.receive(SECONDS)
        assert event is not None and event.offset == 3


async def test_a_member_becomes_active_without_being_asked(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.send(topic, b"x")
    changes: list[bool] = []
    async with ms.exclusive(topic, group=group, on_change=changes.append) as ledger:
        await until(lambda: ledger.is_active)
        assert changes == [True]  # told before it can be seen
    assert changes == [True, False] and not ledger.is_active


async def test_changed_waits_for_a_change_whatever_else_there_is(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.send_many([(topic, b"1"), (topic, b"2")])
    async with ms.exclusive(topic, group=group) as ledger:
        assert await ledger.receive(SECONDS) is not None  # so that another is at hand
        began = time.monotonic()
        assert await ledger.changed(0.4) is True
        assert time.monotonic() - began >= 0.39
        async with ms.exclusive(topic, group=group) as standby:
            began = time.monotonic()
            assert await standby.changed(0.3) is False
            assert time.monotonic() - began >= 0.29
            waiting = asyncio.ensure_future(standby.changed(SECONDS))
            await asyncio.sleep(0)
            await ledger.close()
            assert await waiting is True


async def test_changed_returns_when_its_member_is_closed(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("ledger"), unique("projector")
    async with ms.exclusive(topic, group=group) as ledger:
        await until(lambda: ledger.is_active)
        waiting = asyncio.ensure_future(ledger.changed())
        await asyncio.sleep(0)
        await ledger.close()
        assert await asyncio.wait_for(waiting, SECONDS) is False


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a reader takes until its partitions are paused."""
    monkeypatch.setattr(remote_exclusive, "HOLD_SECONDS", 0.1)
    return 0.1 + 4 * remote_exclusive.KEEP_UP_SECONDS


async def test_who_is_fenced_hears_of_it_while_records_wait(hold: float) -> None:
    async with _five_events() as (server, ms):
        changes: list[bool] = []
        async with ms.exclusive("ledger", group="g", on_change=changes.append) as ledger:
            first = await ledger.receive(SECONDS)
            assert first is not None and changes == [True]
            await asyncio.sleep(hold)  # the others wait: their partition is paused by now
            server.run(lambda broker: _fence(broker, "g"))
            await until(lambda: changes[:2] == [True, False])
            with pytest.raises(NotActive):
                await first.commit()
            events = [await ledger.receive(SECONDS) for _ in range(5)]  # it joined again, and reads from the start
            assert [event.offset for event in events if event is not None] == [0, 1, 2, 3, 4]


async def test_who_is_fenced_while_it_receives_hears_of_both_changes() -> None:
    """Both come inside one poll: it is lost, and it is the active one again."""
    async with _five_events() as (server, ms):
        changes: list[bool] = []
        async with ms.exclusive("ledger", group="g", on_change=changes.append) as ledger:
            first = await ledger.receive(SECONDS)
            for _ in range(4):
                assert await ledger.receive(SECONDS) is not None
            waiting = asyncio.ensure_future(ledger.receive(SECONDS))
            server.run(lambda broker: _fence(broker, "g"))
            again = await waiting
            assert again is not None and again.offset == 0
            assert changes == [True, False, True]
            assert first is not None
            with pytest.raises(NotActive):
                await first.commit()
            await again.commit()


@asynccontextmanager
async def _five_events() -> AsyncIterator[tuple[BrokerThread, Millstream]]:
    with BrokerThread() as server:
        server.run(_hasten)
        async with package.connect(server.bootstrap) as ms:
            await ms.send_many([("ledger", b"%d" % number) for number in range(5)])
            yield server, ms


async def _hasten(broker: Any) -> None:
    """Heartbeats of the group, by which its members learn of changes."""
    object.__setattr__(broker.groups._settings, "consumer_heartbeat_interval_ms", 300)


async def _fence(broker: Any, group: str) -> None:
    [member] = broker.groups.consumer_describe(group).members
    broker.groups.leave(group, [(member.id, None)])


async def test_a_slow_reader_loses_nothing_to_the_pause(
    server: BrokerThread, unique: Callable[[str], str], hold: float
) -> None:
    topic, group = unique("ledger"), unique("projector")
    count = 1_200
    async with package.connect(server.bootstrap) as ms:
        await ms.send_many([(topic, b"%d" % number) for number in range(count)])
        async with ms.exclusive(topic, group=group) as ledger:
            offsets = []
            for number in range(count):
                event = await ledger.receive(SECONDS)
                assert event is not None
                offsets.append(event.offset)
                if number == 3:
                    await asyncio.sleep(hold)
            assert offsets == list(range(count))


async def test_a_clean_end_hands_over_at_once() -> None:
    """Not at the next heartbeat of the one who stands by, which is later than this test waits."""
    with BrokerThread() as server:
        server.run(_slow_down)
        async with (
            package.connect(server.bootstrap) as ms,
            ms.exclusive("ledger", group="g") as active,
        ):
            await until(lambda: active.is_active)
            async with ms.exclusive("ledger", group="g") as standby:
                await until(lambda: server.run(_members_of_g) == 2)
                await active.close()
                await until(lambda: standby.is_active)


async def test_a_clean_end_of_an_embedded_member_hands_over_at_once() -> None:
    async with package.open("memory:") as ms, ms.exclusive("ledger", group="g") as active:
        await until(lambda: active.is_active)
        async with ms.exclusive("ledger", group="g") as standby:
            await active.close()
            await until(lambda: standby.is_active)


async def _slow_down(broker: Any) -> None:
    object.__setattr__(broker.groups._settings, "consumer_heartbeat_interval_ms", int(SECONDS * 1500))


async def _members_of_g(broker: Any) -> int:
    return len(broker.groups.consumer_describe("g").members)


async def test_times_that_make_no_sense_are_refused(ms: Millstream) -> None:
    for times in ({"heartbeat": 60, "takeover": 5}, {"heartbeat": 0}, {"takeover": float("nan")}, {"takeover": 20}):
        with pytest.raises(MillstreamError, match="must be shorter than the takeover"):
            ms.exclusive("ledger", group="g", **times)


async def test_a_server_has_times_of_its_own(server: BrokerThread) -> None:
    async with package.connect(server.bootstrap) as ms:
        with pytest.raises(Unsupported, match="session timeout"):
            ms.exclusive("ledger", group="g", takeover=30)
        with pytest.raises(Unsupported, match="session timeout"):
            ms.exclusive("ledger", group="g", heartbeat=5)


@pytest.mark.parametrize("verb", ["stream", "queue"])
async def test_the_name_of_another_kind_of_group_is_refused(
    ms: Millstream, verb: str, unique: Callable[[str], str]
) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send(topic, b"x")
    async with getattr(ms, verb)(topic, group=group) as other:
        assert await other.receive(SECONDS) is not None
        with pytest.raises(RequestError, match="is not exclusive; choose another name") as caught:
            async with ms.exclusive(topic, group=group) as ledger:
                await ledger.receive(SECONDS)
        assert caught.value.code == Code.INCONSISTENT_GROUP_PROTOCOL
