"""A group with the `exclusive` discipline: one active member reads a topic in order, others are standbys.

              no member is active, or the active one is silent for too long (compare-and-set)
    STANDBY ----------------------------------------------------------------------------------> ACTIVE
       ^                                                                                           |
       +---- another member took over, or a commit had a stale revision ---------------------------+

The state of a group and a topic is one key of the metadata store:

    exclusive/<group>/<topic>    topic id, active member or none, position per partition, time of the change, behind

Rules
-----
1. Every change is a compare-and-set on the key's revision. If two members both believe that they are active, at most
   one can commit: the other has a stale revision, and becomes a standby. This is the only fence, so members may run in
   any number of processes that share the store.
2. A commit never moves a position back. Only a log that lost its tail does (`fall_back`).
3. The active member writes a heartbeat `heartbeat_ms` after the last change, a standby takes over `takeover_ms` after
   it; both only while the group has lag. An idle group writes nothing and stays with its active member.
4. Idle time does not count: both timers restart when a record arrives. A member that joins later uses `behind`, which
   says whether the group had lag when the state was last written.
5. A clean leave clears the active member in the state; the standbys see it and one of them takes over at once.
6. Each member measures the time since a change on its own clock, from the moment it saw the change. The time in the
   state only shortens the first wait of a member that joins later. Clock skew can cause an early takeover, which rule 1
   makes safe.

One change is in flight at a time. Commits that arrive during it share the next one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from millstream.broker.groups.deadline import Deadline
from millstream.broker.topics import Topic, Topics
from millstream.core.clock import Clock
from millstream.core.errors import Code, MillstreamError, NotActive, RevisionConflict, UnknownTopic
from millstream.core.promise import Promise
from millstream.stores.base import MetaStore, Put, Versioned

logger = logging.getLogger(__name__)

PREFIX = "exclusive/"
UNKNOWN_MEMBER = ""
"""An active member whose id is not known yet."""
RETRY_MS = 1_000
"""Delay before a retry after a store error."""


class ExclusiveSettings(NamedTuple):
    heartbeat_ms: int = 28_000
    takeover_ms: int = 60_000
    from_end: bool = False
    """A new group starts at the end."""

    def check(self) -> None:
        if not 0 < self.heartbeat_ms < self.takeover_ms:
            raise MillstreamError(
                f"the heartbeat ({self.heartbeat_ms} ms) must be shorter than the takeover ({self.takeover_ms} ms)"
            )


class State(NamedTuple):
    topic_id: str
    active: str | None
    positions: Mapping[int, int]
    """The next offset to process, per partition with a commit."""
    changed_ms: int
    behind: bool
    """Whether the group had lag when this was written."""

    def encode(self) -> bytes:
        return json.dumps({**self._asdict(), "positions": sorted(self.positions.items())}).encode()

    @classmethod
    def decode(cls, value: bytes) -> State:
        fields = json.loads(value)
        return cls(**{**fields, "positions": {int(partition): offset for partition, offset in fields["positions"]}})


def state_key(group: str, topic: str) -> str:
    return f"{PREFIX}{quote(group, safe='')}/{topic}"


class ExclusiveMember:
    """One member. `open` it, check `is_active`, `commit` processed offsets, finally `leave`."""

    def __init__(
        self,
        meta: MetaStore,
        clock: Clock,
        topics: Topics,
        topic: Topic,
        group: str,
        member_id: str,
        settings: ExclusiveSettings,
    ) -> None:
        settings.check()
        self.id = member_id
        self.group = group
        self.topic = topic
        self.settings = settings
        self.revision = 0
        self.active_since = 0
        """The revision at which it last became active; `written`: that of its last change."""
        self.written = 0
        self._meta = meta
        self._clock = clock
        self._topics = topics
        self._key = state_key(group, topic.name)
        self._state: State | None = None
        self._changed_at = 0.0
        """When this member saw the last change; `_behind_since`: since when it sees lag. On its own clock."""
        self._behind_since: float | None = None
        self._heartbeat = Deadline(clock, self._beat)
        self._takeover = Deadline(clock, self._look)
        self._retry = Deadline(clock, self._reload)
        self._is_busy = False
        self._is_open = False
        self._is_leaving = False
        self._beats = False
        self._committing: dict[int, int] = {}
        self._settling: list[Promise[None]] = []
        self._left: Promise[None] = Promise()
        self._was_active = False
        self._watchers: dict[int, Callable[[], None]] = {}
        self._next_watcher = 0
        self._unwatch: list[Callable[[], None]] = []
        self._wakes: list[Callable[[], None]] = []

    # The public API

    @property
    def is_active(self) -> bool:
        return self._holds and self._is_open and not self._is_leaving

    @property
    def is_gone(self) -> bool:
        """The topic was deleted."""
        return self._topics.get(self.topic.name) is not self.topic

    def position(self, partition: int) -> int:
        """The next offset to read: the committed one, or the log's start."""
        start = self.topic.partitions[partition].log.start
        committed = self._state.positions.get(partition, start) if self._state is not None else start
        return max(committed, start)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back when `is_active` or `is_gone` changes; the result stops it."""
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = callback
        return lambda: self._watchers.pop(number, None) and None

    async def open(self) -> None:
        """Loads the group's state; a group's first member becomes active."""
        self._unwatch = [self._meta.watch(self._key, self._changed), self._topics.watch(self._topics_changed)]
        self._is_open = True
        self._watch_logs()
        self._learn(await self._meta.get(self._key), is_first=True)

    def commit(self, positions: Mapping[int, int]) -> Promise[None]:
        """Commits the next offsets to process. Settles when durable; fails with `NotActive`."""
        if not self.is_active:
            return Promise.failed(self._refusal())
        for partition, offset in positions.items():
            self._committing[partition] = max(offset, self._committing.get(partition, 0))
        promise: Promise[None] = Promise()
        self._settling.append(promise)
        self._pump()
        return promise

    def leave(self) -> Promise[None]:
        """Leaves cleanly: writes pending commits, then a standby takes over at once."""
        if not self._is_leaving:
            self._is_leaving = True
            self._go_if_leaving()
        return self._left

    def _go_if_leaving(self) -> None:
        """Waits for a change in flight: it may be the one that makes this member active."""
        if self._is_busy and self._is_open:
            return
        if self._holds and self._is_open:
            self._pump()
        else:
            self._end()

    def abandon(self) -> None:
        """Stops without a write, like a killed process."""
        self._is_leaving = True
        self._end()

    # Learning

    def _changed(self, key: str, found: Versioned | None) -> None:
        if key == self._key:
            self._learn(found)

    def _learn(self, found: Versioned | None, *, is_first: bool = False) -> None:
        if found is not None and found.revision <= self.revision:
            return
        if found is None and not self.revision and not is_first:
            return  # still no group: a member that failed to create it waits before its retry
        state = State.decode(found.value) if found is not None else None
        self.revision = found.revision if found is not None else 0
        if state is not None and state.topic_id != self.topic.id.hex:
            state = None  # of an earlier topic with that name
        was_ours, self._state = self._holds, state
        if self._holds and not was_ours:
            self.active_since = self.revision
        now = self._clock.monotonic()
        self._changed_at = now
        self._behind_since = None
        if is_first and state is not None:
            age = max(self._clock.now_ms() - state.changed_ms, 0) / 1000
            self._changed_at = now - age
            if state.behind and self._is_behind():
                self._behind_since = self._changed_at
        self._tell()
        self._look()

    def _reload(self) -> None:
        if self._is_open:
            self._meta.get(self._key).then(self._reloaded)

    def _reloaded(self, done: Promise[Versioned | None]) -> None:
        if done.error is not None:
            logger.warning("cannot read the state of group %s; retrying: %s", self.group, done.error)
            self._retry.push(RETRY_MS)
            return
        self._learn(done.value())
        if self._state is not None and self._state.active == UNKNOWN_MEMBER:
            self._retry.push(RETRY_MS)
        self._pump()  # commits that came while the failed change was in flight
        self._look()

    def _topics_changed(self) -> None:
        if self.is_gone:
            was_active = self._was_active
            self._end()
            self._tell(always=not was_active)
        elif len(self._wakes) != self.topic.partition_count:
            self._watch_logs()
            self._look()

    def _watch_logs(self) -> None:
        for unwake in self._wakes:
            unwake()
        self._wakes = [partition.log.wake(self._log_grew) for partition in self.topic.partitions]

    def _log_grew(self) -> None:
        if self._behind_since is None:
            self._look()

    def _is_behind(self) -> bool:
        return any(partition.log.high_watermark > self.position(partition.index) for partition in self.topic.partitions)

    # Deciding

    def _look(self) -> None:
        """Acts on the state, the log and the time."""
        if not self._is_open or self._is_busy or self._is_leaving:
            return
        state = self._state
        if state is None or state.active is None:
            self._take()
            return
        if not self._is_behind():
            self._behind_since = None
            self._heartbeat.stop()
            self._takeover.stop()
            return
        now = self._clock.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        since = max(self._changed_at, self._behind_since)
        if self.is_active:
            self._takeover.stop()
            self._heartbeat.push(_ms(since - now) + self.settings.heartbeat_ms)
            return
        self._heartbeat.stop()
        left_ms = _ms(since - now) + self.settings.takeover_ms
        if left_ms > 0:
            self._takeover.push(left_ms)
        else:
            self._take()

    def _beat(self) -> None:
        if self.is_active and self._is_behind():
            self._beats = True
            self._pump()

    def _take(self) -> None:
        old = self._state
        positions = dict(old.positions) if old is not None else {}
        if old is None and self.settings.from_end:
            positions = {partition.index: partition.log.high_watermark for partition in self.topic.partitions}
        self._write(self.id, positions, [])

    def _pump(self) -> None:
        """Writes the active member's pending changes."""
        state = self._state
        if self._is_busy or not self._is_open or state is None or state.active != self.id:
            return
        if not (self._settling or self._beats or self._is_leaving):
            return
        positions = dict(state.positions)
        for partition, offset in self._committing.items():
            positions[partition] = max(offset, positions.get(partition, 0))
        settling, self._settling, self._committing, self._beats = self._settling, [], {}, False
        self._write(None if self._is_leaving else self.id, positions, settling)

    def _write(self, active: str | None, positions: dict[int, int], settling: list[Promise[None]]) -> None:
        self._is_busy = True
        behind = any(
            partition.log.high_watermark > max(positions.get(partition.index, 0), partition.log.start)
            for partition in self.topic.partitions
        )
        state = State(self.topic.id.hex, active, positions, self._clock.now_ms(), behind)
        put = Put(self._key, state.encode(), self.revision)
        self._meta.transact(put).then(lambda done: self._landed(done, put, state, settling))

    def _landed(self, done: Promise[int], put: Put, state: State, settling: list[Promise[None]]) -> None:
        self._is_busy = False
        if done.error is not None:
            self._failed(done.error, put, state, settling)
            return
        self.written = done.value()
        if done.value() > self.revision:  # else the watch has reported this revision or a newer
            self._learn(Versioned(put.value, done.value()))
        for promise in settling:
            promise.settle(None)
        if self._is_leaving:
            self._go_if_leaving()
            return
        self._pump()
        self._look()

    def _failed(self, error: BaseException, put: Put, state: State, settling: list[Promise[None]]) -> None:
        """Reads the state again to resolve a conflict; pending commits settle after that."""
        if not isinstance(error, RevisionConflict):
            logger.warning("cannot store a change of group %s: %s", self.group, error)
        self._is_busy = True
        self._meta.get(self._key).then(lambda done: self._looked_after(done, error, put, state, settling))

    def _looked_after(
        self,
        done: Promise[Versioned | None],
        error: BaseException,
        put: Put,
        state: State,
        settling: list[Promise[None]],
    ) -> None:
        self._is_busy = False
        before = put.if_revision  # not `self.revision`: the watch may report the conflict before the refusal
        if done.error is None:
            self._learn(done.value())
        is_conflict = isinstance(error, RevisionConflict)
        if is_conflict and self.revision == before and self._state is not None:
            # Another member was faster; its id is not known here yet.
            self._state = self._state._replace(active=UNKNOWN_MEMBER)
            self._tell()
        if is_conflict and self._holds and self._is_open:
            # This member wrote the other revision too: a response was lost, its write was not. Retry the commits.
            for partition, offset in state.positions.items():
                self._committing[partition] = max(offset, self._committing.get(partition, 0))
            self._settling = settling + self._settling
        else:
            for promise in settling:
                promise.fail(self._refusal() if is_conflict else error)
        if self._is_leaving:
            self._go_if_leaving() if is_conflict else self._end()
        elif self.revision == before:
            self._retry.push(RETRY_MS)
        else:
            self._pump()
            self._look()

    @property
    def _holds(self) -> bool:
        return self._state is not None and self._state.active == self.id

    def _give_up(self) -> None:
        settling, self._settling, self._committing, self._beats = self._settling, [], {}, False
        for promise in settling:
            promise.fail(self._refusal())

    def _tell(self, *, always: bool = False) -> None:
        """Notifies watchers; fails pending commits that became stale."""
        is_active = self.is_active
        if self._was_active and not self._holds:
            self._give_up()
        if is_active == self._was_active and not always:
            return
        self._was_active = is_active
        for watcher in list(self._watchers.values()):
            watcher()

    def _end(self) -> None:
        if self._is_open:
            self._stop()
        if not self._left.done:
            self._left.settle(None)

    def _stop(self) -> None:
        self._is_open = False
        for cancel in (*self._unwatch, *self._wakes):
            cancel()
        self._wakes = []
        for deadline in (self._heartbeat, self._takeover, self._retry):
            deadline.stop()
        self._give_up()
        self._tell()

    def _refusal(self) -> MillstreamError:
        if self.is_gone:
            return UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {self.topic.name}")
        return NotActive(self.group, self.topic.name)


async def fall_back(meta: MetaStore, topics: Topics) -> None:
    """At the start of a broker alone: if a machine crash lost a log's tail (`flush=os`), moves positions back to its
    end, because new records will reuse the lost offsets.
    """
    by_id = {topic.id.hex: topic for topic in topics}
    for key, stored in await meta.list(PREFIX):
        state = State.decode(stored.value)
        topic = by_id.get(state.topic_id)
        if topic is None:
            continue
        known = [partition for partition in topic.partitions if partition.log.damage.lost is None]
        ends = {partition.index: partition.log.end for partition in known}
        positions = {index: min(offset, ends.get(index, offset)) for index, offset in state.positions.items()}
        if positions != state.positions:
            logger.error("%s is ahead of topic %s: records are lost", key, topic.name)
            await meta.transact(Put(key, state._replace(positions=positions).encode(), stored.revision))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
