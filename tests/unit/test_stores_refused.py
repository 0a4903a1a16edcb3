"""Stores that are named in a way that would be misunderstood, and databases that cannot be written to."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

import millstream
from millstream.core.errors import MillstreamError, StartupError
from millstream.stores.postgres_url import understand
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock
from tests.postgres import PrivatePostgres
from tests.postgres import postgres as postgres


@pytest.mark.parametrize("url", ["sqlite::memory:", "sqlite:///:memory:"])
def test_memory_is_a_store_of_its_own(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="a store in memory is written memory:"):
        open_store(url, VirtualClock(), lambda seconds: None)
    assert not list(tmp_path.iterdir())


def test_options_of_sqlite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"does not take: write sqlite:.*/app\.db$"):
        open_store(f"sqlite:{tmp_path}/app.db?mode=ro", VirtualClock(), lambda seconds: None)
    assert not list(tmp_path.iterdir())


def test_an_sslmode_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(StartupError, match=r"sslmode=bogus .* is not one of disable, allow, prefer, .* verify-full"):
        understand("postgresql://me:hunter2@db.example/app?sslmode=bogus")


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_database_that_is_read_only_is_said_to_be(postgres: PrivatePostgres, is_new: bool) -> None:
    url = postgres.new_database()
    if not is_new:
        async with millstream.open(url):
            pass
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET default_transaction_read_only = on")
    with pytest.raises(MillstreamError, match="read-only"):
        async with millstream.open(url) as ms:
            await ms.send("orders", b"x")
