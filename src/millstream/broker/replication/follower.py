"""Followers: this broker copies the partitions that one other broker leads.

    fetch --> append --> sync --> the next fetch acknowledges

Rules
-----
1. A copy is fetched again when everything that it received is counted (`flush=always`: synced). So the offset of the
   next fetch tells the leader what this broker holds, and a crash cannot take it back.
2. The leader compares the follower's last epoch and its end with its own history. Where they differ, it answers with
   the divergence, and the follower cuts its log there (KIP-101, KIP-279, KIP-595).
3. A log that ends before the leader's start is emptied and begins at that start.
4. The follower takes over the leader's high watermark, up to its own counted end, and the leader's start.
5. A refused partition pauses. Its state has changed, and the watch of the metadata store will say how.
6. Partitions that begin while a fetch waits at the leader are fetched beside it, in a second lane that does not wait: a
   new leader should not wait for the end of a long poll.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from millstream.broker.replication.calls import Copied, CopyRequest, CopyWanted, Divergence, PeerCalls
from millstream.cluster.base import Node, PartitionKey
from millstream.core.clock import Clock, Timer
from millstream.core.errors import Code, Diverged, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records.batch import sound_batches
from millstream.stores.base import ReplicatedLog

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

WAIT_MS = 500
BYTES_MAX = 8 << 20
"""Of one fetch: all partitions together."""
PARTITION_BYTES_MAX = 1 << 20
PAUSE_SECONDS = 0.1
PAUSE_SECONDS_MAX = 1.0
LANES = 2
SETTLING = -1
OFFSET_MAX = (1 << 63) - 1


class Copy:
    """One partition that this broker follows, under one leader epoch."""

    __slots__ = ("epoch", "is_gone", "key", "lane", "log", "paused_until")

    def __init__(self, key: PartitionKey, log: ReplicatedLog, epoch: int) -> None:
        self.key = key
        self.log = log
        self.epoch = epoch
        self.lane: int | None = None
        """Of the fetch that asks for it now, or of the appends that follow."""
        self.paused_until = 0.0
        self.is_gone = False

    def wanted(self) -> CopyWanted:
        log = self.log
        last = log.epochs.at(log.end - 1) if log.end > log.start else -1
        return CopyWanted(self.key, self.epoch, log.counted, last, PARTITION_BYTES_MAX)


class Follower:
    """All copies of partitions that one broker leads."""

    def __init__(
        self,
        leader_id: int,
        find: Callable[[int], Node | None],
        identity: Callable[[], tuple[int, int]],
        peers: PeerCalls,
        clock: Clock,
        note_cut: Callable[[ReplicatedLog, int], None],
    ) -> None:
        """`identity`: this broker's node id and registration. `note_cut` is called before a log is cut."""
        self.leader_id = leader_id
        self.copies: dict[PartitionKey, Copy] = {}
        self._find = find
        self._identity = identity
        self._peers = peers
        self._clock = clock
        self._note_cut = note_cut
        self._lanes: set[int] = set()
        """In use."""
        self._failures = 0
        self._timer: Timer | None = None
        self._is_closed = False

    def follow(self, key: PartitionKey, log: ReplicatedLog, epoch: int) -> None:
        known = self.copies.get(key)
        if known is not None:
            if known.epoch == epoch:
                return
            known.is_gone = True
        self.copies[key] = copy = Copy(key, log, epoch)
        copy.lane = SETTLING
        log.flush().then(lambda done: self._begin(copy, done))

    def _begin(self, copy: Copy, done: Promise[None]) -> None:
        """Everything that this log took before, as a leader or from another one, is counted (rule 1)."""
        if done.error is not None:
            self._pause(copy, str(done.error))
        copy.lane = None
        if not copy.is_gone:
            copy.log.epochs.drop_empty(copy.log.end)
            self._run()

    def forget(self, key: PartitionKey) -> None:
        copy = self.copies.pop(key, None)
        if copy is not None:
            copy.is_gone = True

    def close(self) -> None:
        self._is_closed = True
        for copy in self.copies.values():
            copy.is_gone = True
        self.copies.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._peers.disconnect(self.leader_id)

    # Fetching

    def _run(self) -> None:
        """Starts a fetch for all copies that are not part of one."""
        if self._is_closed or len(self._lanes) == LANES:
            return
        now = self._clock.monotonic()
        idle = [copy for copy in self.copies.values() if copy.lane is None]
        ready = [copy for copy in idle if copy.paused_until <= now]
        leader, (node_id, registration) = self._find(self.leader_id), self._identity()
        if not ready or leader is None or not registration:
            if idle:
                self._run_later(PAUSE_SECONDS)
            return
        lane = min({*range(LANES)} - self._lanes)
        self._lanes.add(lane)
        for copy in ready:
            copy.lane = lane
        wait_ms = WAIT_MS if len(self._lanes) == 1 else 0
        request = CopyRequest(node_id, registration, [copy.wanted() for copy in ready], wait_ms, BYTES_MAX)
        self._peers.fetch(leader, request, lane).then(lambda done: self._answered(lane, ready, done))

    def _run_later(self, seconds: float) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._clock.call_later(seconds, self._timer_ended)

    def _timer_ended(self) -> None:
        self._timer = None
        self._run()

    def _answered(self, lane: int, copies: Sequence[Copy], done: Promise[Sequence[Copied]]) -> None:
        if done.error is not None:
            self._failures += 1
            if not self._is_closed:
                refusals.warning("cannot fetch from broker %d: %s", self.leader_id, done.error)
            pause = min(PAUSE_SECONDS * 2 ** min(self._failures, 8), PAUSE_SECONDS_MAX)
            until = self._clock.monotonic() + pause
            for copy in copies:
                copy.paused_until = until
            self._end(lane, copies)
            return
        self._failures = 0
        by_key = {copy.key: copy for copy in copies}
        appends: list[Promise[Appended]] = []
        answers = [copied for copied in done.value() if copied.key in by_key]
        for copied in answers:
            copy = by_key[copied.key]
            if not copy.is_gone:
                appends += self._take(copy, copied)
        _when_all(appends, lambda: self._stored(lane, copies, answers))

    def _stored(self, lane: int, copies: Sequence[Copy], answers: Iterable[Copied]) -> None:
        """Everything that the answer brought is counted."""
        by_key = {copy.key: copy for copy in copies}
        for copied in answers:
            copy = by_key[copied.key]
            if not copy.is_gone and copied.code == Code.NONE and copied.divergence is None:
                self._take_over(copy.log, copied)
        self._end(lane, copies)

    def _end(self, lane: int, copies: Sequence[Copy]) -> None:
        self._lanes.discard(lane)
        for copy in copies:
            copy.lane = None
        self._run()

    # Applying

    def _take(self, copy: Copy, copied: Copied) -> list[Promise[Appended]]:
        """Appends what arrived for a partition, or brings its log in line with the leader's."""
        log = copy.log
        if copied.code == Code.OFFSET_OUT_OF_RANGE and copied.log_start > log.end:
            logger.warning(
                "%s ends at %d, before the leader's start %d; copying it from there", log.name, log.end,
                copied.log_start,
            )  # fmt: skip
            self._settled(copy, log.restart_at(copied.log_start))
        elif copied.code != Code.NONE:
            self._pause(copy, f"broker {self.leader_id} answered {copied.code.name}")
        elif copied.divergence is not None:
            self._cut(copy, copied.divergence, copied.log_start)
        elif len(copied.records):
            return self._append(copy, copied)
        return []

    def _append(self, copy: Copy, copied: Copied) -> list[Promise[Appended]]:
        log = copy.log
        appends: list[Promise[Appended]] = []
        sound = 0
        for header, batch in sound_batches(copied.records, 0, OFFSET_MAX, log.counted):
            appended = log.follow(batch, header)
            if appended.done and appended.error is not None:
                self._refuse(copy, appended.error)
                return appends
            appends.append(appended)
            sound += header.size
        if not sound:
            self._pause(copy, "the leader sent a damaged batch")
        return appends

    def _refuse(self, copy: Copy, error: BaseException) -> None:
        if isinstance(error, Diverged):
            logger.error("%s: %s", copy.log.name, error)
        self._pause(copy, str(error))

    def _cut(self, copy: Copy, divergence: Divergence, leader_start: int) -> None:
        log = copy.log
        epoch, own_end = log.epochs.end_of(divergence.epoch, log.end)
        # Without batches of that epoch, everything of later epochs goes; the next fetch compares again.
        target = min(divergence.end, own_end) if epoch == divergence.epoch else own_end
        if log.start < leader_start and target <= leader_start:
            # The leader has trimmed the end of that epoch, so it cannot tell which records here are its own.
            self._note_cut(log, target)
            self._settled(copy, log.restart_at(leader_start))
            return
        target = max(target, log.start)
        if target >= log.end:
            self._pause(copy, f"the leader's history ends at {divergence.end}, behind this copy's end {log.end}")
            return
        self._note_cut(log, target)
        logger.info(
            "%s: cut offsets %d to %d, which the leader of epoch %d does not have", log.name, target, log.end - 1,
            copy.epoch,
        )  # fmt: skip
        self._settled(copy, log.truncate(target))

    def _settled(self, copy: Copy, done: Promise[int]) -> None:
        def judge(done: Promise[int]) -> None:
            copy.log.epochs.drop_empty(copy.log.end)
            if done.error is not None:
                self._pause(copy, str(done.error))

        done.then(judge)

    def _take_over(self, log: ReplicatedLog, copied: Copied) -> None:
        """Rule 4."""
        log.raise_high_watermark(copied.high_watermark)
        start = min(copied.log_start, log.high_watermark)
        if start > log.start:
            log.trim(start).then(_note_trim)

    def _pause(self, copy: Copy, why: str) -> None:
        copy.paused_until = self._clock.monotonic() + PAUSE_SECONDS
        refusals.warning("%s is not copied now: %s", copy.log.name, why)


def _when_all(promises: Sequence[Promise[Appended]], callback: Callable[[], None]) -> None:
    """Calls back when all are settled, whatever their outcome: a failed log refuses the next append as well."""
    waiting = [promise for promise in promises if not promise.done]
    if not waiting:
        callback()
        return
    left = len(waiting)

    def one_done(_: Promise[Appended]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            callback()

    for promise in waiting:
        promise.then(one_done)


def _note_trim(done: Promise[int]) -> None:
    if done.error is not None and isinstance(done.error, RequestError):
        refusals.warning("cannot follow the leader's start: %s", done.error.detail)
