"""`LogStore` over a database: open logs, group commit, retention, and the handling of news."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator, Sequence

from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.log.config import LogConfig
from millstream.log.producers import PRODUCERS_MAX
from millstream.stores import pair
from millstream.stores.base import MetaStore
from millstream.stores.database import Database, Landed, LogState, Stored, Torn
from millstream.stores.group_commit import GroupCommit
from millstream.stores.table_log import TableLog, Waiting
from millstream.stores.table_meta import TableMeta

logger = logging.getLogger(__name__)

PRODUCER_IDLE_MS = 7 * 24 * 3600 * 1000
"""How long an idle producer is remembered: the default retention of its batches."""
EARLY_MAX = 20_000
WAITING_BYTES_MAX = 256 << 20
"""Limit of appends in flight. They are in memory, unlike those that wait for a file's sync. Others must retry."""
RETRY_SECONDS = 0.5
TOPICS_PREFIX = "topics/"


class TableLogStore:
    atomic = True
    tells_loss = False
    can_follow = False

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self.location = database.location
        self._clock = clock
        self._prepared: dict[tuple[str, int], LogState] = {}
        self._preparing = 0
        self._early: dict[int, LogState] = {}
        self._logs: dict[tuple[str, int], TableLog] = {}
        self._by_id: dict[int, TableLog] = {}
        self._gathered: list[Waiting] | None = None
        self._refusal: RequestError | None = None
        """Why no gathered append can be stored."""
        self._last_bundle = 0
        self._commits: GroupCommit[Waiting] = GroupCommit(self._write)
        self.meta = TableMeta(database)
        self._waiting_bytes = 0
        self._catching_up: asyncio.Task[None] | None = None
        self._is_behind = False
        self._damped = Damped(__name__)
        self._losses = 0
        """Counts losses of news: a state read before a loss may stay stale for ever."""
        database.listen(self._learn, self.meta.news, self._lost)

    async def start(self) -> None:
        await self.meta.start()

    async def match(self, meta: MetaStore) -> None:
        await pair.refuse(meta, self.location)

    def prepare(self, topic_id: str, partitions: int) -> Promise[None]:
        return promised(self._prepare(topic_id, partitions))

    async def _prepare(self, topic_id: str, partitions: int) -> None:
        self._preparing += 1
        try:
            losses = -1
            while losses != self._losses:
                losses = self._losses
                states = await self.database.open_logs(topic_id, partitions)
        finally:
            self._preparing -= 1
        if len(states) < partitions:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic is being deleted")
        for index, state in enumerate(states):
            if (topic_id, index) not in self._logs:
                self._prepared[topic_id, index] = state
                self._learn_early(state)

    async def create(self, topic: str, topic_id: str, partitions: range) -> None:
        return None

    def open(self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False) -> TableLog:
        key = topic_id, partition
        if key not in self._logs:
            state = self._prepared.pop(key, None)
            if state is None:  # another caller prepared and opened it too, and it was discarded
                raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic} was deleted concurrently")
            log = TableLog(f"{topic}-{partition}", state, config, self)
            self._logs[key] = self._by_id[log.id] = log
            early = self._early.pop(log.id, None)
            if early is not None:
                log.learn(early)
        return self._logs[key]

    def opened_all(self) -> None:
        """Nothing to set aside: `housekeep` deletes logs without a topic."""

    def room(self) -> tuple[int, int]:
        return self.database.room()

    # -- appending ---------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        return self._waiting_bytes + size <= WAITING_BYTES_MAX or not self._waiting_bytes

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        gathered: list[Waiting] = []
        self._gathered, self._refusal = gathered, None
        try:
            yield
        except BaseException:
            self._refusal = RequestError(Code.OPERATION_NOT_ATTEMPTED)
            raise
        finally:
            refusal, self._gathered, self._refusal = self._refusal, None, None
            if refusal is not None:
                self._land(gathered, [refusal] * len(gathered))
            elif gathered:
                if len(gathered) > 1:
                    self._last_bundle += 1
                    for waiting in gathered:
                        waiting.append = waiting.append._replace(bundle=self._last_bundle)
                self._commits.put(gathered, sum(waiting.size for waiting in gathered))

    def put(self, waiting: Waiting) -> None:
        self._waiting_bytes += waiting.size
        if self._gathered is not None:
            self._gathered.append(waiting)
            return
        self._commits.put([waiting], waiting.size)

    def refused(self, refusal: RequestError) -> None:
        """An append was refused: the others of its bundle fail too."""
        if self._gathered is not None:
            self._refusal = refusal

    def _write(self, group: list[Waiting]) -> Promise[None]:
        group.sort(key=lambda waiting: waiting.log.id)  # every process takes its locks in this order
        written: Promise[None] = Promise()
        self._append(group, written)
        return written

    def _append(self, group: list[Waiting], written: Promise[None]) -> None:
        appended = self.database.append([each.append for each in group], self._clock.now_ms())
        appended.then(lambda done: self._appended(group, done, written))

    def _appended(self, group: list[Waiting], done: Promise[Landed], written: Promise[None]) -> None:
        try:
            rest = self._answer(group, done)
        except Exception as error:
            written.fail(error)
            return
        if rest:
            self._append(rest, written)
        else:
            written.settle(None)

    def _answer(self, group: list[Waiting], done: Promise[Landed]) -> list[Waiting]:
        """Returns the appends to retry: nothing was stored, because of other bundles."""
        if isinstance(done.error, Torn):
            bundles = done.error.bundles
            refused = [each for each in group if each.append.bundle in bundles]
            self._land(refused, [bundles[each.append.bundle] for each in refused])
            return [each for each in group if each.append.bundle not in bundles]
        if done.error is None:
            outcomes, states = done.value()
            self._learn(states)
            self._land(group, outcomes)
        else:
            self._land(group, [_refusal(done.error)] * len(group))
        return []

    def _land(self, group: Sequence[Waiting], outcomes: Sequence[Stored | RequestError]) -> None:
        self._waiting_bytes -= sum(waiting.size for waiting in group)
        for waiting, outcome in zip(group, outcomes, strict=True):
            waiting.log.landed(waiting, outcome)

    # -- news --------------------------------------------------------------------------------------------------------

    def _learn(self, states: Sequence[LogState]) -> None:
        for state in states:
            log = self._by_id.get(state.id)
            if log is not None:
                log.learn(state)
            elif self._preparing or self._prepared:
                self._learn_early(state)

    def _learn_early(self, state: LogState) -> None:
        """News of a log may overtake the answer that opens it."""
        known = self._early.get(state.id)
        if known is None or known.version < state.version:
            self._early[state.id] = state
        if len(self._early) > EARLY_MAX:
            del self._early[next(iter(self._early))]

    def _lost(self) -> None:
        """Some news is missing: asks for the state of all logs and metadata until it succeeds."""
        self._is_behind = True
        self._losses += 1
        if self._catching_up is None:
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        while self._is_behind:
            self._is_behind = False  # another loss sets it again
            try:
                prepared = [state.id for state in self._prepared.values()]
                self._learn(await self.database.states([*self._by_id, *prepared]))
                await self.meta.catch_up()
            except Exception as error:
                self._is_behind = True
                self._damped.warning(
                    "cannot catch up with %s; retrying in %g s: %s", self.location, RETRY_SECONDS, error
                )
                await asyncio.sleep(RETRY_SECONDS)
        self._catching_up = None

    # -- housekeeping ------------------------------------------------------------------------------------------------

    async def discard(self, topic: str, topic_id: str) -> None:
        for key in [key for key in self._logs if key[0] == topic_id]:
            log = self._logs.pop(key)
            del self._by_id[log.id]
            log.abandon()
        await self._commits.drained()
        try:
            await self.database.discard(topic_id)
        except RequestError as error:
            self._damped.warning("cannot delete the rows of topic %s; retrying in the next round: %s", topic, error)

    async def housekeep(self) -> None:
        now_ms = self._clock.now_ms()
        for log in self._every_log():
            try:
                await log.expire(now_ms)
            except RequestError as error:  # deleted by another process, perhaps
                self._damped.warning("housekeeping of %s failed; retrying in the next round: %s", log.name, error)
        try:
            await self.database.forget_producers(now_ms - PRODUCER_IDLE_MS, PRODUCERS_MAX)
            await self._remove_orphans()
        except RequestError as error:
            self._damped.warning("housekeeping of %s failed; retrying in the next round: %s", self.location, error)

    async def _remove_orphans(self) -> None:
        """Deletes orphaned logs: a process that deleted their topic may have died halfway.

        A topic's key is stored before its logs, so reading the logs first cannot orphan a new topic.
        """
        found = await self.database.topic_ids()
        topics = await self.database.list_keys(TOPICS_PREFIX)
        live = {json.loads(stored.value)["id"].replace("-", "") for _, stored in topics}
        for topic_id in found - live - {key[0] for key in self._logs} - {key[0] for key in self._prepared}:
            await self.database.discard(topic_id)

    def _every_log(self) -> Iterator[TableLog]:
        return iter(list(self._logs.values()))

    async def close(self) -> None:
        """Writes queued items first."""
        if self._catching_up is not None:
            self._catching_up.cancel()
        await self._commits.drained()
        await self.meta.drained()
        await self.database.close()


def _refusal(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    logger.error("unexpected error while appending", exc_info=error)
    return RequestError(Code.KAFKA_STORAGE_ERROR, f"the append failed: {type(error).__name__}")
