"""Connections to PostgreSQL that come back: taken for one statement or a few, thrown away when they break.

A pool opens connections as they are needed, up to its size; who finds none waits in line. After an attempt to connect
failed, nobody tries again for `RETRY_SECONDS`: while a database is away its clients get their answer at once.
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
"""A statement that takes longer has lost its server: its connection is given up."""

Connection = Any
"""asyncpg has no types of its own."""
UNREACHABLE = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # what it says of a connection on which the server said goodbye
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,  # it became a replica: another host of the URL may lead by now
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
        """A connection for a while. What goes wrong with it is a `RequestError` outside."""
        async with self._places:
            connection, use = None, object()
            try:
                connection = self._uses[use] = await self._get()
                yield connection
            except asyncpg.DataError:
                raise  # an argument of ours that does not fit: no fault of the server
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
            except BaseException:  # cancelled, most likely: nobody knows what its statement is doing
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
            raise ConnectionError("it could not be reached a moment ago")
        try:
            return await self._connect()
        except BaseException:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            raise

    def _drop(self, connection: Connection | None) -> None:
        if connection is not None and not connection.is_closed():
            connection.terminate()

    def start_over(self) -> None:
        """The server went, or is back: whoever comes next connects anew."""
        self._retry_at = 0.0
        idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    def uses(self) -> list[object]:
        """What connections are taken for now."""
        return list(self._uses)

    def give_up(self, use: object, at_work: Container[int]) -> bool:
        """Unless the server's process (`at_work`) has not done with it; whether it is over now."""
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
    """What a server said, on one line; its detail and its context may quote data and are left out."""
    if isinstance(error, asyncpg.DiskFullError):
        return "the disk of the database is full"
    return " ".join(str(getattr(error, "message", None) or error).split())
