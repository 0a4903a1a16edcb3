"""The first offset of each leader epoch (KIP-101).

Every batch carries the epoch of the leader that first stored it. A log keeps the offset where each epoch begins. A
returning follower asks the leader for the end offset of its last epoch, and truncates its log to that offset.

Rules
-----
1. Epochs and their first offsets rise. An epoch without a batch is dropped when a later one begins at the same offset.
2. The history is cut with the log, at both ends. The epoch at the log's start then begins at that start.
3. The checkpoint holds the history up to its offset; recovery adds the epochs of the batches after it.
4. A log with one copy has one leader: epoch 0 from offset 0. That history is not stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from millstream.core.errors import Code

NO_EPOCH = -1


class Epochs:
    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[Sequence[int]] = ((0, 0),)) -> None:
        self._entries = [(epoch, first) for epoch, first in entries]

    @property
    def latest(self) -> int:
        return self._entries[-1][0] if self._entries else NO_EPOCH

    def check(self, claimed: int) -> Code:
        """Whether a client's idea of the current epoch is up to date (KIP-320); -1: not given."""
        if claimed > self.latest:
            return Code.UNKNOWN_LEADER_EPOCH
        return Code.FENCED_LEADER_EPOCH if NO_EPOCH < claimed < self.latest else Code.NONE

    def begin(self, epoch: int, offset: int) -> None:
        """Starts an epoch at an offset. Does nothing for the latest epoch."""
        if epoch < self.latest:
            raise ValueError(f"epoch {epoch} cannot begin at {offset}: epoch {self.latest} has begun")
        if epoch == self.latest:
            return
        while self._entries and self._entries[-1][1] >= offset:
            self._entries.pop()
        self._entries.append((epoch, offset))

    def at(self, offset: int) -> int:
        """The epoch of the batch at an offset, or -1 below the first known epoch."""
        at = bisect_right(self._entries, offset, key=lambda entry: entry[1])
        return self._entries[at - 1][0] if at else NO_EPOCH

    def end_of(self, epoch: int, end: int) -> tuple[int, int]:
        """The result of OffsetForLeaderEpoch, for a log that ends at `end`: the largest known epoch that is not above
        `epoch`, and the offset after its last batch; -1 and -1 for an epoch that is not known yet.
        """
        if not self._entries or epoch == NO_EPOCH or epoch > self.latest:
            return NO_EPOCH, -1
        if epoch == self.latest:
            return epoch, end
        at = bisect_right(self._entries, epoch, key=lambda entry: entry[0])
        return self._entries[at - 1][0] if at else epoch, self._entries[at][1]

    def cut_from(self, end: int) -> None:
        """Follows a truncation of the log."""
        while len(self._entries) > 1 and self._entries[-1][1] >= end:
            self._entries.pop()

    def restart(self) -> None:
        """Follows a log that was emptied: its next batch begins the history."""
        self._entries = []

    def drop_empty(self, end: int) -> None:
        """Drops epochs without a batch: a follower takes those of its leader, which may be older."""
        while self._entries and self._entries[-1][1] >= end:
            self._entries.pop()

    def cut_below(self, start: int) -> None:
        """Follows a trim of the log."""
        at = bisect_right(self._entries, start, key=lambda entry: entry[1])
        if at > 1:
            self._entries[:at] = [(self._entries[at - 1][0], start)]

    def to_state(self) -> list[list[int]]:
        """Empty for a log that has had one leader."""
        return [] if self._entries in ([], [(0, 0)]) else [list(entry) for entry in self._entries]
