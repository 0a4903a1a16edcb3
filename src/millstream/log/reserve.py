"""Room that is held back on a disk, so that a full one can be emptied through the broker.

    DIR/reserve    blocks of up to 4 MiB, without content

Deleting a topic commits to the metadata, and a trim writes a checkpoint: both need a little room. When they find none
the reserve is given up (`make_room`), and taken again when there is room (`hold_back`). Appends and other commits never
get it. A broker that starts on a full disk gives it up first.
"""

from __future__ import annotations

import contextlib
import os
import shutil

from millstream.log.disk import FILE_MODE, Disk

RESERVE_BYTES = 4 << 20
SHARE_OF_DISK = 16
"""Of a small disk no more than this part of it is held back."""
STEP_BYTES = 64 << 10
"""Less is not worth holding back."""
BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's is."""


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
        """As much as there is room for, unless enough is held back now."""
        with contextlib.suppress(OSError):
            held, size = self._held(), self._wanted
            while size >= STEP_BYTES and size > held and not self._allocate(size, held):
                size //= 2

    def _held(self) -> int:
        """The blocks, and not the length: a process that was killed may have left a file without any."""
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
