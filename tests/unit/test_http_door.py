"""The HTTP door over real sockets: pages, refusals, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from millstream.broker.session import Sessions
from millstream.cluster.base import Solo
from millstream.core.errors import StartupError
from millstream.core.metrics import Histogram, Metrics, QueueShare, Scrape
from millstream.doors.http import HttpDoor, Request, Response, pages
from millstream.doors.http.connection import BODY_BYTES_MAX, HEADER_BYTES_MAX, Connection
from millstream.doors.http.door import (
    CONNECTIONS_MAX,
    URGENT_CONNECTIONS_MAX,
    URGENT_YOUNG_MAX,
    URGENT_YOUNG_SECONDS,
    YOUNG_SECONDS,
)
from millstream.security.rights import AllowAll

METRICS = Metrics()
SCRAPE = Scrape(
    METRICS,
    topics=lambda: [("orders", 0, 5, 100, 104, 4096), ("orders", 1, 0, 7, 7, 512)],
    committed=lambda: [("billing", "orders", 0, 90), ("billing", "orders", 1, 7), ("billing", "deleted", 0, 3)],
    groups=lambda: [("billing", "Stable", 2), ("audit", "Empty", 0)],
    queues=lambda: [QueueShare("workers", "jobs", 3, 10, 2, 1, 100, 4, 7, 2500)],
    api_name=lambda key: {0: "Produce", 1: "Fetch"}[key],
)


async def broken_later(_: Request) -> Response:
    await asyncio.sleep(0)
    return Response.text(200, str(1 // 0))


async def nothing() -> None: ...


@asynccontextmanager
async def opened(failures: list[str] | None = None, ready: bool = True, **bounds: Any) -> AsyncIterator[HttpDoor]:
    broker: Any = SimpleNamespace(
        authorizer=AllowAll(),
        cluster=Solo(1),
        topics=None,
        clock=None,
        config=None,
        metrics=None,
        failures=lambda: failures or [],
        shortages=tuple,
        damage=tuple,
    )
    routes = pages.Pages(Sessions(broker), SCRAPE, lambda: ready, nothing).routes
    routes["/broken"] = lambda _: Response.text(200, str(1 // 0))
    routes["/broken/later"] = broken_later
    routes["/large"] = lambda _: Response(200, bytes(20_000_000))
    door = HttpDoor("127.0.0.1", 0, routes, **bounds)
    await door.start()
    try:
        yield door
    finally:
        await door.close()


async def talk(door: HttpDoor, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Sends bytes, reads until the door hangs up, and gives the last answer's status, headers and body."""
    reader, writer = await asyncio.open_connection(door.host, door.port)
    writer.write(request)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


async def test_metrics_speak_the_names_that_kafka_dashboards_use() -> None:
    METRICS.requests[0] += 3
    async with opened() as door:
        status, headers, body = await talk(door, get("/metrics?x=1"))
    text = body.decode()
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'kafka_consumergroup_lag{consumergroup="billing",partition="0",topic="orders"} 10.0',
        'kafka_consumergroup_lag_sum{consumergroup="billing",topic="orders"} 10.0',
        'kafka_consumergroup_current_offset{consumergroup="billing",partition="1",topic="orders"} 7.0',
        'kafka_topic_partition_current_offset{partition="0",topic="orders"} 100.0',
        'kafka_topic_partition_oldest_offset{partition="0",topic="orders"} 5.0',
        'kafka_topic_partitions{topic="orders"} 2.0',
        'kafka_consumergroup_members{consumergroup="billing"} 2.0',
        "kafka_brokers 1.0",
        'millstream_requests_total{api="Produce"} 3.0',
        'millstream_partition_unsynced_records{partition="0",topic="orders"} 4.0',
        'millstream_groups{state="Stable"} 1.0',
        'millstream_queue_available{group="workers",partition="3",topic="jobs"} 10.0',
        'millstream_queue_leased{group="workers",partition="3",topic="jobs"} 2.0',
        'millstream_queue_waiting{group="workers",partition="3",topic="jobs"} 1.0',
        'millstream_queue_done_total{group="workers",partition="3",topic="jobs"} 100.0',
        'millstream_queue_dead_total{group="workers",partition="3",topic="jobs"} 4.0',
        'millstream_queue_redeliveries_total{group="workers",partition="3",topic="jobs"} 7.0',
        'millstream_queue_oldest_available_seconds{group="workers",partition="3",topic="jobs"} 2.5',
    ):
        assert sorted_labels(line) in {sorted_labels(found) for found in text.splitlines()}, line
    assert "deleted" not in text
    assert "process_resident_memory_bytes" in text


def sorted_labels(line: str) -> str:
    name, brace, rest = line.partition("{")
    labels, _, value = rest.partition("} ")
    return name + brace + ",".join(sorted(labels.split(","))) + value


def test_a_histogram_counts_each_observation_in_its_bucket_and_above() -> None:
    histogram = Histogram()
    for seconds in (0.00001, 0.001, 0.3, 99):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets["5e-05"], buckets["0.001"], buckets["0.5"], buckets["10.0"], buckets["+Inf"]) == (1, 2, 3, 3, 4)
    assert histogram.count == 4


async def test_health_follows_what_failed_and_readiness_follows_serving() -> None:
    async with opened() as door:
        assert (await talk(door, get("/healthz")))[0] == 200
        assert (await talk(door, get("/readyz")))[0] == 200
    async with opened(failures=["orders-0 is read-only"], ready=False) as door:
        status, _, body = await talk(door, get("/healthz"))
        assert status == 503 and b"orders-0 is read-only" in body
        assert (await talk(door, get("/readyz")))[0] == 503


async def test_an_unknown_path_is_told_which_there_are() -> None:
    async with opened() as door:
        status, _, body = await talk(door, get("/metric"))
    assert status == 404 and b"/metrics" in body


async def test_another_method_is_told_which_are_allowed() -> None:
    async with opened() as door:
        status, headers, _ = await talk(door, get("/metrics", "DELETE"))
    assert status == 405 and headers["allow"] == "get, head"


async def test_head_gives_the_headers_without_the_body() -> None:
    async with opened() as door:
        status, headers, body = await talk(door, get("/healthz", "HEAD"))
    assert status == 200 and int(headers["content-length"]) > 0 and body == b""


async def test_a_page_that_fails_costs_its_request_and_not_the_door() -> None:
    async with opened() as door:
        for path in ("/broken", "/broken/later"):
            status, _, body = await talk(door, get(path))
            assert status == 500 and b"ZeroDivision" not in body
        assert (await talk(door, get("/healthz")))[0] == 200


async def test_one_connection_serves_many_requests_even_pipelined() -> None:
    async with opened() as door:
        reader, writer = await asyncio.open_connection(door.host, door.port)
        both = b"".join(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/healthz", b"/metrics"))
        writer.write(both * 25 + get("/readyz"))
        answers = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 51


async def test_a_slow_reader_holds_one_answer_in_memory_and_still_gets_all() -> None:
    async with opened() as door:
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + get("/readyz"))
        await until_connected(door, 1)
        (connection,) = door.connections
        async with asyncio.timeout(60):
            while not connection._transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert connection._transport.get_write_buffer_size() < 21_000_000
        answers = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert len(answers) > 60_000_000 and answers.count(b"HTTP/1.1 200 OK") == 4


class Wire(asyncio.Transport):
    """What a connection reads from and writes to, without a socket behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.sent = b""

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    @property
    def answers(self) -> int:
        return self.sent.count(b"HTTP/1.1 200")


KEPT = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_nothing_is_read_while_a_page_is_made() -> None:
    """A client that sends requests faster than pages are made would fill the memory with them."""
    made = asyncio.Event()

    async def slow(_: Request) -> Response:
        await made.wait()
        return Response.text(200, "made")

    door = HttpDoor("127.0.0.1", 0, {"/slow": slow, "/healthz": lambda _: Response.text(200, "ok")})
    wire, connection = Wire(), Connection(door)
    connection.connection_made(wire)
    connection.data_received(KEPT.replace(b"healthz", b"slow"))
    await asyncio.sleep(0)
    assert wire.is_read, "so that a client who goes is noticed"
    connection.data_received(KEPT * 2)
    assert not wire.is_read and wire.answers == 0
    made.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.is_read and wire.answers == 3
    connection.connection_lost(None)


async def test_requests_that_come_together_have_a_turn_of_the_loop_each() -> None:
    """A read brings thousands: the broker's other clients would wait for all of them."""
    door = HttpDoor("127.0.0.1", 0, {"/healthz": lambda _: Response.text(200, "ok")})
    wire, connection = Wire(), Connection(door)
    connection.connection_made(wire)
    connection.data_received(KEPT * 100)
    assert wire.answers == 1
    connection.data_received(KEPT)
    assert not wire.is_read and wire.answers == 1
    for turn in range(2, 102):
        await asyncio.sleep(0)
        assert wire.answers == turn
    await asyncio.sleep(0)
    assert wire.is_read
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x00\x00\x00\x1a\x00\x12\x00\x03garbage\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * HEADER_BYTES_MAX, 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b"x" * (BODY_BYTES_MAX + 1), 413),
    ],
    ids=["not http", "no host", "headers too large", "body too large"],
)
async def test_what_is_not_a_request_is_refused_and_costs_the_connection(request_bytes: bytes, status: int) -> None:
    async with opened() as door:
        assert (await talk(door, request_bytes))[0] == status
        assert (await talk(door, get("/healthz")))[0] == 200


async def until_connected(door: HttpDoor, count: int) -> None:
    async with asyncio.timeout(20):
        while len(door.connections) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_health_answers_while_more_clients_drip_than_there_are_connections() -> None:
    async with opened(young_seconds=0) as door:
        dripping = await connect(door, CONNECTIONS_MAX, b"GET /healthz HTTP/1.1\r\nX: ")
        await until_connected(door, CONNECTIONS_MAX)
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await talk(door, get(path)))[0] == 200
        dripping += await connect(door, 100, b"G")
        assert (await talk(door, get("/healthz")))[0] == 200
        for each in dripping:
            each.close()


async def connect(door: HttpDoor, count: int, data: bytes = b"") -> list[asyncio.StreamWriter]:
    writers = [(await asyncio.open_connection(door.host, door.port))[1] for _ in range(count)]
    for each in writers:
        each.write(data)
    return writers


async def test_the_oldest_incomplete_request_makes_room_and_not_a_client_between_requests() -> None:
    async with opened(connections_max=2, young_seconds=0, request_seconds=600) as door:
        scraper, scrapes = await asyncio.open_connection(door.host, door.port)
        scrapes.write(KEPT)
        assert b"200 OK" in await scraper.readuntil(b"ok")
        dripping, drips = await asyncio.open_connection(door.host, door.port)
        drips.write(b"GET")
        await until_connected(door, 2)
        assert (await talk(door, get("/metrics")))[0] == 200, "which has no room of its own"
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(dripping.read(), 20) == b""
        scrapes.write(get("/healthz"))
        assert b"200 OK" in await asyncio.wait_for(scraper.read(), 20)
        drips.close()
        scrapes.close()


async def test_a_probe_is_answered_although_more_clients_connect_behind_it_before_it_is_read() -> None:
    """All of them in one turn of the event loop, as a backlog is accepted."""
    async with opened() as door:
        loop = asyncio.get_running_loop()
        with socket.create_connection((door.host, door.port), 20) as probe, contextlib.ExitStack() as stack:
            for _ in range(CONNECTIONS_MAX + URGENT_CONNECTIONS_MAX + 50):
                dripping = stack.enter_context(socket.create_connection((door.host, door.port), 20))
                dripping.send(b"GET /healthz HTTP/1.1\r\nX: ")
            await until_connected(door, CONNECTIONS_MAX + URGENT_CONNECTIONS_MAX + 51)
            probe.setblocking(False)
            await loop.sock_sendall(probe, get("/healthz"))
            assert (await asyncio.wait_for(loop.sock_recv(probe, 1000), 20)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("is_sent_first", [True, False], ids=["request sent", "request to come"])
@pytest.mark.parametrize("behind", [URGENT_CONNECTIONS_MAX + 1, 200])
def test_a_probe_among_the_urgent_is_answered_whatever_comes_behind_it(
    loop_kind: str, is_sent_first: bool, behind: int
) -> None:
    """All connections but the urgent ones wait for their pages, and a burst is accepted in one turn of the loop."""

    async def check() -> None:
        async with opened(connections_max=1) as door, asyncio.timeout(20):
            door.routes = {**door.routes, "/slow": lambda _: asyncio.sleep(60, pages.READY)}
            slow = await connect(door, 1, get("/slow"))
            while not any(not each.waits_for_client for each in door.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            loop = asyncio.get_running_loop()
            with socket.create_connection((door.host, door.port), 20) as probe, contextlib.ExitStack() as stack:
                if is_sent_first:
                    probe.sendall(get("/healthz"))
                for _ in range(behind):
                    stack.enter_context(socket.create_connection((door.host, door.port), 20)).send(b"GET")
                probe.setblocking(False)
                if not is_sent_first:
                    await until_connected(door, behind + 2)
                    await loop.sock_sendall(probe, get("/healthz"))
                assert (await loop.sock_recv(probe, 1000)).startswith(b"HTTP/1.1 200")
            slow[0].close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop_kind == "uvloop" else None) as runner:
        runner.run(check())


async def test_a_flood_of_urgent_connections_is_bounded_and_shuts_no_probe_out() -> None:
    async with opened(connections_max=1) as door, asyncio.timeout(20):
        door.routes = {**door.routes, "/slow": lambda _: asyncio.sleep(60, pages.READY)}
        open_ones = await connect(door, 1, get("/slow"))
        for _ in range(3):
            open_ones += await connect(door, URGENT_YOUNG_MAX, b"GET")
            assert len(door.connections) <= 1 + URGENT_YOUNG_MAX
            assert (await talk(door, get("/healthz")))[0] == 200
        await asyncio.sleep(URGENT_YOUNG_SECONDS)
        assert (await talk(door, get("/healthz")))[0] == 200
        assert len(door.connections) <= 1 + URGENT_CONNECTIONS_MAX
        for each in open_ones:
            each.close()


async def test_a_client_makes_room_when_its_request_has_been_incomplete_for_a_second() -> None:
    async with opened(connections_max=1) as door:
        dripping, drips = await asyncio.open_connection(door.host, door.port)
        drips.write(b"GET")
        await until_connected(door, 1)
        (connection,) = door.connections
        connection.waits_since += 60  # however slow this machine is
        assert (await talk(door, get("/metrics")))[0] == 503
        connection.waits_since -= 60 + YOUNG_SECONDS
        assert (await talk(door, get("/metrics")))[0] == 200
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(dripping.read(), 5) == b""
        drips.close()


async def test_health_has_room_of_its_own_while_all_connections_wait_for_pages() -> None:
    async with opened(connections_max=2) as door:
        made = asyncio.Event()

        async def slow(_: Request) -> Response:
            await made.wait()
            return Response.text(200, "made")

        door.routes = {**door.routes, "/slow": slow}
        waiting = [asyncio.create_task(talk(door, get("/slow"))) for _ in range(2)]
        async with asyncio.timeout(20):
            while sum(not each.waits_for_client for each in door.connections) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        dripping = await connect(door, URGENT_CONNECTIONS_MAX + 1)
        assert (await talk(door, get("/healthz")))[0] == 200
        assert (await talk(door, get("/readyz")))[0] == 200
        assert (await talk(door, get("/metrics")))[0] == 503
        made.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]
        for each in dripping:
            each.close()


async def test_a_request_that_has_begun_is_complete_within_its_time_or_costs_its_connection() -> None:
    async with opened(request_seconds=0.05) as door:
        _, silent = await asyncio.open_connection(door.host, door.port)
        await until_connected(door, 1)
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        await until_connected(door, 1)
        silent.write(get("/healthz"))
        await until_connected(door, 0)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8092", "127.0.0.1:1", "[::1]:8092", "192.0.2.7", "broker.example.", "pages.test:80"],
)
async def test_pages_are_served_under_the_names_and_addresses_of_the_listener(host: str) -> None:
    async with opened(names=("Broker.example", " pages.test")) as door:
        request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        assert (await talk(door, request.encode()))[0] == 200


@pytest.mark.parametrize("host", ["rebound.example", "localhost.rebound.example:8092", "127.0.0.1.rebound.example", ""])
@pytest.mark.parametrize("path", ["/queues", "/metrics", "/healthz"])
async def test_a_page_that_was_rebound_to_this_address_cannot_read_the_brokers(host: str, path: str) -> None:
    async with opened() as door:
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        status, _, body = await talk(door, request.encode())
    assert status == 421 and b"http_hosts" in body


async def test_any_name_will_do_if_the_operator_says_so_and_so_does_none() -> None:
    async with opened(names=("*",)) as door:
        assert (await talk(door, get("/healthz").replace(b"localhost", b"rebound.example")))[0] == 200
    async with opened() as door:
        assert (await talk(door, b"GET /healthz HTTP/1.0\r\n\r\n"))[0] == 200


async def test_a_client_that_drips_bytes_is_hung_up_on() -> None:
    async with opened(idle_seconds=0.2) as door:
        reader, writer = await asyncio.open_connection(door.host, door.port)
        for byte in b"GET /healthz HTTP/1.1\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)
            writer.write(b"x")
            await writer.drain()
            raise ConnectionError  # a clean end of file is as good
        assert not door.connections


async def test_a_taken_port_is_named_with_what_to_do() -> None:
    async with opened() as door:
        with pytest.raises(StartupError, match="choose another with --http"):
            await HttpDoor("127.0.0.1", door.port, {}).start()
