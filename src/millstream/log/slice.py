"""The result of a read: bytes in memory, or a range of a file that a door can send without a copy."""

from __future__ import annotations

import os


class OpenFile:
    """A file descriptor that closes when the last reader drops it.

    Retention may remove a segment while a door still sends from it. The range keeps this object, so the descriptor
    stays valid (and is not reused for another file) until the send is done.
    """

    __slots__ = ("fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


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
