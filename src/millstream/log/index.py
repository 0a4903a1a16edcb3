"""The sparse index of one segment, for offsets and for times at once.

    offset  size  field
         0     4  base offset of a batch, relative to the segment's
         4     4  position of that batch in the segment file
         8     8  largest timestamp of all batches before it in the segment

One entry about every `index.interval.bytes`; entries only grow in all three fields, so one bisection serves "where is
offset N", "where may time T begin" and "which batch starts below position P". The file is memory-mapped and grows by
doubling; behind the last entry it is zero.

Crash policy: an index holds nothing that the segment does not. Entries are trusted only below the log's last
checkpoint, which syncs them; what lies above is written again while the tail is scanned. An entry of zeros says "from
the beginning", which is always true. A reader that finds an entry pointing at anything but the batch it names has the
whole index rebuilt, unless it is the segment that is damaged there: then the entries behind say where reading goes on.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from mmap import mmap
from struct import Struct

from millstream.log.disk import Disk
from millstream.log.slice import OpenFile

_ENTRY = Struct(">IIq")
ENTRY_BYTES = _ENTRY.size
_FIRST_CAPACITY = 256
NO_TIME = -1

Entry = tuple[int, int, int]
"""Relative offset, position, and largest timestamp before it."""
_BEGINNING: Entry = (0, 0, NO_TIME)


def pack(relative: int, position: int, timestamp: int) -> bytes:
    return _ENTRY.pack(relative, position, timestamp)


def entry_at(data: bytes, at: int) -> Entry:
    relative, position, timestamp = _ENTRY.unpack_from(data, at * ENTRY_BYTES)
    return relative, position, timestamp


def entries(data: bytes) -> Iterator[Entry]:
    """What an index file holds. Entries are never at position 0, so the zeros behind the last one end it."""
    for relative, position, timestamp in _ENTRY.iter_unpack(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES]):
        if position == 0:
            return
        yield relative, position, timestamp


class Index:
    __slots__ = ("_capacity", "_disk", "_file", "_is_dirty", "_map", "count", "path")

    def __init__(self, disk: Disk, path: str) -> None:
        """An index over what may be on disk already. The file is opened, or made, with the first use."""
        self._disk = disk
        self.path = path
        self._file: OpenFile | None = None
        self._map: mmap | None = None
        self._capacity = 0
        self._is_dirty = False
        self.count = 0

    def load(self, size_max: int) -> bool:
        """Takes over the entries on disk that lie below a position; False if there is no usable file."""
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return False
        if size % ENTRY_BYTES or size == 0:
            return False
        self._open(size // ENTRY_BYTES)
        # Entries grow and are never at position 0, so the zeros behind the last one end the run.
        low, high = 0, self._capacity
        while low < high:
            middle = (low + high) // 2
            if 0 < self.entry(middle)[1] < size_max:
                low = middle + 1
            else:
                high = middle
        self.count = low
        return True

    def entry(self, at: int) -> Entry:
        if self._map is None:
            self._open(self.count)
        relative, position, timestamp = _ENTRY.unpack_from(self._map, at * ENTRY_BYTES)  # type: ignore[arg-type]
        return relative, position, timestamp

    def reserve(self, more: int) -> None:
        """Has room for so many entries; what cannot be had (a full disk) fails here and not between two of them."""
        if self.count + more > self._capacity:
            self._open(max(_FIRST_CAPACITY, self.count * 2, self.count + more))

    def add(self, relative: int, position: int, timestamp: int) -> None:
        self.reserve(1)
        assert self._map is not None
        _ENTRY.pack_into(self._map, self.count * ENTRY_BYTES, relative, position, timestamp)
        self.count += 1
        self._is_dirty = True

    def by_offset(self, relative: int) -> Entry:
        """The last indexed batch at or before the one that holds a relative offset."""
        return self._last_at_most(0, relative)

    def by_position(self, position: int) -> Entry:
        """The last indexed batch that starts at or before a position."""
        return self._last_at_most(1, position)

    def by_time(self, timestamp: int) -> Entry:
        """The last indexed batch before which every record is older than `timestamp`."""
        return self._last_at_most(2, timestamp - 1)

    def _last_at_most(self, field: int, value: int) -> Entry:
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[field] <= value:
                low = middle + 1
            else:
                high = middle
        return self.entry(low - 1) if low else _BEGINNING

    def to_bytes(self) -> bytes:
        """All entries, for a thread: the index itself may be closed or grow while that reads them."""
        if self._map is None and self.count:
            self._open(self.count)
        return self._map[: self.count * ENTRY_BYTES] if self._map is not None else b""

    def number_at(self, position: int) -> int:
        """How many entries there are for batches that start at or before a position."""
        return bisect_right(range(self.count), position, key=lambda at: self.entry(at)[1])

    def replace(self, data: bytes, position: int) -> None:
        """Takes these entries for all that lie below a position."""
        data += b"".join(pack(*self.entry(at)) for at in range(self.number_at(position - 1), self.count))
        self.clear()
        if data:
            count = len(data) // ENTRY_BYTES
            self.reserve(count)
            assert self._map is not None
            self._map[: len(data)] = data
            self.count = count
            self._is_dirty = True

    def cut(self, position: int) -> None:
        """Forgets the entries of batches that start at or behind a position."""
        while self.count and self.entry(self.count - 1)[1] >= position:
            self.count -= 1
        self.close()

    def clear(self) -> None:
        self.count = 0
        if self._map is None and os.path.exists(self.path):
            self._open(1)
        self.close()

    def sync(self) -> None:
        """Makes the entries durable, also those of a file that was let go since."""
        if not self._is_dirty:
            return
        if self._map is not None and self._file is not None:
            self._disk.sync_map(self._file, self._map)
        else:
            self._disk.sync(self._disk.open(self.path, create=True))
        self._is_dirty = False

    def close(self) -> None:
        """Lets go of the file until the next use, cut to its entries so that nothing stale lies behind them."""
        if self._map is not None and self._file is not None:
            self._map.close()
            if self._capacity != self.count:
                self._disk.truncate(self._file, self.count * ENTRY_BYTES)
                self._is_dirty = True
        self._map = self._file = None
        self._capacity = 0

    def _open(self, capacity: int) -> None:
        if self._map is not None:
            self._map.close()
            self._map, self._capacity = None, 0  # on a full disk there may be no next one
        if self._file is None:
            self._file = self._disk.open(self.path, create=True)
        self._map = self._disk.map(self._file, capacity * ENTRY_BYTES)
        self._capacity = capacity
