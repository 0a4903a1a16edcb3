"""Topics: created, deleted, grown and configured, also by several at the same time, and found again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import topics
from millstream.broker.settings import TopicSettings
from millstream.broker.topics import Topics
from millstream.core.errors import Code, RequestError
from millstream.records import codec
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.stores.sqlite_meta import SqliteMeta
from millstream.testing.clock import VirtualClock


class Bench:
    def __init__(self, meta: Any, **options: Any) -> None:
        self.meta = meta
        self.clock = VirtualClock()
        self.logs = MemoryLogStore(self.clock)
        self.options = {"partitions_max": 100, "default_partitions": 2, "auto_create": True, **options}
        self.topics = self.again()

    def again(self) -> Topics:
        """The same store, seen by a broker that starts."""
        return Topics(self.meta, self.logs, self.clock, defaults={}, **self.options)


@pytest.fixture(params=["memory", "sqlite"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    meta = MemoryMeta() if request.param == "memory" else SqliteMeta(str(tmp_path / "meta.db"))
    made = Bench(meta)
    await made.topics.start()
    yield made
    await meta.close()


async def code_of(work: Awaitable[object]) -> Code:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.code


async def test_a_created_topic_is_found_by_name_and_id_and_after_a_restart(bench: Bench) -> None:
    topic = await bench.topics.create("orders", 3, {"retention.ms": "5"})
    assert bench.topics.get("orders") is bench.topics.by_id(topic.id) is bench.topics.find(topic.id) is topic
    assert list(bench.topics.names()) == ["orders"] and bench.topics.partition_count == 3
    restarted = bench.again()
    await restarted.start()
    found = restarted.get("orders")
    assert found is not None
    assert (found.id, found.partition_count, found.settings.overrides) == (topic.id, 3, {"retention.ms": "5"})


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "x" * 250, "a\n"])
async def test_a_name_that_no_file_may_have_is_refused(name: str, bench: Bench) -> None:
    assert await code_of(bench.topics.create(name, 1, {})) == Code.INVALID_TOPIC_EXCEPTION


async def test_of_many_who_create_the_same_topic_one_succeeds(bench: Bench) -> None:
    answers = await asyncio.gather(
        *(bench.topics.create("orders", 1 + number, {}) for number in range(10)), return_exceptions=True
    )
    created = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(created) == 1 and bench.topics.get("orders") is created[0]
    codes = {answer.code for answer in answers if isinstance(answer, RequestError)}
    assert codes == {Code.TOPIC_ALREADY_EXISTS}


async def test_of_many_who_need_the_same_topic_all_get_the_one(bench: Bench) -> None:
    found = await asyncio.gather(*(bench.topics.ensure("orders") for _ in range(20)))
    assert len({id(topic) for topic in found}) == 1
    assert found[0].partition_count == 2


async def test_without_automatic_creation_a_missing_topic_stays_missing() -> None:
    bench = Bench(MemoryMeta(), auto_create=False)
    assert await code_of(bench.topics.ensure("orders")) == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_deleted_topic_is_gone_with_its_logs_and_a_new_one_of_its_name_is_empty(bench: Bench) -> None:
    old = await bench.topics.create("orders", 1, {})
    header, promise = old.partitions[0].append(memoryview(codec.encode([(0, 1, None, b"x")])), bench.clock)
    await promise
    assert header.count == 1 and old.partitions[0].log.high_watermark == 1
    await (await bench.topics.delete("orders"))
    assert bench.topics.get("orders") is None and bench.topics.by_id(old.id) is None
    assert await code_of(bench.topics.delete("orders")) == Code.UNKNOWN_TOPIC_OR_PARTITION
    new = await bench.topics.create("orders", 1, {})
    assert new.id != old.id and new.partitions[0].log.high_watermark == 0


async def test_of_two_who_delete_one_succeeds(bench: Bench) -> None:
    await bench.topics.create("orders", 1, {})
    answers = await asyncio.gather(*(bench.topics.delete("orders") for _ in range(2)), return_exceptions=True)
    assert sorted(isinstance(answer, RequestError) for answer in answers) == [False, True]
    for answer in answers:
        if not isinstance(answer, BaseException):
            await answer


async def test_a_topic_grows_and_never_shrinks(bench: Bench) -> None:
    topic = await bench.topics.create("orders", 2, {})
    first = topic.partitions[0]
    await bench.topics.grow("orders", 5)
    assert [partition.index for partition in topic.partitions] == [0, 1, 2, 3, 4]
    assert topic.partitions[0] is first
    for count in (5, 4, 0, -1):
        assert await code_of(bench.topics.grow("orders", count)) == Code.INVALID_PARTITIONS
    assert await code_of(bench.topics.grow("nothing", 5)) == Code.UNKNOWN_TOPIC_OR_PARTITION
    restarted = bench.again()
    await restarted.start()
    found = restarted.get("orders")
    assert found is not None and found.partition_count == 5


async def test_two_changes_at_the_same_time_do_not_undo_each_other(bench: Bench) -> None:
    topic = await bench.topics.create("orders", 1, {})
    answers = await asyncio.gather(
        bench.topics.grow("orders", 4),
        bench.topics.configure("orders", {"retention.ms": "5"}),
        bench.topics.grow("orders", 3),
        return_exceptions=True,
    )
    done = [answer is None for answer in answers]
    assert done[0]
    assert topic.partition_count == 4 and [partition.index for partition in topic.partitions] == [0, 1, 2, 3]
    restarted = bench.again()
    await restarted.start()
    found = restarted.get("orders")
    assert found is not None
    assert found.partition_count == topic.partition_count
    assert found.settings.overrides == topic.settings.overrides == ({"retention.ms": "5"} if done[1] else {})


async def test_new_settings_reach_the_logs_at_once(bench: Bench) -> None:
    topic = await bench.topics.create("orders", 2, {})
    await bench.topics.configure("orders", {"retention.ms": "5", "max.message.bytes": "2000"})
    assert {partition.log.config.retention_ms for partition in topic.partitions} == {5}
    assert {partition.settings.message_bytes_max for partition in topic.partitions} == {2000}
    await bench.topics.grow("orders", 3)
    assert topic.partitions[2].log.config.retention_ms == 5
    assert await code_of(bench.topics.configure("orders", {"retention.ms": "soon"})) == Code.INVALID_CONFIG
    assert topic.settings.overrides == {"retention.ms": "5", "max.message.bytes": "2000"}


async def test_new_defaults_are_parsed_once_for_all_topics_with_the_same_overrides(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        await bench.topics.create(f"t{number}", 1, {"retention.ms": "5"} if number == 3 else {})
    made: list[TopicSettings] = []

    def make(overrides: dict[str, str], defaults: dict[str, str]) -> TopicSettings:
        made.append(TopicSettings(overrides, defaults))
        return made[-1]

    monkeypatch.setattr(topics, "TopicSettings", make)
    bench.topics.set_defaults({"retention.ms": "7"})
    assert len(made) == 2
    assert [topic.partitions[0].log.config.retention_ms for topic in bench.topics] == [7, 7, 7, 5]


async def test_validating_changes_nothing(bench: Bench) -> None:
    await bench.topics.create("perhaps", 1, {}, validate_only=True)
    assert bench.topics.get("perhaps") is None
    topic = await bench.topics.create("orders", 1, {})
    await bench.topics.grow("orders", 9, validate_only=True)
    await bench.topics.configure("orders", {"retention.ms": "5"}, validate_only=True)
    assert topic.partition_count == 1 and topic.settings.overrides == {}


async def test_there_are_never_more_partitions_than_the_broker_may_hold(bench: Bench) -> None:
    await bench.topics.create("most", 90, {})
    assert await code_of(bench.topics.create("more", 11, {})) == Code.POLICY_VIOLATION
    assert await code_of(bench.topics.grow("most", 101)) == Code.POLICY_VIOLATION
    await asyncio.gather(*(bench.topics.create(f"some-{number}", 4, {}) for number in range(5)), return_exceptions=True)
    assert bench.topics.partition_count <= 100


async def test_watchers_hear_of_topics_that_come_grow_and_go(bench: Bench) -> None:
    heard: list[int] = []
    stop = bench.topics.watch(lambda: heard.append(bench.topics.partition_count))
    await bench.topics.create("orders", 1, {})
    await bench.topics.grow("orders", 3)
    await (await bench.topics.delete("orders"))
    assert heard == [1, 3, 0]
    stop()
    await bench.topics.create("others", 1, {})
    assert heard == [1, 3, 0]


async def settle() -> None:
    """Lets news get to where they go."""
    for _ in range(20):
        await asyncio.sleep(0)


class TestAnotherBrokerOverTheSameStore:
    """Each has logs of its own here; only what is known of topics is shared."""

    @pytest.fixture
    async def other(self, bench: Bench) -> Topics:
        other = Topics(bench.meta, MemoryLogStore(bench.clock), bench.clock, defaults={}, **bench.options)
        await other.start()
        return other

    async def test_what_it_creates_is_here(self, bench: Bench, other: Topics) -> None:
        heard: list[int] = []
        bench.topics.watch(lambda: heard.append(bench.topics.partition_count))
        made = await other.create("orders", 3, {"retention.ms": "5"})
        await settle()
        found = bench.topics.get("orders")
        assert found is not None and found is bench.topics.by_id(made.id)
        assert (found.partition_count, found.settings.overrides) == (3, {"retention.ms": "5"})
        assert heard == [3]

    async def test_what_it_grows_and_configures_follows(self, bench: Bench, other: Topics) -> None:
        topic = await bench.topics.create("orders", 1, {})
        await settle()
        await other.grow("orders", 4)
        await other.configure("orders", {"retention.ms": "77"})
        await settle()
        assert topic.partition_count == 4
        assert {partition.log.config.retention_ms for partition in topic.partitions} == {77}
        await bench.topics.configure("orders", {})  # by the revision that was learnt

    async def test_what_it_deletes_is_gone(self, bench: Bench, other: Topics) -> None:
        topic = await bench.topics.create("orders", 1, {})
        await settle()
        await (await other.delete("orders"))
        await settle()
        assert bench.topics.get("orders") is None and bench.topics.by_id(topic.id) is None

    async def test_what_it_deletes_and_makes_again_is_another_topic(self, bench: Bench, other: Topics) -> None:
        old = await bench.topics.create("orders", 1, {})
        await settle()
        await (await other.delete("orders"))
        new = await other.create("orders", 2, {})
        await settle()
        found = bench.topics.get("orders")
        assert found is not None and found.id == new.id and bench.topics.by_id(old.id) is None

    async def test_our_own_deletion_and_new_creation_are_not_undone_by_late_news(self, bench: Bench) -> None:
        await bench.topics.create("orders", 1, {})
        await (await bench.topics.delete("orders"))
        again = await bench.topics.create("orders", 1, {})
        await settle()
        assert bench.topics.get("orders") is again

    async def test_both_may_ensure_the_same_topic_at_once(self, bench: Bench, other: Topics) -> None:
        here, there = await asyncio.gather(bench.topics.ensure("orders"), other.ensure("orders"))
        assert here.id == there.id

    async def test_a_topic_that_is_news_yet_to_come_can_be_ensured(self, bench: Bench, other: Topics) -> None:
        made = await other.create("orders", 1, {})
        assert (await bench.topics.ensure("orders")).id == made.id
