"""The read barrier: a read sees every oneway item that the door has received, on any connection.

Luxun's producers send `asyncProduce` and regard an item as sent when its bytes are in the socket. A consume on another
connection expects to see it. So a read first waits for items in these stages:

    accept queue --> socket --> frame --> append in flight --> durable: visible

Rules
-----
1. A read waits for the bytes in the kernel at its arrival, not for later ones: a busy producer starves no reader. A
   connection's mark is its count of received bytes after those are read.
2. A read does not wait for a connection that waits for a read of its own, or whose client does not take its responses.
   That client is synchronous and sends nothing before the response, and two reads must not wait for each other.
3. A read does not wait for appends in flight to other topics.
4. Bytes may still be in the producer's own send buffer, for three reasons. Nagle's algorithm (RFC 896) keeps them until
   earlier bytes are acknowledged: the door makes the kernel acknowledge now. The rest of a frame is in flight: the read
   waits while the frame is younger than `ARRIVAL_SECONDS`, so a producer that stops within a frame delays no reader for
   longer. TCP's window was closed, because the socket was full: the door reads the socket until it is empty, or has
   given one more send buffer, for `DRAIN_SECONDS_MAX` at most.
5. A read waits at most `WAIT_SECONDS_MAX` and then returns the visible items. It stops if its connection closes.
6. A read stops waiting for an item that is refused or whose append fails, and for bytes whose connection closes. It
   waits for an append in flight even if its producer is gone: the item may become visible.

If no item is in flight, which is the usual case, a read costs one poll without a timeout.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
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
"""From this many unread bytes on TCP's window may have been closed: small segments waste receive buffer."""
SEND_BUFFER_BYTES = 4 << 20
"""The limit of Linux's send buffer autotuning (tcp_wmem)."""
DRAIN_SECONDS_MAX = 1.0
EMPTY_SECONDS = 0.001
"""After this time without bytes the producer's send buffer counts as empty."""
READS_PER_TURN = 8
"""Reads of other connections in one turn of the event loop."""
ROUNDS = 2
"""Rounds of receiving: bytes in the kernel, and bytes that follow their acknowledgement."""
ACCEPTS_MAX = 32
"""Rounds of accepting connections for one read."""


class Appends:
    """A batch of oneway items in flight to one topic. A read that waits for it closes it to further items."""

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
        """By topic: closed batches, then at most one open batch; none is empty."""
        self._changed: asyncio.Future[None] | None = None
        self._kept: set[LuxunConnection] = set()
        """Connections with received frames that they cannot handle yet."""
        self._partial: dict[LuxunConnection, int] = {}
        """Connections with a recent incomplete frame, and that frame's number."""
        self._frames = itertools.count()
        self._unacknowledged: set[LuxunConnection] = set()
        """Connections that sent oneway items since the last `acknowledge`."""
        self.is_resuming = False
        """Whether a connection resumes within another's work, whose state is then unknown."""

    # -- items in flight ---------------------------------------------------------------------------------------------

    def listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def watch(self, connection: LuxunConnection) -> None:
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def forget(self, connection: LuxunConnection) -> None:
        """Call before its socket closes."""
        self._selector.unregister(connection)
        self._kept.discard(connection)
        self._partial.pop(connection, None)
        self._unacknowledged.discard(connection)
        self.wake()

    def close(self) -> None:
        self._selector.close()

    def began(self, topic: str, producer: LuxunConnection) -> Appends:
        """Counts the append of a oneway item; pass the result to `ended`."""
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
        """Wakes the reads that wait."""
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
        """Returns when all items that the door has received for the topic are visible; False after a timeout."""
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
            delays.warning("a read of topic %s by %s stopped waiting for items in flight", topic, reader.peer)
        return not late

    async def _receive(self, reader: LuxunConnection, is_late: Callable[[], bool]) -> None:
        """Makes the other connections handle their received bytes."""
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
        return {each: each.unread_bytes() for each in ready if each is not None and each is not reader}

    async def _reach(self, marks: dict[LuxunConnection, int], is_late: Callable[[], bool]) -> None:
        while not is_late() and (marks := await self._behind(marks)):
            if is_late():  # nothing wakes a read whose timer has fired
                return
            await self._change()

    async def _behind(self, marks: dict[LuxunConnection, int]) -> dict[LuxunConnection, int]:
        """Reads and handles available bytes; returns the connections that are still behind."""
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
        """Whether the rest of a frame may arrive soon. Drops complete and late frames."""
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
