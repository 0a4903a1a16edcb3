"""Table sinks, the same tests against SQLite and a real PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from millstream.pipeline import table_postgres
from millstream.pipeline.table import Table, TableError, TableGone, empty_table, open_table
from tests.postgres import PrivatePostgres, postgres  # noqa: F401  (a fixture)

SCHEMA = pa.schema([("minute", pa.timestamp("us", "UTC")), ("url", pa.string()), ("hits", pa.int64())])
KEY = ("minute", "url")
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
APP = "clicks/hits/1"


class Database:
    """One that tests can look into."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:"))) as connection, connection:
                return connection.execute(statement).fetchall()
        with psycopg.connect(self.url, autocommit=True) as database:
            cursor = database.execute(statement)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        yield Database("sqlite", f"sqlite:{tmp_path / 'tables.db'}")
        return
    server: PrivatePostgres = request.getfixturevalue("postgres")
    found = Database("postgres", server.url)
    found.ask("DROP SCHEMA IF EXISTS public CASCADE")
    found.ask("CREATE SCHEMA public")
    yield found


@pytest.fixture
def opened(database: Database) -> Iterator[Callable[..., Table]]:
    tables: list[Table] = []

    def open_one(name: str = "hits", key: tuple[str, ...] = KEY, schema: pa.Schema = SCHEMA, app: str = APP) -> Table:
        tables.append(open_table(database.url, name, key, schema, app))
        return tables[-1]

    yield open_one
    for table in tables:
        table.close()


def batch(*rows: tuple[Any, ...], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


def hits(database: Database) -> dict[str, int]:
    return {str(url): int(count) for url, count in database.ask("SELECT url, hits FROM hits")}


# -- once ------------------------------------------------------------------------------------------------------------


def test_rows_are_inserted_and_later_ones_replace_them(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()
    assert table.upsert(0, [batch((NOON, "/a", 1), (NOON, "/b", 2))]) == 2
    assert table.upsert(1, [batch((NOON, "/b", 5)), batch((NOON, "/c", 7))]) == 2
    assert hits(database) == {"/a": 1, "/b": 5, "/c": 7}


def test_a_batch_that_comes_again_changes_nothing(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()
    assert not table.has(0)
    table.upsert(0, [batch((NOON, "/a", 1))])
    table.upsert(1, [batch((NOON, "/a", 2))])
    assert table.has(0)
    assert table.has(1)
    assert not table.has(2)
    assert table.upsert(0, [batch((NOON, "/a", 1))]) == 0
    assert opened().upsert(1, [batch((NOON, "/a", 99))]) == 0
    assert hits(database) == {"/a": 2}


def test_of_rows_with_one_key_the_last_in_the_batch_wins(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()
    many = [(NOON, f"/{at % 7}", at) for at in range(1000)]
    assert table.upsert(0, [batch(*many[:400]), batch(*many[400:])]) == 1000
    assert hits(database) == {f"/{at % 7}": at for at in range(993, 1000)}


def test_another_checkpoint_counts_on_its_own(database: Database, opened: Callable[..., Table]) -> None:
    opened().upsert(8, [batch((NOON, "/a", 1))])
    second = opened(app="clicks/hits/2")
    assert not second.has(0)
    assert second.upsert(0, [batch((NOON, "/b", 1))]) == 1
    remembered = database.ask("SELECT app, batch FROM millstream_batches ORDER BY app")
    assert remembered == [("clicks/hits/1", 8), ("clicks/hits/2", 0)]


def test_a_batch_that_fails_half_way_leaves_no_trace(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()

    def breaking() -> Iterator[pa.RecordBatch]:
        yield batch((NOON, "/a", 1))
        raise RuntimeError("a task failed")

    with pytest.raises(RuntimeError, match="a task failed"):
        table.upsert(0, breaking())
    assert not table.has(0)
    assert hits(database) == {}
    assert table.upsert(0, [batch((NOON, "/a", 1))]) == 1


def test_an_empty_batch_is_remembered(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()
    assert table.upsert(3, []) == 0
    assert table.has(3)


def test_a_table_that_went_is_not_made_anew_where_batches_are_counted(
    database: Database, opened: Callable[..., Table]
) -> None:
    opened().upsert(1, [batch((NOON, "/a", 1))])
    database.ask("ALTER TABLE hits RENAME TO kept")
    for _ in range(2):
        with pytest.raises(TableGone):
            opened()
    database.ask("ALTER TABLE kept RENAME TO hits")
    assert opened().has(1)
    assert hits(database) == {"/a": 1}
    database.ask("DROP TABLE hits")
    assert not opened(app="another checkpoint").has(0)


def race(count: int, act: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = act(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def upsert(tables: list[Table], number: int, batches: list[pa.RecordBatch], each: int) -> int:
    return tables[each].upsert(number, [batches[each]])


def test_of_many_drivers_with_the_same_batch_one_gets_it_in(database: Database, opened: Callable[..., Table]) -> None:
    tables = [opened() for _ in range(4)]
    for number in range(10):
        rows = batch(*[(NOON, f"/{at}", number) for at in range(50)])
        results = race(4, partial(upsert, tables, number, [rows] * 4))
        assert sorted(results) == [0, 0, 0, 50]
    assert set(hits(database).values()) == {9}


def test_pipelines_on_one_table_do_not_lock_each_other_out(database: Database, opened: Callable[..., Table]) -> None:
    tables = [opened(app=f"app-{number}") for number in range(3)]
    rows = [(NOON, f"/{at}", at) for at in range(500)]
    orders = [batch(*rows), batch(*rows[::-1]), batch(*rows[250:], *rows[:250])]
    for number in range(5):
        assert race(3, partial(upsert, tables, number, orders)) == [500] * 3
    assert len(hits(database)) == 500


def test_drivers_that_make_the_table_at_once_all_get_it(database: Database, opened: Callable[..., Table]) -> None:
    results = race(4, lambda each: opened())
    assert [type(table).__name__ for table in results if isinstance(table, Exception)] == []
    if database.kind == "sqlite":
        assert database.ask("PRAGMA journal_mode") == [("wal",)]


def test_an_sqlite_file_gets_its_write_ahead_log_though_another_has_the_lock_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tables.db"
    connect = sqlite3.connect
    tries: list[str] = []

    class Second(sqlite3.Connection):
        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
            if not statement.startswith("PRAGMA journal_mode"):
                return super().execute(statement, *given)
            tries.append(statement)
            if len(tries) > 1:
                return super().execute(statement)
            with closing(connect(path, isolation_level=None)) as first:
                first.execute("BEGIN IMMEDIATE")
                first.execute("CREATE TABLE theirs (id)")
                try:
                    return super().execute(statement)
                finally:
                    first.execute("COMMIT")

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Second))
    open_table(f"sqlite:{path}", "hits", KEY, SCHEMA, APP).close()
    with closing(connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    assert len(tries) == 2


# -- what can be stored ------------------------------------------------------------------------------------------------

EVERYTHING = pa.schema(
    [
        ("id", pa.int32()),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("long", pa.int64()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("exact", pa.decimal128(20, 4)),
        ("text", pa.string()),
        ("wide", pa.large_string()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("list", pa.list_(pa.float64())),
        ("struct", pa.struct([("a", pa.string()), ("b", pa.timestamp("us", "UTC")), ("c", pa.binary())])),
        ("map", pa.map_(pa.int64(), pa.decimal128(5, 2))),
        ("nothing", pa.null()),
    ]
)
ROW = (
    1,
    True,
    -7,
    2**62,
    0.5,
    0.1,
    Decimal("1234567890123456.7890"),
    "grüße",
    "wide",
    b"\x00\xff\\",
    date(2024, 2, 29),
    datetime(2024, 2, 29, 23, 59, 59, 123_456, tzinfo=UTC),
    datetime(2024, 2, 29, 1),
    [1.5, None, float("nan"), float("inf")],
    {"a": 'q"uo\\te\0\\u0000', "b": NOON, "c": b"\xff"},
    [(5, Decimal("1.20")), (6, None)],
    None,
)
LIST = [1.5, None, "NaN", "Infinity"]
STRUCT = {"a": 'q"uo\\te\ufffd\\u0000', "b": "2024-05-01T12:00:00+00:00", "c": "/w=="}
MAP = {"5": "1.20", "6": None}


def test_every_type_of_a_row_is_stored_as_it_should(database: Database, opened: Callable[..., Table]) -> None:
    table = opened("things", ("id",), EVERYTHING)
    table.upsert(0, [batch(ROW, (2, *[None] * 16), schema=EVERYTHING)])
    first, second = database.ask("SELECT * FROM things ORDER BY id")
    assert second == (2, *[None] * 16)
    if database.kind == "postgres":
        assert first[:13] == (*ROW[:9], ROW[9], *ROW[10:13])
        assert first[11].astimezone(UTC) == ROW[11]
        assert list(first[13:]) == [LIST, STRUCT, MAP, None]
        kinds = database.ask(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'things'"
        )
        assert dict(kinds)["at"] == "timestamp with time zone"
        assert dict(kinds)["struct"] == "jsonb"
    else:
        assert first[:6] == ROW[:6]
        assert first[6:13] == (
            "1234567890123456.7890",
            "grüße",
            "wide",
            b"\x00\xff\\",
            "2024-02-29",
            "2024-02-29T23:59:59.123456Z",
            "2024-02-29T01:00:00.000000",
        )
        assert [json.loads(value) for value in first[13:16]] == [LIST, STRUCT, MAP]


@pytest.mark.parametrize(
    "text", ["", "NULL", "\\N", "\\.", "a\n\\.\nb", '"', "a,b", "\r\n", "'; DROP TABLE hits; --", "☃" * 300, " x "]
)
def test_any_text_comes_back(database: Database, opened: Callable[..., Table], text: str) -> None:
    opened("words", ("id",), pa.schema([("id", pa.int64()), ("word", pa.string())])).upsert(
        0, [pa.RecordBatch.from_pydict({"id": [1, 2], "word": [text, None]})]
    )
    assert database.ask("SELECT word FROM words ORDER BY id") == [(text,), (None,)]


def test_a_zero_character_does_not_stop_the_pipeline(database: Database, opened: Callable[..., Table]) -> None:
    opened().upsert(0, [batch((NOON, "a\0b", 1))])
    assert list(hits(database)) == ["a\ufffdb" if database.kind == "postgres" else "a\0b"]


def test_a_large_batch_is_taken_in_pieces(database: Database, opened: Callable[..., Table]) -> None:
    size = 150_000
    rows = pa.RecordBatch.from_pydict({"id": range(size), "value": [1.5] * size})
    table = opened("many", ("id",), rows.schema)
    assert table.upsert(0, [rows]) == size
    assert database.ask("SELECT count(*), count(DISTINCT id) FROM many") == [(size, size)]


def test_names_are_taken_as_they_are(database: Database, opened: Callable[..., Table]) -> None:
    odd = pa.schema([('the "key"', pa.int64()), ("select", pa.string()), ("Größe %s {}", pa.string())])
    table = opened('or"der by', ('the "key"',), odd)
    for number, value in enumerate(("a", "b")):
        table.upsert(number, [batch((1, value, value), schema=odd)])
    assert database.ask('SELECT * FROM "or""der by"') == [(1, "b", "b")]


def test_a_table_of_keys_alone_keeps_them(database: Database, opened: Callable[..., Table]) -> None:
    seen = pa.schema([("user", pa.string())])
    table = opened("seen", ("user",), seen)
    for number in range(2):
        table.upsert(number, [batch(("ann",), ("bob",), ("ann",), schema=seen)])
    assert sorted(database.ask('SELECT "user" FROM seen')) == [("ann",), ("bob",)]


def test_columns_are_found_by_name(database: Database, opened: Callable[..., Table]) -> None:
    rows = pa.RecordBatch.from_pydict({"more": [1], "hits": [4], "url": ["/a"], "minute": [NOON]})
    opened().upsert(0, [rows])
    assert hits(database) == {"/a": 4}


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(TableError) as caught:
        act()
    return str(caught.value)


def test_a_key_that_is_null_is_refused_with_the_row_it_is_in(database: Database, opened: Callable[..., Table]) -> None:
    table = opened()
    text = refusal(lambda: table.upsert(0, [batch((NOON, "/a", 1)), batch((NOON, "/b", 1), (NOON, None, 3))]))
    assert "a row for the table hits has no url" in text
    assert "minute=2024-05-01 12:00:00+00:00, url=null" in text
    assert hits(database) == {}
    assert not table.has(0)


def test_a_key_that_the_rows_do_not_have_is_refused(opened: Callable[..., Table]) -> None:
    assert "names page, but the rows have minute, url, hits" in refusal(lambda: opened(key=("page",)))
    assert "has no key" in refusal(lambda: opened(key=()))
    nested = pa.schema([("tags", pa.list_(pa.string()))])
    assert "tags cannot be in the key" in refusal(lambda: opened(key=("tags",), schema=nested))
    odd = pa.schema([("id", pa.int64()), ("took", pa.duration("us"))])
    assert "cannot have took, which is duration[us]" in refusal(lambda: opened(key=("id",), schema=odd))


def test_a_table_that_does_not_fit_is_refused_with_all_that_is_wrong(
    database: Database, opened: Callable[..., Table]
) -> None:
    database.ask("CREATE TABLE hits (minute text, hits real, owner text NOT NULL, note text)")
    text = refusal(opened)
    assert "it has no column url" in text and "which is part of the key" in text
    assert "its column hits is real, not" in text.lower()
    assert "its column owner must not be null" in text
    assert "it has no unique key for minute, url (CREATE UNIQUE INDEX" in text
    assert "note" not in text
    if database.kind == "postgres":
        assert "its column minute is text, not timestamp with time zone" in text


def test_columns_that_rows_have_and_a_table_has_not_are_added(database: Database, opened: Callable[..., Table]) -> None:
    opened().upsert(0, [batch((NOON, "/a", 1))])
    wider = pa.schema([*SCHEMA, ("ms", pa.float64()), ("price", pa.decimal128(10, 2))])
    opened(schema=wider).upsert(1, [batch((NOON, "/b", 2, 0.5, Decimal("1.25")), schema=wider)])
    found = database.ask("SELECT url, hits, ms, price FROM hits ORDER BY url")
    assert [(url, hits, ms, price and str(price)) for url, hits, ms, price in found] == [
        ("/a", 1, None, None),
        ("/b", 2, 0.5, "1.25"),
    ]
    opened().upsert(2, [batch((NOON, "/c", 3))])
    assert database.ask("SELECT ms FROM hits WHERE url = '/c'") == [(None,)], "and rows without them are still taken"


def test_an_emptied_table_forgets_the_batches_of_its_sink_alone(
    database: Database, opened: Callable[..., Table]
) -> None:
    assert empty_table(database.url, "hits", "clicks/hits/") == 0, "there is none yet"
    opened().upsert(3, [batch((NOON, "/a", 1), (NOON, "/b", 1))])
    opened(name="others", app="clicks/others/1").upsert(5, [batch((NOON, "/a", 1))])
    assert empty_table(database.url, "hits", "clicks/hits/") == 2
    assert hits(database) == {}
    assert database.ask("SELECT app, batch FROM millstream_batches") == [("clicks/others/1", 5)]
    assert opened().upsert(0, [batch((NOON, "/a", 1))]) == 1


def test_a_table_of_the_users_own_is_used_as_it_is(database: Database, opened: Callable[..., Table]) -> None:
    instant = "timestamptz" if database.kind == "postgres" else "text"
    database.ask(
        f"CREATE TABLE hits (note text, hits numeric, url varchar(20), minute {instant}, "
        "since integer NOT NULL DEFAULT 7)"
    )
    database.ask("CREATE UNIQUE INDEX ours ON hits (url, minute)")
    database.ask("CREATE UNIQUE INDEX part ON hits (hits) WHERE hits < 0")
    table = opened()
    table.upsert(0, [batch((NOON, "/a", 1))])
    database.ask("UPDATE hits SET note = 'kept'")
    table.upsert(1, [batch((NOON, "/a", 2))])
    assert database.ask("SELECT url, hits, note, since FROM hits") == [("/a", 2, "kept", 7)]


def test_what_the_statement_in_the_refusal_says_helps(database: Database, opened: Callable[..., Table]) -> None:
    instant = "timestamptz" if database.kind == "postgres" else "text"
    database.ask(f"CREATE TABLE hits (minute {instant}, url text, hits bigint)")
    text = refusal(opened)
    database.ask(text[text.index("(CREATE") + 1 : -1])
    assert opened().upsert(0, [batch((NOON, "/a", 1))]) == 1


def test_databases_that_are_not_known_are_refused_without_their_password() -> None:
    text = refusal(lambda: open_table("mysql://me:secret@host/db", "hits", KEY, SCHEMA, APP))
    assert "use sqlite:FILE or postgresql://" in text
    assert "secret" not in text


def test_an_sqlite_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    text = refusal(lambda: open_table(f"sqlite:{tmp_path}/no/such.db", "hits", KEY, SCHEMA, APP))
    assert "cannot open the SQLite file" in text
    (tmp_path / "text.db").write_text("this is not a database at all" * 100)
    assert "is not a database" in refusal(lambda: open_table(f"sqlite:{tmp_path}/text.db", "hits", KEY, SCHEMA, APP))


# -- PostgreSQL alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def server(postgres: PrivatePostgres) -> PrivatePostgres:  # noqa: F811
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres


def test_a_database_that_is_away_is_named_without_its_password(server: PrivatePostgres) -> None:
    dead = "postgresql://mill:s3cret%2Fw%C3%B6rd@127.0.0.1:1/shop"
    text = refusal(lambda: open_table(dead, "hits", KEY, SCHEMA, APP))
    assert "cannot reach PostgreSQL at 127.0.0.1:1, database shop" in text
    assert "check that it runs" in text
    wrong = server.url.replace("s3cret", "wr0ng")
    denied = refusal(lambda: open_table(wrong, "hits", KEY, SCHEMA, APP))
    assert "password authentication failed" in denied
    broken = "postgresql://mill:s3cret%ZZ@[host/shop"
    unread = refusal(lambda: open_table(broken, "hits", KEY, SCHEMA, APP))
    assert "postgresql://USER:PASSWORD@HOST" in unread
    for message in (text, denied, unread):
        assert not any(secret in message for secret in ("s3cret", "wr0ng", "wörd"))


def test_a_unix_socket_is_reached_by_its_folder(server: PrivatePostgres) -> None:
    with closing(open_table(server.socket_url, "hits", KEY, SCHEMA, APP)) as table:
        assert table.upsert(0, [batch((NOON, "/a", 1))]) == 1


def test_a_table_in_another_schema_keeps_its_batches_there(server: PrivatePostgres) -> None:
    database = Database("postgres", server.url)
    database.ask("DROP SCHEMA IF EXISTS shop CASCADE")
    missing = refusal(lambda: open_table(server.url, "shop.hits", KEY, SCHEMA, APP))
    assert 'schema "shop" does not exist' in missing
    database.ask("CREATE SCHEMA shop")
    with closing(open_table(server.url, "shop.hits", KEY, SCHEMA, APP)) as table:
        table.upsert(0, [batch((NOON, "/a", 1))])
    assert database.ask("SELECT batch FROM shop.millstream_batches") == [(0,)]
    assert database.ask("SELECT hits FROM shop.hits") == [(1,)]


def test_a_connection_that_was_cut_is_made_anew(server: PrivatePostgres) -> None:
    database = Database("postgres", server.url)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'millstream'"
    with closing(open_table(server.url, "hits", KEY, SCHEMA, APP)) as table:
        table.upsert(0, [batch((NOON, "/a", 1))])
        database.ask(cut)
        assert table.upsert(1, [batch((NOON, "/a", 2))]) == 1

        def cut_while_copying() -> Iterator[pa.RecordBatch]:
            yield batch((NOON, "/a", 3))
            database.ask(cut)
            yield batch((NOON, "/b", 3))

        text = refusal(lambda: table.upsert(2, cut_while_copying()))
        assert "the table hits at 127.0.0.1" in text
        assert not table.has(2)
        assert hits(database) == {"/a": 2}
        assert table.upsert(2, [batch((NOON, "/a", 3))]) == 1


def test_a_driver_that_holds_its_batch_for_ever_is_not_waited_for(
    server: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_postgres, "LOCK_WAIT", "100ms")
    first, second = (open_table(server.url, "hits", KEY, SCHEMA, APP) for _ in range(2))

    def held() -> Iterator[pa.RecordBatch]:
        assert "lock timeout" in refusal(lambda: second.upsert(0, [batch((NOON, "/b", 1))]))
        yield batch((NOON, "/a", 1))

    with closing(first), closing(second):
        assert first.upsert(0, held()) == 1
        assert second.has(0)


def test_what_the_database_refuses_is_said_in_one_sentence(server: PrivatePostgres) -> None:
    database = Database("postgres", server.url)
    database.ask(
        "CREATE TABLE hits (minute timestamptz, url varchar(3), hits bigint CHECK (hits > 0), UNIQUE (minute, url))"
    )
    with closing(open_table(server.url, "hits", KEY, SCHEMA, APP)) as table:
        long = refusal(lambda: table.upsert(0, [batch((NOON, "/long", 1))]))
        assert "value too long for type character varying(3)" in long
        assert "violates check constraint" in refusal(lambda: table.upsert(0, [batch((NOON, "/a", 0))]))
        assert "\n" not in long
        assert table.upsert(0, [batch((NOON, "/a", 1))]) == 1


def test_names_that_postgresql_would_cut_are_refused(server: PrivatePostgres) -> None:
    long = pa.schema([("k" * 64, pa.int64())])
    assert "too long a name" in refusal(lambda: open_table(server.url, "hits", ("k" * 64,), long, APP))


def test_a_database_in_another_encoding_still_gets_utf_8(server: PrivatePostgres) -> None:
    database = Database("postgres", server.url)
    database.ask("DROP DATABASE IF EXISTS latin")
    database.ask("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = server.url.removesuffix("postgres") + "latin"
    with closing(open_table(url, "hits", KEY, SCHEMA, APP)) as table:
        table.upsert(0, [batch((NOON, "/größe", 1))])
    assert Database("postgres", url).ask("SELECT length(url) FROM hits") == [(6,)]
    database.ask("DROP DATABASE latin")


def test_a_key_is_found_whatever_its_capitals(database: Database) -> None:
    """As Spark compares names, and as `check` does, which has let it pass."""
    schema = pa.schema([("Url", pa.string()), ("hits", pa.int64())])
    with closing(open_table(database.url, "hits", ("url",), schema, APP)) as table:
        for batch in range(2):
            table.upsert(batch, [pa.RecordBatch.from_pylist([{"Url": "/", "hits": batch}], schema=schema)])
    assert database.ask('SELECT "Url", hits FROM hits') == [("/", 1)]
