"""Disk space that the broker holds in reserve, so that clients can still empty a full disk.

    DIR/reserve    blocks of up to 4 MiB, without content

Deleting a topic commits to the metadata, and a trim writes a checkpoint: both need a little space. On a full disk they
free the reserve (`make_room`); `hold_back` allocates it again when there is space. Appends and other commits never
use it. A broker that starts on a full disk frees it first.
"""

from __future__ import annotations

import contextlib
import os
import shutil

from millstream.core.disk import FILE_MODE, Disk

RESERVE_BYTES = 4 << 20
SHARE_OF_DISK = 16
"""The reserve takes at most 1/16 of a small disk."""
STEP_BYTES = 64 << 10
"""The smallest useful reserve."""
BLOCK_BYTES = 512
"""The unit of `st_blocks` on every file system."""


class ReservingDisk(Disk):
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, "reserve")

    @property
    def _wanted(self) -> int:
        return min(RESERVE_BYTES, shutil.disk_usage(self._directory).total // SHARE_OF_DISK)

    def make_room(self) -> bool:
        try:
            held = os.stat(self._path).st_blocks > 0
            os.remove(self._path)
        except OSError:
            return False
        return held

    def make_room_if_full(self) -> None:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._directory).free < self._wanted:
                self.make_room()

    def hold_back(self) -> None:
        """Allocates as much as fits, unless the reserve is large enough."""
        with contextlib.suppress(OSError):
            held, size = self._held(), self._wanted
            while size >= STEP_BYTES and size > held and not self._allocate(size, held):
                size //= 2

    def _held(self) -> int:
        """Counts blocks, not the length: a killed process may have left a file without blocks."""
        try:
            return os.stat(self._path).st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _allocate(self, size: int, held: int) -> bool:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            if held:
                os.ftruncate(fd, held)
            else:
                os.remove(self._path)
            return False
        finally:
            os.close(fd)
        return True
