"""Jobs leased from a Millstream server by our own member of a share group, with every verb of a queue.

    tasks --acknowledgements, "one more"--> the member's thread --requests--> server
          <--jobs, results--

The member blocks (`share.py`), so it has a thread of its own. That thread sends acknowledgements, leases jobs when
a task waits for one, and sends heartbeats. Rules:

1. Nothing is leased before a task asks, and then at most `prefetch`; a job whose lease ends before a task takes it
   is dropped here, since another worker may have it.
2. While jobs are leased, fetches do not wait, so that no acknowledgement waits behind a fetch.
3. When the connection breaks all leases are lost: acknowledgements raise `LeaseLost`, and the member rejoins by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.client.iterators import QueueOptions
from millstream.client.link import Link, LinkBroken
from millstream.client.records import Desk, Job, user_job
from millstream.client.share import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    AnswersRefused,
    Delivery,
    Lease,
    PartitionRefused,
    Reply,
    ShareError,
    ShareMember,
)
from millstream.core.errors import Closed, Code, LeaseLost, MillstreamError, code_of, refusal

if TYPE_CHECKING:
    from millstream.client.remote import Remote

logger = logging.getLogger(__name__)

V = TypeVar("V")
IDLE_WAIT_MS = 500
"""The wait of a fetch while nothing is leased; closing may wait as long."""
BUSY_PAUSE_SECONDS = 0.03
"""The pause between fetches that do not wait."""
BEAT_SECONDS_MAX = 1.0
"""The longest pause between heartbeat checks."""
RECONNECT_SECONDS = 0.5
FIND_SECONDS_MAX = 5.0
TOO_LATE = "the job was already acknowledged, or its lease expired"
LEFT = "its consumer disconnected"
CUT_OFF = "the connection to the server broke, which ended the lease; the job may be delivered again"


class Saying(NamedTuple):
    """An acknowledgement in flight."""

    lease: Lease
    reply: Reply
    outcome: asyncio.Future[None]


class LeasedJobs(Desk[V]):
    """Implements `remote_queue.Jobs`."""

    def __init__(self, remote: Remote, options: QueueOptions) -> None:
        self._remote = remote
        self._topics, self._group, self._prefetch, _, self._decode = options
        self._member_id = str(uuid.uuid4())
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Future[None] | None = None
        """Done when the thread ends."""
        self._ready: deque[tuple[Delivery, float]] = deque()
        """Jobs, and the ends of their leases."""
        self._arrived = asyncio.Event()
        self._given: set[Lease] = set()
        """Jobs that a task received and has not acknowledged."""
        self._error: MillstreamError | None = None
        self._is_over = False
        # Shared by both sides, under the condition:
        self._told = threading.Condition()
        self._sayings: list[Saying] = []
        self._is_wanted = False
        self._is_stopping = False
        self._has_ended = False
        # Used by the thread only:
        self._member: ShareMember | None = None
        self._link: Link | None = None
        self._out: dict[Lease, float] = {}
        """Leased and not acknowledged, with the end of the lease."""

    # -- the tasks' side ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        # A daemon: a program that ends without closing must not wait for it; the server redelivers its jobs
        thread = threading.Thread(target=self._run, name="millstream-queue", daemon=True)
        running = self._loop.create_future()
        thread.start()
        self._running = running  # set after the start: a thread that failed to start never reports its end

    async def next(self, timeout: float | None) -> Job[V] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over:
            while self._ready:
                delivery, until = self._ready.popleft()
                if until > time.monotonic():
                    self._given.add(delivery.lease)
                    return self._job(delivery)
            if self._error is not None:
                error = self._error
                if not self._has_ended:  # else no job will ever come
                    self._error = None
                raise error
            self._arrived.clear()
            with self._told:
                self._is_wanted = True  # until a job arrives, even if the caller is cancelled
                self._told.notify()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        return None

    def _job(self, delivery: Delivery) -> Job[V]:
        topic, partition, record, attempt, _ = delivery
        return user_job(topic, partition, record, self._decode, attempt, self, delivery.lease)

    async def accept(self, job: Job[V]) -> None:
        await self._say(job, Reply(ACCEPT))

    async def release(self, job: Job[V], delay: float, reason: str) -> None:
        await self._say(job, Reply(RELEASE, round(delay * 1000), reason))

    async def reject(self, job: Job[V], reason: str) -> None:
        await self._say(job, Reply(REJECT, reason=reason))

    async def renew(self, job: Job[V]) -> None:
        await self._say(job, Reply(RENEW))

    async def _say(self, job: Job[V], reply: Reply) -> None:
        saying = Saying(job._lease, reply, self._loop.create_future())
        with self._told:
            if self._is_stopping or self._has_ended:
                raise Closed("this worker has left its queue; the job goes to another worker")
            self._sayings.append(saying)
            self._told.notify()
        await saying.outcome

    async def shut(self) -> None:
        self._is_over = True
        self._arrived.set()
        with self._told:
            self._is_stopping = True
            self._told.notify()
        if self._running is not None:
            await asyncio.wait([self._running])

    # -- the member's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: MillstreamError | None = None
        try:
            while not self._turn():
                pass
        except Exception as error:
            logger.exception("the worker of queue %s failed", self._group)
            failure = MillstreamError(f"the worker failed: {type(error).__name__}: {error}")
        finally:
            with self._told:
                self._has_ended = True
                sayings, self._sayings = self._sayings, []
            if failure is not None:  # after the end: a caller told earlier would ask again, and wait for ever
                self._call(self._fail, failure)
            for saying in sayings:
                self._tell(saying, Closed("this worker has left its queue; the job goes to another worker"))
            try:
                self._leave()
            finally:
                self._call(self._end)

    def _turn(self) -> bool:
        """One round: waits for work and does it; returns whether it was the last round."""
        with self._told:
            self._told.wait_for(lambda: self._sayings or self._is_wanted or self._is_stopping, BEAT_SECONDS_MAX)
            self._is_stopping = self._is_stopping or self._loop.is_closed()
            sayings, self._sayings = self._sayings, []
            wanted, stopping = self._is_wanted and not self._is_stopping, self._is_stopping
        answers = self._answers(sayings)
        try:
            late = self._exchange({lease: saying.reply for lease, saying in answers.items()}, wanted)
            for lease, saying in answers.items():
                self._tell(saying, LeaseLost(Code.INVALID_RECORD_STATE, TOO_LATE) if lease in late else None)
        except AnswersRefused as error:
            self._tell_refused(error, answers)
        except (LinkBroken, ClusterError, ShareError) as error:
            self._drop_link()
            for saying in answers.values():
                self._tell(saying, LeaseLost(Code.INVALID_RECORD_STATE, CUT_OFF))
            if isinstance(error, ShareError):
                self._tell_refusal(error)
            self._pause(RECONNECT_SECONDS)
        except Exception:  # the thread ends with it: resolve them first
            for saying in answers.values():
                self._tell(saying, LeaseLost(Code.INVALID_RECORD_STATE, CUT_OFF))
            raise
        return stopping and not self._sayings  # no task can add to them now

    def _tell_refused(self, error: AnswersRefused, answers: dict[Lease, Saying]) -> None:
        """The leases of refused acknowledgements are unchanged: the worker may retry."""
        for lease, saying in answers.items():
            if lease in error.refused:
                self._tell(saying, refusal(code_of(error.code) or Code.COORDINATOR_NOT_AVAILABLE, str(error)))
                continue
            if saying.reply.verb != RENEW:
                self._out.pop(lease, None)
            self._tell(saying, LeaseLost(Code.INVALID_RECORD_STATE, TOO_LATE) if lease in error.late else None)

    def _tell_refusal(self, error: ShareError) -> None:
        """Raises the error to the task that waits for a job, unless it is retriable."""
        code = code_of(error.code)
        if code is not None and not code.retriable:
            self._call(self._fail, refusal(code, str(error)))

    def _answers(self, sayings: list[Saying]) -> dict[Lease, Saying]:
        """One for each job; further ones, such as an accept after a renewal, are left for the next round."""
        answers: dict[Lease, Saying] = {}
        later: list[Saying] = []
        for saying in sayings:
            if saying.lease not in self._out:
                self._tell(saying, LeaseLost(Code.INVALID_RECORD_STATE, TOO_LATE))
            elif saying.lease in answers:
                later.append(saying)
            else:
                answers[saying.lease] = saying
        if later:
            with self._told:
                self._sayings[:0] = later
        return answers

    def _exchange(self, answers: dict[Lease, Reply], wanted: bool) -> list[Lease]:
        """Sends acknowledgements and leases the wanted jobs; returns the late acknowledgements."""
        member = self._member or self._open()
        member.beat()
        now = time.monotonic()
        self._out = {lease: until for lease, until in self._out.items() if until > now}
        if wanted and not answers:
            is_busy = bool(self._out)
            try:
                taken, late = member.fetch(self._prefetch, 0 if is_busy else IDLE_WAIT_MS, {})
            except PartitionRefused as error:  # workers keep their jobs of the other partitions
                self._tell_refusal(error)
                self._pause(RECONNECT_SECONDS)
                return []
            self._give(taken, member)
            if not taken and (is_busy or not member.has_places):
                self._pause(BUSY_PAUSE_SECONDS if is_busy else IDLE_WAIT_MS / 1000)
            return late
        late = member.answer(answers)
        until = time.monotonic() + member.lease_ms / 1000
        for lease, reply in answers.items():
            if reply.verb == RENEW and lease not in late:
                self._out[lease] = until
            else:
                self._out.pop(lease, None)
        return late

    def _give(self, taken: list[Delivery], member: ShareMember) -> None:
        if taken:
            until = time.monotonic() + member.lease_ms / 1000
            self._out.update((delivery.lease, until) for delivery in taken)
            with self._told:
                self._is_wanted = False
            self._call(self._arrive, [(delivery, until) for delivery in taken])

    def _open(self) -> ShareMember:
        cluster = KafkaCluster(self._remote.bootstrap, "millstream", FIND_SECONDS_MAX)
        try:
            self._link = cluster.coordinator(self._group)
        finally:
            cluster.close()
        self._member = ShareMember(self._link, self._group, self._topics, self._member_id)
        return self._member

    def _leave(self) -> None:
        try:
            if self._member is not None:
                # No task receives a job any more. Jobs that a task has are failed deliveries; the others do not count.
                given = [lease for lease in self._out if lease in self._given]
                self._member.leave(dict.fromkeys(given, Reply(RELEASE, reason=LEFT)))
        except (LinkBroken, ShareError):  # the server detects the lost connection
            pass
        self._drop_link()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._member = None
        self._out.clear()

    def _pause(self, seconds: float) -> None:
        with self._told:
            self._told.wait_for(lambda: self._sayings or self._is_stopping, seconds)

    # -- from the thread to the loop ---------------------------------------------------------------------------------

    def _call(self, function: object, *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _arrive(self, jobs: list[tuple[Delivery, float]]) -> None:
        self._given.intersection_update(list(self._out))
        self._given.difference_update(delivery.lease for delivery, _ in jobs)  # leased again
        self._ready.extend(jobs)
        self._arrived.set()

    def _fail(self, error: MillstreamError) -> None:
        self._error = error
        self._arrived.set()

    def _end(self) -> None:
        if self._running is not None and not self._running.done():
            self._running.set_result(None)

    def _tell(self, saying: Saying, error: MillstreamError | None) -> None:
        def settle() -> None:
            if saying.outcome.done():  # the waiting task was cancelled
                return
            if error is None:
                saying.outcome.set_result(None)
            else:
                saying.outcome.set_exception(error)

        self._call(settle)
