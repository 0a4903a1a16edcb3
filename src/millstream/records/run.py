"""Several batches for one partition that are stored as one: what a log is given for many small appends at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from millstream.records.batch import BatchHeader, read_header, read_prefix


class BatchRun(Protocol):
    """Whole batches behind each other, each checked, none with a producer id, at least one."""

    @property
    def data(self) -> bytearray: ...

    @property
    def count(self) -> int:
        """How many batches there are."""

    @property
    def offsets(self) -> int:
        """How many offsets they take."""

    @property
    def max_timestamp(self) -> int: ...

    def place(self, base_offset: int, leader_epoch: int) -> None:
        """Gives the batches their places in the log."""


def split(data: bytearray) -> Iterator[tuple[memoryview, BatchHeader]]:
    """The batches of a run, one by one."""
    view, position = memoryview(data), 0
    while position < len(view):
        size = read_prefix(view, position)[1]
        yield view[position : position + size], read_header(view, position)
        position += size
