"""A pool of PostgreSQL connections: taken for one statement or a few, replaced when they break.

A pool opens connections as they are needed, up to its size; further callers wait in line. After a failed attempt to
connect, the pool fails at once for `RETRY_SECONDS`, so that clients do not wait for an absent database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from millstream.core.errors import Code, RequestError

RETRY_SECONDS = 0.2
STATEMENT_SECONDS_MAX = 60.0
"""A longer statement has lost its server: the pool drops the connection."""

Connection = Any
"""asyncpg ships no types."""
UNREACHABLE = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # raised on a connection that the server closed
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,  # it became a replica: another host may be the primary
)


class Pool:
    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int, location: str) -> None:
        self._connect = connect
        self._places = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._uses: dict[object, Connection] = {}
        self._location = location
        self._retry_at = 0.0
        self._closed = False

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Connection]:
        """A connection for the block. Its failures become a `RequestError`."""
        async with self._places:
            connection, use = None, object()
            try:
                connection = self._uses[use] = await self._get()
                yield connection
            except asyncpg.DataError:
                raise  # our argument does not fit: not the server's fault
            except asyncpg.ReadOnlySQLTransactionError as error:
                self._drop(connection)
                connection = None
                detail = f"{self._location} is read-only: it is a replica, or default_transaction_read_only is on"
                raise RequestError(Code.KAFKA_STORAGE_ERROR, detail) from error
            except UNREACHABLE as error:
                self._drop(connection)
                connection = None
                raise RequestError(Code.KAFKA_STORAGE_ERROR, f"{self._location} cannot be reached") from error
            except asyncpg.PostgresError as error:
                detail = f"{self._location} refused: {sentence(error)}"
                raise RequestError(Code.KAFKA_STORAGE_ERROR, detail) from error
            except BaseException:  # most likely cancelled: its statement may still run
                self._drop(connection)
                connection = None
                raise
            finally:
                self._uses.pop(use, None)
                if connection is not None and not connection.is_closed() and not self._closed:
                    self._idle.append(connection)
                else:
                    self._drop(connection)

    async def _get(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        if self._closed:
            raise RequestError(Code.KAFKA_STORAGE_ERROR, "the store is closed")
        now = asyncio.get_running_loop().time()
        if now < self._retry_at:
            raise ConnectionError(f"the last attempt to connect failed less than {RETRY_SECONDS:g} s ago")
        try:
            return await self._connect()
        except BaseException:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            raise

    def _drop(self, connection: Connection | None) -> None:
        if connection is not None and not connection.is_closed():
            connection.terminate()

    def start_over(self) -> None:
        """The server went, or is back: the next caller connects again."""
        self._retry_at = 0.0
        idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    def uses(self) -> list[object]:
        """The uses that hold a connection."""
        return list(self._uses)

    def give_up(self, use: object, at_work: Container[int]) -> bool:
        """Drops a use unless the server still executes it (`at_work`); whether it is over."""
        connection = self._uses.get(use)
        if connection is not None and not connection.is_closed() and connection.get_server_pid() in at_work:
            return False
        self._drop(connection)
        return True

    async def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            try:
                await connection.close(timeout=2)
            except Exception:
                connection.terminate()


def sentence(error: BaseException) -> str:
    """The server's message on one line, without detail and context, which may quote data."""
    if isinstance(error, asyncpg.DiskFullError):
        return "the disk of the database is full"
    return " ".join(str(getattr(error, "message", None) or error).split())
