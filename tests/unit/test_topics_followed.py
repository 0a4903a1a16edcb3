"""Topics of several brokers over one store: each follows what the others do, also when it comes at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import topics as topics_module
from millstream.broker.topics import Topic, Topics
from millstream.core.clock import SystemClock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import promised
from millstream.log.config import LogConfig
from millstream.stores.base import Delete, Put, Versioned
from millstream.stores.group_commit import GroupCommit
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.table_store import TableLogStore

SECONDS = 10.0


class Held:
    """A store whose preparing and discarding wait for the test, and which fails when told to."""

    def __init__(self, store: TableLogStore) -> None:
        self._store = store
        self.may_prepare, self.may_discard = asyncio.Event(), asyncio.Event()
        self.may_prepare.set()
        self.may_discard.set()
        self.prepares = asyncio.Event()
        self.failing_prepares = 0
        """How many of the next fail."""
        self.failure = Code.KAFKA_STORAGE_ERROR
        self.unopenable: set[int] = set()
        """Partitions that cannot be opened."""
        self.refused_opening = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def prepare(self, topic_id: str, partitions: int) -> None:
        self.prepares.set()
        await self.may_prepare.wait()
        if self.failing_prepares:
            self.failing_prepares -= 1
            raise RequestError(self.failure, "the store cannot be reached, or its topic is being deleted")
        await self._store.prepare(topic_id, partitions)

    def open(self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False) -> Any:
        if partition in self.unopenable:
            self.refused_opening.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._store.open(topic, topic_id, partition, config)

    async def discard(self, topic: str, topic_id: str) -> None:
        await self.may_discard.wait()
        await self._store.discard(topic, topic_id)


class Member:
    """What one broker knows."""

    def __init__(self, path: Path) -> None:
        self.store = TableLogStore(SqliteDatabase(str(path)), SystemClock())
        self.held = Held(self.store)
        logs: Any = self.held
        self.topics = Topics(self.store.meta, logs, SystemClock(), {}, 1000, 1, True)

    async def heard_what(self, other: Member) -> None:
        await until(lambda: self.store.meta._told >= other.store.meta._told)

    async def stored_count(self, name: str) -> int:
        stored = await self.store.meta.get(f"topics/{name}")
        assert stored is not None
        return int(json.loads(stored.value)["partitions"])

    def count(self, name: str) -> int:
        topic = self.topics.get(name)
        return 0 if topic is None else topic.partition_count

    def become_deaf(self) -> None:
        """It hears nothing from the store any more."""
        self.store.database.listen(lambda states: None, lambda revision: None, lambda: None)

    async def close(self) -> None:
        self.held.may_prepare.set()
        self.held.may_discard.set()
        self.topics.close()
        await self.store.close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Member, Member]]:
    one, two = Member(tmp_path / "store.db"), Member(tmp_path / "store.db")
    for member in (one, two):
        await member.store.start()
        await member.topics.start()
    yield one, two
    for member in (one, two):
        await member.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.005)


@pytest.fixture
def retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "RETRY_SECONDS", 0.01)


async def delete(member: Member, name: str) -> None:
    await (await member.topics.delete(name))


async def test_a_topic_that_is_deleted_while_it_is_taken_over_does_not_stay(pair: tuple[Member, Member]) -> None:
    one, two = pair
    two.held.may_prepare.clear()
    await one.topics.create("orders", 1, {})
    await two.held.prepares.wait()
    await delete(one, "orders")
    await two.heard_what(one)
    two.held.may_prepare.set()
    await until(lambda: not two.topics._following)
    assert two.topics.get("orders") is None


async def test_a_topic_that_is_deleted_while_it_is_being_made_does_not_stay(pair: tuple[Member, Member]) -> None:
    one, two = pair
    two.held.may_prepare.clear()
    making = asyncio.ensure_future(two.topics.create("orders", 1, {}))
    await until(lambda: one.topics.get("orders") is not None)
    await delete(one, "orders")
    await two.heard_what(one)
    two.held.may_prepare.set()
    with contextlib.suppress(RequestError):  # told that it is gone, if it is by then
        await making
    await until(lambda: two.topics.get("orders") is None)


async def test_a_topic_that_is_deleted_before_its_maker_knows_that_it_is_made_does_not_stay(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    transact, may_answer = two.store.meta.transact, asyncio.Event()

    async def answered_late(*changes: Put | Delete) -> int:
        revision = await transact(*changes)
        await may_answer.wait()
        return revision

    monkeypatch.setattr(two.store.meta, "transact", answered_late)
    making = asyncio.ensure_future(two.topics.create("orders", 1, {}))
    await until(lambda: one.topics.get("orders") is not None)
    await delete(one, "orders")
    await two.heard_what(one)
    may_answer.set()
    with contextlib.suppress(RequestError):
        await making
    await until(lambda: two.topics.get("orders") is None)


async def test_a_topic_that_is_deleted_while_a_broker_starts_does_not_stay(tmp_path: Path) -> None:
    one, two = Member(tmp_path / "store.db"), Member(tmp_path / "store.db")
    await one.store.start()
    await one.topics.start()
    for name in ("first", "second"):
        await one.topics.create(name, 1, {})
    await two.store.start()
    two.held.may_prepare.clear()
    starting = asyncio.ensure_future(two.topics.start())
    await two.held.prepares.wait()  # it has listed both, and opens the first
    await delete(one, "second")
    await two.heard_what(one)
    await until(lambda: not two.topics._following)
    two.held.may_prepare.set()
    await starting
    await until(lambda: [topic.name for topic in two.topics] == ["first"])
    for member in (one, two):
        await member.close()


async def test_a_removal_that_takes_long_keeps_nobody_from_following(pair: tuple[Member, Member]) -> None:
    one, two = pair
    await one.topics.create("large", 1, {})
    await until(lambda: two.topics.get("large") is not None)
    two.held.may_discard.clear()
    await delete(one, "large")
    await one.topics.create("next", 1, {})
    await until(lambda: two.topics.get("next") is not None)
    assert two.topics.get("large") is None


async def test_a_topic_that_is_being_deleted_holds_up_no_other(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_module, "RETRY_SECONDS", 3600)
    one, two = pair
    two.held.failing_prepares, two.held.failure = 1, Code.UNKNOWN_TOPIC_OR_PARTITION  # its logs are closed already
    await one.topics.create("doomed", 1, {})
    await until(lambda: two.held.failing_prepares == 0)
    await one.topics.create("orders", 1, {})
    await until(lambda: two.topics.get("orders") is not None)
    await delete(one, "doomed")
    await two.heard_what(one)
    await until(lambda: not two.topics._following)
    assert two.topics.get("doomed") is None


async def test_after_a_refresh_every_topic_is_known_as_the_store_has_it(pair: tuple[Member, Member]) -> None:
    one, two = pair
    for name in ("stays", "goes", "changes"):
        await one.topics.create(name, 1, {})
    await until(lambda: len(list(two.topics)) == 3)
    two.become_deaf()
    await delete(one, "goes")
    await delete(one, "changes")
    again = await one.topics.create("changes", 2, {})
    await one.topics.create("new", 1, {})
    await two.topics.refresh()
    assert {topic.name for topic in two.topics} == {"stays", "changes", "new"}
    found: Topic | None = two.topics.get("changes")
    assert found is not None and (found.id, found.partition_count) == (again.id, 2)


async def test_a_topic_that_is_deleted_during_a_refresh_is_no_mistake(pair: tuple[Member, Member]) -> None:
    one, two = pair
    two.become_deaf()
    for name in ("doomed", "orders"):
        await one.topics.create(name, 1, {})
    two.held.may_prepare.clear()
    refreshing = asyncio.ensure_future(two.topics.refresh())
    await two.held.prepares.wait()
    await (await one.topics.delete("doomed"))
    two.held.failing_prepares, two.held.failure = 1, Code.UNKNOWN_TOPIC_OR_PARTITION  # its logs were closed just now
    two.held.may_prepare.set()
    await refreshing
    assert {topic.name for topic in two.topics} == {"orders"}


async def test_a_topic_that_is_heard_of_when_the_last_was_just_followed_is_followed_too(
    pair: tuple[Member, Member],
) -> None:
    one, two = pair
    two.become_deaf()
    for name in ("first", "second"):
        await one.topics.create(name, 1, {})
    loop = asyncio.get_running_loop()
    two.topics.watch(lambda: [loop.call_soon(two.topics._heard, "topics/second", None)].clear())
    two.topics._heard("topics/first", None)
    await until(lambda: two.topics.get("second") is not None)


async def test_a_topic_whose_log_cannot_be_opened_is_followed_later(
    pair: tuple[Member, Member], retries_soon: None
) -> None:
    one, two = pair
    two.held.unopenable = {0}
    await one.topics.create("orders", 1, {})
    await asyncio.wait_for(two.held.refused_opening.wait(), SECONDS)
    two.held.unopenable = set()
    await until(lambda: two.count("orders") == 1)


async def test_a_topic_that_is_configured_while_it_grows_does_not_shrink(pair: tuple[Member, Member]) -> None:
    one, _ = pair
    await one.topics.create("orders", 1, {})
    one.held.may_prepare.clear()
    one.held.prepares.clear()
    growing = asyncio.ensure_future(one.topics.grow("orders", 3))
    await one.held.prepares.wait()  # the key says 3, the logs are on their way
    with contextlib.suppress(RequestError):  # told that it was changed meanwhile
        await one.topics.configure("orders", {"retention.ms": "1000"})
    one.held.may_prepare.set()
    await growing
    assert one.count("orders") == await one.stored_count("orders") == 3


async def test_a_topic_whose_growth_failed_half_way_is_followed(
    pair: tuple[Member, Member], retries_soon: None
) -> None:
    one, _ = pair
    await one.topics.create("orders", 1, {})
    one.held.failing_prepares = 1
    with contextlib.suppress(RequestError):  # unless the watch was faster, and met the failure
        await one.topics.grow("orders", 3)
    await until(lambda: one.count("orders") == 3)
    assert await one.stored_count("orders") == 3


async def test_a_topic_that_is_configured_when_it_could_not_grow_does_not_shrink(
    pair: tuple[Member, Member], retries_soon: None
) -> None:
    one, two = pair
    await one.topics.create("orders", 1, {})
    one.held.unopenable = {2}
    with pytest.raises(OSError, match="No space left"):
        await one.topics.grow("orders", 3)
    with contextlib.suppress(RequestError):  # told that it was changed meanwhile
        await one.topics.configure("orders", {"retention.ms": "1000"})
    one.held.unopenable = set()
    await until(lambda: one.count("orders") == two.count("orders") == 3)
    assert await one.stored_count("orders") == 3


async def test_news_that_come_when_the_last_were_just_told_are_told_too(pair: tuple[Member, Member]) -> None:
    one, two = pair
    two.become_deaf()
    loop = asyncio.get_running_loop()
    seen: list[str] = []

    def note(key: str, value: Versioned | None) -> None:
        seen.append(key)
        if key == "first":
            loop.call_soon(two.store.meta.news, revision + 1)  # when the look that told this is over, and not yet noted

    two.store.meta.watch("", note)
    revision = await one.store.meta.transact(Put("first", b""))
    two.store.meta.news(revision)
    await until(lambda: seen)
    await one.store.meta.transact(Put("second", b""))
    await until(lambda: seen == ["first", "second"])


async def test_waiting_for_what_was_put_in_does_not_wait_for_what_comes_later() -> None:
    written: list[int] = []
    commits: GroupCommit[int] = GroupCommit(lambda group: promised(_write(group, written)))
    is_loaded = True

    async def load() -> None:
        number = 0
        while is_loaded:
            commits.put([number := number + 1], 0)
            await asyncio.sleep(0)

    loading = asyncio.ensure_future(load())
    await until(lambda: written)
    async with asyncio.timeout(SECONDS):
        await commits.drained()
    is_loaded = False
    await loading
    await commits.drained()
    assert written == list(range(1, len(written) + 1))


async def _write(group: list[int], written: list[int]) -> None:
    await asyncio.sleep(0.001)
    written += group
