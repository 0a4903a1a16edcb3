"""What every `MetaStore` promises."""

from __future__ import annotations

import asyncio

import pytest

from millstream.core.errors import RevisionConflict
from millstream.core.promise import Promise
from millstream.stores.base import Check, Delete, MetaStore, Put, Versioned
from tests.contract.conftest import Driver
from tests.stores import stored


async def reopen(driver: Driver) -> MetaStore:
    await driver.meta.close()
    return await driver.open_meta()


async def test_an_unknown_key_has_no_value(meta: MetaStore) -> None:
    assert await meta.get("nothing") is None
    assert list(await meta.list("")) == []


async def test_a_put_can_be_read_at_its_revision(meta: MetaStore) -> None:
    revision = await meta.transact(Put("a", b"1"))
    assert revision == 1
    assert await meta.get("a") == Versioned(b"1", 1)


async def test_revisions_grow_with_every_transaction(meta: MetaStore) -> None:
    revisions = [await meta.transact(Put(key, b"")) for key in ("a", "b", "a", "c")]
    assert revisions == [1, 2, 3, 4]
    assert await meta.get("a") == Versioned(b"", 3)


async def test_lists_a_prefix_in_order_of_key(meta: MetaStore) -> None:
    await meta.transact(*(Put(key, key.encode()) for key in ("t/b", "t/a", "u/a", "t/a/x", "s")))
    assert [key for key, _ in await meta.list("t/")] == ["t/a", "t/a/x", "t/b"]
    assert [key for key, _ in await meta.list("")] == ["s", "t/a", "t/a/x", "t/b", "u/a"]


async def test_a_delete_removes_the_key(meta: MetaStore) -> None:
    await meta.transact(Put("a", b"1"), Put("b", b"2"))
    await meta.transact(Delete("a"))
    assert await meta.get("a") is None
    assert [key for key, _ in await meta.list("")] == ["b"]


async def test_deleting_what_is_not_there_is_no_error(meta: MetaStore) -> None:
    await meta.transact(Delete("nothing"))


class TestCompareAndSet:
    async def test_puts_at_the_expected_revision(self, meta: MetaStore) -> None:
        revision = await meta.transact(Put("a", b"1", if_revision=0))
        await meta.transact(Put("a", b"2", if_revision=revision))
        assert (await stored(meta, "a")).value == b"2"

    @pytest.mark.parametrize("expected", [0, 7])
    async def test_refuses_another_revision(self, meta: MetaStore, expected: int) -> None:
        await meta.transact(Put("a", b"1"))
        with pytest.raises(RevisionConflict, match="a is at revision 1"):
            await meta.transact(Put("a", b"2", if_revision=expected))
        assert await meta.get("a") == Versioned(b"1", 1)

    async def test_refuses_a_revision_of_what_does_not_exist(self, meta: MetaStore) -> None:
        with pytest.raises(RevisionConflict):
            await meta.transact(Put("a", b"2", if_revision=3))
        with pytest.raises(RevisionConflict):
            await meta.transact(Delete("a", if_revision=3))

    async def test_deletes_at_the_expected_revision_only(self, meta: MetaStore) -> None:
        await meta.transact(Put("a", b"1"))
        with pytest.raises(RevisionConflict):
            await meta.transact(Delete("a", if_revision=2))
        await meta.transact(Delete("a", if_revision=1))
        assert await meta.get("a") is None

    async def test_one_of_many_at_the_same_moment_wins(self, meta: MetaStore) -> None:
        outcomes = await asyncio.gather(
            *(meta.transact(Put("leader", b"%d" % number, if_revision=0)) for number in range(10)),
            return_exceptions=True,
        )
        winners = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, int)]
        assert len(winners) == 1
        assert (await stored(meta, "leader")).value == b"%d" % winners[0]

    async def test_a_key_that_was_deleted_and_made_again_is_another_one(self, meta: MetaStore) -> None:
        first = await meta.transact(Put("a", b"1"))
        await meta.transact(Delete("a"))
        await meta.transact(Put("a", b"2", if_revision=0))
        with pytest.raises(RevisionConflict):
            await meta.transact(Put("a", b"3", if_revision=first))

    async def test_a_check_holds_the_others_to_a_revision(self, meta: MetaStore) -> None:
        lease = await meta.transact(Put("lease", b"mine"))
        await meta.transact(Put("a", b"1"), Check("lease", lease))
        assert (await stored(meta, "lease")).revision == lease, "a check changes nothing"
        await meta.transact(Put("lease", b"another's"))
        with pytest.raises(RevisionConflict, match="lease is at revision 3"):
            await meta.transact(Put("a", b"2"), Check("lease", lease))
        assert (await stored(meta, "a")).value == b"1"

    async def test_a_check_can_ask_that_a_key_does_not_exist(self, meta: MetaStore) -> None:
        await meta.transact(Put("a", b"1"), Check("b", 0))
        with pytest.raises(RevisionConflict):
            await meta.transact(Put("b", b"1"), Check("a", 0))

    async def test_nothing_is_ever_at_a_negative_revision(self, meta: MetaStore) -> None:
        """What a broker without a lease holds its writes to."""
        await meta.transact(Put("there", b""))
        for key in ("there", "not there"):
            with pytest.raises(RevisionConflict):
                await meta.transact(Put("a", b"1"), Check(key, -1))


class TestTransactions:
    async def test_apply_all(self, meta: MetaStore) -> None:
        await meta.transact(Put("old", b""))
        revision = await meta.transact(Put("a", b"1"), Put("b", b"2"), Delete("old"))
        assert [(key, value.revision) for key, value in await meta.list("")] == [("a", revision), ("b", revision)]

    async def test_or_nothing(self, meta: MetaStore) -> None:
        await meta.transact(Put("guard", b""))
        with pytest.raises(RevisionConflict) as caught:
            await meta.transact(Put("a", b"1"), Delete("guard"), Put("b", b"2", if_revision=9))
        assert caught.value.key == "b"
        assert [key for key, _ in await meta.list("")] == ["guard"]

    async def test_take_effect_in_the_order_of_the_calls(self, meta: MetaStore) -> None:
        promises = [meta.transact(Put("a", b"%d" % number)) for number in range(50)]
        assert list(await asyncio.gather(*promises)) == list(range(1, 51))
        assert await meta.get("a") == Versioned(b"49", 50)

    async def test_a_conflict_does_not_harm_those_around_it(self, meta: MetaStore) -> None:
        outcomes = await asyncio.gather(
            meta.transact(Put("a", b"1")),
            meta.transact(Put("a", b"2", if_revision=77)),
            meta.transact(Put("b", b"3")),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], RevisionConflict)
        assert [(key, value.value) for key, value in await meta.list("")] == [("a", b"1"), ("b", b"3")]

    async def test_of_nothing_are_answered(self, meta: MetaStore) -> None:
        await meta.transact()


class TestWatch:
    async def test_tells_changes_under_the_prefix(self, meta: MetaStore) -> None:
        seen: list[tuple[str, Versioned | None]] = []
        meta.watch("t/", lambda key, value: seen.append((key, value)))
        await meta.transact(Put("t/a", b"1"), Put("u/b", b"2"))
        await meta.transact(Delete("t/a"))
        assert seen == [("t/a", Versioned(b"1", 1)), ("t/a", None)]

    async def test_tells_nothing_of_what_was_refused(self, meta: MetaStore) -> None:
        seen: list[str] = []
        meta.watch("", lambda key, value: seen.append(key))
        with pytest.raises(RevisionConflict):
            await meta.transact(Put("a", b"1", if_revision=5))
        assert seen == []

    async def test_can_be_ended(self, meta: MetaStore) -> None:
        seen: list[str] = []
        end = meta.watch("", lambda key, value: seen.append(key))
        end()
        end()
        await meta.transact(Put("a", b"1"))
        assert seen == []

    async def test_a_watcher_finds_the_change_when_it_looks(self, meta: MetaStore) -> None:
        found: list[Promise[Versioned | None]] = []
        meta.watch("a", lambda key, value: found.append(meta.get("a")))
        await meta.transact(Put("a", b"1"))
        assert [await each for each in found] == [Versioned(b"1", 1)]


class TestReopen:
    @pytest.fixture(autouse=True)
    def only_what_persists(self, persistent: Driver) -> None: ...

    async def test_everything_is_there(self, driver: Driver, meta: MetaStore) -> None:
        await meta.transact(Put("a", b"\x00\xff"), Put("b", b"2"))
        await meta.transact(Delete("b"), Put("c", b""))
        meta = await reopen(driver)
        assert list(await meta.list("")) == [("a", Versioned(b"\x00\xff", 1)), ("c", Versioned(b"", 2))]

    async def test_revisions_go_on(self, driver: Driver, meta: MetaStore) -> None:
        await meta.transact(Put("a", b"1"))
        meta = await reopen(driver)
        assert await meta.transact(Put("a", b"2", if_revision=1)) == 2

    async def test_revisions_never_come_back_even_where_the_newest_key_was_deleted(
        self, driver: Driver, meta: MetaStore
    ) -> None:
        await meta.transact(Put("a", b"1"))
        stale = await meta.transact(Put("b", b"1"))
        await meta.transact(Delete("b"))
        meta = await reopen(driver)
        await meta.transact(Put("b", b"2"))
        with pytest.raises(RevisionConflict):
            await meta.transact(Put("b", b"3", if_revision=stale))

    async def test_what_was_under_way_at_closing_is_kept(self, driver: Driver, meta: MetaStore) -> None:
        promises = [meta.transact(Put(f"key/{number:02}", b"")) for number in range(20)]
        meta = await reopen(driver)
        assert all(promise.done for promise in promises)
        assert len(await meta.list("key/")) == 20

    async def test_what_was_answered_outlives_a_process_that_never_closed(
        self, driver: Driver, meta: MetaStore
    ) -> None:
        await meta.transact(Put("a", b"1"))
        second = driver.make_meta()
        await second.start()
        assert await second.get("a") == Versioned(b"1", 1)
        await second.close()


class TestCallbacksThatFail:
    async def test_a_watcher_costs_neither_the_others_nor_the_write(self, meta: MetaStore) -> None:
        seen: list[str] = []
        meta.watch("t/", _raise)
        meta.watch("t/", lambda key, value: seen.append(key))
        revision = await meta.transact(Put("t/a", b""))
        await meta.transact(Put("t/b", b""))
        assert revision == 1 and seen == ["t/a", "t/b"]

    async def test_whoever_waits_for_an_answer_costs_those_behind_nothing(self, meta: MetaStore) -> None:
        first = meta.transact(Put("a", b""))
        if first.done:
            pytest.skip("answered at once: it fails where it asks")
        first.then(_raise)
        second = meta.transact(Put("b", b""))
        async with asyncio.timeout(10):
            assert await second == 2
            assert await meta.transact(Put("c", b"")) == 3


def _raise(*_: object) -> None:
    raise ValueError("a mistake elsewhere")
