"""The scrub verifies all stored batches slowly, in the background, round after round.

Nothing else reads old data: without the scrub, a consumer would be the first to find a lost page. The scrub reads every
partition in turn, at most `scrub_bytes_per_second`, and records damage as any verification does.

Rules
-----
1. A round begins `ROUND_SECONDS` after the previous one began, or `IDLE_SECONDS` after a longer one. The first begins
   `FIRST_SECONDS` after the start: a start has the disk to itself, and short-lived brokers never scrub.
2. A round takes topics by id and partitions by number. It checkpoints its position in a key of the metadata store
   after every `SAVE_BYTES`, and resumes there after a restart. A smaller round writes nothing.
3. Of several brokers over one store, the one with the lowest node id scrubs.
4. A failed read is left for the next round. No error ends the scrub.
5. Each round verifies known damage again. `known_damage.py` keeps it across a restart, whether the scrub is on or
   off.
"""

from __future__ import annotations

import asyncio
import json
import logging

from millstream.broker.known_damage import KnownDamage
from millstream.broker.partition import Partition
from millstream.broker.topics import Topic, Topics
from millstream.broker.verification import verify_piece
from millstream.cluster.base import Cluster
from millstream.core.clock import Clock, sleep
from millstream.core.errors import RequestError
from millstream.core.metrics import Metrics
from millstream.stores.base import MetaStore, Put

logger = logging.getLogger(__name__)

FIRST_SECONDS = 300.0
ROUND_SECONDS = 24 * 3600.0
SAVE_BYTES = 64 << 20
IDLE_SECONDS = 60.0
"""How often a broker that does not scrub checks if it should."""
KEY = "scrub/position"

Position = tuple[str, int, int]
"""Topic id, partition and first unverified offset."""


class Scrub:
    def __init__(
        self,
        topics: Topics,
        meta: MetaStore,
        clock: Clock,
        cluster: Cluster,
        metrics: Metrics,
        bytes_per_second: int,
    ) -> None:
        self._topics = topics
        self._meta = meta
        self._clock = clock
        self._cluster = cluster
        self._metrics = metrics
        self._bytes_per_second = bytes_per_second
        self._known = KnownDamage(topics, meta, clock, cluster.node_id)
        self._task: asyncio.Task[None] | None = None
        self._unsaved_bytes = 0
        self._is_saved = False
        """Whether the store has a position."""

    def start(self) -> None:
        self._known.start()
        if self._bytes_per_second:
            self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._known.close()

    async def _run(self) -> None:
        await sleep(self._clock, FIRST_SECONDS)
        while True:
            while not self._is_ours():
                await sleep(self._clock, IDLE_SECONDS)
            began = self._clock.monotonic()
            try:
                await self._round()
            except Exception:
                logger.exception("scrub round failed; the next one starts over")
            await sleep(self._clock, max(began + ROUND_SECONDS - self._clock.monotonic(), IDLE_SECONDS))

    def _is_ours(self) -> bool:
        return all(self._cluster.node_id < other.node_id for other in self._cluster.others())

    async def _round(self) -> None:
        self._unsaved_bytes = 0
        begin = await self._load()
        self._is_saved = begin is not None
        for topic in sorted(self._topics, key=lambda topic: topic.id):
            for part in topic.partitions:
                here = (topic.id.hex, part.index)
                if begin is None or here >= begin[:2]:
                    offset = begin[2] if begin is not None and here == begin[:2] else 0
                    await self._scrub(topic, part, offset)
        if self._is_saved:
            await self._store(None)
        self._metrics.scrub_rounds += 1

    async def _scrub(self, topic: Topic, part: Partition, offset: int) -> None:
        """Verifies a partition from an offset, rate-limited."""
        log = part.log
        offset, end = max(offset, log.start), log.high_watermark
        while offset < end and self._topics.get(topic.name) is topic:
            try:
                piece = await verify_piece(log, offset)
            except (RequestError, OSError) as error:
                if self._topics.get(topic.name) is topic:  # else it was deleted
                    logger.warning("scrub cannot read %s-%d at offset %d: %s", topic.name, part.index, offset, error)
                return
            self._metrics.verified_bytes += piece.size
            await sleep(self._clock, piece.size / self._bytes_per_second)
            if piece.next_offset <= offset:
                return
            offset = piece.next_offset
            self._unsaved_bytes += piece.size
            if self._unsaved_bytes >= SAVE_BYTES:
                self._unsaved_bytes = 0
                await self._store((topic.id.hex, part.index, offset))

    async def _load(self) -> Position | None:
        found = await self._meta.get(KEY)
        if found is None or not found.value:
            return None
        try:
            topic, index, offset = json.loads(found.value)
            return str(topic), int(index), int(offset)
        except (ValueError, TypeError) as error:
            logger.warning("cannot read the scrub position; the round starts over: %s", error)
            return None

    async def _store(self, position: Position | None) -> None:
        try:
            await self._meta.transact(Put(KEY, json.dumps(position).encode() if position else b""))
            self._is_saved = position is not None
        except RequestError as error:
            logger.warning("cannot store the scrub position; a restart would start the round over: %s", error.detail)
