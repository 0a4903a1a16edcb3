"""What metadata promise that several brokers share: two stores over one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millstream.core.errors import RevisionConflict
from millstream.stores.base import Check, Delete, MetaStore, Put, Versioned
from tests.contract.conftest import Driver
from tests.contract.watched import SECONDS, Watched

pytestmark = pytest.mark.parametrize("driver", ["sqlite", "postgresql", "etcd"], indirect=True)
Pair = tuple[MetaStore, MetaStore]


@pytest.fixture
async def metas(driver: Driver) -> AsyncIterator[Pair]:
    one, two = driver.make_meta(), driver.make_meta()
    for meta in (one, two):
        await meta.start()
    yield one, two
    for meta in (one, two):
        await meta.close()


async def test_a_watch_tells_what_the_other_changed(metas: Pair) -> None:
    one, two = metas
    watched = Watched()
    two.watch("t/", watched)
    await one.transact(Put("t/a", b"1"), Put("u/a", b"1"))
    await watched.key("t/a")
    await one.transact(Delete("t/a"))
    await one.transact(Put("t/b", b"2"))
    await watched.key("t/b")
    assert watched.seen == [("t/a", b"1"), ("t/a", None), ("t/b", b"2")]


async def test_own_and_others_changes_come_in_one_order(metas: Pair) -> None:
    told: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
    for meta, changes in zip(metas, told, strict=True):

        def hear(key: str, value: Versioned | None, changes: list[tuple[int, str]] = changes) -> None:
            assert value is not None
            changes.append((value.revision, key))

        meta.watch("t/", hear)
    await asyncio.gather(*(meta.transact(Put(f"t/{at}", b"")) for at in range(30) for meta in metas))
    last = Watched()
    for meta in metas:
        meta.watch("end", last)
    await metas[0].transact(Put("end", b""))
    await metas[1].transact(Put("end", b""))
    stored = {key: value.revision for key, value in await metas[0].list("t/")}
    for changes in told:
        revisions = [revision for revision, _ in changes]
        assert revisions == sorted(revisions) and len(set(changes)) == len(changes), "each once, in order"
        assert {key: revision for revision, key in changes} == stored


async def test_compare_and_set_holds_across_both(metas: Pair) -> None:
    one, two = metas
    revision = await one.transact(Put("a", b"1", if_revision=0))
    with pytest.raises(RevisionConflict):
        await two.transact(Put("a", b"2", if_revision=0))
    assert await two.get("a") == Versioned(b"1", revision)


async def test_a_conflict_is_answered_after_the_change_that_caused_it_is_reported(metas: Pair) -> None:
    one, two = metas
    seen: list[str] = []
    two.watch("t/", lambda key, value: seen.append(key))
    for number in range(20):
        await one.transact(Put(f"t/{number}", b""))
        with pytest.raises(RevisionConflict):
            await two.transact(Put(f"t/{number}", b"", if_revision=0))
        assert seen[-1] == f"t/{number}"


async def test_a_read_sees_what_the_other_was_answered(metas: Pair) -> None:
    one, two = metas
    for number in range(20):
        await one.transact(Put("a", b"%d" % number))
        found = await two.get("a")
        assert found is not None and found.value == b"%d" % number
        assert [value.value for _, value in await two.list("a")] == [b"%d" % number]


async def test_a_counter_loses_no_increment(metas: Pair) -> None:
    """Four writers through two stores, each of which repeats what was refused."""
    await metas[0].transact(Put("count", b"0"))

    async def count(meta: MetaStore) -> None:
        for _ in range(10):
            while True:
                found = await meta.get("count")
                assert found is not None
                try:
                    await meta.transact(Put("count", b"%d" % (int(found.value) + 1), if_revision=found.revision))
                    break
                except RevisionConflict:
                    continue

    async with asyncio.timeout(SECONDS * 3):
        await asyncio.gather(*(count(meta) for meta in (*metas, *metas)))
    found = await metas[1].get("count")
    assert found is not None and found.value == b"40"


async def test_a_check_fences_a_writer_whose_lease_the_other_deleted(metas: Pair) -> None:
    one, two = metas
    lease = await one.transact(Put("lease", b"one"))
    await two.transact(Delete("lease", if_revision=lease))
    with pytest.raises(RevisionConflict):
        await one.transact(Put("state", b"stale"), Check("lease", lease))
    assert await two.get("state") is None
