"""Share fetches (KIP-932): leases from many partitions of a queue, with a long poll.

A fetch completes when it has leased records, when a partition reports an error, or when its wait time is over. Until
then it is parked: it holds neither data nor leases, only a place in the line at each partition. If another fetch is
faster, it keeps waiting.

`cancel` releases records that the fetch leases at that moment. If another broker gets the queue, the fetch fails with
SHARE_SESSION_NOT_FOUND, and clients open a new session. Clients know no such error for a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.share_lines import Lines
from millstream.broker.groups.queue.verbs import Answer, Member, Run, Taken, Verb
from millstream.broker.topics import Topic
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise

unexpected = Damped(__name__)

TopicIdPartition = tuple[UUID, int]
"""Topic and partition."""
NOTHING = Taken(b"", [])
TURN_PARTITIONS = 1_000
"""Partitions that a fetch checks or opens in one turn of the event loop."""


class Leased(NamedTuple):
    """The result of a fetch for one partition."""

    place: TopicIdPartition
    taken: Taken
    lease_ms: int
    """0: nothing was leased."""
    error: RequestError | None = None


class TopicsById(Protocol):
    def by_id(self, topic_id: UUID) -> Topic | None:
        """Raises `RequestError` for a topic that the member may not read."""


def find(queue: Queue, topics: TopicsById, place: TopicIdPartition) -> QueuePartition | None:
    """None: the queue has not opened it."""
    topic_id, index = place
    topic = topics.by_id(topic_id)
    if topic is None:
        raise RequestError(Code.UNKNOWN_TOPIC_ID)
    if not 0 <= index < topic.partition_count:
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION)
    return queue.opened(topic, index)


class ShareFetch:
    """One fetch, from its first attempt to its response."""

    def __init__(
        self,
        queue: Queue,
        member: Member,
        lines: Lines,
        topics: TopicsById,
        places: Sequence[TopicIdPartition],
        records_max: int,
        bytes_max: int,
    ) -> None:
        self._queue = queue
        self._member = member
        self._lines = lines
        self._topics = topics
        self._places = places
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._found: list[QueuePartition] = []
        self._unopened: dict[TopicIdPartition, RequestError] = {}
        self._is_over = False
        self._is_cancelled = False
        self._is_woken = False
        self._sleeper: asyncio.Future[None] | None = None

    async def run(
        self, clock: Clock, wait_ms_max: int, whole_batches: bool, parked: Callable[[], None]
    ) -> list[Leased]:
        """Calls `parked` if no record is available yet."""
        await self._open()
        leased = await self._lease(whole_batches)
        if _is_worth_telling(leased) or wait_ms_max <= 0 or not self._places or self._is_cancelled:
            return leased
        parked()
        waiters = [self._lines.join(partition, self._wake) for partition in self._found]
        timer = clock.call_later(wait_ms_max / 1000, self._time_is_over)
        leased = []
        try:
            while True:
                # Tries again before it sleeps: records may have arrived before it joined the lines.
                self._is_woken = False
                for waiter in waiters:
                    waiter.is_called = False
                leased = await self._lease(whole_batches)
                if _is_worth_telling(leased) or self._is_over:
                    return leased
                if not self._is_woken:
                    self._sleeper = asyncio.get_running_loop().create_future()
                    await self._sleeper
                    self._sleeper = None
        finally:
            timer.cancel()
            served = {each.place for each in leased if each.taken.runs}
            for waiter in waiters:
                partition = waiter.line.partition
                waiter.leave(
                    self._is_cancelled or partition.is_closed or (partition.topic.id, partition.index) in served
                )

    def cancel(self) -> None:
        self._is_cancelled = self._is_over = True
        self._wake()

    def _time_is_over(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def _open(self) -> None:
        """Opens partitions that are new to the queue, many at once: one write makes them durable."""
        for start in range(0, len(self._places), TURN_PARTITIONS):
            await self._open_some(self._places[start : start + TURN_PARTITIONS])

    async def _open_some(self, places: Sequence[TopicIdPartition]) -> None:
        missing: dict[TopicIdPartition, Coroutine[Any, Any, QueuePartition]] = {}
        for topic_id, index in places:
            try:
                topic = self._topics.by_id(topic_id)
            except RequestError:
                continue  # `_lease` reports it
            if topic is not None and 0 <= index < topic.partition_count and self._queue.opened(topic, index) is None:
                missing[topic_id, index] = self._queue.partition(topic, index)
        if not missing:
            return
        opened = await asyncio.gather(*missing.values(), return_exceptions=True)
        for place, failed in zip(missing, opened, strict=True):
            if isinstance(failed, RequestError):  # fails this partition only
                # The journal reports an unavailable store with a group error, which clients do not expect here.
                is_unstored = failed.code == Code.COORDINATOR_NOT_AVAILABLE
                code = Code.KAFKA_STORAGE_ERROR if is_unstored else failed.code
                self._unopened[place] = RequestError(code, failed.detail)
            elif isinstance(failed, BaseException):
                raise failed

    async def _lease(self, whole_batches: bool) -> list[Leased]:
        records, room = self._records_max, self._bytes_max
        leased: list[Leased] = []
        self._found = []
        for number, place in enumerate(self._places, 1):
            if not number % TURN_PARTITIONS:
                await asyncio.sleep(0)
            if self._is_cancelled:
                break
            try:
                partition, taken = find(self._queue, self._topics, place), NOTHING
                if partition is None:  # its topic was recreated, or its queue forgot it
                    raise self._unopened.get(place) or RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION)
                partition.check()
                partition.log.damage.check_lost()
                if records > 0 and room > 0 and partition.has_some:
                    taken = await partition.acquire(self._member, records, room, whole_batches=whole_batches)
            except RequestError as error:
                if error.code == Code.NOT_COORDINATOR:  # the whole queue is lost, with all leases
                    detail = f"{error.detail}; open a new session"
                    raise RequestError(Code.SHARE_SESSION_NOT_FOUND, detail) from error
                leased.append(Leased(place, NOTHING, 0, error))
                continue
            except Exception as error:  # fails this partition and keeps the leases from other partitions
                unexpected.error("share fetch of %s-%d failed: %r", *place, error)
                leased.append(Leased(place, NOTHING, 0, RequestError(Code.UNKNOWN_SERVER_ERROR)))
                continue
            self._found.append(partition)
            leased.append(Leased(place, taken, partition.settings.lease_ms if taken.runs else 0))
            records -= sum(run.last - run.first + 1 for run in taken.runs)
            room -= len(taken.data)
        if self._is_cancelled:
            await give_back(self._queue, self._member, self._topics, leased)
            return []
        return leased


async def give_back(queue: Queue, member: Member, topics: TopicsById, leased: Sequence[Leased]) -> None:
    """Releases records whose client disconnected before the response."""
    answers = {each.place: [_release(run) for run in each.taken.runs] for each in leased if each.taken.runs}
    await settle(acknowledge(queue, member, topics, answers))


def _release(run: Run) -> Answer:
    return Answer(run.first, run.last, Verb.RELEASE)


def _is_worth_telling(leased: Sequence[Leased]) -> bool:
    return any(each.taken.runs or each.error is not None for each in leased)


def acknowledge(
    queue: Queue, member: Member, topics: TopicsById, answers: Mapping[TopicIdPartition, Sequence[Answer]]
) -> dict[TopicIdPartition, Promise[None]]:
    """Acknowledges records. Each partition takes all its acknowledgements or none, on its own."""
    promises: dict[TopicIdPartition, Promise[None]] = {}
    for place, said in answers.items():
        try:
            partition = find(queue, topics, place)
            if partition is None:
                raise RequestError(Code.INVALID_RECORD_STATE, "no record of this partition is leased")
            promises[place] = partition.answer(member, said)
        except RequestError as error:
            promises[place] = Promise.failed(error)
    return promises


async def settle(promises: Mapping[TopicIdPartition, Promise[None]]) -> dict[TopicIdPartition, RequestError | None]:
    """Waits until each is durable or refused."""
    errors: dict[TopicIdPartition, RequestError | None] = {}
    for place, promise in promises.items():
        try:
            await promise
            errors[place] = None
        except RequestError as error:
            errors[place] = error
    return errors
