"""A worker of a queue over an embedded broker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millstream.broker.groups.queue.verbs import Answer, Member, TakenRecord, Verb
from millstream.broker.session import Queue as BrokerQueue
from millstream.broker.session import QueuePartition
from millstream.client.iterators import Queue, QueueOptions
from millstream.client.records import Desk, Job, user_job
from millstream.client.signal import Signal
from millstream.core.errors import Closed, Code, LeaseLost, LogLost, RequestError, UnknownTopic, refusal
from millstream.security.rights import Operation

if TYPE_CHECKING:
    from millstream.client.embedded import Embedded

V = TypeVar("V")
TAKE_BYTES = 1024 * 1024
ELSEWHERE = frozenset({Code.NOT_COORDINATOR, Code.COORDINATOR_NOT_AVAILABLE, Code.COORDINATOR_LOAD_IN_PROGRESS})
"""Another process coordinates the group: this one is a standby."""
STANDBY_SECONDS = 1.0


class EmbeddedQueue(Queue[V], Desk[V]):
    _owner: Embedded

    def __init__(self, owner: Embedded, options: QueueOptions) -> None:
        super().__init__(owner, options)
        self._queue: BrokerQueue | None = None
        self._member: Member | None = None
        self._partitions: dict[tuple[str, int], QueuePartition] = {}
        self._order: list[QueuePartition] = []
        self._turn = 0
        self._ready: deque[tuple[QueuePartition, TakenRecord]] = deque()
        self._taking: asyncio.Task[None] | None = None
        self._signal = Signal(owner.clock)
        self._cancels: list[Callable[[], None]] = []

    async def _start(self) -> None:
        for name in self._topics:
            await self._owner.topic(name, Operation.READ)
        if not self._cancels:
            self._cancels.append(self._owner.session.watch_topics(self._signal.set))
        await self._join()

    async def _join(self) -> bool:
        """Whether this process coordinates the group; if not, another does."""
        if not await self._owner.is_coordinator(self._group):
            return False
        try:
            if self.is_closed:  # meanwhile, as below: it would never leave
                return False
            queue = self._queue = self._owner.session.open_queue(
                self._group, durable=True, settings=self._settings, door_defaults={}
            )
            await self._open_partitions()
            if self._queue is not queue:
                return False
            self._member = queue.join("python")
        except RequestError as error:
            if error.code in ELSEWHERE:
                return False
            raise refusal(error.code, error.detail) from None
        return True

    @property
    def _is_joined(self) -> bool:
        """Whether this process still coordinates the queue."""
        return self._member is not None and self._queue is not None and self._owner.session.has_queue(self._queue)

    async def _open_partitions(self) -> None:
        """Those of new and of grown topics."""
        queue, session = self._queue, self._owner.session
        assert queue is not None
        for name in self._topics:
            topic = session.find(name, Operation.READ)
            if topic is None:
                raise UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name} any more")
            session.check_lease(queue, topic)
            for index in range(topic.partition_count):
                known = self._partitions.get((name, index))
                if known is None or known.is_closed or known.topic is not topic:
                    opened = await queue.partition(topic, index)
                    self._partitions[name, index] = opened
                    self._cancels.append(opened.wake(self._signal.set))
        self._order = list(self._partitions.values())

    async def _next(self, timeout: float | None) -> Job[V] | None:
        deadline = None if timeout is None else self._owner.clock.monotonic() + timeout
        while not self.is_closed:
            if not self._is_joined:
                self._leave()
                if not await self._join():
                    left = STANDBY_SECONDS
                    if deadline is not None:
                        left = min(left, deadline - self._owner.clock.monotonic())
                    if left <= 0:
                        return None
                    await self._signal.wait(left)
                    continue
            while self._ready:
                partition, taken = self._ready.popleft()
                assert self._member is not None
                if partition.has_leased(self._member, taken.record.offset, taken.attempt):
                    place = partition.topic.name, partition.index
                    return user_job(*place, taken.record, self._decode, taken.attempt, self, partition)
                # The lease ended before a task asked: another worker may have the record.
            taking = self._taking
            if taking is None:
                taking = self._taking = asyncio.ensure_future(self._take())
            await asyncio.wait([taking])  # in a task of its own: a cancelled caller loses no job
            if self._taking is taking:  # else it is being closed
                self._taking = None
                taking.result()
            if not self._ready:
                left_over = None if deadline is None else deadline - self._owner.clock.monotonic()
                if not await self._signal.wait(left_over) and left_over is not None:
                    return None
        return None

    async def _take(self) -> None:
        member = self._member
        assert member is not None
        try:
            await self._open_partitions()
            order = self._order
            for step in range(len(order)):
                partition = order[(self._turn + step) % len(order)]
                try:
                    taken = await partition.take(member, self._prefetch - len(self._ready), TAKE_BYTES)
                except LogLost:  # the next call serves the other partitions
                    self._turn = (self._turn + step + 1) % len(order)
                    raise
                if self._member is not member:  # it has left, and its leases are gone
                    self._signal.set()
                    return
                self._ready.extend((partition, each) for each in taken)
                if len(self._ready) >= self._prefetch:
                    self._turn = (self._turn + step + 1) % len(order)
                    return
        except RequestError as error:
            if error.code == Code.NOT_COORDINATOR and (self._member is not member or not self._is_joined):
                self._signal.set()  # another process coordinates the queue, or did: stand by, or this member rejoined
                return
            if type(error) is not RequestError:
                raise
            raise refusal(error.code, error.detail) from None

    async def accept(self, job: Job[V]) -> None:
        await self._answer(job, Answer(job.offset, job.offset, Verb.ACCEPT))

    async def release(self, job: Job[V], delay: float, reason: str) -> None:
        await self._answer(job, Answer(job.offset, job.offset, Verb.RELEASE, round(delay * 1000), reason))

    async def reject(self, job: Job[V], reason: str) -> None:
        await self._answer(job, Answer(job.offset, job.offset, Verb.REJECT, reason=reason))

    async def renew(self, job: Job[V]) -> None:
        await self._answer(job, Answer(job.offset, job.offset, Verb.RENEW))

    async def _answer(self, job: Job[V], answer: Answer) -> None:
        if self.is_closed:
            raise Closed("this worker has left its queue; the job goes to another worker")
        if not self._is_joined:
            raise LeaseLost(Code.INVALID_RECORD_STATE, "another process coordinates the queue now")
        try:
            assert self._member is not None and self._queue is not None
            self._owner.session.check_lease(self._queue, job._lease.topic)
            await job._lease.answer(self._member, [answer])
        except RequestError as error:
            if error.code in ELSEWHERE and job._lease.is_closed:  # else the store failed; a retry may help
                raise LeaseLost(Code.INVALID_RECORD_STATE, "another process coordinates the queue now") from None
            if error.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise LeaseLost(Code.INVALID_RECORD_STATE, "the job's topic was deleted") from None
            raise refusal(error.code, error.detail) from None

    async def _shut(self, clean: bool) -> None:
        taking, self._taking = self._taking, None
        try:
            if taking is not None:
                await asyncio.wait([taking])
                if not taking.cancelled():
                    taking.exception()
            for cancel in self._cancels:
                cancel()
            self._cancels.clear()
            self._leave()
        finally:
            self._signal.set()

    def _leave(self) -> None:
        """Releases the jobs at hand; if another process coordinates the queue, they are released already.

        Jobs that no task received do not count as delivered: stopping and starting makes no dead letters.
        """
        ready, self._ready = self._ready, deque()
        if self._queue is not None and self._member is not None:
            unseen: dict[QueuePartition, set[int]] = {}
            for partition, taken in ready:
                if partition.has_leased(self._member, taken.record.offset, taken.attempt):
                    unseen.setdefault(partition, set()).add(taken.record.offset)
            for partition, offsets in unseen.items():
                partition.give_back(self._member, offsets)
            self._queue.leave(self._member)
        self._queue = self._member = None
        self._partitions.clear()
