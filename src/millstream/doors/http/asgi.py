"""An ASGI application behind the door, for pages that need routes, static files, streams and cookies: Starlette.

Rules
-----
1. The application is loaded when its first page is requested, in a thread: its import takes 50 ms, in which the event
   loop serves the broker's clients.
2. The door's connection stays in charge: every bound of `door.py` holds. Only complete requests reach the application.
3. A page is cancelled when its client hangs up. Work that must continue belongs to `Broker.in_background`.
4. A streamed response sends each part within `idle_seconds` of the last. A quiet stream of server-sent events sends a
   comment, as the HTML standard (9.2.7) recommends.

This is ASGI 3.0, HTTP 2.4, without lifespan events, WebSockets and extensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol
from urllib.parse import unquote

from millstream.doors.http.request import Request
from millstream.doors.http.response import Response

Message = MutableMapping[str, Any]
Asgi = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Stream(Protocol):
    """The response to one request, sent in parts."""

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None: ...

    async def send(self, part: bytes, *, more: bool) -> None:
        """Returns when the client has taken enough for the next part."""


class Application:
    def __init__(self, load: Callable[[], Asgi]) -> None:
        """`load` imports and makes the application."""
        self._load = load
        self._loading = asyncio.Lock()
        self._app: Asgi | None = None

    async def answer(self, request: Request, stream: Stream) -> Response | None:
        """Serves a page through `stream`, or returns the response."""
        try:
            async with self._loading:
                if self._app is None:
                    self._app = await asyncio.to_thread(self._load)
        except ModuleNotFoundError as error:
            return Response.text(501, f"this page needs {error.name}: pip install 'millstream[console]'")
        await _converse(self._app, request, stream)
        return None


async def _converse(app: Asgi, request: Request, stream: Stream) -> None:
    unread, is_complete = [request.body], False

    async def receive() -> Message:
        if not unread:
            await asyncio.Future()  # until the page is cancelled
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            stream.begin(message["status"], message.get("headers", ()))
        else:
            is_complete = not message.get("more_body", False)
            await stream.send(message.get("body", b""), more=not is_complete)

    path, _, query = request.head.target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.head.http_version.decode("ascii"),
        "method": request.method,
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(request.head.headers),
        "client": (request.peer, 0),
        "server": None,
    }
    await app(scope, receive, send)
    if not is_complete:
        raise RuntimeError("the application did not complete its response")
