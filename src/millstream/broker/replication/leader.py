"""The leader of one partition: what its followers hold, and which records are committed.

    follower fetches from offset N      it holds and has synced everything below N
    high watermark                      the smallest counted end over the ISR
    acks=all                            answered when the high watermark passes the batch

Rules
-----
1. A fetch is an acknowledgement: a follower syncs what it received before it fetches on. So the offset of its fetch is
   its counted end, and needs no message of its own.
2. While a change of the ISR is in flight, the high watermark counts the members of both sets (the maximal ISR): this
   broker cannot know which of the two holds. A write without an answer may still take effect, until the key has a new
   revision.
3. The high watermark stands still while the ISR is smaller than `min_isr`, and never goes back.
4. A follower enters the ISR when it holds everything below the high watermark and the start of this leader's epoch.
   The write checks the registration under which it fetched: a broker that restarted since is not let in (KIP-903).
5. A follower that has not caught up for `lag_ms_max` leaves the ISR. The controller takes out followers whose lease
   ended; a leader that cannot reach the metadata store changes nothing, and goes on with the ISR that it knows.
6. The leader changes no epoch and elects no broker. It resigns when the partition's state names another leader or term.

Until the high watermark reaches the start of its epoch, a new leader does not know how far readers were told, so it
answers the question for the latest offset with OFFSET_NOT_AVAILABLE (KIP-207).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millstream.cluster.partition_state import PartitionState
from millstream.core.callbacks import tell
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.stores.base import ReplicatedLog

NEVER = float("-inf")


@dataclass(slots=True)
class Progress:
    """What the leader knows of one follower."""

    registration: int
    counted: int
    """Its end, by its last fetch."""
    caught_up_at: float
    """When it last held everything that the leader had at its fetch before."""
    fetched_at: float
    leader_end: int
    """The leader's end at its last fetch."""


class Leader:
    """For one partition under one leader epoch."""

    def __init__(self, node_id: int, state: PartitionState, revision: int, log: ReplicatedLog, clock: Clock) -> None:
        self.node_id = node_id
        self.state = state
        self.revision = revision
        """Of the partition's key: the next change of the ISR must replace it."""
        self.proposed: list[PartitionState] = []
        """Changes of the ISR whose outcome is not known yet."""
        self.log = log
        self._clock = clock
        self._begun_at = clock.monotonic()
        self._followers: dict[int, Progress] = {}
        self._waiting: deque[tuple[int, Promise[Appended], Appended]] = deque()
        """acks=all, by the end of their batch."""
        self._wakers: dict[Callable[[], None], None] = {}
        """Fetches of followers that wait for records."""
        log.join_replicas(self._grown)
        log.lead(state.leader_epoch)
        self.epoch_start = log.end
        self.advance()

    @property
    def knows_watermark(self) -> bool:
        return self.log.high_watermark >= self.epoch_start

    @property
    def members(self) -> set[int]:
        """The maximal ISR (rule 2)."""
        members = set(self.state.isr)
        for each in self.proposed:
            members.update(each.isr)
        return members

    def refusal_of(self, epoch: int) -> Code:
        """What a follower of another epoch is told."""
        if epoch == self.state.leader_epoch:
            return Code.NONE
        return Code.FENCED_LEADER_EPOCH if epoch < self.state.leader_epoch else Code.UNKNOWN_LEADER_EPOCH

    # Appends

    def _grown(self) -> None:
        self.advance()
        self._wake()

    def _wake(self) -> None:
        for waker in list(self._wakers):
            tell(waker)

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back when the log has grown, or this broker leads no more; the answer removes the callback."""
        self._wakers[callback] = None
        return lambda: self._wakers.pop(callback, None)

    def check_committable(self) -> None:
        """Raises unless a batch with acks=all can be committed now."""
        if not self.state.can_commit:
            raise RequestError(
                Code.NOT_ENOUGH_REPLICAS,
                f"{self.log.name} has {len(self.state.isr)} in-sync replicas; min.insync.replicas is "
                f"{self.state.min_isr}",
            )

    def when_committed(self, appended: Promise[Appended], end: int) -> Promise[Appended]:
        """Settles when every in-sync replica holds the records below `end`; `appended` is the local append."""
        committed: Promise[Appended] = Promise()

        def stored(done: Promise[Appended]) -> None:
            if done.error is not None:
                committed.fail(done.error)
            elif end <= self.log.high_watermark:
                committed.settle(done.value())
            else:
                self._waiting.append((end, committed, done.value()))

        appended.then(stored)
        return committed

    def advance(self) -> None:
        """Raises the high watermark as far as rules 2 and 3 allow, and answers what is committed by then."""
        if not self.state.can_commit:
            return
        followers = self._followers
        end = self.log.counted
        for member in self.members:
            if member != self.node_id:
                progress = followers.get(member)
                end = min(end, progress.counted if progress is not None else 0)
        if end > self.log.high_watermark:
            self.log.raise_high_watermark(end)
            self._settle()

    def _settle(self) -> None:
        waiting, reached = self._waiting, self.log.high_watermark
        while waiting and waiting[0][0] <= reached:
            _, promise, answer = waiting.popleft()
            promise.settle(answer)

    def resign(self, error: RequestError) -> None:
        """Another broker leads, or this one lost its registration: the outcome of waiting batches is not known."""
        waiting, self._waiting = self._waiting, deque()
        for _, promise, _ in waiting:
            promise.fail(error)
        self._wake()

    # Followers

    def note_fetch(self, node_id: int, registration: int, offset: int) -> None:
        """Takes the offset of a follower's fetch as its counted end (rule 1)."""
        if node_id not in self.state.replicas:
            return
        now, end = self._clock.monotonic(), self.log.end
        known = self._followers.get(node_id)
        if known is None or known.registration != registration:
            if known is not None and known.registration > registration:
                return  # a request of an earlier life of that broker
            caught_up = now if offset >= end else NEVER
            self._followers[node_id] = Progress(registration, offset, caught_up, now, end)
        else:
            if offset >= end:
                known.caught_up_at = now
            elif offset >= known.leader_end:
                known.caught_up_at = max(known.caught_up_at, known.fetched_at)
            known.counted, known.fetched_at, known.leader_end = offset, now, end
        self.advance()

    def joins(self) -> int | None:
        """A follower that may enter the ISR now (rule 4)."""
        if self.proposed:
            return None
        needed = max(self.log.high_watermark, self.epoch_start)
        for node_id, progress in self._followers.items():
            if node_id in self.state.replicas and node_id not in self.state.isr and progress.counted >= needed:
                return node_id
        return None

    def laggards(self, lag_ms_max: int) -> list[int]:
        """Members of the ISR that have not caught up in time (rule 5)."""
        if self.proposed:
            return []
        oldest = self._clock.monotonic() - lag_ms_max / 1000
        late = []
        for member in self.state.isr:
            if member == self.node_id:
                continue
            progress = self._followers.get(member)
            caught_up = self._begun_at if progress is None else max(progress.caught_up_at, self._begun_at)
            is_current = progress is not None and progress.counted >= self.log.end
            if not is_current and caught_up < oldest:
                late.append(member)
        return late

    def registration_of(self, node_id: int) -> int:
        return self._followers[node_id].registration

    # The state

    def learn(self, state: PartitionState, revision: int) -> bool:
        """Takes the state as it is stored. Returns whether this broker still leads under the same epoch."""
        if revision < self.revision:
            return True
        if state.leader_epoch != self.state.leader_epoch or not state.leads(self.node_id, self.state.term):
            return False
        self.state, self.revision = state, revision
        self.proposed = []
        for gone in [each for each in self._followers if each not in state.replicas]:
            del self._followers[gone]
        self.advance()
        return True
