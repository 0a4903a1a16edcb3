"""A position in a message that clients wrote: it never leaves the message."""

from __future__ import annotations

from struct import Struct

from millstream.core.errors import ProtocolError


class BoundedReader:
    """Checks every length against the remaining bytes before it is used."""

    __slots__ = ("buffer", "end", "position")

    def __init__(self, buffer: memoryview, position: int = 0) -> None:
        self.buffer = buffer
        self.position = position
        self.end = len(buffer)

    def unpack(self, layout: Struct) -> tuple[int, ...]:
        position = self._advance(layout.size)
        return layout.unpack_from(self.buffer, position)

    def _advance(self, size: int) -> int:
        """Moves behind a field of this size; returns where it starts."""
        position = self.position
        if size < 0 or position + size > self.end:
            raise ProtocolError(f"a field of {size} bytes does not fit into the {self.end - position} that are left")
        self.position = position + size
        return position
