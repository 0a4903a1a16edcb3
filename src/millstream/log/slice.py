"""The result of a read: bytes in memory, or a range of a file that a door can send without a copy."""

from __future__ import annotations

import os

from millstream.core.disk import OpenFile


class Slice:
    """Whole batches: either `data`, or `size` bytes of `file` from `position`."""

    __slots__ = ("data", "file", "next_offset", "position", "size")

    def __init__(
        self,
        size: int,
        next_offset: int,
        data: memoryview | bytes = b"",
        file: OpenFile | None = None,
        position: int = 0,
    ) -> None:
        self.size = size
        self.next_offset = next_offset
        """The offset of the next read."""
        self.data = data
        self.file = file
        self.position = position

    def to_bytes(self) -> bytes:
        if self.file is None:
            return bytes(self.data)
        return os.pread(self.file.fd, self.size, self.position)
