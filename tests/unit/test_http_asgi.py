"""A throw-away Starlette application behind the HTTP door: what it can do, and the bounds that hold for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.responses import Response as Page
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from millstream.doors.http import HttpDoor, Response
from millstream.doors.http.connection import BODY_BYTES_MAX, HEADER_BYTES_MAX

PART_BYTES = 1 << 16
PARTS = 200


class Console:
    """Pages as a console needs them."""

    def __init__(self, static: Path) -> None:
        self.cancelled = 0
        self.parts = 0
        self.wake = asyncio.Event()
        (static / "page.css").write_text("body { color: red }")
        self.app = Starlette(
            routes=[
                Route("/login", self.login, methods=["POST"]),
                Route("/whoami", self.whoami),
                Route("/events", self.events),
                Route("/large", self.large),
                Route("/broken", self.broken),
                Route("/broken/later", self.broken_later),
                Mount("/static", StaticFiles(directory=static)),
            ]
        )

    async def login(self, asked: Asked) -> Page:
        page = PlainTextResponse(f"hello {(await asked.body()).decode()}")
        page.set_cookie("session", "s1", httponly=True, samesite="strict")
        page.set_cookie("theme", "dark")
        return page

    async def whoami(self, asked: Asked) -> Page:
        assert asked.client is not None
        return PlainTextResponse(f"{asked.cookies['session']} from {asked.client.host} asks {asked.query_params['q']}")

    async def events(self, asked: Asked) -> Page:
        async def stream() -> AsyncIterator[str]:
            try:
                for number in itertools.count():
                    yield f"id: {number}\ndata: tick\n\n"
                    self.wake.clear()
                    await self.wake.wait()
            finally:
                self.cancelled += 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def large(self, asked: Asked) -> Page:
        async def stream() -> AsyncIterator[bytes]:
            for _ in range(PARTS):
                self.parts += 1
                yield bytes(PART_BYTES)

        return StreamingResponse(stream())

    async def broken(self, asked: Asked) -> Page:
        return PlainTextResponse(str(1 // 0))

    async def broken_later(self, asked: Asked) -> Page:
        async def stream() -> AsyncIterator[str]:
            yield "begun"
            yield str(1 // 0)

        return StreamingResponse(stream())


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console(tmp_path)


@asynccontextmanager
async def opened(load: Callable[[], Any], **bounds: Any) -> AsyncIterator[HttpDoor]:
    door = HttpDoor("127.0.0.1", 0, {"/healthz": lambda _: Response.text(200, "ok")}, app=load, **bounds)
    await door.start()
    try:
        yield door
    finally:
        await door.close()


def request(line: str, *headers: str, body: str = "", host: str = "localhost") -> bytes:
    head = (f"{line} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers)
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()


async def talk(door: HttpDoor, *requests: bytes) -> str:
    """Sends requests on one connection; returns everything that the door sent until it hung up."""
    reader, writer = await asyncio.open_connection(door.host, door.port)
    *first, last = requests
    writer.write(b"".join(first) + last.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    answers = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answers.decode()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_cookies_bodies_and_files_are_served_beside_the_brokers_pages(console: Console) -> None:
    async with opened(lambda: console.app) as door:
        login, health, asked, file, head, missing = (
            request("POST /login", body="alice"),
            request("GET /healthz"),
            request("GET /whoami?q=a%20b", "Cookie: session=s1"),
            request("GET /static/page.css"),
            request("HEAD /static/page.css"),
            request("GET /static/..%2f..%2fetc/passwd"),
        )
        answers = await talk(door, login, health, asked, file, head, missing)
        assert answers.count("HTTP/1.1 200 OK") == 5 and answers.count("HTTP/1.1 404 Not Found") == 1
        assert "set-cookie: session=s1; HttpOnly" in answers and "set-cookie: theme=dark" in answers
        assert "hello alice" in answers and "ok\n" in answers
        assert "s1 from 127.0.0.1 asks a b" in answers
        assert answers.count("body { color: red }") == 1, "HEAD has no body"
        tag = answers.partition('etag: "')[2].partition('"')[0]
        cached = await talk(door, request("GET /static/page.css", f'If-None-Match: "{tag}"'))
        assert cached.startswith("HTTP/1.1 304")


async def test_events_are_streamed_as_they_come_until_the_client_goes(console: Console) -> None:
    async with opened(lambda: console.app) as door:
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(request("GET /events"))
        for number in range(3):
            assert f"id: {number}" in (await asyncio.wait_for(reader.readuntil(b"tick\n\n"), 20)).decode()
            console.wake.set()
        assert "ok" in await talk(door, request("GET /healthz")), "while the stream is open"
        writer.close()
        await until(lambda: console.cancelled == 1)
        assert not door.connections


async def test_the_application_is_loaded_once_by_its_first_page_while_probes_are_answered(console: Console) -> None:
    loads, may_load = [], threading.Event()

    def load() -> Any:
        loads.append(threading.current_thread())
        may_load.wait(20)
        return console.app

    async with opened(load) as door:
        assert "ok" in await talk(door, request("GET /healthz"))
        assert not loads
        pages = [asyncio.create_task(talk(door, request("GET /static/page.css"))) for _ in range(3)]
        await until(lambda: len(loads) == 1)
        assert "ok" in await talk(door, request("GET /healthz"))
        may_load.set()
        assert all("color: red" in page for page in await asyncio.gather(*pages))
    assert len(loads) == 1 and loads[0] is not threading.main_thread()


async def test_a_page_without_its_libraries_names_what_to_install() -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")

    async with opened(load) as door:
        answers = await talk(door, request("GET /console"), request("GET /healthz"))
    assert "501 Not Implemented" in answers and "needs starlette: pip install 'millstream[console]'" in answers
    assert "HTTP/1.1 200 OK" in answers


async def test_a_page_that_fails_costs_its_request_or_the_response_that_it_began(console: Console) -> None:
    async with opened(lambda: console.app) as door:
        answers = await talk(door, request("GET /broken"), request("GET /healthz"))
        assert "500 Internal Server Error" in answers and "HTTP/1.1 200 OK" in answers
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(request("GET /broken/later"))
        with contextlib.suppress(ConnectionError):
            assert not (await asyncio.wait_for(reader.read(), 20)).endswith(b"0\r\n\r\n"), "it is not complete"
        writer.close()

    async def silent(*_: Any) -> None: ...

    async with opened(lambda: silent) as door:
        assert "500 Internal Server Error" in await talk(door, request("GET /silent"))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("GET /whoami", host="rebound.example"), 421),
        (request("GET /whoami", "X: " + "x" * HEADER_BYTES_MAX).rstrip(), 431),
        (request("POST /login", body="x" * (BODY_BYTES_MAX + 1)), 413),
        (request("GET /none"), 404),
        (request("DELETE /login"), 405),
    ],
    ids=["host", "headers", "body", "path", "method"],
)
async def test_the_doors_refusals_come_before_the_application(console: Console, sent: bytes, status: int) -> None:
    async with opened(lambda: console.app) as door:
        assert (await talk(door, sent)).startswith(f"HTTP/1.1 {status} ")


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_slow_reader_holds_one_part_and_gets_all_of_them_or_is_hung_up_on(console: Console, loop_kind: str) -> None:
    async def check() -> None:
        async with opened(lambda: console.app) as door:
            reader, writer = await asyncio.open_connection(door.host, door.port)
            writer.write(request("GET /large"))
            await until(lambda: any(each.waits_for_client and each.is_streaming for each in door.connections))
            (connection,) = door.connections
            assert connection._transport.get_write_buffer_size() < 3 * PART_BYTES and console.parts < PARTS
            writer.write(request("GET /healthz", "Connection: close"))
            assert len(await asyncio.wait_for(reader.read(), 20)) > PARTS * PART_BYTES
            writer.close()
        async with opened(lambda: console.app, idle_seconds=0.2) as door:
            _, writer = await asyncio.open_connection(door.host, door.port)
            writer.write(request("GET /large"))
            await until(lambda: any(each.is_streaming for each in door.connections))
            await until(lambda: not door.connections)
            writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop_kind == "uvloop" else None) as runner:
        runner.run(check())


async def test_the_oldest_stream_makes_room_when_no_connection_is_idle(console: Console) -> None:
    async with opened(lambda: console.app, connections_max=2, young_seconds=0) as door:
        streams = [await asyncio.open_connection(door.host, door.port) for _ in range(2)]
        for reader, writer in streams:
            writer.write(request("GET /events"))
            await asyncio.wait_for(reader.readuntil(b"tick\n\n"), 20)
        assert "color: red" in await talk(door, request("GET /static/page.css"))
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(streams[0][0].read(), 20)
        assert console.cancelled == 1 and len(door.connections) == 1
        for _, writer in streams:
            writer.close()
