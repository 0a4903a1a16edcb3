"""Leases, sessions and memberships over real sockets, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from millstream.config import Config
from millstream.core.errors import Code
from millstream.server import Server
from millstream.testing.clock import VirtualClock
from tests.compat import raw
from tests.compat.raw import Raw
from tests.compat.share_frames import ACCEPT, RELEASE, RENEW, Bare, codes, leases, topic_id
from tests.compat.share_workers import configure


class Desk:
    """A broker in this process, with a topic of ten records; whatever blocks runs in a thread."""

    def __init__(self, server: Server, clock: VirtualClock) -> None:
        self.server = server
        self.clock = clock
        self.address = str(server.addresses["kafka"])
        self.place: Any = None

    async def prepare(self) -> None:
        await self.run(raw.create_topic, self.address, "jobs")
        self.place = (await self.run(topic_id, self.address, "jobs"), 0)
        await self.configure()
        await self.produce(*(b"%d" % number for number in range(10)))

    async def configure(self, **settings: str) -> None:
        await self.run(lambda: configure(self.address, "workers", **settings))

    async def member(self) -> Bare:
        bare: Bare = await self.run(Bare, self.address, "workers", "jobs")
        return bare

    async def run(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        return await asyncio.to_thread(call, *arguments, **more)

    async def fetch(self, member: Bare, epoch: int, **more: Any) -> Any:
        return await self.run(member.fetch, epoch, {self.place: ()}, **more)

    async def park(self, member: Bare, epoch: int, wait_ms: int = 120_000) -> asyncio.Task[Any]:
        """Returns when the fetch waits."""
        before = self.server.metrics.fetch_waits
        waiting = asyncio.ensure_future(self.fetch(member, epoch, wait_ms=wait_ms))
        while self.server.metrics.fetch_waits == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return waiting

    async def produce(self, *values: bytes) -> None:
        records = raw.batch(*values, timestamp_ms=self.clock.now_ms())
        with Raw(self.address) as connection:
            assert (await self.run(connection.ask, raw.produce("jobs", records))).responses

    async def answer(self, member: Bare, epoch: int, *acks: Any, **more: Any) -> int:
        answer = await self.run(member.acknowledge, epoch, {self.place: acks}, **more)
        return int(answer.error_code) or codes(answer)[0]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    clock = VirtualClock()
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off"), clock)
    await server.start()
    desk = Desk(server, clock)
    await desk.prepare()
    yield desk
    await server.stop()


async def test_a_lease_ends_after_30_seconds_and_the_record_goes_to_another_member(desk: Desk) -> None:
    one, other = await desk.member(), await desk.member()
    with one, other:
        assert leases(await desk.fetch(one, 0)) == {0: [(0, 9, 1)]}
        desk.clock.advance(29.9)
        assert leases(await desk.fetch(other, 0)) == {}
        desk.clock.advance(0.2)
        assert leases(await desk.fetch(other, 1)) == {0: [(0, 9, 2)]}
        assert await desk.answer(one, 1, (0, 9, [ACCEPT])) == Code.INVALID_RECORD_STATE
        assert await desk.answer(other, 2, (0, 9, [ACCEPT])) == 0


async def test_a_parked_fetch_gets_a_record_the_moment_its_lease_ends(desk: Desk) -> None:
    one, other = await desk.member(), await desk.member()
    with one, other:
        await desk.fetch(one, 0)
        await desk.fetch(other, 0)
        waiting = await desk.park(other, 1)
        desk.clock.advance(30.1)
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(0, 9, 2)]}


async def test_a_parked_fetch_wakes_for_what_is_new_released_or_left_behind(desk: Desk) -> None:
    one, other = await desk.member(), await desk.member()
    with one, other:
        await desk.fetch(one, 0)
        await desk.fetch(other, 0)
        waiting = await desk.park(other, 1)
        await desk.produce(b"new")
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(10, 10, 1)]}
        waiting = await desk.park(other, 2)
        assert await desk.answer(one, 1, (3, 4, [RELEASE])) == 0
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(3, 4, 2)]}
        waiting = await desk.park(other, 3)
        one.close()
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(0, 2, 2), (5, 9, 2)]}


async def test_a_parked_fetch_gives_up_in_time(desk: Desk) -> None:
    member = await desk.member()
    with member:
        await desk.fetch(member, 0)
        waiting = await desk.park(member, 1, wait_ms=500)
        desk.clock.advance(0.4)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        desk.clock.advance(0.2)
        assert (await asyncio.wait_for(waiting, 10)).responses == ()


async def test_a_client_that_goes_while_its_fetch_is_parked_takes_nothing_with_it(desk: Desk) -> None:
    one, other = await desk.member(), await desk.member()
    with other:
        await desk.fetch(one, 0)
        await desk.fetch(other, 0)
        before = desk.server.metrics.fetch_waits
        one.raw.send(one.fetch_frame(1, wait_ms=120_000))
        while desk.server.metrics.fetch_waits == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        waiting = await desk.park(other, 1)
        one.close()
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(0, 9, 2)]}
        waiting = await desk.park(other, 2)
        await desk.produce(b"new")
        assert leases(await asyncio.wait_for(waiting, 10)) == {0: [(10, 10, 1)]}


async def test_a_renewed_lease_lasts_another_30_seconds(desk: Desk) -> None:
    one, other = await desk.member(), await desk.member()
    with one, other:
        await desk.fetch(one, 0)
        desk.clock.advance(20)
        assert await desk.answer(one, 1, (0, 4, [RENEW]), renew=True) == 0
        desk.clock.advance(20)
        assert leases(await desk.fetch(other, 0)) == {0: [(5, 9, 2)]}
        assert await desk.answer(one, 2, (0, 4, [ACCEPT])) == 0


async def test_a_record_rests_between_its_deliveries_if_the_group_wants_that(desk: Desk) -> None:
    await desk.configure(millstream__retry__backoff__ms="10000")
    member = await desk.member()
    with member:
        await desk.fetch(member, 0)
        assert await desk.answer(member, 1, (0, 8, [ACCEPT]), (9, 9, [RELEASE])) == 0
        desk.clock.advance(9.9)
        assert leases(await desk.fetch(member, 2)) == {}
        desk.clock.advance(0.2)
        assert leases(await desk.fetch(member, 3)) == {0: [(9, 9, 2)]}
        assert await desk.answer(member, 4, (9, 9, [RELEASE])) == 0
        desk.clock.advance(19.9)
        assert leases(await desk.fetch(member, 5)) == {}
        desk.clock.advance(0.2)
        assert leases(await desk.fetch(member, 6)) == {0: [(9, 9, 3)]}


async def test_45_seconds_of_silence_end_a_membership_with_its_session_and_its_leases(desk: Desk) -> None:
    await desk.configure(share__record__lock__duration__ms="3600000")
    silent, living = await desk.member(), await desk.member()
    with silent, living:
        await desk.fetch(silent, 0)
        for _ in range(4):
            desk.clock.advance(10)
            assert (await desk.run(living.beat, living.epoch)).error_code == 0
        assert leases(await desk.fetch(living, 0)) == {}
        desk.clock.advance(5.1)
        assert leases(await desk.fetch(living, 1)) == {0: [(0, 9, 2)]}
        assert await desk.answer(silent, 1, (0, 9, [ACCEPT])) == Code.SHARE_SESSION_NOT_FOUND
        assert (await desk.run(silent.beat, silent.epoch)).error_code == Code.UNKNOWN_MEMBER_ID
