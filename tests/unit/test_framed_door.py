"""What doors of length-prefixed frames share, with a protocol of its own and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.session import Sessions
from millstream.config import Address, Config
from millstream.core.errors import ProtocolError, StartupError
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.doors.engine import door as engine_door
from millstream.doors.engine.connection import Connection
from millstream.doors.framed import door as framed_door
from millstream.doors.framed.door import FramedDoor
from millstream.doors.framed.protocol import Answer, FramedProtocol, Large
from millstream.doors.listener import KEEPALIVE
from millstream.doors.transport import Transport
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock


class Toy(FramedProtocol):
    """Frames as FlowMQ has them: a command, a length, a payload.

    e echoes, w waits for the test to say so (and overlaps with its kind), j waits too (and overlaps with nothing), l
    echoes as a large answer, m answers with many bytes, x is an error of the protocol, b is a mistake of ours.
    """

    HEAD_BYTES = 5

    def overlaps(self, frame: memoryview) -> bool:
        return frame[0] == ord("w")

    def handle(self, frame: memoryview) -> Answer:
        door = self._door
        assert isinstance(door, ToyDoor)
        command, payload = chr(frame[0]), bytes(frame[5:])
        door.handled.append(command + payload.decode())
        if command == "w":
            promise: Promise[None] = Promise()
            door.waiting.append(promise)
            place = self.reserve()
            promise.then(lambda done: self.fill(place, payload))
            return None
        if command == "j":
            waiting: Promise[bytes] = Promise()
            door.joining.append(waiting)
            return waiting
        if command == "m":
            return bytes(int(payload))
        if command == "l":
            return Large(int(payload), lambda: payload)
        if command == "x":
            raise ProtocolError("x is not understood")
        return payload if command == "e" else payload[9999]  # type: ignore[return-value]


class ToyDoor(FramedDoor):
    name = "toy"

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(sessions)
        self.handled: list[str] = []
        self.waiting: list[Promise[None]] = []
        self.joining: list[Promise[bytes]] = []

    def welcome(self, transport: Transport, peer: str) -> Connection:
        return Connection(self, transport, peer, partial(Toy, self))


def frame(command: str, payload: bytes = b"") -> bytes:
    return command.encode() + struct.pack(">i", len(payload)) + payload


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.clock = VirtualClock()
        config = Config(**settings)
        self.broker = Broker(config, MemoryLogStore(self.clock), MemoryMeta(), self.clock, Metrics())
        self.door = ToyDoor(Sessions(self.broker))
        self.address = self.door.start(Address("127.0.0.1", 0))
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        self.writers.append(writer)
        return reader, writer

    async def until_handled(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.door.handled) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_connected(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.broker.metrics.connections_active != count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_stuck(self) -> None:
        """Until the door has what there is of a frame, and waits for the rest."""
        async with asyncio.timeout(20):
            while not any(each.is_stuck for each in self.door._connections):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for writer in bench.writers:
        writer.close()
    await bench.door.close()
    assert bench.door.frames.free == bench.door.frames.limit, "all memory was given back"
    assert bench.door.answers.free == bench.door.answers.limit


@pytest.mark.parametrize("piece", [1, 3, 5, 7, 1 << 20])
async def test_any_split_of_the_bytes_gives_the_same_frames(bench: Bench, piece: int) -> None:
    reader, writer = await bench.connect()
    payloads = [b"", b"a", b"bc" * 10, b"d" * 300]
    data = b"".join(frame("e", payload) for payload in payloads)
    for at in range(0, len(data), piece):
        writer.write(data[at : at + piece])
        await writer.drain()
        await asyncio.sleep(0)
    expected = b"".join(payloads)
    assert await asyncio.wait_for(reader.readexactly(len(expected)), 20) == expected


async def test_large_frames_go_through_whatever_came_before_them(bench: Bench) -> None:
    reader, writer = await bench.connect()
    for size in (10, 70_000, 5_000_000, 3, 300_000, 70_000):
        payload = bytes([size % 100]) * size
        writer.write(frame("e", payload))
        assert await asyncio.wait_for(reader.readexactly(size), 20) == payload


async def test_others_are_handled_when_what_waits_is_answered_and_answers_keep_their_order(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(frame("w", b"1") + frame("w", b"2") + frame("e", b"3") + frame("w", b"4") + frame("e", b"5"))
    await bench.until_handled(2)
    await asyncio.sleep(0.01)
    assert bench.door.handled == ["w1", "w2"], "the echo waits for both"
    bench.door.waiting[1].settle(None)
    await asyncio.sleep(0.01)
    assert bench.door.handled == ["w1", "w2"]
    bench.door.waiting[0].settle(None)
    await bench.until_handled(4)
    assert await reader.readexactly(3) == b"123"
    bench.door.waiting[2].settle(None)
    assert await reader.readexactly(2) == b"45"


async def test_who_stops_sending_still_gets_its_answers(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(frame("w", b"1") + frame("e", b"2") + frame("e", b"3"))
    writer.write_eof()
    await bench.until_handled(1)
    await asyncio.sleep(0.01)
    bench.door.waiting[0].settle(None)
    assert await asyncio.wait_for(reader.read(), 20) == b"123"
    await bench.until_connected(0)


@pytest.mark.parametrize("unread", [0, 1000], ids=["nothing waits", "bytes wait"])
async def test_an_answer_that_waits_for_others_ends_ten_seconds_after_its_client_hung_up(
    bench: Bench, unread: int
) -> None:
    _, writer = await bench.connect()
    writer.write(frame("j"))
    await bench.until_handled(1)
    if unread:
        await sent(bench, writer, frame("e", b"x" * unread))
        writer.write(frame("e", b"x" * unread))  # one was read ahead, this is not
    writer.write_eof()
    await until_hung_up(bench)
    bench.clock.advance(9)
    assert bench.broker.metrics.connections_active == 1, "it may still read"
    bench.clock.advance(11)
    assert bench.broker.metrics.connections_active == 0
    bench.door.joining[0].settle(b"too late")


async def test_a_client_that_hung_up_still_gets_what_waits_for_a_sync(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(frame("w", b"1"))
    await bench.until_handled(1)
    writer.write_eof()
    await until_hung_up(bench)
    bench.clock.advance(50)
    bench.door.waiting[0].settle(None)
    assert await asyncio.wait_for(reader.read(), 20) == b"1"


async def until_hung_up(bench: Bench) -> None:
    async with asyncio.timeout(20):
        while not any(each.hung_up for each in bench.door._connections):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_what_was_answered_before_nonsense_arrives(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(frame("e", b"1") + frame("x") + frame("e", b"2"))
    assert await asyncio.wait_for(reader.read(), 20) == b"1"
    assert bench.door.handled == ["e1", "x"]


@pytest.mark.parametrize("nonsense", [frame("x"), b"e" + struct.pack(">i", -1)], ids=["a frame", "a length"])
async def test_what_was_asked_before_nonsense_is_still_answered(bench: Bench, nonsense: bytes) -> None:
    reader, writer = await bench.connect()
    writer.write(b"".join(frame("w", b"%d" % number) for number in range(5)) + nonsense + frame("e", b"no"))
    await bench.until_handled(5)
    await asyncio.sleep(0.01)
    for promise in reversed(bench.door.waiting):
        promise.settle(None)
    assert await asyncio.wait_for(reader.read(), 60) == b"01234"
    await bench.until_connected(0)
    assert "eno" not in bench.door.handled


async def test_after_nonsense_answers_are_not_waited_for_longer_than_two_seconds(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(frame("w", b"1") + frame("w", b"2") + b"e" + struct.pack(">i", -1))
    await bench.until_handled(2)
    bench.door.waiting[0].settle(None)
    assert await asyncio.wait_for(reader.readexactly(1), 60) == b"1"
    bench.clock.advance(1.9)
    assert bench.broker.metrics.connections_active == 1
    bench.clock.advance(0.2)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    bench.door.waiting[1].settle(None)


async def test_a_mistake_of_ours_costs_its_connection_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    (reader, writer), (other, others) = await bench.connect(), await bench.connect()
    writer.write(frame("b"))
    assert await asyncio.wait_for(reader.read(), 20) == b""
    assert "IndexError" in caplog.text
    others.write(frame("e", b"fine"))
    assert await other.readexactly(4) == b"fine"


@pytest.mark.parametrize("size", [-1, 0x7FFFFFFF, (100 << 20) + 1])
async def test_a_length_out_of_bounds_costs_the_connection(bench: Bench, size: int) -> None:
    reader, writer = await bench.connect()
    writer.write(b"e" + struct.pack(">i", size) + b"..")
    assert await asyncio.wait_for(reader.read(), 20) == b""


async def test_who_stops_in_the_middle_of_a_frame_is_closed_after_a_minute(bench: Bench) -> None:
    reader, writer = await bench.connect()
    await bench.until_connected(1)
    writer.write(frame("e", b"12345")[:-1])
    await bench.until_stuck()
    bench.clock.advance(50)
    assert bench.broker.metrics.connections_active == 1
    bench.clock.advance(30)
    assert await asyncio.wait_for(reader.read(), 20) == b""


async def test_idle_connections_stay_open_and_are_kept_alive(bench: Bench) -> None:
    reader, writer = await bench.connect()
    await bench.until_connected(1)
    bench.clock.advance(24 * 3600)
    writer.write(frame("e", b"still here"))
    assert await asyncio.wait_for(reader.readexactly(10), 20) == b"still here"
    [connection] = bench.door._connections
    transport: Any = connection.transport
    assert transport._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for option, value in KEEPALIVE:
        assert transport._socket.getsockopt(socket.IPPROTO_TCP, option) == value


async def test_a_full_door_closes_the_connection_that_is_idle_longest_and_no_other() -> None:
    bench = Bench(connections_max=3)
    owed, waiting = await bench.connect()
    waiting.write(frame("w", b"1"))
    await bench.until_handled(1)
    bench.clock.advance(20)
    longest, _ = await bench.connect()
    await bench.until_connected(2)
    bench.clock.advance(20)
    idle, writer = await bench.connect()
    await bench.until_connected(3)
    taken, other = await bench.connect()
    assert await asyncio.wait_for(longest.read(), 20) == b""
    for reader, sender in ((idle, writer), (taken, other)):
        sender.write(frame("e", b"x"))
        assert await asyncio.wait_for(reader.readexactly(1), 20) == b"x"
    bench.door.waiting[0].settle(None)
    assert await asyncio.wait_for(owed.readexactly(1), 20) == b"1", "it was owed the answer to a write"
    for each in bench.writers:
        each.close()
    await bench.door.close()


async def test_large_answers_wait_for_room_and_for_nothing_else(bench: Bench) -> None:
    bench.door.answers.free = 0
    (reader, writer), (other, others) = await bench.connect(), await bench.connect()
    writer.write(frame("l", b"100"))
    await bench.until_handled(1)
    others.write(frame("e", b"small"))
    assert await other.readexactly(5) == b"small"
    assert not reader._buffer  # type: ignore[attr-defined]
    bench.door.answers.give(bench.door.answers.limit)
    assert await asyncio.wait_for(reader.readexactly(3), 20) == b"100"


async def test_a_frame_waits_for_memory_before_it_starts(bench: Bench) -> None:
    bench.door.frames.free = 1000
    reader, writer = await bench.connect()
    payload = b"p" * 200_000
    writer.write(frame("e", payload))
    await asyncio.sleep(0.02)
    assert bench.door.handled == []
    bench.door.frames.give(bench.door.frames.limit - 1000)
    assert await asyncio.wait_for(reader.readexactly(len(payload)), 20) == payload


async def test_a_client_that_leaves_while_it_waits_leaves_the_line(bench: Bench) -> None:
    bench.door.answers.free = 0
    (_, writer), (reader, staying) = await bench.connect(), await bench.connect()
    writer.write(frame("l", b"100"))
    await bench.until_handled(1)
    writer.transport.abort()
    staying.write(frame("l", b"200"))
    await bench.until_handled(2)
    bench.door.answers.give(bench.door.answers.limit)
    assert await asyncio.wait_for(reader.readexactly(3), 20) == b"200"


async def test_a_client_that_is_gone_before_its_answers_gives_its_memory_back(bench: Bench) -> None:
    gone = socket.create_connection((bench.address.host, bench.address.port))
    await bench.until_connected(1)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.sendall(frame("m", b"2000000") + frame("e", b"x" * 1000) * 10)
    gone.close()
    await bench.until_connected(0)
    assert bench.door.handled == ["m2000000"], "the answer could not be sent"
    assert bench.door.frames.free == bench.door.frames.limit


@pytest.fixture
async def narrow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """With memory for eight small buffers, and a sweep that is as late as those of real clocks."""
    for module in (engine_door, framed_door):
        monkeypatch.setattr(module, "SWEEP_SECONDS", 10.01)
    narrow = Bench(inflight_bytes_max=1 << 20)
    yield narrow
    for writer in narrow.writers:
        writer.close()
    await narrow.door.close()
    assert narrow.door.frames.free == narrow.door.frames.limit


async def test_many_who_send_a_byte_and_stop_use_up_no_memory(narrow: Bench) -> None:
    for _ in range(20):
        (await narrow.connect())[1].write(b"e")
    async with asyncio.timeout(20):
        while sum(each.is_stuck for each in narrow.door._connections) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert narrow.door.frames.free == narrow.door.frames.limit
    reader, writer = await narrow.connect()
    writer.write(frame("e", b"fine"))
    assert await asyncio.wait_for(reader.readexactly(4), 20) == b"fine"


async def contested(bench: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that waits for memory for ever; the one that was there before it holds some."""
    taken, bench.door.frames.free = bench.door.frames.free, 0
    reader, writer = await bench.connect()
    writer.write(frame("e", b"waits"))
    async with asyncio.timeout(20):
        while not bench.door.frames.is_contested:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    bench.door.frames.free = taken - bench.door.frames.limit  # other connections hold the rest
    return reader, writer


async def sent(bench: Bench, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Until the door has it."""
    count = bench.broker.metrics.bytes_in + len(data)
    writer.write(data)
    async with asyncio.timeout(20):
        while bench.broker.metrics.bytes_in < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_who_is_sending_a_frame_keeps_its_connection_while_others_wait_for_memory(narrow: Bench) -> None:
    reader, writer = await narrow.connect()
    narrow.clock.advance(10.01 * 3 - 0.1)  # the last sweep was ten seconds ago
    data = frame("e", b"p" * 10_000)
    await sent(narrow, writer, data[:9000])
    await contested(narrow)
    narrow.clock.advance(0.2)
    assert narrow.broker.metrics.connections_active == 2, "it has been sending for a moment"
    writer.write(data[9000:])
    assert await asyncio.wait_for(reader.readexactly(10_000), 20) == b"p" * 10_000
    narrow.door.frames.give(narrow.door.frames.limit - narrow.door.frames.free)


async def test_who_sends_a_frame_byte_by_byte_gives_up_its_memory_to_those_who_wait(narrow: Bench) -> None:
    reader, writer = await narrow.connect()
    data = frame("e", b"p" * 10_000)
    await sent(narrow, writer, data[:9000])
    other, _ = await contested(narrow)
    for at in range(9000, 9002):
        narrow.clock.advance(9)
        await sent(narrow, writer, data[at : at + 1])
    narrow.clock.advance(9)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    narrow.door.frames.give(narrow.door.frames.limit - narrow.door.frames.free)
    assert await asyncio.wait_for(other.readexactly(5), 20) == b"waits"


@pytest.mark.parametrize("first", [1, 5, 1000])
async def test_a_frame_of_which_little_was_there_waits_for_memory_too(narrow: Bench, first: int) -> None:
    """As when a client writes the header first: its bytes are in a buffer that no budget counts."""
    reader, writer = await narrow.connect()
    data = frame("e", b"p" * 10_000)
    await sent(narrow, writer, data[:first])
    other, _ = await contested(narrow)
    writer.write(data[first:])
    async with asyncio.timeout(20):
        while len(narrow.door.frames._waiting) < 2 and narrow.broker.metrics.connections_active == 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for _ in range(10):
        narrow.clock.advance(9)
    assert narrow.broker.metrics.connections_active == 2, "it has sent all it has to send"
    narrow.door.frames.give(narrow.door.frames.limit - narrow.door.frames.free)
    assert await asyncio.wait_for(reader.readexactly(10_000), 20) == b"p" * 10_000
    assert await asyncio.wait_for(other.readexactly(5), 20) == b"waits"


async def test_requests_behind_one_that_waits_for_others_give_up_their_memory(narrow: Bench) -> None:
    reader, writer = await narrow.connect()
    await sent(narrow, writer, frame("j") + frame("e", b"x" * 100) * 100)
    other, _ = await contested(narrow)
    narrow.clock.advance(15)
    assert narrow.broker.metrics.connections_active == 2
    narrow.clock.advance(20)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    narrow.door.joining[0].settle(b"nobody is there")
    narrow.door.frames.give(narrow.door.frames.limit - narrow.door.frames.free)
    assert await asyncio.wait_for(other.readexactly(5), 20) == b"waits"


async def test_the_quietest_connection_makes_room_for_a_new_one() -> None:
    bench = Bench(connections_max=2)
    first, second = [await bench.connect() for _ in range(2)]
    await bench.until_connected(2)
    bench.clock.advance(11)
    first[1].write(frame("e", b"in"))
    assert await first[0].readexactly(2) == b"in"
    third = await bench.connect()
    assert await asyncio.wait_for(second[0].read(), 20) == b""
    for reader, writer in (first, third):
        writer.write(frame("e", b"in"))
        assert await reader.readexactly(2) == b"in"
    assert bench.broker.metrics.connections_evicted == 1
    await bench.door.close()


async def test_a_connection_that_is_owed_an_answer_makes_no_room() -> None:
    bench = Bench(connections_max=1)
    reader, writer = await bench.connect()
    writer.write(frame("w", b"1"))
    await bench.until_handled(1)
    refused, _ = await bench.connect()
    assert await asyncio.wait_for(refused.read(), 20) == b""
    bench.door.waiting[0].settle(None)
    assert await reader.readexactly(1) == b"1"
    assert bench.broker.metrics.connections_refused == 1
    await bench.door.close()


async def test_a_client_that_does_not_read_its_answer_makes_room() -> None:
    bench = Bench(connections_max=1)
    _, unread = await bench.connect()
    unread.write(frame("m", b"50000000"))
    await bench.until_stuck()
    reader, writer = await bench.connect()
    writer.write(frame("e", b"in"))
    assert await asyncio.wait_for(reader.readexactly(2), 20) == b"in"
    assert bench.broker.metrics.connections_evicted == 1
    await bench.door.close()


async def test_a_port_in_use_stops_the_start_and_names_the_flag(bench: Bench) -> None:
    with pytest.raises(StartupError, match="--toy HOST:PORT"):
        ToyDoor(Sessions(bench.broker)).start(bench.address)
