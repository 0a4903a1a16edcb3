"""The file operations that durability depends on, behind one object.

Every operation that decides what survives a crash goes through a `Disk`: write, truncate, sync, rename. Tests replace
it with a disk that drops all unsynced bytes (`millstream.testing.disk.ForgetfulDisk`). Reads do not affect durability
and go straight to the operating system.

Only their owner can read and write the files, whatever the umask is: other local users must not read records.

Rules of the real disk, which callers rely on:
- A new name (file, directory, rename) is durable only after `sync_directory` on its parent.
- `sync` makes a file's bytes and its length durable. If it fails, bytes written since the last good sync may be lost,
  although the page cache still shows them: the caller must stop trusting the file, and must not retry.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterable

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def restrict(path: str, mode: int) -> None:
    """Removes other users' access to a file or directory, if it exists and is ours."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.stat(path).st_mode & 0o777 & ~mode:
            os.chmod(path, mode)


def restrict_tree(path: str) -> None:
    """Restricts a directory and its content. Skips a directory that other users cannot enter.

    The directory itself comes last, so that the next start repeats an interrupted run.
    """
    if not os.path.isdir(path) or not os.stat(path).st_mode & 0o777 & ~DIRECTORY_MODE:
        return
    for parent, directories, files in os.walk(path):
        for name in directories:
            restrict(os.path.join(parent, name), DIRECTORY_MODE)
        for name in files:
            restrict(os.path.join(parent, name), FILE_MODE)
    restrict(path, DIRECTORY_MODE)


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


class Disk:
    def open(self, path: str, create: bool = False) -> OpenFile:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return OpenFile(path, os.open(path, flags, FILE_MODE))

    def append(self, file: OpenFile, data: memoryview | bytes | bytearray) -> None:
        """Writes all of `data` at the end of the file; raises OSError with the file possibly longer than before."""
        written = os.write(file.fd, data)
        if written != len(data):
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[os.write(file.fd, rest) :]

    def rewrite(self, path: str, position: int, data: memoryview | bytes) -> None:
        """Writes the same bytes in place: marks pages dirty again whose earlier sync may have failed."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                written = os.pwrite(fd, data, position)
                data, position = data[written:], position + written
        finally:
            os.close(fd)

    def truncate(self, file: OpenFile, size: int) -> None:
        os.ftruncate(file.fd, size)

    def sync(self, file: OpenFile) -> None:
        os.fdatasync(file.fd)

    def map(self, file: OpenFile, size: int) -> mmap.mmap:
        """Maps the first `size` bytes; grows the file to that size if it is shorter."""
        if os.fstat(file.fd).st_size < size:
            self._grow(file.fd, size)
        return mmap.mmap(file.fd, size)

    def _grow(self, fd: int, size: int) -> None:
        """Allocates blocks: a store into a mapped hole on a full disk would end the process with SIGBUS."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF):
                raise
            os.ftruncate(fd, size)

    def sync_map(self, file: OpenFile, mapped: mmap.mmap) -> None:
        mapped.flush()
        os.fsync(file.fd)

    def make_directory(self, path: str) -> None:
        """Makes a directory and its parents; all new names are durable on return."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            self.make_unsynced_directory(directory)
            try:
                self.sync_directory(os.path.dirname(directory))
            except OSError:
                # Else the next call would find the directory, and assume that its name is durable.
                self.unmake_directory(directory)
                raise

    def make_unsynced_directory(self, directory: str) -> None:
        """Makes a directory if it is missing; its name is not durable yet."""
        with contextlib.suppress(FileExistsError):  # another broker made it just now
            os.mkdir(directory, DIRECTORY_MODE)

    def unmake_directory(self, directory: str) -> None:
        """Removes an empty directory."""
        with contextlib.suppress(OSError):
            os.rmdir(directory)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def make_room(self) -> bool:
        """Frees the reserve for a full disk; returns whether there was one. See `reserve.py`."""
        return False

    def make_room_if_full(self) -> None:
        return None

    def hold_back(self) -> None:
        return None

    def replace(self, path: str, data: bytes | Iterable[bytes]) -> None:
        """Replaces a file's content, given whole or in pieces, atomically: after a crash it holds the old content or
        the new.
        """
        temporary = path + ".new"
        if os.path.exists(temporary):
            self.remove(temporary)
        file = self.open(temporary, create=True)
        for piece in (data,) if isinstance(data, bytes) else data:
            self.append(file, piece)
        self.sync(file)
        self.rename(temporary, path)
        self.sync_directory(os.path.dirname(path))
