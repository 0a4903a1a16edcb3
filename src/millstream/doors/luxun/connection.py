"""A connection of the Luxun door: what the read barrier (`read_barrier.py`) knows of it, and has it do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.doors.engine.connection import Connection
from millstream.doors.luxun.read_barrier import ReadBarrier
from millstream.doors.transport import Transport

if TYPE_CHECKING:
    from millstream.doors.framed.door import FramedDoor
    from millstream.doors.luxun.protocol import LuxunProtocol


class LuxunConnection(Connection):
    __slots__ = ("_barrier", "received")

    protocol: LuxunProtocol

    def __init__(
        self,
        door: FramedDoor,
        transport: Transport,
        peer: str,
        serve: Callable[[Connection], LuxunProtocol],
        barrier: ReadBarrier,
    ) -> None:
        self._barrier = barrier
        self.received = 0
        """In bytes."""
        super().__init__(door, transport, peer, serve)
        barrier.watch(self)

    def fileno(self) -> int:
        return self.transport.fileno()

    def unread_bytes(self) -> int:
        return self.transport.unread_bytes()

    def is_behind(self, mark: int) -> bool:
        """Whether it has not handled its first `mark` bytes yet."""
        kept = len(self._backlog) if self._backlog is not None else 0
        return not self.closed and self.received - kept < mark

    def read_more(self) -> bool:
        """Reads its transport once and handles the bytes; returns whether there were any."""
        if self.is_parked or not self._is_read:
            return False
        before = self.received
        self._on_readable()
        return self.received > before

    def acknowledge(self) -> None:
        if not self.closed:
            self.transport.acknowledge()

    @property
    def is_held_up(self) -> bool:
        """Whether its received bytes wait for its own client's read, or for that client to take its responses."""
        return self.is_written or (self.protocol.waits_for_others and not self.protocol.creates)

    def is_in_a_frame_since(self, moment: float) -> bool:
        """Whether it holds an incomplete frame that began after `moment`."""
        return self.is_inside_frame and self.frame_began > moment

    def _on_readable(self) -> None:
        before = self.door.metrics.bytes_in
        super()._on_readable()
        self.received += self.door.metrics.bytes_in - before

    def _keep(self, rest: memoryview, is_backlog: bool = False) -> None:
        super()._keep(rest, is_backlog)
        self._barrier.keeps(self, self.has_backlog)
        if not (self.has_backlog or self.closed):
            self._barrier.starts_a_frame(self)

    def _go_on(self) -> None:
        outer, self._barrier.is_resuming = self._barrier.is_resuming, True
        try:
            super()._go_on()
        finally:
            self._barrier.is_resuming = outer
        if not self.closed:
            self._barrier.keeps(self, self.has_backlog)
            self._barrier.wake()
