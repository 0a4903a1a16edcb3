"""The HTTP door: HTTP/1.1 (RFC 9112) with h11 for the protocol and asyncio for the sockets.

A route is a path and a page, for GET and HEAD. A page takes a `Request` and returns a `Response`, or an awaitable of
one if it takes time: code on the event loop must be quick, because the broker runs there too. An action is a path and
a page for POST. The door refuses a POST that a web page sent. An ASGI application, if there is one, serves all other
paths (`asgi.py`); it protects its own POST pages.

Bounds
------
- `CONNECTIONS_MAX` connections. A new connection evicts the oldest one with an incomplete request, else the oldest idle
  one, else the oldest one that streams its response. A client that connected, or began its request, within
  `YOUNG_SECONDS` is not evicted: otherwise a burst of connections would evict a health probe before its request is
  read. If no connection can be evicted, further ones are accepted for `/healthz` and `/readyz` only; other pages get a
  503.
- `URGENT_CONNECTIONS_MAX` of these stay. Up to `URGENT_YOUNG_MAX` are open while they are younger than
  `URGENT_YOUNG_SECONDS`, so that a burst behind a probe does not close it. None is closed before the event loop has had
  enough turns to read a request that arrived with the connection.
- A request is complete within `REQUEST_SECONDS` of its first byte.
- A request's line and headers fit in `HEADER_BYTES_MAX`, its body in `BODY_BYTES_MAX`.
- A client begins its request, and takes its response, within `IDLE_SECONDS`. Further bytes restart neither timer, so
  neither a silent client nor one that sends single bytes keeps a connection. The time for a streamed response starts
  again with each part; the next part waits until the client has taken the last.
- Backpressure: while a response is prepared, or waits for a slow reader, the connection is not read. It holds at most
  one response, or a part of it, and the bytes of one read.
- A connection gets one response, or a part of it, per turn of the event loop, however many requests arrived together.

Requests for other host names than this listener's get a 421 (RFC 9110): see `hosts.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.logs import Damped
from millstream.doors.http.asgi import Application, Asgi
from millstream.doors.http.connection import Connection
from millstream.doors.http.hosts import Hosts
from millstream.doors.http.pages import Page
from millstream.doors.http.request import Request
from millstream.doors.http.response import Response
from millstream.doors.listener import BACKLOG

CONNECTIONS_MAX = 256
URGENT_CONNECTIONS_MAX = 16
URGENT_YOUNG_MAX = 256
URGENT_YOUNG_SECONDS = 0.25
IDLE_SECONDS = 30.0
REQUEST_SECONDS = 10.0
YOUNG_SECONDS = 1.0
STATUSES = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: 404,
    Code.TOPIC_AUTHORIZATION_FAILED: 403,
    Code.GROUP_AUTHORIZATION_FAILED: 403,
    Code.CLUSTER_AUTHORIZATION_FAILED: 403,
}

logger = logging.getLogger(__name__)
refusals = Damped(__name__)


class HttpDoor:
    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Page],
        actions: Mapping[str, Page] | None = None,
        *,
        app: Callable[[], Asgi] | None = None,
        names: Iterable[str] = (),
        connections_max: int = CONNECTIONS_MAX,
        idle_seconds: float = IDLE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
        young_seconds: float = YOUNG_SECONDS,
    ) -> None:
        """`app` makes the ASGI application. `names` are valid in `Host` besides `host`."""
        self.host = host
        self.port = port
        self.routes = routes
        self.actions = actions or {}
        self.app = Application(app) if app is not None else None
        self.connections_max = connections_max
        self.idle_seconds = idle_seconds
        self.request_seconds = request_seconds
        self.young_seconds = young_seconds
        self.hosts = Hosts((host, *names))
        self.connections: dict[Connection, None] = {}
        """Least recently answered first."""
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Returns the bound address; port 0 binds a free port."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Connection(self), self.host, self.port, backlog=BACKLOG)
        except OSError as error:
            reason = error.strerror or error
            raise StartupError(
                f"http={self.host}:{self.port} cannot be opened ({reason}); choose another with --http"
            ) from None
        self.host, self.port = self._server.sockets[0].getsockname()[:2]
        return self.host, self.port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self.connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None

    def make_room(self, *, urgent: bool = False) -> bool:
        """Makes room for a connection, or for one that serves urgent pages only; returns whether it could."""
        mine = [each for each in self.connections if each.is_urgent == urgent]
        if urgent:
            return self._make_urgent_room(mine)
        if len(mine) < self.connections_max:
            return True
        oldest = self._oldest(mine, asyncio.get_running_loop().time() - self.young_seconds)
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def _make_urgent_room(self, urgent: list[Connection]) -> bool:
        if len(urgent) < URGENT_CONNECTIONS_MAX:
            return True
        idle = [each for each in urgent if each.waits_for_client and each.was_polled]
        latest = asyncio.get_running_loop().time() - URGENT_YOUNG_SECONDS
        old = [each for each in idle if each.is_between_requests or each.waits_since <= latest]
        old = old[: len(urgent) - URGENT_CONNECTIONS_MAX + 1]
        if not old and len(urgent) >= URGENT_YOUNG_MAX:
            old = idle[:1]
        for each in old:
            self._evict(each)
        return len(urgent) - len(old) < URGENT_YOUNG_MAX

    def _evict(self, connection: Connection) -> None:
        refusals.warning("closing the oldest idle http connection: %d are open", len(self.connections))
        del self.connections[connection]
        connection.abort()

    def _oldest(self, connections: list[Connection], latest: float) -> Connection | None:
        """The connection to evict. One with an incomplete request must have begun at `latest` or earlier."""
        idle = [each for each in connections if each.waits_for_client]
        incomplete = [each for each in idle if not each.is_between_requests]
        if not incomplete:
            return idle[0] if idle else next((each for each in connections if each.is_streaming), None)
        return next((each for each in incomplete if each.waits_since <= latest and each.was_polled), None)

    def answer(self, request: Request, connection: Connection) -> Response | Awaitable[Response | None]:
        method, path = request.method, request.path
        route, action = self.routes.get(path), self.actions.get(path)
        if route is None and self.app is not None:
            return self.app.answer(request, connection)
        if route is None:
            return Response.text(404, f"there is no page {path}; there are {', '.join(sorted(self.routes))}")
        if method == "POST" and action is not None and request.header(b"origin") is not None:
            return Response.text(403, f"{path} refuses a POST from a web page, which may belong to another site")
        try:
            if method == "POST" and action is not None:
                return action(request)
            return route(request) if method in ("GET", "HEAD") else self._not_allowed(method, path)
        except Exception as error:
            return self.failure(request, error)

    def _not_allowed(self, method: str, path: str) -> Response:
        allowed = ["GET", "HEAD", *["POST"] * (path in self.actions)]
        refusal = Response.text(405, f"{path} accepts {' and '.join(allowed)}, not {method}")
        return Response(refusal.status, refusal.body, headers=(("Allow", ", ".join(allowed)),))

    def failure(self, request: Request, error: BaseException) -> Response:
        if isinstance(error, RequestError) and error.code in STATUSES:
            return Response.json(STATUSES[error.code], {"error": error.detail})
        logger.error("unexpected error while serving http page %s", request.path, exc_info=error)
        return Response.text(500, "unexpected error in the broker; see its log")
