"""A log whose directory is missing: it has no offsets, and refuses everything.

Rules
-----
1. Every read, append and lookup fails with `LogLost`, never with OFFSET_OUT_OF_RANGE: a consumer would reset its
   position, and resume at another record once the directory is restored.
2. `start`, `high_watermark` and `end` are 0, because the real ones are unknown. Code that compares positions with
   them tests `damage.lost` first.
3. The log writes nothing: the next start finds the directory restored, or reports the loss again.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.core.errors import LogLost
from millstream.core.promise import Promise
from millstream.log.answers import Appended, TimedOffset
from millstream.log.config import LogConfig
from millstream.log.damage import Damage, DamagedRange
from millstream.log.epochs import Epochs
from millstream.log.producers import Producers
from millstream.log.slice import Slice
from millstream.records.batch import BatchHeader
from millstream.records.run import BatchRun


class LostLog:
    """Implements `stores.base.PartitionLog` on a missing directory."""

    def __init__(self, name: str, directory: str, config: LogConfig) -> None:
        self.config = config
        self.start = self.high_watermark = self.counted = self.end = self.unsynced_bytes = 0
        self.epochs = Epochs()
        self.failure: str | None = None
        """None: a read-only log needs a restart (`/healthz` answers 503), which does not help here."""
        self.damage = Damage(name)
        self._refusal = LogLost(name, directory)
        self.damage.lose_all(directory)

    @property
    def stable(self) -> int:
        return self.high_watermark

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        return Promise.failed(self._refusal)

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        return Promise.failed(self._refusal)

    def lead(self, epoch: int) -> None:
        return None

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        return Promise.failed(self._refusal)

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        return Promise.failed(self._refusal)

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        return Promise.of(self.damage.ranges[0])

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        return Promise.failed(self._refusal)

    def find_max_time(self) -> Promise[TimedOffset | None]:
        return Promise.failed(self._refusal)

    def trim(self, offset: int) -> Promise[int]:
        return Promise.failed(self._refusal)

    def truncate(self, offset: int) -> Promise[int]:
        return Promise.failed(self._refusal)

    def flush(self) -> Promise[None]:
        return Promise.of(None)

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def size_bytes(self) -> int:
        return 0

    def refresh(self) -> Promise[None]:
        return Promise.failed(self._refusal)

    def known_producers(self) -> Promise[Producers]:
        return Promise.of(Producers())
