"""Which revisions of etcd a broker compacts, and when. Decisions only: the caller brings revisions and sizes.

Rules
-----
1. A revision is kept for `KEEP_SECONDS`, so that the watch of a broker that was away resumes without a comparison of
   all keys. At most `KEEP_REVISIONS` and about `KEEP_BYTES` of this broker's writes are kept, so that etcd's file stays
   small under load.
2. A compaction walks over all keys. It waits for `COMPACT_REVISIONS` revisions or `COMPACT_BYTES` of writes.
3. Several brokers may compact one etcd: each compacts up to a revision that it chose, and etcd ignores older ones.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from millstream.core.clock import Clock

KEEP_SECONDS = 300.0
KEEP_REVISIONS = 10_000
KEEP_BYTES = 32 << 20
COMPACT_REVISIONS = 1_000
COMPACT_BYTES = 16 << 20


class _Seen(NamedTuple):
    at: float
    revision: int
    written: int


class Compaction:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[_Seen] = deque()
        self._written = 0
        self._chosen = _Seen(0.0, 0, 0)

    def wrote(self, size: int) -> bool:
        """Counts bytes that this broker wrote; whether to choose a revision now, without waiting for housekeeping."""
        self._written += size
        last = self._seen[-1] if self._seen else self._chosen
        return self._written - last.written >= COMPACT_BYTES

    def choose(self, revision: int) -> int | None:
        """The revision to compact, if any. `revision` is etcd's current one."""
        now = self._clock.monotonic()
        self._seen.append(_Seen(now, revision, self._written))
        below, written = revision - KEEP_REVISIONS, self._chosen.written
        while self._seen[0].at <= now - KEEP_SECONDS or self._seen[0].written <= self._written - KEEP_BYTES:
            old = self._seen.popleft()
            below, written = max(below, old.revision), old.written
        is_worth_it = written - self._chosen.written >= COMPACT_BYTES
        if below - self._chosen.revision < COMPACT_REVISIONS and not (is_worth_it and below > self._chosen.revision):
            return None
        self._chosen = _Seen(now, below, written)
        return below
