"""A leader answers a follower's fetch: it reads to the end of its logs, and waits for appends if there is nothing new.

The fetch is the follower's acknowledgement as well (`leader.py`, rule 1). So every partition is noted before the first
one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millstream.broker.replication.calls import NO_RECORDS, CopyRequest, CopyWanted, Divergence, Served
from millstream.broker.replication.leader import Leader
from millstream.cluster.base import PartitionKey
from millstream.core.clock import Clock, Timer
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.slice import Slice


class Serving:
    """One fetch of one follower, from its first read to its answer."""

    def __init__(self, leaders: Mapping[PartitionKey, Leader], request: CopyRequest, clock: Clock) -> None:
        self._leaders = leaders
        self._request = request
        self._clock = clock
        self._timer: Timer | None = None
        self._cancels: list[Callable[[], None]] = []
        self._is_last = request.wait_ms_max <= 0
        self._reading = 0
        self._is_stale = False
        self.answer: Promise[list[Served]] = Promise()

    def run(self) -> None:
        request = self._request
        for wanted in request.wanted:
            leader = self._leaders.get(wanted.key)
            if (
                leader is not None
                and leader.refusal_of(wanted.leader_epoch) == Code.NONE
                and not _divergence(leader, wanted)
            ):
                leader.note_fetch(request.node_id, request.registration, wanted.offset)
        self._try()
        if not self.answer.done and not self._is_last:
            self._park()

    def _park(self) -> None:
        for wanted in self._request.wanted:
            leader = self._leaders.get(wanted.key)
            if leader is not None:
                self._cancels.append(leader.wake(self._try))
        self._timer = self._clock.call_later(self._request.wait_ms_max / 1000, self.finish)

    def finish(self) -> None:
        """Answers with what is there: at the timeout, or if the follower hung up."""
        self._is_last = True
        self._try()

    def _try(self) -> None:
        if self.answer.done:
            return
        if self._reading:
            self._is_stale = True
            return
        room = self._request.bytes_max
        served: list[Served] = []
        is_news = False
        for wanted in self._request.wanted:
            leader = self._leaders.get(wanted.key)
            one = _serve(leader, wanted, room) if room > 0 or not served else _without_records(leader, wanted)
            if isinstance(one, Promise):  # old data that is examined first
                self._reading += 1
                one.then(self._read_late)
                one = _without_records(leader, wanted)
            room -= one.slice.size
            is_news = is_news or bool(one.slice.size) or one.code != Code.NONE or one.divergence is not None
            served.append(one)
        if (is_news or self._is_last) and not self._reading:
            self._end(served)

    def _read_late(self, _: Promise[Slice]) -> None:
        self._reading -= 1
        if not self._reading:
            self._is_stale = False
            self._try()

    def _end(self, served: list[Served]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for cancel in self._cancels:
            cancel()
        self._cancels = []
        self.answer.settle(served)


def _divergence(leader: Leader, wanted: CopyWanted) -> Divergence | None:
    log = leader.log
    if wanted.last_epoch < 0:
        return None
    epoch, end = log.epochs.end_of(wanted.last_epoch, log.end)
    if epoch < 0:  # an epoch that this log never had
        return Divergence(log.epochs.latest, log.end)
    return Divergence(epoch, end) if epoch < wanted.last_epoch or end < wanted.offset else None


def _serve(leader: Leader | None, wanted: CopyWanted, room: int) -> Served | Promise[Slice]:
    if leader is None:
        return Served(wanted.key, Code.NOT_LEADER_OR_FOLLOWER)
    code = leader.refusal_of(wanted.leader_epoch)
    if code != Code.NONE:
        return Served(wanted.key, code)
    log = leader.log
    divergence = _divergence(leader, wanted)
    if divergence is not None:
        return Served(wanted.key, Code.NONE, log.high_watermark, log.start, divergence)
    read = log.read_to_end(wanted.offset, min(wanted.bytes_max, room))
    if not read.done:
        return read
    if read.error is not None:
        code = read.error.code if isinstance(read.error, RequestError) else Code.UNKNOWN_SERVER_ERROR
        return Served(wanted.key, code, log.high_watermark, log.start)
    return Served(wanted.key, Code.NONE, log.high_watermark, log.start, None, read.value())


def _without_records(leader: Leader | None, wanted: CopyWanted) -> Served:
    if leader is None:
        return Served(wanted.key, Code.NOT_LEADER_OR_FOLLOWER)
    return Served(wanted.key, Code.NONE, leader.log.high_watermark, leader.log.start, None, NO_RECORDS)
