"""A fetch: reads many partitions at once, and long-polls for new records.

A fetch completes when it has `bytes_min`, when a partition returns an error, or at its timeout. Until then it is
parked: it holds no data, only a wake-up callback on each log that it reads. Reading again is cheap: a read returns
a range, not bytes.

A store that answers at once is read within one call. Reads from a database are asynchronous: those of one round run
concurrently, each with room reserved for its result, and the fetch is judged after the last of them. A wake-up during
a round starts another round.

An error in one partition's read, of any kind, is that partition's result. The other partitions are served.

Old data is verified as it is read (`log/checked.py`). A round that has verified `TURN_BYTES` continues in the next turn
of the event loop: the result is the same, and other clients are served in between. A round over many partitions
yields after `TURN_PARTITIONS` of them. Their wake-up callbacks are set and removed over several turns, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from millstream.broker.topics import Topics
from millstream.core.clock import Clock, Timer
from millstream.core.collector import collector
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.log.checked import Work
from millstream.log.slice import Slice
from millstream.stores.base import PartitionLog

unexpected = Damped(__name__)

TURN_BYTES = 1 << 20
"""Bytes that a round verifies before the event loop runs again. The last read may verify as much again."""
PARTITIONS_MANY = 1_000
"""A larger fetch reads `TURN_PARTITIONS` in each turn of the event loop."""
TURN_PARTITIONS = 250
"""A read takes 15 to 45 microseconds."""
EMPTY = Slice(0, 0)


class Wanted(NamedTuple):
    topic: str | UUID
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


NOTHING_REFUSED: Mapping[Wanted, Code] = {}


class Fetched(NamedTuple):
    wanted: Wanted
    code: Code
    high_watermark: int
    stable: int
    log_start: int
    slice: Slice


class Fetch:
    """One fetch, from its first read to its result."""

    __slots__ = (
        "_bytes_max", "_bytes_min", "_cancels", "_committed", "_is_cancelled", "_is_last", "_is_stale", "_reading",
        "_refused", "_round", "_topics", "_wanted", "answer", "timer",
    )  # fmt: skip

    def __init__(
        self,
        topics: Topics,
        wanted: list[Wanted],
        bytes_min: int,
        bytes_max: int,
        refused: Mapping[Wanted, Code] = NOTHING_REFUSED,
        committed: bool = False,
    ) -> None:
        """`refused`: what the session does not read, and why. `committed`: reads end at a log's `stable` offset."""
        self._topics = topics
        self._committed = committed
        self._refused = refused
        self._wanted = wanted
        self._bytes_min = bytes_min
        self._bytes_max = bytes_max
        self._cancels: list[Callable[[], None]] = []
        self._is_cancelled = False
        self._is_last = False
        """The timeout has passed: the next round is the result."""
        self._is_stale = False
        """A wake-up came while a round was in flight."""
        self._reading = 0
        self._round: list[Fetched] = []
        self.timer: Timer | None = None
        self.answer: Promise[list[Fetched]] = Promise()

    def run(self, clock: Clock, wait_ms_max: int) -> bool:
        """Reads; returns whether it is complete. Otherwise parks for at most `wait_ms_max`."""
        self._is_last = wait_ms_max <= 0 or not self._wanted
        if self._try():
            return True
        if self._is_last:
            return False
        self._set_wakers(0)
        self.timer = clock.call_later(wait_ms_max / 1000, self.finish)
        return False

    def _set_wakers(self, start: int) -> None:
        if self._is_cancelled:
            return
        for wanted in islice(self._wanted, start, start + PARTITIONS_MANY):
            log = self._log(wanted)
            if log is not None:
                self._cancels.append(log.wake(self._woken))
        if start + PARTITIONS_MANY < len(self._wanted):
            asyncio.get_running_loop().call_soon(self._set_wakers, start + PARTITIONS_MANY)
        elif start:
            self._woken()  # records may have arrived between a partition's read and its callback

    def cancel(self) -> None:
        """Removes the wake-up callbacks: the fetch is over, or its client is gone."""
        self._is_cancelled = True
        if self.timer is not None:
            self.timer.cancel()
        if len(self._cancels) > PARTITIONS_MANY:
            self._unset_wakers()
            return
        for cancel in self._cancels:
            cancel()
        self._cancels = []

    def _unset_wakers(self) -> None:
        for cancel in self._cancels[-PARTITIONS_MANY:]:
            cancel()
        del self._cancels[-PARTITIONS_MANY:]
        if self._cancels:
            asyncio.get_running_loop().call_soon(self._unset_wakers)

    def _woken(self) -> None:
        if not self._is_cancelled:
            self._try()

    def finish(self) -> None:
        """Completes with the data at hand: at the timeout, or if the client gives up."""
        if not self.answer.done:
            self._is_last = True
            self._try()

    def _try(self) -> bool:
        """One round; returns whether it completes."""
        if self._reading:
            self._is_stale = True
            return False
        self._round = []
        counted = self._read_on(self._bytes_max, 0)
        return counted is not None and self._judge(*counted)

    def _read_on(self, room: int, found: int) -> tuple[int, bool] | None:
        """Continues the round. When it is complete, returns the bytes found and whether a read failed."""
        fetched, failed, enough = self._round, False, Work.bytes + TURN_BYTES
        stop = len(self._wanted)
        if stop > PARTITIONS_MANY:
            stop = len(fetched) + TURN_PARTITIONS
        for wanted in islice(self._wanted, len(fetched), stop):
            if Work.bytes >= enough:
                break
            one = self._read(wanted, room, first=found == 0)
            if isinstance(one, Fetched):
                found += one.slice.size
                room -= one.slice.size
                failed = failed or one.code != Code.NONE
            else:
                promise, log, limit = one
                promise.then(partial(self._one_is_there, len(fetched), wanted, log, found == 0, limit))
                found += 1
                room -= min(limit, log.size_bytes())
                self._reading += 1
                one = Fetched(wanted, Code.NONE, log.high_watermark, log.stable, log.start, EMPTY)
            fetched.append(one)
        if len(fetched) < len(self._wanted):
            self._reading += 1
            asyncio.get_running_loop().call_soon(self._next_turn, room, found)
            return None
        return None if self._reading else (found, failed)

    def _next_turn(self, room: int, found: int) -> None:
        self._reading -= 1
        if len(self._wanted) > PARTITIONS_MANY:
            collector.postpone()
        if not self._is_cancelled and self._read_on(room, found) is not None:
            self._end_round()

    def _one_is_there(
        self, at: int, wanted: Wanted, log: PartitionLog, first: bool, limit: int, done: Promise[Slice]
    ) -> None:
        if done.error is None:
            slice_ = done.value()
            if slice_.size > limit and not first:
                slice_ = EMPTY
            self._round[at] = Fetched(wanted, Code.NONE, log.high_watermark, log.stable, log.start, slice_)
        else:
            self._round[at] = _refused(wanted, log, done.error)
        self._reading -= 1
        if not self._reading:
            self._end_round()

    def _end_round(self) -> None:
        """Ends an asynchronous round."""
        if self.answer.done:
            return
        failed = any(one.code != Code.NONE for one in self._round)
        if not self._judge(sum(one.slice.size for one in self._round), failed) and self._is_stale:
            self._is_stale = False
            self._try()

    def _judge(self, found: int, failed: bool) -> bool:
        fetched, self._round = self._round, []
        if not (self._is_last or failed or found >= self._bytes_min):
            return False
        self.cancel()
        self.answer.settle(fetched)
        return True

    def _log(self, wanted: Wanted) -> PartitionLog | None:
        topic = self._topics.find(wanted.topic)
        if topic is None or not 0 <= wanted.partition < len(topic.partitions):
            return None
        return topic.partitions[wanted.partition].log

    def _read(self, wanted: Wanted, room: int, first: bool) -> Fetched | tuple[Promise[Slice], PartitionLog, int]:
        """The result of a partition; for an asynchronous read, its promise, its log and its size limit."""
        if self._refused and wanted in self._refused:
            return Fetched(wanted, self._refused[wanted], -1, -1, -1, EMPTY)
        log = self._log(wanted)
        if log is None:
            unknown = Code.UNKNOWN_TOPIC_OR_PARTITION if isinstance(wanted.topic, str) else Code.UNKNOWN_TOPIC_ID
            return Fetched(wanted, unknown, -1, -1, -1, EMPTY)
        if wanted.leader_epoch != log.epochs.latest and (code := log.epochs.check(wanted.leader_epoch)) != Code.NONE:
            return Fetched(wanted, code, -1, -1, -1, EMPTY)
        if room <= 0 and not first:
            return Fetched(wanted, Code.NONE, log.high_watermark, log.stable, log.start, EMPTY)
        # Only the first partition with data may exceed the limit, by one batch (KIP-74): a later one would
        # overfill the response.
        limit = min(wanted.bytes_max, room)
        try:
            if self._committed and (stable := log.stable) != log.high_watermark:
                promise = log.read(wanted.offset, limit, stable)
            else:
                promise = log.read(wanted.offset, limit)
        except Exception as error:
            return _refused(wanted, log, error)
        if not promise.done:
            return promise, log, limit
        if promise.error is not None:
            return _refused(wanted, log, promise.error)
        slice_ = promise.value()
        if slice_.size > limit and not first:
            slice_ = EMPTY
        return Fetched(wanted, Code.NONE, log.high_watermark, log.stable, log.start, slice_)


def _refused(wanted: Wanted, log: PartitionLog, error: BaseException) -> Fetched:
    if isinstance(error, RequestError):
        return Fetched(wanted, error.code, log.high_watermark, log.stable, log.start, EMPTY)
    unexpected.error("fetch of %s-%d failed: %r", wanted.topic, wanted.partition, error)
    return Fetched(wanted, Code.UNKNOWN_SERVER_ERROR, log.high_watermark, log.stable, log.start, EMPTY)
