"""Stores that cannot be used: one clear sentence each, and never a secret in it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import psycopg
import pytest

from millstream.config import Config, without_secrets
from millstream.core.errors import Code, RequestError, StartupError
from millstream.log.config import LogConfig
from millstream.stores.postgres_url import understand
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.table_store import TableLogStore
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill, read_back
from tests.postgres import PrivatePostgres
from tests.postgres import postgres as postgres
from tests.serving import MILLSTREAM

SECRET = "hunter2"


async def refusal(url: str) -> str:
    """What is said when a store cannot be opened."""
    with pytest.raises(StartupError) as caught:
        logs, _ = open_store(url, VirtualClock(), lambda seconds: None)
        await logs.start()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "mysql://user:hunter2@host/db",
            "host=127.0.0.1 user=me password=hunter2",
            "password = hunter2 host=127.0.0.1",
            "postgres+ssl://user:hunter2@host/db",
            "files:data",
            "sqlite",
            "memory:x",
            "x",
        ],
    )
    async def test_an_unknown_one_is_told_what_there_is(self, url: str) -> None:
        text = await refusal(url)
        assert "file:DIR" in text and "sqlite:FILE" in text and "postgresql://" in text and SECRET not in text

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql:db",
            "postgresql:/db",
            "postgresql://user:hunter2#x@host/db",
            "postgresql://user@host:hunter2/db",
            "postgresql://user:x@[host/hunter2",
            "postgresql://user:x@host/db?hunter2",
        ],
    )
    async def test_one_that_cannot_be_understood_says_so_without_quoting_it(self, url: str) -> None:
        text = await refusal(url)
        assert "cannot be understood" in text and SECRET not in text

    @pytest.mark.parametrize(
        ("url", "location"),
        [
            ("postgresql://me:hunter2@db.example:5433/app", "postgresql://db.example:5433/app"),
            ("postgresql://db.example/app?user=me&password=hunter2", "postgresql://db.example/app"),
            ("postgresql://me:hunter2@/app?host=/run/pg&port=5433", "postgresql:///run/pg:5433/app"),
            ("postgres://me@one:1,two:2/app?sslmode=require", "postgresql://one:1,two:2/app"),
            ("postgresql:///app", "postgresql://localhost/app"),
        ],
    )
    def test_a_place_is_named_without_user_and_password(self, url: str, location: str) -> None:
        assert understand(url).location == location

    def test_options_of_libpqs_own_sockets_are_not_for_the_server(self) -> None:
        found = understand("postgresql://h/d?connect_timeout=3&keepalives=1&sslmode=require&application_name=x")
        assert found.dsn == "postgresql://h/d?sslmode=require&application_name=x"
        assert found.connect_seconds == 3

    @pytest.mark.parametrize(
        ("url", "query"),
        [
            ("postgresql://one,two/d", "target_session_attrs=read-write"),
            ("postgresql:///d?host=one,two", "host=one%2Ctwo&target_session_attrs=read-write"),
            ("postgresql://one,two/d?target_session_attrs=any", "target_session_attrs=any"),
            ("postgresql://one/d", ""),
        ],
    )
    def test_of_several_hosts_the_one_that_can_be_written_to_is_meant(self, url: str, query: str) -> None:
        assert urlsplit(understand(url).dsn).query == query

    def test_hosts_from_the_environment_are_several_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGHOST", "one,two")
        monkeypatch.setenv("PGPORT", "5,6")
        found = understand("postgresql:///d")
        assert urlsplit(found.dsn).query == "target_session_attrs=read-write"
        each = [parse_qs(urlsplit(host).query) for host in found.hosts]
        assert [(host["host"], host["port"]) for host in each] == [(["one"], ["5"]), (["two"], ["6"])]
        assert understand("postgresql://three/d").dsn == "postgresql://three/d"

    @pytest.mark.parametrize(
        ("url", "hosts"),
        [
            ("postgresql://me:p%40w@one,two/d", [("one", "5"), ("two", "6")]),
            ("postgresql://me:p%40w@[::1]:7,two/d", [("[::1]", "7"), ("two", "6")]),
            ("postgresql://me:p%40w@%2Frun%2Fone,two:7/d", [("/run/one", "5"), ("two", "7")]),
        ],
    )
    def test_ports_from_the_environment_belong_to_the_hosts_of_a_url(
        self, monkeypatch: pytest.MonkeyPatch, url: str, hosts: list[tuple[str, str]]
    ) -> None:
        monkeypatch.setenv("PGPORT", "5,6")
        found = [urlsplit(each) for each in understand(url).hosts]
        assert [each.netloc for each in found] == ["me:p%40w@"] * 2
        options = [dict(parse_qsl(each.query)) for each in found]
        assert [(each["host"], each["port"]) for each in options] == hosts

    @pytest.mark.parametrize(
        ("url", "hosts"),
        [
            ("postgresql://me:pw@[::1]:5,one:6/d?target_session_attrs=any", ["me:pw@[::1]:5", "me:pw@one:6"]),
            ("postgresql://one,two/d?target_session_attrs=prefer-standby", ["one,two"]),
            ("postgresql://one/d", ["one"]),
        ],
    )
    def test_each_host_is_tried_by_itself(self, url: str, hosts: list[str]) -> None:
        assert [urlsplit(each).netloc for each in understand(url).hosts] == hosts

    def test_a_plus_is_a_plus_as_libpq_has_it(self) -> None:
        found = understand("postgresql://h/d?user=a+b&password=c%2Bd&options=e%20f")
        assert parse_qs(urlsplit(found.dsn).query) == {"user": ["a+b"], "password": ["c+d"], "options": ["e f"]}

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("file:data", "file:data"),
            ("sqlite:a:b@c", "sqlite:a:b@c"),
            ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
            ("postgresql://me:hun@ter2@host/db", "postgresql://me:***@host/db"),
            ("postgresql://me@host/db?sslmode=require", "postgresql://me@host/db?sslmode=require"),
            ("postgresql://host/db?password=hunter2&user=me", "postgresql://host/db?password=***&user=me"),
            ("postgresql://host/db?user=me&sslpassword=hunter2", "postgresql://host/db?user=me&sslpassword=***"),
        ],
    )
    def test_what_is_shown_of_one_has_no_secret(self, url: str, shown: str) -> None:
        assert without_secrets(url) == shown

    @pytest.mark.parametrize("store", ["", "file:", "sqlite:"])
    def test_one_without_a_place_is_a_mistake_of_the_configuration(self, store: str) -> None:
        with pytest.raises(StartupError, match="store names no"):
            Config(store=store)

    async def test_a_missing_driver_is_named_with_the_way_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.startswith("millstream.stores.postgres")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "asyncpg", None)
        assert "pip install 'millstream[postgres]'" in await refusal("postgresql://localhost/db")


class TestSqlite:
    async def test_a_place_that_cannot_be_written(self) -> None:
        assert "/sys/store.db cannot be opened as a store: " in await refusal("sqlite:/sys/store.db")

    async def test_a_read_only_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write whatever its mode says
        text = await refusal(f"sqlite:{tmp_path}/store.db")
        assert text.endswith("cannot be opened as a store: the file or its directory is read-only")

    async def test_a_directory_that_does_not_exist(self, tmp_path: Path) -> None:
        assert "No such file or directory" in await refusal(f"sqlite:{tmp_path}/missing/store.db")

    async def test_a_directory_in_place_of_a_file(self, tmp_path: Path) -> None:
        assert "Is a directory" in await refusal(f"sqlite:{tmp_path}")

    async def test_a_file_in_place_of_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "Not a directory" in await refusal(f"sqlite:{tmp_path}/file/store.db")

    async def test_a_file_that_is_no_database(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("dear diary, " * 100)
        assert "it is not an SQLite database" in await refusal(f"sqlite:{tmp_path}/notes.txt")
        assert (tmp_path / "notes.txt").read_text() == "dear diary, " * 100

    async def test_a_database_of_another_program(self, tmp_path: Path) -> None:
        with sqlite3.connect(tmp_path / "other.db") as other:
            other.execute("CREATE TABLE logs (line TEXT)")
        other.close()
        assert "is a database of another program" in await refusal(f"sqlite:{tmp_path}/other.db")

    async def test_a_newer_schema(self, tmp_path: Path) -> None:
        logs, _ = open_store(f"sqlite:{tmp_path}/store.db", VirtualClock(), lambda seconds: None)
        await logs.start()
        await logs.close()
        with sqlite3.connect(tmp_path / "store.db") as newer:
            newer.execute("PRAGMA user_version=7")
        newer.close()
        text = await refusal(f"sqlite:{tmp_path}/store.db")
        assert "was written by a newer Millstream (schema 7); upgrade this one" in text

    async def test_a_full_disk_costs_the_request_and_what_was_acknowledged_stays(self, tmp_path: Path) -> None:
        database = SqliteDatabase(str(tmp_path / "store.db"))
        store = TableLogStore(database, VirtualClock())
        await store.start()
        await store.prepare("id", 1)
        log = store.open("orders", "id", 0, LogConfig())
        values = await fill(log, 5)
        assert database._writer is not None
        connection = database._writer.connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 3}")  # as if the disk ended there
        with pytest.raises(RequestError, match="the disk is full") as caught:
            await append(log, batch(bytes(1 << 20)))
        assert caught.value.code is Code.KAFKA_STORAGE_ERROR and caught.value.code.retriable
        assert log.failure is None and log.end == 5
        connection.execute("PRAGMA max_page_count=1000000")
        assert (await append(log, batch(b"room again"))).base_offset == 5
        assert [record.value for record in await read_back(log)] == [*values, b"room again"]
        await store.close()

    async def test_an_io_error_is_final(self, tmp_path: Path) -> None:
        database = SqliteDatabase(str(tmp_path / "store.db"))
        store = TableLogStore(database, VirtualClock())
        await store.start()
        await store.prepare("id", 1)
        log = store.open("orders", "id", 0, LogConfig())
        await fill(log, 5)

        def fail(*_: object) -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error

        database._writer.append = fail  # type: ignore[union-attr, method-assign]
        with pytest.raises(RequestError, match="disk I/O error"):
            await append(log, batch(b"x"))
        assert log.failure == "disk I/O error"
        with pytest.raises(RequestError, match="orders-0 is read-only"):
            await append(log, batch(b"x"))
        assert len(await read_back(log)) == 5, "what is there can still be read"
        await store.close()


class TestPostgres:
    async def test_a_wrong_password(self, postgres: PrivatePostgres) -> None:
        text = await refusal(postgres.url.replace("s3cret", SECRET))
        assert "password authentication failed" in text and SECRET not in text

    async def test_nobody_there(self) -> None:
        text = await refusal(f"postgresql://me:{SECRET}@127.0.0.1:1/db")
        assert text.startswith("postgresql://127.0.0.1:1/db cannot be used: ") and SECRET not in text

    async def test_a_database_that_does_not_exist(self, postgres: PrivatePostgres) -> None:
        assert 'database "nowhere" does not exist' in await refusal(postgres.url_of("nowhere"))

    async def test_tls_that_the_server_does_not_speak(self, postgres: PrivatePostgres) -> None:
        assert "does not speak TLS" in await refusal(postgres.url + "?sslmode=require")

    async def test_tls_with_a_certificate_that_is_checked(self, tmp_path: Path) -> None:
        with PrivatePostgres() as server:
            trusted = server.speak_tls()
            url = server.url.replace("127.0.0.1", "localhost")
            for options in ("sslmode=require", f"sslmode=verify-full&sslrootcert={trusted}"):
                logs, _ = open_store(f"{url}?{options}", VirtualClock(), lambda seconds: None)
                await logs.start()
                with psycopg.connect(server.url) as connection:
                    encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE ssl AND pid <> pg_backend_pid()"
                    (count,) = connection.execute(encrypted).fetchone() or (0,)
                assert count >= 1
                await logs.close()
            wrong = tmp_path / "wrong.crt"
            wrong.write_bytes(trusted.read_bytes())
            text = await refusal(f"{server.url}?sslmode=verify-full&sslrootcert={wrong}")  # not the name it is for
            assert "cannot be used" in text

    async def test_a_newer_schema(self, postgres: PrivatePostgres) -> None:
        url = postgres.new_database()
        logs, _ = open_store(url, VirtualClock(), lambda seconds: None)
        await logs.start()
        await logs.close()
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE millstream.schema_version SET version = 9")
        assert "was written by a newer Millstream (schema 9); upgrade this one" in await refusal(url)

    async def test_somebody_who_may_not_make_tables(self, postgres: PrivatePostgres) -> None:
        url = postgres.new_database()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS guest")
            connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        guest = url.replace("mill:s3cret%2Fw%C3%B6rd", "guest:guest")
        assert "permission denied for database" in await refusal(guest)

    async def test_a_unix_socket(self, postgres: PrivatePostgres) -> None:
        logs, _ = open_store(postgres.socket_url, VirtualClock(), lambda seconds: None)
        await logs.start()
        assert logs.location.startswith("postgresql:///") and "s3cret" not in logs.location
        await logs.close()

    async def test_a_host_that_does_not_answer_leaves_time_for_the_next(self, postgres: PrivatePostgres) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{postgres.port}"
            url = postgres.url.replace(address, f"127.0.0.1:{silent.getsockname()[1]},{address}")
            logs, _ = open_store(f"{url}?connect_timeout=1", VirtualClock(), lambda seconds: None)
            await logs.start()
            await logs.close()

    async def test_hosts_of_a_url_have_their_ports_from_the_environment(
        self, postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGPORT", f"1,{postgres.port}")  # no server listens on the first
        url = postgres.url.replace(f"127.0.0.1:{postgres.port}", "127.0.0.1,127.0.0.1")
        logs, _ = open_store(url, VirtualClock(), lambda seconds: None)
        await logs.start()
        await logs.close()

    async def test_two_that_start_at_once_make_the_tables_once(self, postgres: PrivatePostgres) -> None:
        url = postgres.new_database()
        opened = [open_store(url, VirtualClock(), lambda seconds: None)[0] for _ in range(4)]
        await asyncio.gather(*(logs.start() for logs in opened))
        for logs in opened:
            await logs.close()

    async def test_nothing_that_is_logged_holds_the_password(
        self, postgres: PrivatePostgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        url = postgres.new_database()
        logs, meta = open_store(url, VirtualClock(), lambda seconds: None)
        await logs.start()
        with psycopg.connect(postgres.url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'made_%'")
        for _ in range(3):
            try:
                await meta.get("x")
            except RequestError as error:
                assert "s3cret" not in str(error)
        await logs.close()
        assert "s3cret" not in caplog.text and "wörd" not in caplog.text


def test_the_command_says_one_sentence_and_exits_with_1(postgres: PrivatePostgres) -> None:
    url = postgres.url.replace("s3cret", SECRET)
    done = subprocess.run(
        [MILLSTREAM, "serve", "--store", url, "--kafka", "127.0.0.1:0", "--http", "off"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "password authentication failed" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert SECRET not in done.stderr


def test_a_root_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [MILLSTREAM, "serve", "--store", f"postgresql://me:{SECRET}@127.0.0.1:1/db?sslmode=verify-full"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and SECRET not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert f'root certificate file "{tmp_path}/.postgresql/root.crt" does not exist' in done.stderr
    assert done.stderr.endswith("; name the one to trust with sslrootcert=FILE\n")


def test_config_show_hides_the_password(tmp_path: Path) -> None:
    environment = {**os.environ, "MILLSTREAM_STORE": f"postgresql://me:{SECRET}@host/db"}
    for output in ("table", "json"):
        done = subprocess.run(
            [MILLSTREAM, "config", "show", "--output", output],
            capture_output=True, text=True, timeout=60, env={**environment, "COLUMNS": "300"}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0 and SECRET not in done.stdout and "me:***@host" in done.stdout
