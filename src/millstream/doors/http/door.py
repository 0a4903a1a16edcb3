"""The HTTP door: HTTP/1.1 (RFC 9112) with h11 for the protocol and asyncio for the sockets.

A route is a path and a page, for GET and HEAD. A page takes a `Request` and returns a `Response`, or an awaitable of
one if it takes time: code on the event loop must be quick, because the broker runs there too. An action is a path and
a page for POST. The door refuses a POST that a web page sent.

Bounds
------
- `CONNECTIONS_MAX` connections. A new connection evicts the oldest one with an incomplete request, else the oldest idle
  one. A client that connected, or began its request, within `YOUNG_SECONDS` is not evicted: otherwise a burst of
  connections would evict a health probe before its request is read. If no connection can be evicted, further ones are
  accepted for `/healthz` and `/readyz` only; other pages get a 503.
- `URGENT_CONNECTIONS_MAX` of these stay. Up to `URGENT_YOUNG_MAX` are open while they are younger than
  `URGENT_YOUNG_SECONDS`, so that a burst behind a probe does not close it. None is closed before the event loop has had
  enough turns to read a request that arrived with the connection.
- A request is complete within `REQUEST_SECONDS` of its first byte.
- A request's line and headers fit in `HEADER_BYTES_MAX`, its body (read and discarded) in `BODY_BYTES_MAX`.
- A client begins its request, and takes its response, within `IDLE_SECONDS`. Further bytes restart neither timer, so
  neither a silent client nor one that sends single bytes keeps a connection.
- Backpressure: while a response is prepared, or waits for a slow reader, the connection is not read. It holds at most
  one response and the bytes of one read.
- A connection gets one response per turn of the event loop, however many requests arrived together.

Requests for other host names than this listener's get a 421 (RFC 9110): see `hosts.py`.
"""

from __future__ import annotations

import asyncio
import functools
import http
from collections.abc import Awaitable, Iterable, Mapping
from email.utils import formatdate
from typing import cast

import h11

from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.logs import Damped, Log
from millstream.doors.http.hosts import Hosts
from millstream.doors.http.pages import URGENT, Page
from millstream.doors.http.request import Request
from millstream.doors.http.response import Response
from millstream.doors.listener import BACKLOG

CONNECTIONS_MAX = 256
URGENT_CONNECTIONS_MAX = 16
URGENT_YOUNG_MAX = 256
URGENT_YOUNG_SECONDS = 0.25
READ_TURNS = 3
"""Turns of the event loop until a request that arrived with a connection is read: accept, poll, read."""
HEADER_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 64 * 1024
IDLE_SECONDS = 30.0
REQUEST_SECONDS = 10.0
YOUNG_SECONDS = 1.0
STATUSES = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: 404,
    Code.TOPIC_AUTHORIZATION_FAILED: 403,
    Code.GROUP_AUTHORIZATION_FAILED: 403,
    Code.CLUSTER_AUTHORIZATION_FAILED: 403,
}

log = Log(__name__)
refusals = Damped(__name__)


class HttpDoor:
    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Page],
        actions: Mapping[str, Page] | None = None,
        *,
        names: Iterable[str] = (),
        connections_max: int = CONNECTIONS_MAX,
        idle_seconds: float = IDLE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
        young_seconds: float = YOUNG_SECONDS,
    ) -> None:
        """`names` are valid in `Host` besides `host`."""
        self.host = host
        self.port = port
        self.routes = routes
        self.actions = actions or {}
        self.connections_max = connections_max
        self.idle_seconds = idle_seconds
        self.request_seconds = request_seconds
        self.young_seconds = young_seconds
        self.hosts = Hosts((host, *names))
        self.connections: dict[_Connection, None] = {}
        """Least recently answered first."""
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Returns the bound address; port 0 binds a free port."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Connection(self), self.host, self.port, backlog=BACKLOG)
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

    def _make_urgent_room(self, urgent: list[_Connection]) -> bool:
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

    def _evict(self, connection: _Connection) -> None:
        refusals.warning("closing the oldest idle http connection: %d are open", len(self.connections))
        del self.connections[connection]
        connection.abort()

    def _oldest(self, connections: list[_Connection], latest: float) -> _Connection | None:
        """The connection to evict. One with an incomplete request must have begun at `latest` or earlier."""
        idle = [each for each in connections if each.waits_for_client]
        incomplete = [each for each in idle if not each.is_between_requests]
        if not incomplete:
            return idle[0] if idle else None
        return next((each for each in incomplete if each.waits_since <= latest and each.was_polled), None)

    def answer(self, request: Request) -> Response | Awaitable[Response]:
        method, path = request.method, request.path
        route, action = self.routes.get(path), self.actions.get(path)
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
        log.exception("unexpected error while serving an http page", error, page=request.path)
        return Response.text(500, "unexpected error in the broker; see its log")


class _Connection(asyncio.Protocol):
    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        self._request: h11.Request | None = None
        self._body_bytes = 0
        self._has_begun = False
        """Whether a request has begun."""
        self.waits_since = 0.0
        """When the client connected, or began its request."""
        self._answered = 0
        self.is_urgent = False
        """Whether it serves urgent pages only."""
        self._turns_left = READ_TURNS
        self._paused = False
        self._page: asyncio.Future[Response] | None = None
        self._next: asyncio.Handle | None = None
        """Set while the next request waits for its turn of the event loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._peer = (transport.get_extra_info("peername") or ("",))[0]
        self.waits_since = asyncio.get_running_loop().time()
        self.is_urgent = not self._door.make_room()
        if self.is_urgent and not self._door.make_room(urgent=True):
            self._refuse(Response.text(503, "too many connections; try again later"))
            return
        self._door.connections[self] = None
        self._restart_timer(self._door.idle_seconds)
        self._count_turn()

    def _count_turn(self) -> None:
        if self._turns_left:
            self._turns_left -= 1
            asyncio.get_running_loop().call_soon(self._count_turn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            self._next.cancel()
        if self._page is not None:
            self._page.cancel()

    @property
    def was_polled(self) -> bool:
        """Whether the event loop has had the turns to read a request that arrived with the connection."""
        return not self._turns_left

    @property
    def waits_for_client(self) -> bool:
        """Whether it waits for the client to send, or to take its response."""
        return self._paused or (self._page is None and self._next is None)

    @property
    def is_between_requests(self) -> bool:
        return self._answered > 0 and not (self._has_begun or self._paused)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun and self._page is None:
            self._has_begun = True
            self.waits_since = asyncio.get_running_loop().time()
            self._restart_timer(min(self._door.request_seconds, self._door.idle_seconds))
        self._http.receive_data(data)
        if self._page is None and self._next is None:
            self._advance()
        else:  # until earlier requests are answered
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._restart_timer(self._door.idle_seconds)
        if self._next is None:
            self._advance()

    def abort(self) -> None:
        self._transport.abort()

    def _restart_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _advance(self) -> None:
        """Answers one complete request, unless the client reads slowly; the next request gets the next turn."""
        while not self._paused and self._page is None and not self._transport.is_closing():
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(Response.text(error.error_status_hint, f"this is not an HTTP/1.1 request: {error}"))
                return
            if isinstance(event, h11.Request):
                self._request, self._body_bytes = event, 0
            elif isinstance(event, h11.Data):
                self._body_bytes += len(event.data)
                if self._body_bytes > BODY_BYTES_MAX:
                    self._refuse(Response.text(413, f"the request's body is larger than {BODY_BYTES_MAX} bytes"))
            elif isinstance(event, h11.EndOfMessage) and self._request is not None:
                self._serve(self._request)
                if self._page is None:
                    self._next = asyncio.get_running_loop().call_soon(self._take_turn)
                return
            elif isinstance(event, h11.ConnectionClosed):
                self._transport.close()
            else:  # more data is needed, or the next request must wait
                if self._http.they_are_waiting_for_100_continue:
                    self._write(h11.InformationalResponse(status_code=100, headers=[]))
                self._transport.resume_reading()
                return

    def _take_turn(self) -> None:
        self._next = None
        self._advance()

    def _serve(self, head: h11.Request) -> None:
        request = Request(head, self._peer)
        response = self._refusal(request) or self._door.answer(request)
        if isinstance(response, Response):
            self._finish(request, response)
        else:
            self._page = asyncio.ensure_future(response)
            self._page.add_done_callback(functools.partial(self._serve_later, request))

    def _refusal(self, request: Request) -> Response | None:
        host = request.header(b"host")
        if host is not None and not self._door.hosts.allow(host):
            detail = f"these pages are not served under the name {host}: use an IP address, or add it to http_hosts"
            return Response.text(421, detail)
        if self.is_urgent and request.path not in URGENT:
            return Response.text(503, "too many connections; try again later")
        return None

    def _serve_later(self, request: Request, page: asyncio.Future[Response]) -> None:
        self._page = None
        if page.cancelled() or self._transport.is_closing():
            return
        error = page.exception()
        self._finish(request, page.result() if error is None else self._door.failure(request, error))
        self._advance()

    def _finish(self, request: Request, response: Response) -> None:
        self._send(response, with_body=request.method != "HEAD")
        if self._http.our_state is h11.MUST_CLOSE:
            self._transport.close()
        else:
            self._http.start_next_cycle()
            self._answered += 1
            self._has_begun = False
            if self in self._door.connections:
                del self._door.connections[self]
                self._door.connections[self] = None
            self._restart_timer(self._door.idle_seconds)

    def _refuse(self, response: Response) -> None:
        """Sends an error response and closes the connection: later bytes may not be a request."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(response, extra=(("Connection", "close"),))
        self._transport.close()

    def _send(self, response: Response, *, with_body: bool = True, extra: tuple[tuple[str, str], ...] = ()) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Date", formatdate(usegmt=True)),
            # The pages change with every request.
            ("Cache-Control", "no-store"),
            *response.headers,
            *extra,
        ]
        self._write(
            h11.Response(status_code=response.status, reason=http.HTTPStatus(response.status).phrase, headers=headers)
        )
        if with_body:
            self._write(h11.Data(data=response.body))
        self._write(h11.EndOfMessage())

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._transport.write(data)
