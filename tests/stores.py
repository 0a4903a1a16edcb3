"""The stores that a broker can be served over in tests, each in a place of its own."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import psycopg
import pytest

from millstream.stores.base import MetaStore, Versioned
from tests.postgres import PrivatePostgres

DEFAULT = "file"
OTHERS = ("memory", "sqlite", "postgresql")
ALL = (DEFAULT, *OTHERS)
LASTING = (DEFAULT, "sqlite", "postgresql")
"""Those that outlive the broker."""


def store_url(kind: str, directory: Path, request: pytest.FixtureRequest) -> str:
    """A new, empty one."""
    if kind == "memory":
        return "memory:"
    if kind == "postgresql":
        server: PrivatePostgres = request.getfixturevalue("postgres")
        return server.new_database()
    return f"file:{directory}" if kind == "file" else f"sqlite:{directory / 'store.db'}"


def stored_key(url: str, key: str) -> bytes:
    """What a lasting store's metadata has under a key."""
    kind, _, place = url.partition(":")
    if kind == "postgresql":
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT value FROM millstream.meta WHERE key = %s", (key,)).fetchone()
    else:
        file = place if kind == "sqlite" else f"{place}/meta.db"
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
            row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    assert row is not None
    return bytes(row[0])


async def stored(meta: MetaStore, key: str) -> Versioned:
    found = await meta.get(key)
    assert found is not None
    return found
