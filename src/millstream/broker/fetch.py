"""Reading from many partitions at once, with waiting.

A fetch is answered when it has `bytes_min`, when any partition has an error to report, or when its time is over.
Until then it is parked: it holds no data, only a wake-up call on each log that it reads. Reading again is cheap,
since a read answers with a range and not with bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from uuid import UUID

from millstream.broker.topics import Topics
from millstream.clock import Clock, Timer
from millstream.errors import Code, RequestError
from millstream.log.slice import Slice
from millstream.promise import Promise
from millstream.stores.base import PartitionLog

LEADER_EPOCH = 0
EMPTY = Slice(0, 0)


class Wanted(NamedTuple):
    topic: str | UUID
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


class Fetched(NamedTuple):
    wanted: Wanted
    code: Code
    high_watermark: int
    log_start: int
    slice: Slice


class Fetch:
    """One fetch, from its first read to its answer."""

    __slots__ = ("_bytes_max", "_bytes_min", "_cancels", "_topics", "_wanted", "answer", "timer")

    def __init__(self, topics: Topics, wanted: list[Wanted], bytes_min: int, bytes_max: int) -> None:
        self._topics = topics
        self._wanted = wanted
        self._bytes_min = bytes_min
        self._bytes_max = bytes_max
        self._cancels: list[Callable[[], None]] = []
        self.timer: Timer | None = None
        self.answer: Promise[list[Fetched]] = Promise()

    def run(self, clock: Clock, wait_ms_max: int) -> bool:
        """Reads; whether the answer is there at once. Otherwise it is parked for at most so long."""
        if self._try(last_chance=wait_ms_max <= 0 or not self._wanted):
            return True
        for wanted in self._wanted:
            log = self._log(wanted)
            if log is not None:
                self._cancels.append(log.wake(self._woken))
        self.timer = clock.call_later(wait_ms_max / 1000, self._time_is_over)
        return False

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        for cancel in self._cancels:
            cancel()
        self._cancels = []
        if self.timer is not None:
            self.timer.cancel()

    def _woken(self) -> None:
        if not self.answer.done:
            self._try(last_chance=False)

    def _time_is_over(self) -> None:
        if not self.answer.done:
            self._try(last_chance=True)

    def _try(self, last_chance: bool) -> bool:
        fetched = []
        room, found, failed = self._bytes_max, 0, False
        for wanted in self._wanted:
            one = self._read(wanted, room, first=found == 0)
            fetched.append(one)
            found += one.slice.size
            room -= one.slice.size
            failed = failed or one.code != Code.NONE
        if not (last_chance or failed or found >= self._bytes_min):
            return False
        self.cancel()
        self.answer.settle(fetched)
        return True

    def _log(self, wanted: Wanted) -> PartitionLog | None:
        topic = self._topics.find(wanted.topic)
        if topic is None or not 0 <= wanted.partition < len(topic.partitions):
            return None
        return topic.partitions[wanted.partition].log

    def _read(self, wanted: Wanted, room: int, first: bool) -> Fetched:
        log = self._log(wanted)
        if log is None:
            unknown = Code.UNKNOWN_TOPIC_OR_PARTITION if isinstance(wanted.topic, str) else Code.UNKNOWN_TOPIC_ID
            return Fetched(wanted, unknown, -1, -1, EMPTY)
        if wanted.leader_epoch > LEADER_EPOCH:
            return Fetched(wanted, Code.UNKNOWN_LEADER_EPOCH, -1, -1, EMPTY)
        if room <= 0 and not first:
            return Fetched(wanted, Code.NONE, log.durable, log.start, EMPTY)
        # A later partition must not get its one oversized batch on top of a full answer, so only the first may
        # overshoot.
        limit = min(wanted.bytes_max, room)
        try:
            slice_ = log.read(wanted.offset, limit).value()
        except RequestError as error:
            return Fetched(wanted, error.code, log.durable, log.start, EMPTY)
        if slice_.size > limit and not first:
            slice_ = EMPTY
        return Fetched(wanted, Code.NONE, log.durable, log.start, slice_)
