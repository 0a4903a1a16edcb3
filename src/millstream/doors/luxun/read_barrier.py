"""The read barrier: a read sees every oneway item that the door has received, on any connection.

Luxun's producers send `asyncProduce` and take an item for sent when its bytes are in the socket. A consume on another
connection expects to find it. So a read first waits for what lies before it on the way of an item:

    accept queue --> socket --> frame --> append in flight --> durable: visible

Rules
-----
1. What the kernel holds when the read comes is waited for, and what comes later is not: a busy producer starves no
   reader. A connection's mark is how many bytes it will have received when those are read.
2. A connection that waits for the answer to a read of its own, or does not take its answers, is not waited for. Its
   client is synchronous and sends nothing before that answer, and two readers must not wait for each other.
3. Items of other topics are not waited for once they are appends in flight.
4. Bytes may still be in the producer's own send buffer, for three reasons. Nagle's algorithm keeps them until what was
   sent before is acknowledged: the kernel is told to acknowledge now. The rest of a frame is on its way: it is waited
   for while the frame is younger than `ARRIVAL_SECONDS`, so that a producer that stops in the middle delays no reader
   for longer. TCP's window was closed, because the socket was full: it is read until it is empty, or has given as much
   more as a send buffer holds, for `DRAIN_SECONDS_MAX`.
5. A read waits `WAIT_SECONDS_MAX` at most and then answers with what is there. If its connection closes it stops.
6. A read stops waiting for an item that is refused or whose append fails, and for bytes whose connection closes. An
   append in flight is waited for even if its producer is gone: the item may become visible.

Where nothing is on its way, which is the usual case, a read costs one poll without a timeout.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import selectors
import sys
import termios
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from millstream.core.logs import Damped

if TYPE_CHECKING:
    from millstream.core.clock import Clock
    from millstream.doors.listener import Listener
    from millstream.doors.luxun.connection import LuxunConnection

delays = Damped(__name__)

ARRIVAL_SECONDS = 0.1
WAIT_SECONDS_MAX = 10.0
FULL_BYTES = 16 << 10
"""Unread bytes from which on TCP's window may have been closed: small segments use a receive buffer up many times."""
SEND_BUFFER_BYTES = 4 << 20
"""The most that Linux lets a send buffer grow to by itself (tcp_wmem)."""
DRAIN_SECONDS_MAX = 1.0
EMPTY_SECONDS = 0.001
"""How long a socket must stay empty before its producer's send buffer is taken for empty."""
READS_PER_TURN = 8
"""From sockets of other connections, before the loop serves its other clients."""
ROUNDS = 2
"""Of receiving: what is there, and what comes when that is acknowledged."""
ACCEPTS_MAX = 32
"""Rounds of accepting connections for one read."""


class Appends:
    """Oneway items of one topic that are in flight. A read that waits for them closes the batch: no more come to it."""

    __slots__ = ("count", "is_closed")

    def __init__(self) -> None:
        self.count = 0
        self.is_closed = False


class ReadBarrier:
    def __init__(self, clock: Clock, listener: Listener) -> None:
        self._clock = clock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._in_flight: dict[str, list[Appends]] = {}
        """By topic, none of them empty: closed batches, and one that is open last."""
        self._changed: asyncio.Future[None] | None = None
        self._kept: set[LuxunConnection] = set()
        """Connections with frames that they have received and cannot handle yet."""
        self._partial: dict[LuxunConnection, int] = {}
        """Connections that have received the beginning of a frame, lately, and the frame's number."""
        self._frames = itertools.count()
        self._unacknowledged: set[LuxunConnection] = set()
        """Connections that oneway items came from, since the kernel was last told to acknowledge what they sent."""
        self.is_resuming = False
        """Whether a connection goes on in the middle of another's work, of which nothing is known then."""

    # -- what is on its way ------------------------------------------------------------------------------------------

    def listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def watch(self, connection: LuxunConnection) -> None:
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def forget(self, connection: LuxunConnection) -> None:
        """Before its socket closes."""
        self._selector.unregister(connection)
        self._kept.discard(connection)
        self._partial.pop(connection, None)
        self._unacknowledged.discard(connection)
        self.wake()

    def close(self) -> None:
        self._selector.close()

    def began(self, topic: str, producer: LuxunConnection) -> Appends:
        """A oneway item is appended; the answer goes to `ended`."""
        self._unacknowledged.add(producer)
        batches = self._in_flight.setdefault(topic, [])
        if not batches or batches[-1].is_closed:
            batches.append(Appends())
        batches[-1].count += 1
        return batches[-1]

    def ended(self, topic: str, appends: Appends) -> None:
        appends.count -= 1
        if appends.count == 0:
            batches = self._in_flight[topic]
            batches.remove(appends)
            if not batches:
                del self._in_flight[topic]
            self.wake()

    def keeps(self, connection: LuxunConnection, has_frames: bool) -> None:
        if has_frames:
            self._kept.add(connection)
        else:
            self._kept.discard(connection)

    def starts_a_frame(self, connection: LuxunConnection) -> None:
        self._partial[connection] = next(self._frames)

    def wake(self) -> None:
        """Something that reads may wait for is done."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    # -- reads -------------------------------------------------------------------------------------------------------

    def is_clear(self, topic: str, reader: LuxunConnection) -> bool:
        """Whether a read of the topic need not wait."""
        if self.is_resuming or self._kept or topic in self._in_flight or self._arriving(reader):
            return False
        self._acknowledge()
        ready = self._selector.select(0)
        return not ready or (len(ready) == 1 and ready[0][0].data is reader)

    async def passed(self, topic: str, reader: LuxunConnection) -> bool:
        """Returns when everything is visible that the door has received for the topic; False: it took too long."""
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            self.wake()

        timer = self._clock.call_later(WAIT_SECONDS_MAX, give_up)
        try:
            await self._receive(reader, lambda: late or reader.closed)
            batches = list(self._in_flight.get(topic, ()))
            for appends in batches:
                appends.is_closed = True
            while any(appends.count for appends in batches) and not (late or reader.closed):
                await self._change()
        finally:
            timer.cancel()
        if late:
            delays.warning("a read of %s by %s did not wait longer for items in flight", topic, reader.peer)
        return not late

    async def _receive(self, reader: LuxunConnection, is_late: Callable[[], bool]) -> None:
        """Has the other connections handle what they are sent."""
        await self._accept()
        full: dict[LuxunConnection, int] = {}
        for _ in range(ROUNDS):
            self._acknowledge()
            unread = self._unread(reader)
            marks = {each: each.received for each in self._kept if each is not reader}
            marks.update((each, each.received + count) for each, count in unread.items())
            full.update((each, marks[each] + SEND_BUFFER_BYTES) for each in unread if unread[each] >= FULL_BYTES)
            await self._reach(marks, is_late)
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS_MAX
        while full and not is_late() and asyncio.get_running_loop().time() < deadline:
            self._acknowledge()
            await asyncio.sleep(EMPTY_SECONDS)
            unread = self._unread(reader)
            full = {each: end for each, end in full.items() if self._holds(each, unread) and each.received < end}
            await self._reach({each: each.received + unread.get(each, 0) for each in full}, is_late)
        await self._await_arrivals(reader)

    def _holds(self, connection: LuxunConnection, unread: Container[LuxunConnection]) -> bool:
        return not connection.is_held_up and (connection in unread or connection in self._kept)

    def _acknowledge(self) -> None:
        while self._unacknowledged:
            self._unacknowledged.pop().acknowledge()

    async def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            if all(key.data is not None for key, _ in self._selector.select(0)):
                return
            self._listener.accept()
            await asyncio.sleep(0)

    def _unread(self, reader: LuxunConnection) -> dict[LuxunConnection, int]:
        ready = [key.data for key, _ in self._selector.select(0)]
        return {each: unread_bytes(each) for each in ready if each is not None and each is not reader}

    async def _reach(self, marks: dict[LuxunConnection, int], is_late: Callable[[], bool]) -> None:
        while not is_late() and (marks := await self._behind(marks)):
            if is_late():  # nothing wakes a read whose timer has fired
                return
            await self._change()

    async def _behind(self, marks: dict[LuxunConnection, int]) -> dict[LuxunConnection, int]:
        """Reads and handles what can be; answers with the connections that wait for something."""
        behind, reads = {}, 0
        for connection, mark in marks.items():
            while connection.is_behind(mark) and connection.read_more():
                reads += 1
                if reads % READS_PER_TURN == 0:
                    await asyncio.sleep(0)
            if connection.is_behind(mark) and not connection.is_held_up:
                behind[connection] = mark
        return behind

    def _arriving(self, reader: LuxunConnection) -> bool:
        """Whether the rest of a frame may come at any moment; forgets what is whole, or late."""
        if not self._partial:
            return False
        oldest = self._clock.monotonic() - ARRIVAL_SECONDS
        for connection in [each for each in self._partial if not each.is_in_a_frame_since(oldest)]:
            del self._partial[connection]
        return bool(self._partial.keys() - {reader})

    async def _await_arrivals(self, reader: LuxunConnection) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ARRIVAL_SECONDS
        frames = {each: number for each, number in self._partial.items() if each is not reader}
        while frames and self._arriving(reader) and loop.time() < deadline:
            frames = {each: number for each, number in frames.items() if self._partial.get(each) == number}
            for connection in frames:
                connection.acknowledge()
            await asyncio.sleep(0.001)

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)


def unread_bytes(connection: LuxunConnection) -> int:
    """What the kernel has received for it."""
    count = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)
