"""`postgresql://…`: logs and metadata in PostgreSQL, for any number of brokers.

    appends      one connection, one call of `millstream.append` at a time: one transaction and one round trip for all
                 waiting appends. Row locks on the logs, taken in id order, serialise the appends of all brokers
    metadata     one connection, one call of `millstream.transact` at a time
    reads        a few connections
    news         one connection that LISTENs. PostgreSQL sends a notification after its commit, so readers see what it
                 names. After a reconnect the broker asks for missed changes, and all statements in flight are in
                 doubt. A server that vanished and was replaced answers none of them. A server that was only paused
                 answers soon. A statement that the server still executes is not given up

A statement whose connection breaks has an unknown outcome. The broker does not retry it: the client does, and the
table of producers, part of the same transaction, recognises an idempotent producer's batch (KIP-98).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg

from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError, code_of
from millstream.core.promise import Promise, promised
from millstream.log.producers import Producers
from millstream.records.batch import patch_offset
from millstream.stores import queries
from millstream.stores.base import Check, Operation, Put, Versioned
from millstream.stores.database import Append, Changes, Landed, LogState, Row, Stored, Torn, check_bundles
from millstream.stores.postgres_connections import STATEMENT_SECONDS_MAX, UNREACHABLE, Connection, Pool, sentence
from millstream.stores.postgres_url import understand

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
CHANNEL = "millstream"
READERS = 4
STEP_ROWS = 500
READ_ROWS_MAX = 2_000
PAUSE_MS_MAX = 4_000
"""Limit between two statements of a transaction that holds locks (`idle_in_transaction_session_timeout`). A process
that stops there (SIGSTOP, a frozen container) blocks all brokers, so the server aborts its transaction. The locking
statement sets the limit: set earlier, it would also abort a large append on a slow line.
"""
PING_SECONDS = 10.0
"""Ping interval of the listening connection: a server that vanished says nothing."""
RECONNECT_SECONDS = 0.2
DUPLICATE = 1
_SQL = queries.named("postgres_queries.sql")
_REFUSALS = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: "the topic was deleted",
    Code.OUT_OF_ORDER_SEQUENCE_NUMBER: "sequence {1} of producer {0} neither follows nor repeats its last batches",
    Code.INVALID_PRODUCER_EPOCH: "producer {0} has a newer epoch",
}


class PostgresDatabase:
    """Implements `stores.database.Database`."""

    def __init__(self, url: str) -> None:
        self._url = understand(url)
        self.location = self._url.location
        self.failure: str | None = None
        self._host = 0
        self._appends = Pool(self._connect, 1, self.location)
        self._meta = Pool(self._connect, 1, self.location)
        self._reads = Pool(self._connect, READERS, self.location)
        self._row_bytes: dict[int, float] = {}
        """The mean batch size of a log's last read: sets how many rows to ask for."""
        self._listener: asyncio.Task[None] | None = None
        self._on_logs: Callable[[Sequence[LogState]], None] = lambda states: None
        self._on_meta: Callable[[int], None] = lambda revision: None
        self._on_lost: Callable[[], None] = lambda: None

    def listen(
        self, logs: Callable[[Sequence[LogState]], None], meta: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        self._on_logs, self._on_meta, self._on_lost = logs, meta, lost

    # -- connecting --------------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        connection = await self._connect_to_a_host()
        try:
            await connection.execute(_SQL["session"])  # overrides defaults of the database or role
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _connect_to_a_host(self) -> Connection:
        """The first usable one, starting with the last one used."""
        hosts, seconds = self._url.hosts, self._url.connect_seconds
        for index in range(self._host, self._host + len(hosts)):
            host = index % len(hosts)
            try:
                found = await asyncpg.connect(hosts[host], timeout=seconds, command_timeout=STATEMENT_SECONDS_MAX)
            except UNREACHABLE as error:
                refusal = error
                continue
            self._host = host
            return found
        raise refusal

    async def start(self) -> None:
        if self._listener is not None:
            return
        try:
            connection = await self._connect()
        except Exception as error:
            raise StartupError(f"{self.location} cannot be used: {_why(error)}") from None
        try:
            await self._migrate(connection)
            await connection.add_listener(CHANNEL, self._heard)
        except asyncpg.PostgresError as error:
            await connection.close()
            raise StartupError(f"{self.location} cannot be used: {sentence(error)}") from None
        except BaseException:
            await connection.close()
            raise
        self._listener = asyncio.get_running_loop().create_task(self._keep_listening(connection))

    async def _migrate(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.fetchrow(_SQL["setup_lock"], f"{PAUSE_MS_MAX}ms")
            schema, table = await connection.fetchrow(_SQL["schema_exists"])
            if table:
                version = await connection.fetchval(_SQL["schema_version"])
                if version > SCHEMA_VERSION:
                    raise StartupError(
                        f"{self.location} was written by a newer Millstream (schema {version}); upgrade this one"
                    )
                return
            if not schema:
                await connection.execute("CREATE SCHEMA millstream")
            await connection.execute(queries.text("postgres_schema.sql"))

    async def _keep_listening(self, connection: Connection | None) -> None:
        doubted: list[tuple[Pool, object]] = []
        while True:
            try:
                if connection is None:
                    connection = await self._connect()
                    await connection.add_listener(CHANNEL, self._heard)
                    self._start_over()
                    doubted = [(pool, use) for pool in (self._appends, self._meta, self._reads) for use in pool.uses()]
                    logger.info("connected to %s again", self.location)
                    self._on_lost()
                while True:
                    await _closed_or_later(connection, PING_SECONDS / 2 if doubted else PING_SECONDS)
                    at_work = await connection.fetchval(_SQL["at_work"], timeout=PING_SECONDS)
                    doubted = [(pool, use) for pool, use in doubted if not pool.give_up(use, at_work)]
            except Exception as error:  # any error: reconnect, or news would stop
                if connection is not None:
                    logger.warning("connection to %s lost; reconnecting: %s", self.location, type(error).__name__)
                    connection.terminate()
                    connection = None
                    self._start_over()
                await asyncio.sleep(RECONNECT_SECONDS)
            except asyncio.CancelledError:
                if connection is not None:
                    connection.terminate()
                raise

    def _start_over(self) -> None:
        for pool in (self._appends, self._meta, self._reads):
            pool.start_over()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: str) -> None:
        kind, *numbers = payload.split()
        if kind == "l":
            figures = list(map(int, numbers))
            self._on_logs([LogState(*figures[at : at + 5]) for at in range(0, len(figures), 5)])
        else:
            self._on_meta(int(numbers[0]))

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
        for pool in (self._appends, self._meta, self._reads):
            await pool.close()

    def room(self) -> tuple[int, int]:
        return -1, -1

    async def _fetch(self, name: str, *arguments: object) -> list[Any]:
        async with self._reads.take() as connection:
            rows: list[Any] = await connection.fetch(_SQL[name], *arguments)
            return rows

    # -- logs --------------------------------------------------------------------------------------------------------

    async def open_logs(self, topic_id: str, partitions: int) -> list[LogState]:
        rows = await self._fetch("logs_of_topic", topic_id, partitions)
        if len(rows) < partitions:
            await self._fetch("make_logs", topic_id, partitions)
            rows = await self._fetch("logs_of_topic", topic_id, partitions)
        return [LogState(*row) for row in rows]

    async def states(self, log_ids: Sequence[int]) -> list[LogState]:
        return [LogState(*row) for row in await self._fetch("logs", log_ids)]

    def append(self, appends: Sequence[Append], now_ms: int) -> Promise[Landed]:
        return promised(self._append_bundles(appends, now_ms))

    async def _append_bundles(self, appends: Sequence[Append], now_ms: int) -> Landed:
        torn: Torn | None = None
        async with self._appends.take() as connection:
            if not any(each.bundle for each in appends):
                return await self._append(connection, appends, now_ms)
            try:
                async with connection.transaction():
                    outcomes, states = await self._append(connection, appends, now_ms)
                    check_bundles(appends, outcomes)
            except Torn as error:  # raised outside `take`: the connection is fine
                torn = error
        if torn is not None:
            raise torn
        return outcomes, states

    async def _append(self, connection: Connection, appends: Sequence[Append], now_ms: int) -> Landed:
        headers = [header for each in appends for header in each.headers]
        batches = [batch for each in appends for batch in each.batches]
        for each in appends:
            for batch, header in zip(each.batches, each.headers, strict=True):
                patch_offset(batch, 0, header.length, each.epoch)  # the database writes the offset, which it assigns
        holds = connection.is_in_transaction()
        codes, bases, states, *_ = await connection.fetchrow(
            _SQL["append_and_hold" if holds else "append"],
            [each.log_id for each in appends for _ in each.headers],
            [header.last_offset_delta + 1 for header in headers],
            [header.max_timestamp for header in headers],
            [header.producer_id for header in headers],
            [header.producer_epoch for header in headers],
            [header.base_sequence for header in headers],
            batches,
            now_ms,
            *([f"{PAUSE_MS_MAX}ms"] if holds else []),
        )
        outcomes: list[Stored | RequestError] = []
        at = 0
        for each in appends:
            header, code = each.headers[0], codes[at]
            if code in (0, DUPLICATE):
                outcomes.append(Stored(bases[at], code == DUPLICATE))
            else:
                refusal = code_of(code) or Code.UNKNOWN_SERVER_ERROR
                if refusal is Code.DUPLICATE_SEQUENCE_NUMBER:  # the function guesses: see rule 3 of `Producers`
                    refusal = Code.OUT_OF_ORDER_SEQUENCE_NUMBER
                detail = _REFUSALS[refusal].format(header.producer_id, header.base_sequence)
                outcomes.append(RequestError(refusal, detail))
            at += len(each.headers)
        return outcomes, [LogState(*states[at : at + 5]) for at in range(0, len(states), 5)]

    async def read(self, log_id: int, offset: int, below: int, bytes_max: int) -> tuple[bytes, int]:
        expected = self._row_bytes.get(log_id, 16_384.0)
        count = min(int(bytes_max / expected * 1.2) + 4, READ_ROWS_MAX)
        rows = await self._fetch("read", log_id, offset, below, bytes_max, count)
        if not rows:
            return b"", offset
        data = rows[0][1] if len(rows) == 1 else b"".join([row[1] for row in rows])
        if len(self._row_bytes) > 10_000:
            self._row_bytes.clear()
        self._row_bytes[log_id] = len(data) / len(rows)
        return data, rows[-1][0] + 1

    async def rows(self, log_id: int, offset: int, count_max: int) -> list[Row]:
        return [Row(*row) for row in await self._fetch("rows", log_id, offset, count_max)]

    async def first_at(self, log_id: int, timestamp: int, offset: int, below: int) -> bytes | None:
        rows = await self._fetch("first_at", log_id, offset, below, timestamp)
        return rows[0][0] if rows else None

    async def newest_time(self, log_id: int, offset: int, below: int) -> int:
        return int((await self._fetch("newest_time", log_id, offset, below))[0][0])

    async def trim(self, log_id: int, offset: int) -> LogState:
        await self._fetch("trim", log_id, offset)
        await self._remove_below(log_id, None)
        return await self._state(log_id)

    async def _remove_below(self, log_id: int, offset: int | None) -> None:
        while (await self._fetch("remove_below", log_id, offset, STEP_ROWS))[0][0] >= STEP_ROWS:
            pass  # other transactions run in between

    async def _state(self, log_id: int) -> LogState:
        states = await self.states([log_id])
        if not states:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic was deleted")
        return states[0]

    async def truncate(self, log_id: int, offset: int) -> LogState:
        await self._fetch("truncate", log_id, offset)
        return await self._state(log_id)

    async def producers(self, log_id: int) -> Producers:
        rows = await self._fetch("producers", log_id)
        return Producers.from_state(
            [[known, epoch, seen, list(zip(firsts, lasts, bases, strict=True))]
             for known, epoch, seen, firsts, lasts, bases in rows]
        )  # fmt: skip

    async def forget_producers(self, before_ms: int, per_log_max: int) -> None:
        await self._fetch("forget_idle_producers", before_ms)
        await self._fetch("forget_surplus_producers", per_log_max)

    async def discard(self, topic_id: str) -> None:
        for (log_id,) in await self._fetch("every_log_of_topic", topic_id):
            await self._fetch("close_log", log_id)
            await self._fetch("delete_producers", log_id)
            await self._remove_below(log_id, 1 << 62)
            await self._fetch("delete_log", log_id)

    async def topic_ids(self) -> set[str]:
        return {row[0] for row in await self._fetch("topic_ids")}

    # -- metadata ----------------------------------------------------------------------------------------------------

    async def revision(self) -> int:
        return int((await self._fetch("revision"))[0][0])

    async def get(self, key: str) -> Versioned | None:
        rows = await self._fetch("get", key)
        return Versioned(*rows[0]) if rows else None

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]:
        rows = await self._fetch("list", prefix)
        return [(key, Versioned(value, revision)) for key, value, revision in rows]

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        flat = [(owner, each) for owner, operations in enumerate(transactions, 1) for each in operations]
        async with self._meta.take() as connection:
            revisions, present = await connection.fetchrow(
                _SQL["transact"],
                len(transactions),
                [owner for owner, _ in flat],
                [0 if isinstance(each, Put) else 2 if isinstance(each, Check) else 1 for _, each in flat],
                [each.key for _, each in flat],
                [each.value if isinstance(each, Put) else None for _, each in flat],
                [each.if_revision for _, each in flat],
            )
            changes = await self._changes(connection, since, prefixes)
        answers: list[int | RevisionConflict] = []
        for verdict, found in zip(revisions, present, strict=True):
            if verdict > 0:
                answers.append(verdict)
            else:
                refused = flat[-verdict - 1][1]
                answers.append(RevisionConflict(refused.key, refused.if_revision or 0, found))
        return answers, changes

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        async with self._reads.take() as connection:
            return await self._changes(connection, since, prefixes)

    async def _changes(self, connection: Connection, since: int, prefixes: Sequence[str]) -> Changes:
        rows = await connection.fetch(_SQL["changes"], since, prefixes)
        last, floor = rows[0][0], rows[0][1]
        items = [
            (key, None if value is None else Versioned(value, revision), revision)
            for _, _, key, value, revision in rows
            if key is not None
        ]
        return Changes(last, since >= floor, items)

    async def forget_deleted(self, keep: int) -> None:
        await self._fetch("forget_deleted", keep)


async def _closed_or_later(connection: Connection, seconds: float) -> None:
    """Returns when the connection closes or the time is over."""
    closed = asyncio.Event()

    def note(_: object) -> None:
        closed.set()

    connection.add_termination_listener(note)
    try:
        async with asyncio.timeout(seconds):
            await closed.wait()
    except TimeoutError:
        pass
    finally:
        connection.remove_termination_listener(note)


def _why(error: Exception) -> str:
    """One sentence without secrets: a driver may quote the input that it could not parse."""
    if isinstance(error, asyncpg.PostgresError):
        return sentence(error)
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "none of its hosts accepts writes now"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, ConnectionError) and "rejected SSL upgrade" in str(error):
        return "it does not speak TLS, which sslmode asks for"
    if isinstance(error, OSError):
        return error.strerror or "no server listens there"
    if isinstance(error, asyncpg.ClientConfigurationError) and str(error).startswith("root certificate file "):
        return f"{error.args[0]}; name the one to trust with sslrootcert=FILE"
    return f"its URL or the server's answer cannot be understood ({type(error).__name__})"
