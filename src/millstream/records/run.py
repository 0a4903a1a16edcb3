"""Several batches for one partition that a log stores with one write: many small appends at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from millstream.records.batch import BatchHeader, read_header, read_prefix


class BatchRun(Protocol):
    """One or more whole batches in sequence, each checked, none with a producer id."""

    @property
    def data(self) -> bytearray: ...

    @property
    def count(self) -> int:
        """The number of batches."""

    @property
    def offsets(self) -> int:
        """The number of offsets they take."""

    @property
    def max_timestamp(self) -> int: ...

    def place(self, base_offset: int, leader_epoch: int) -> None:
        """Sets the batches' offsets and leader epoch."""


def split(data: bytearray) -> Iterator[tuple[memoryview, BatchHeader]]:
    """The batches of a run, one by one."""
    view, position = memoryview(data), 0
    while position < len(view):
        size = read_prefix(view, position)[1]
        yield view[position : position + size], read_header(view, position)
        position += size
