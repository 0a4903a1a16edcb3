"""A disk that forgets: what a power loss, a failed sync or a full disk may leave behind.

`ForgetfulDisk` works on real files, so their readers need no change, and tracks which parts of them are durable. A
crash may change the other parts:

    bytes of a file     durable by `sync` and `sync_map`. Until then each 512-byte sector (4 KiB page of a mapped file)
                        has its new content or an older one: earlier bytes, truncated bytes, zeros.
    length of a file    durable by the same. Until then any length between the shortest and the longest so far.
    a name              new, renamed or removed: durable by `sync_directory`. Until then each change has happened or
                        not, independently of the others; a rename is one change.
    a directory         durable by `sync_directory` of its parent. Until then it may be lost, with its content.

A failed sync (`fail_sync`) acts like the kernel's: the pages count as clean although they never reached the disk.
Reads return them, a later sync succeeds without writing them, and a crash loses them. Only a new write helps. Names
are kinder: after a failed `sync_directory` a later one either fails too or is good (journals do not lie).

A crash has two steps. `lose_power_at` cuts the power at the n-th operation from now, in the middle if it is a write:
that operation and every later one raises `PowerLoss`. `crash` then puts the files into a random state that the model
allows, and answers with a new disk for the next process. The old disk stays dark for ever, so that leftovers of the
old process do no harm.

The model is harsher than most file systems: ext4 would not do half of it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from dataclasses import dataclass, field
from random import Random

from millstream.core.disk import Disk, OpenFile

SECTOR_BYTES = 512
PAGE_BYTES = 4096


class PowerLoss(BaseException):
    """The machine is off. Not an `Exception`, because no code on the machine could handle it."""


@dataclass(eq=False, slots=True)
class _Inode:
    """One file under any name: its durable bytes, and its pending changes."""

    path: str
    durable: bytearray
    number: int
    dirty: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that the next good sync writes."""
    lengths: list[int] = field(default_factory=list)
    ghosts: list[tuple[int, bytes]] = field(default_factory=list)
    """Bytes written and truncated since the last sync; a crash may show them."""
    mapped: bytes | None = None
    """For a mapped file: its bytes at the last sync, to find the dirty pages."""
    kept: bytes | None = None
    """The last bytes of a removed file: a crash may undo the removal."""

    def content(self) -> bytes:
        if self.kept is not None:
            return self.kept
        with open(self.path, "rb") as file:
            return file.read()

    def note_write(self, start: int, end: int) -> None:
        if self.dirty and self.dirty[-1][1] == start:
            self.dirty[-1] = (self.dirty[-1][0], end)
        else:
            self.dirty.append((start, end))

    def unwritten(self, content: bytes) -> list[tuple[int, int]]:
        if self.mapped is None or self.mapped == content:
            return self.dirty
        pages = range(0, len(content), PAGE_BYTES)
        old = self.mapped
        return self.dirty + [
            (at, at + PAGE_BYTES) for at in pages if content[at : at + PAGE_BYTES] != old[at : at + PAGE_BYTES]
        ]

    def keep(self, content: bytes) -> None:
        """A good sync."""
        ranges = self.unwritten(content)
        _resize(self.durable, len(content))
        for start, end in ranges:
            self.durable[start : min(end, len(content))] = content[start:end]
        self.dirty, self.lengths, self.ghosts = [], [], []
        if self.mapped is not None:
            self.mapped = content

    def forget(self, content: bytes) -> None:
        """A failed sync: writes nothing, and marks all pages clean."""
        self.lengths.append(len(content))
        self.dirty = []
        if self.mapped is not None:
            self.mapped = content

    def is_as_it_was(self, name: str) -> bool:
        """Whether a crash leaves the file of that name unchanged."""
        if self.kept is not None or self.path != name or self.dirty or self.lengths:
            return False
        return self.durable == self.content()

    def after_crash(self, random: Random) -> bytes:
        content = self.content()
        lengths = [*self.lengths, len(self.durable), len(content)]
        low, high = min(lengths), max(lengths)
        mood = random.randrange(4)
        if mood == 0:
            return bytes(self.durable)
        length = len(content) if mood == 1 else random.randint(low, high)
        newest = bytearray(content[:length])
        _resize(newest, length)
        result = self.durable[:length]
        _resize(result, length)
        unit = SECTOR_BYTES if self.mapped is None else PAGE_BYTES
        for start, end in self.unwritten(content):
            for at in range(start - start % unit, min(end, length), unit):
                low_at, high_at = max(at, start), min(at + unit, end, length)
                if mood != 3 or random.random() < 0.5:
                    result[low_at:high_at] = newest[low_at:high_at]
        if mood == 3:
            for position, ghost in self.ghosts:
                self._haunt(result, position, ghost, unit, random)
        return bytes(result)

    def _haunt(self, result: bytearray, position: int, ghost: bytes, unit: int, random: Random) -> None:
        for at in range(position - position % unit, min(position + len(ghost), len(result)), unit):
            low, high = max(at, position), min(at + unit, position + len(ghost), len(result))
            if random.random() < 0.3:
                result[low:high] = ghost[low - position : high - position]


@dataclass(eq=False, slots=True)
class _Change:
    """One change of names. `inode` is None for directories."""

    verb: str
    path: str
    target: str = ""
    inode: _Inode | None = None

    def touches(self, directory: str) -> bool:
        return os.path.dirname(self.path) == directory or (
            self.verb == "rename" and os.path.dirname(self.target) == directory
        )

    def apply(self, names: dict[str, _Inode | None]) -> None:
        if self.verb == "create":
            names[self.path] = self.inode
        elif self.verb == "remove":
            if self.path in names and names[self.path] is self.inode:
                del names[self.path]
        elif self.inode is not None:
            if names.get(self.path) is self.inode:
                del names[self.path]
            names[self.target] = self.inode
        else:
            for name in [name for name in names if name == self.path or name.startswith(self.path + os.sep)]:
                names[self.target + name[len(self.path) :]] = names.pop(name)


class ForgetfulDisk(Disk):
    def __init__(self, directory: str) -> None:
        """All files now under `directory` count as durable."""
        self.directory = os.path.abspath(directory)
        self.operations = 0
        self.syncs = 0
        self.is_dark = False
        self._lock = threading.RLock()
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, _Inode | None] = {}
        self._durable: dict[str, _Inode | None] = {}
        self._changes: list[_Change] = []
        self._power_fails_at: int | None = None
        self._random = Random(0)
        self._sync_fails_at: int | None = None
        self._write_fails: tuple[int, int] | None = None
        for parent, directories, files in os.walk(self.directory):
            self._names.update((os.path.join(parent, name), None) for name in directories)
            for name in files:
                self._adopt(os.path.join(parent, name))
        self._durable.update(self._names)

    # -- faults --------------------------------------------------------------------------------------------------------

    def lose_power_at(self, operation: int, random: Random) -> None:
        """The power fails at the n-th operation from now (1: the next)."""
        self._power_fails_at, self._random = self.operations + operation, random

    def fail_sync(self, at: int) -> None:
        """The n-th sync from now (1: the next) fails with EIO and loses its writes."""
        self._sync_fails_at = self.syncs + at

    def fail_write(self, number: int, after_bytes: int) -> None:
        """After `after_bytes` more bytes, one write stops in the middle with errno `number`."""
        self._write_fails = number, after_bytes

    def crash(self, random: Random) -> ForgetfulDisk:
        """Leaves the directory as after a power loss, and answers with the next process's disk."""
        with self._lock:
            self.is_dark = True
            names = dict(self._durable)
            mood = random.randrange(3)
            for change in self._changes:
                if mood == 1 or (mood == 2 and random.random() < 0.5):
                    change.apply(names)
            orphans = {name for name in names if not self._has_parents(name, names)}
            contents = {
                name: inode.after_crash(random)
                for name, inode in names.items()
                if inode is not None and name not in orphans and not inode.is_as_it_was(name)
            }
            for name in sorted(set(self._names) - (set(names) - orphans), reverse=True):
                if os.path.isdir(name):
                    shutil.rmtree(name)
                elif os.path.exists(name):
                    os.remove(name)
            for name in sorted(name for name, inode in names.items() if inode is None and name not in orphans):
                os.makedirs(name, exist_ok=True)
            for name, content in contents.items():
                if os.path.exists(name):
                    os.remove(name)
                with open(name, "wb") as file:
                    file.write(content)
        return ForgetfulDisk(self.directory)

    def _has_parents(self, name: str, names: dict[str, _Inode | None]) -> bool:
        parent = os.path.dirname(name)
        while parent != self.directory:
            if names.get(parent, self) is not None:
                return False
            parent = os.path.dirname(parent)
        return True

    def _step(self) -> None:
        if self.is_dark:
            raise PowerLoss
        self.operations += 1
        if self.operations == self._power_fails_at:
            self.is_dark = True
            raise PowerLoss

    def _does_sync_fail(self) -> bool:
        self.syncs += 1
        return self.syncs == self._sync_fails_at

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _adopt(self, path: str) -> _Inode:
        """Adds a file not created by this disk, as durable."""
        with open(path, "rb") as file:
            inode = _Inode(path, bytearray(file.read()), os.fstat(file.fileno()).st_ino)
        self._inodes[inode.number] = inode
        self._names[path] = self._durable[path] = inode
        return inode

    def _inode(self, file: OpenFile) -> _Inode:
        return self._inodes[os.fstat(file.fd).st_ino]

    def open(self, path: str, create: bool = False) -> OpenFile:
        with self._lock:
            if os.path.exists(path) or not create:
                if self.is_dark:
                    raise PowerLoss
                file = super().open(path)
                if path not in self._names:
                    self._adopt(path)
                return file
            self._step()
            file = super().open(path, create)
            inode = _Inode(path, bytearray(), os.fstat(file.fd).st_ino)
            self._inodes[inode.number] = self._names[path] = inode
            self._changes.append(_Change("create", path, inode=inode))
            return file

    def append(self, file: OpenFile, data: memoryview | bytes | bytearray) -> None:
        with self._lock:
            try:
                self._step()
            except PowerLoss:
                if self.operations == self._power_fails_at:
                    self._write(file, data[: self._random.randrange(len(data) + 1)])
                raise
            failure = None
            if self._write_fails is not None:
                number, room = self._write_fails
                if len(data) > room:
                    failure, data, self._write_fails = OSError(number, os.strerror(number)), data[:room], None
                else:
                    self._write_fails = number, room - len(data)
            self._write(file, data)
            if failure is not None:
                raise failure

    def _write(self, file: OpenFile, data: memoryview | bytes | bytearray) -> None:
        inode, position = self._inode(file), os.fstat(file.fd).st_size
        super().append(file, data)
        inode.note_write(position, position + len(data))
        inode.lengths.append(position + len(data))

    def rewrite(self, path: str, position: int, data: memoryview | bytes) -> None:
        with self._lock:
            self._step()
            inode = self._names.get(path) or self._adopt(path)
            size = os.stat(path).st_size
            super().rewrite(path, position, data)
            inode.note_write(position, position + len(data))
            inode.lengths.append(max(size, position + len(data)))

    def truncate(self, file: OpenFile, size: int) -> None:
        with self._lock:
            old = os.fstat(file.fd).st_size
            if size == old:
                return
            self._step()
            inode = self._inode(file)
            if size < old:
                inode.ghosts.append((size, os.pread(file.fd, old - size, size)))
                inode.note_write(size, old)
            inode.lengths.append(size)
            super().truncate(file, size)

    def map(self, file: OpenFile, size: int) -> mmap.mmap:
        with self._lock:
            inode = self._inode(file)
            if inode.mapped is None:
                inode.mapped = bytes(inode.durable)
            if os.fstat(file.fd).st_size < size:
                self._step()
                inode.lengths.append(size)
            elif self.is_dark:
                raise PowerLoss
            return super().map(file, size)

    def sync(self, file: OpenFile) -> None:
        with self._lock:
            self._step()
            inode = self._inode(file)
            if self._does_sync_fail():
                inode.forget(inode.content())
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            inode.keep(inode.content())

    def sync_map(self, file: OpenFile, mapped: mmap.mmap) -> None:
        self.sync(file)

    # -- names ---------------------------------------------------------------------------------------------------------

    def make_unsynced_directory(self, directory: str) -> None:
        with self._lock:
            self._step()
            super().make_unsynced_directory(directory)
            self._names[directory] = None
            self._changes.append(_Change("create", directory))

    def unmake_directory(self, directory: str) -> None:
        with self._lock:
            self._step()
            super().unmake_directory(directory)
            del self._names[directory]
            self._changes.append(_Change("remove", directory))

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._step()
            if self._does_sync_fail():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            for change in [change for change in self._changes if change.touches(path)]:
                change.apply(self._durable)
                self._changes.remove(change)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._step()
            inode = self._names[source] if source in self._names else self._take_in(source)
            replaced = self._names.get(target)
            if replaced is not None:
                replaced.kept = replaced.content()
            super().rename(source, target)
            change = _Change("rename", source, target, inode)
            change.apply(self._names)
            self._changes.append(change)
            for name, moved in self._names.items():
                if moved is not None and moved.path != name:
                    moved.path = name

    def _take_in(self, path: str) -> _Inode | None:
        """Adds a file or directory that other code created."""
        if os.path.isdir(path):
            self._names[path] = self._durable[path] = None
            return None
        return self._adopt(path)

    def remove(self, path: str) -> None:
        with self._lock:
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._step()
            inode = self._names.get(path) or self._adopt(path)
            inode.kept = inode.content()
            super().remove(path)
            del self._names[path]
            self._changes.append(_Change("remove", path, inode=inode))

    def remove_tree(self, path: str) -> None:
        with self._lock:
            for parent, _, files in os.walk(path, topdown=False):
                for name in files:
                    self.remove(os.path.join(parent, name))
                self._step()
                os.rmdir(parent)
                self._names.pop(parent, None)
                self._changes.append(_Change("remove", parent))


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))
