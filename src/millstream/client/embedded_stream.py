"""A member of a stream group over an embedded broker: the consumer protocol, spoken in process.

    beats (a task)          joins, learns its assignment, gives up revoked partitions, leaves
    receive (the caller)    reads its partitions in turn; reports processed records

Members in this process notify each other of changes, so that none waits for its next heartbeat to learn of them.

Rules
-----
1. A record counts as processed when the caller asks for the next one. A partition is given up when its last given
   record is processed; until then its new owner waits, at most for the group's rebalance timeout.
2. Progress in a partition is committed before the partition is given up.
3. If another process coordinates the group this member is a standby: it has no partitions, and retries.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millstream.broker.groups.stream.consumer_member import Beat, BeatAnswer
from millstream.broker.groups.stream.offsets import PartitionCommit, TopicCommit
from millstream.client.embedded_queue import ELSEWHERE, STANDBY_SECONDS
from millstream.client.embedded_reading import Cursor, Rotation
from millstream.client.iterators import Stream, StreamOptions
from millstream.client.records import Record, user_record
from millstream.client.signal import Signal
from millstream.core.errors import Code, MillstreamError, NotMember, OutOfRange, RequestError, refusal
from millstream.security.rights import Operation

if TYPE_CHECKING:
    from millstream.client.embedded import Embedded
    from millstream.wire.kafka.requests import TopicPartition

V = TypeVar("V")

REBALANCE_MS = 60_000
JOINING, LEAVING = 0, -1
LOST = frozenset({Code.UNKNOWN_MEMBER_ID, Code.FENCED_MEMBER_EPOCH, Code.ILLEGAL_GENERATION})
"""The group has removed this member, which rejoins."""
COMMIT_TRIES = 3
COMMIT_AGAIN_SECONDS = 1.0
"""The pause after a failed commit if no record arrives."""
UNSETTLED_SECONDS = 0.1
"""Between heartbeats during a rebalance: the group's decision is unknown until it is stored."""

logger = logging.getLogger(__name__)


class EmbeddedStream(Stream[V]):
    _owner: Embedded

    def __init__(self, owner: Embedded, options: StreamOptions) -> None:
        super().__init__(owner, options)
        self._id = uuid.uuid4().hex
        self._epoch = JOINING
        self._cursors: dict[TopicPartition, Cursor[V]] = {}
        self._wakes: dict[TopicPartition, Callable[[], None]] = {}
        self._losing: set[TopicPartition] = set()
        """Given up as soon as the current record is processed."""
        self._last: Cursor[V] | None = None
        self._rotation: Rotation[V] = Rotation(self._may_take, self._skip)
        self._committed: dict[TopicPartition, int] = {}
        self._committed_at = 0.0
        self._committing: asyncio.Task[None] | None = None
        self._is_commit_owed = False
        """The member became idle during a commit: a second commit follows for its progress since."""
        self._signal = Signal(owner.clock)
        self._poke = Signal(owner.clock)
        self._beaten: list[asyncio.Future[None]] = []
        self._beats: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._unwatch: Callable[[], None] | None = None
        self._is_leaving = False

    @property
    def assignment(self) -> list[TopicPartition]:
        return sorted(self._cursors.keys() - self._losing)

    def stop(self) -> None:
        self._is_stopped = True
        self._signal.set()

    # -- the caller's side -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        for name in self._topics:
            await self._owner.topic(name, Operation.READ)
        self._epoch, self._is_leaving = JOINING, False
        self._unwatch = self._owner.session.watch_topics(self._poke.set)
        self._owner.streams_of.setdefault(self._group, set()).add(self)
        self._committed_at = self._owner.clock.monotonic()
        self._beats = asyncio.ensure_future(self._beat_on())
        self._beats.add_done_callback(self._beats_ended)

    async def _next(self, timeout: float | None) -> Record[V] | None:
        self._process_last()
        while not self.is_closed:
            if self._failure is not None:
                raise self._failure
            self._commit_now_and_then()
            found = await self._take()
            if found is not None:
                return found
            if self._is_stopped:
                await self.close()
                return None
            self._commit_now_and_then(idle=True)
            if not await self._signal.wait(timeout):
                return None
        return None

    async def _take(self) -> Record[V] | None:
        taken = await self._rotation.take(self._cursors.values())
        if taken is None:
            return None
        self._last, found = taken
        return user_record(*self._last.place, found, self._decode)

    def _may_take(self, cursor: Cursor[V]) -> bool:
        place = cursor.place
        is_mine = self._cursors.get(place) is cursor and place not in self._losing
        return is_mine and (cursor.is_inside_batch or not self._is_stopped)

    def _skip(self, cursor: Cursor[V], error: OutOfRange) -> None:
        """Retention deleted the records."""
        cursor.seek(cursor.log.start if self._reset == "earliest" else cursor.log.high_watermark)
        self._signal.set()  # the remaining records are old and wake no reader

    def _process_last(self) -> None:
        if self._last is not None:
            self._last.processed = self._last.given + 1
            self._last = None
            if self._losing:
                self._poke.set()

    # -- committing --------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        self._process_last()
        await self._commit(self._progress())

    def _progress(self) -> dict[TopicPartition, int]:
        return {
            place: cursor.processed
            for place, cursor in self._cursors.items()
            if self._committed.get(place) != cursor.processed
        }

    def _commit_now_and_then(self, *, idle: bool = False) -> None:
        if self._committing is not None:
            self._is_commit_owed = self._is_commit_owed or idle  # an idle member does not return here
        if self._committing is not None or self.is_closed:
            return
        now = self._owner.clock.monotonic()
        if not idle and now - self._committed_at < self._commit_every:
            return
        self._committed_at = now
        progress = self._progress()
        if progress:
            self._committing = asyncio.ensure_future(self._commit_in_background(progress))

    async def _commit_in_background(self, progress: dict[TopicPartition, int]) -> None:
        try:
            while progress:
                self._is_commit_owed = False
                await self._commit(progress)
                progress = self._progress() if self._is_commit_owed and not self.is_closed else {}
        except MillstreamError as error:
            logger.warning("group %s: commit failed; the next commit repeats its offsets: %s", self._group, error)
            self._owner.clock.call_later(max(self._commit_every, COMMIT_AGAIN_SECONDS), self._signal.set)
        finally:
            self._committing = None

    async def _commit(self, progress: dict[TopicPartition, int]) -> None:
        """Raises `NotMember` if a processed partition belongs to another member now."""
        if not progress:
            return
        by_topic: dict[str, list[PartitionCommit]] = {}
        for (topic, partition), offset in progress.items():
            by_topic.setdefault(topic, []).append(PartitionCommit(partition, offset))
        commits = [TopicCommit(topic, partitions) for topic, partitions in by_topic.items()]
        session = self._owner.session
        for attempt in range(COMMIT_TRIES):
            try:
                codes = await session.commit(self._group, self._id, None, self._epoch, commits)
                break
            except RequestError as error:
                if error.code == Code.STALE_MEMBER_EPOCH and attempt + 1 < COMMIT_TRIES:
                    await self._next_beat()
                elif error.code in LOST or error.code in ELSEWHERE or error.code == Code.STALE_MEMBER_EPOCH:
                    raise NotMember(f"this member of {self._group} lost its partitions: {error.detail}") from None
                else:
                    raise refusal(error.code, error.detail) from None
        for code in (code for per_topic in codes for code in per_topic):
            if code != Code.NONE:
                raise refusal(code)
        for place, offset in progress.items():
            if place in self._cursors:
                self._committed[place] = offset

    def _next_beat(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._beats is None or self._beats.done():
            future.set_result(None)
        self._beaten.append(future)
        self._poke.set()
        return future

    def _tell_of_beat(self) -> None:
        waiting, self._beaten = self._beaten, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _beats_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._tell_of_beat()
        self._signal.set()

    # -- the group's side --------------------------------------------------------------------------------------------

    async def _beat_on(self) -> None:
        told: tuple[object, ...] = ()
        while not self._is_leaving:
            try:
                if not await self._owner.is_coordinator(self._group):
                    raise RequestError(Code.NOT_COORDINATOR, "another process coordinates the group")
                answer = await self._beat()
                wait = answer.heartbeat_interval_ms / 1000
                await self._follow(answer)
                if self._owner.session.describe_consumer(self._group).state != "Stable":
                    wait = min(wait, UNSETTLED_SECONDS)
            except RequestError as error:
                self._drop_all()
                self._epoch = JOINING
                if error.code in ELSEWHERE:
                    wait = STANDBY_SECONDS
                elif error.code in LOST:
                    wait = 0.0
                else:
                    raise refusal(error.code, error.detail) from None
            self._tell_of_beat()
            now = (self._epoch, frozenset(self._cursors), frozenset(self._losing))
            if now != told:
                told = now
                self._tell_the_others()
            await self._poke.wait(wait)

    async def _beat(self) -> BeatAnswer:
        session = self._owner.session
        found = {name: session.find(name, Operation.READ) for name in self._topics}
        owned = frozenset((topic.id, partition) for name, partition in self._cursors if (topic := found.get(name)))
        beat = Beat(
            self._group,
            self._id,
            self._epoch,
            rebalance_ms=REBALANCE_MS,
            topics=frozenset(self._topics),
            owned=owned,
        )
        answer = await session.consumer_heartbeat(beat)
        self._epoch = answer.epoch
        return answer

    async def _follow(self, answer: BeatAnswer) -> None:
        if answer.assignment is None:
            return
        find = self._owner.session.find
        named = {topic.id: name for name in self._topics if (topic := find(name, Operation.READ)) is not None}
        wanted = {
            (named[topic_id], number)
            for topic_id, numbers in answer.assignment.items()
            if topic_id in named
            for number in numbers
        }
        self._losing = self._cursors.keys() - wanted
        last = self._last.place if self._last is not None else None
        free = {place for place in self._losing if place != last}
        if free:
            progress = {place: offset for place, offset in self._progress().items() if place in free}
            try:
                await self._commit_at_this_epoch(progress)
            finally:
                for place in free:
                    self._drop(place)
            self._poke.set()  # to confirm it
        for place in wanted - self._cursors.keys():
            await self._begin(place)

    async def _commit_at_this_epoch(self, progress: dict[TopicPartition, int]) -> None:
        """Part of a heartbeat: waiting for the next heartbeat would deadlock."""
        commits = [TopicCommit(name, [PartitionCommit(number, offset)]) for (name, number), offset in progress.items()]
        if commits:
            try:
                await self._owner.session.commit(self._group, self._id, None, self._epoch, commits)
            except RequestError as error:
                logger.warning("group %s: cannot commit progress: %s", self._group, error)

    async def _begin(self, place: TopicPartition) -> None:
        session = self._owner.session
        name, number = place
        topic = session.find(name, Operation.READ)
        if topic is None or number >= topic.partition_count:
            return
        log = session.partition(name, number, Operation.READ).log
        [fetched] = session.committed(self._group, [(name, [number])])
        committed = fetched.partitions[0][1]
        if log.damage.lost is not None:  # commit nothing until the log is restored
            offset = committed.offset if committed is not None else 0
            self._committed[place] = offset
            self._cursors[place] = Cursor(session, topic, number, offset)
            self._signal.set()
            return
        if committed is not None and committed.offset > log.high_watermark:
            await log.refresh()  # other processes' appends may be known late here; their commits are not
        offset = log.start if self._reset == "earliest" else log.high_watermark
        if committed is not None and log.start <= committed.offset <= log.high_watermark:
            offset = self._committed[place] = committed.offset
        cursor: Cursor[V] = Cursor(session, topic, number, offset)
        self._cursors[place] = cursor
        self._wakes[place] = log.wake(self._signal.set)
        self._signal.set()

    def _drop(self, place: TopicPartition) -> None:
        self._cursors.pop(place, None)
        self._committed.pop(place, None)
        self._losing.discard(place)
        unwake = self._wakes.pop(place, None)
        if unwake is not None:
            unwake()

    def _drop_all(self) -> None:
        self._last = None
        for place in list(self._cursors):
            self._drop(place)

    def _tell_the_others(self) -> None:
        for other in self._owner.streams_of.get(self._group, ()):
            if other is not self:
                other._poke.set()

    async def _shut(self, clean: bool) -> None:
        if clean:
            self._process_last()
        if self._unwatch is not None:
            self._unwatch()
        try:
            if self._failure is None:
                await self._commit(self._progress())
        except NotMember as error:
            logger.warning("%s", error)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        self._is_leaving = True
        self._poke.set()
        members = self._owner.streams_of.get(self._group, set())
        members.discard(self)
        if not members:
            self._owner.streams_of.pop(self._group, None)
        try:
            for task in (self._beats, self._committing):
                if task is not None and not task.done():
                    await asyncio.wait([task])
            self._drop_all()
            if self._epoch > JOINING:
                await self._owner.session.consumer_heartbeat(Beat(self._group, self._id, LEAVING))
        except RequestError as error:
            logger.debug("cannot leave group %s: %s", self._group, error)
        finally:
            self._tell_the_others()
            self._signal.set()
