"""The few file operations that durability depends on, behind one object.

Everything that decides what survives a crash goes through a `Disk`: writing, truncating, syncing, renaming. Tests
replace it with one that forgets whatever was not synced (`millstream.testing.disk.ForgetfulDisk`). Reading does not
matter for durability and goes straight to the operating system.

Files are readable and writable by their owner alone, whatever the umask says: other local users must not read records.

Rules of the real disk, which callers rely on:
- A new name (file, directory, rename) is durable only after `sync_directory` on its parent.
- `sync` makes a file's bytes and its length durable. If it fails, what was written since the last good sync may be gone
  although a read still shows it: the caller must stop trusting the file, and must not retry.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil

from millstream.log.slice import OpenFile

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def restrict(path: str, mode: int) -> None:
    """Takes away what others may do with a file or directory, where it is ours and there is one."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.stat(path).st_mode & 0o777 & ~mode:
            os.chmod(path, mode)


def restrict_tree(path: str) -> None:
    """The same for a directory and all that is in it; without a look inside where others cannot come in anyway.

    The directory itself comes last: as long as it is open to others, the next start begins again.
    """
    if not os.path.isdir(path) or not os.stat(path).st_mode & 0o777 & ~DIRECTORY_MODE:
        return
    for parent, directories, files in os.walk(path):
        for name in directories:
            restrict(os.path.join(parent, name), DIRECTORY_MODE)
        for name in files:
            restrict(os.path.join(parent, name), FILE_MODE)
    restrict(path, DIRECTORY_MODE)


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
        """Writes bytes over the same bytes, in place: makes pages dirty again whose earlier sync may have failed."""
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
        """Maps the first `size` bytes, growing the file to that size where it is shorter."""
        if os.fstat(file.fd).st_size < size:
            self._grow(file.fd, size)
        return mmap.mmap(file.fd, size)

    def _grow(self, fd: int, size: int) -> None:
        """With blocks behind it: a store into a mapped hole on a full disk would end the process with SIGBUS."""
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
        """Makes a directory and its parents; each new name is durable when this returns."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            self.make_unsynced_directory(directory)
            try:
                self.sync_directory(os.path.dirname(directory))
            except OSError:
                # Or the next one to come by would find the directory, and take its name for durable.
                self.unmake_directory(directory)
                raise

    def make_unsynced_directory(self, directory: str) -> None:
        """Makes a directory whose name is not durable yet; nothing where there is one."""
        with contextlib.suppress(FileExistsError):  # another broker, at the same moment
            os.mkdir(directory, DIRECTORY_MODE)

    def unmake_directory(self, directory: str) -> None:
        """Removes a directory that is empty."""
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
        """Gives up what was held back for a full disk; whether there was anything. See `reserve.py`."""
        return False

    def make_room_if_full(self) -> None:
        return None

    def hold_back(self) -> None:
        return None

    def replace(self, path: str, data: bytes) -> None:
        """Gives a file new content as one step: after a crash it holds the old content or the new."""
        temporary = path + ".new"
        if os.path.exists(temporary):
            self.remove(temporary)
        file = self.open(temporary, create=True)
        self.append(file, data)
        self.sync(file)
        self.rename(temporary, path)
        self.sync_directory(os.path.dirname(path))
