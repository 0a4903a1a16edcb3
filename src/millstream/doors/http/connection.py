"""A connection of the HTTP door: reads requests, has them answered one at a time, and sends the responses.

`door.py` has the bounds; this engine keeps them for every page, whether it is a `Response` or a stream.
"""

from __future__ import annotations

import asyncio
import functools
import http
from collections.abc import Iterable
from email.utils import formatdate
from typing import TYPE_CHECKING, cast

import h11

from millstream.doors.http.pages import URGENT
from millstream.doors.http.request import Request
from millstream.doors.http.response import Response

if TYPE_CHECKING:
    from millstream.doors.http.door import HttpDoor

READ_TURNS = 3
"""Turns of the event loop until a request that arrived with a connection is read: accept, poll, read."""
HEADER_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 64 * 1024
PHRASES = {status.value: status.phrase for status in http.HTTPStatus}


class Connection(asyncio.Protocol):
    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._has_begun = False
        """Whether a request has begun."""
        self.waits_since = 0.0
        """When the client connected, or began its request."""
        self._answered = 0
        self.is_urgent = False
        """Whether it serves urgent pages only."""
        self._turns_left = READ_TURNS
        self._paused = False
        self._taken: asyncio.Future[None] | None = None
        """Set while a streamed response waits for a slow reader."""
        self._page: asyncio.Future[Response | None] | None = None
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
    def is_streaming(self) -> bool:
        return self._page is not None and self._http.our_state is h11.SEND_BODY

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
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
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
                self._head = event
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > BODY_BYTES_MAX:
                    self._refuse(Response.text(413, f"the request's body is larger than {BODY_BYTES_MAX} bytes"))
            elif isinstance(event, h11.EndOfMessage) and self._head is not None:
                request, self._body = Request(self._head, bytes(self._body), self._peer), bytearray()
                self._serve(request)
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

    def _serve(self, request: Request) -> None:
        response = self._refusal(request) or self._door.answer(request, self)
        if isinstance(response, Response):
            self._finish(response)
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

    def _serve_later(self, request: Request, page: asyncio.Future[Response | None]) -> None:
        self._page = None
        if page.cancelled() or self._transport.is_closing():
            return
        error = page.exception()
        response = self._door.failure(request, error) if error is not None else page.result()
        if response is not None and self._http.our_state is h11.SEND_RESPONSE:
            self._finish(response)
        elif self._http.our_state in (h11.DONE, h11.MUST_CLOSE):
            self._end()
        else:  # the response broke off
            self.abort()
        self._advance()

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._restart_timer(self._door.idle_seconds)
        head = [(b"Date", formatdate(usegmt=True).encode()), *headers]
        self._write(h11.Response(status_code=status, reason=PHRASES.get(status, ""), headers=head))

    async def send(self, part: bytes, *, more: bool) -> None:
        """Sends a part of the response and gives other clients a turn; waits for a slow reader."""
        self._restart_timer(self._door.idle_seconds)
        self._write_body(part)
        if not more:
            self._write(h11.EndOfMessage())
        await asyncio.sleep(0)
        if self._paused:
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken

    def _finish(self, response: Response) -> None:
        self._send(response)
        self._end()

    def _end(self) -> None:
        if self._http.our_state is h11.MUST_CLOSE:
            self._transport.close()
        else:
            self._http.start_next_cycle()
            self._answered += 1
            self._head, self._has_begun = None, False
            if self in self._door.connections:
                del self._door.connections[self]
                self._door.connections[self] = None

    def _refuse(self, response: Response) -> None:
        """Sends an error response and closes the connection: later bytes may not be a request."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(response, (b"Connection", b"close"))
        self._transport.close()

    def _send(self, response: Response, *extra: tuple[bytes, bytes]) -> None:
        headers = [
            (b"Content-Type", response.content_type.encode()),
            (b"Content-Length", b"%d" % len(response.body)),
            (b"Cache-Control", b"no-store"),  # the pages change with every request
            *((name.encode(), value.encode()) for name, value in response.headers),
            *extra,
        ]
        self.begin(response.status, headers)
        self._write_body(response.body)
        self._write(h11.EndOfMessage())

    def _write_body(self, part: bytes) -> None:
        if self._head is None or self._head.method != b"HEAD":
            self._write(h11.Data(data=part))

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._transport.write(data)
