"""Stores known damage, so that a restart keeps it.

The registry of each log (`log/damage.py`) is in memory, and the next scrub may be a day away. So the broker stores the
ranges, and `/healthz` reports them right after a start.

Rules
-----
1. Each broker stores its ranges in one key of the metadata store. It compares them every `SAVE_SECONDS` and on close,
   and writes them on a change: a broker over sound logs writes nothing.
2. At start the broker verifies every stored range as a scrub does. A range that is still damaged enters its log's
   registry; a repaired range is dropped. The broker stores no ranges before that is complete.
3. At most `RANGES_MAX` ranges are stored. A scrub finds the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from uuid import UUID

from millstream.broker.topics import Topics
from millstream.broker.verification import verify_piece
from millstream.core.clock import Clock, sleep
from millstream.core.errors import RequestError
from millstream.core.logs import Damped
from millstream.stores.base import MetaStore, Put

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

SAVE_SECONDS = 10.0
RANGES_MAX = 10_000
KEY = "scrub/damage/{node}"

Known = list[tuple[str, int, int, int]]
"""Topic id, partition, first offset and end offset."""


class KnownDamage:
    def __init__(self, topics: Topics, meta: MetaStore, clock: Clock, node_id: int) -> None:
        self._topics = topics
        self._meta = meta
        self._clock = clock
        self._key = KEY.format(node=node_id)
        self._stored: Known | None = None
        """None until the ranges of the last run are verified."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._save()

    async def _run(self) -> None:
        stored = await self._load()
        await self._verify(stored)
        self._stored = stored
        while True:
            await self._save()
            await sleep(self._clock, SAVE_SECONDS)

    async def _verify(self, stored: Known) -> None:
        for topic_id, index, first, end in stored:
            topic = self._topics.find(UUID(topic_id))
            if topic is None or index >= len(topic.partitions):
                continue
            log = topic.partitions[index].log
            offset, end = max(first, log.start), min(end, log.high_watermark)
            try:
                while offset < end:
                    piece = await verify_piece(log, offset)
                    if piece.next_offset <= offset:
                        break
                    offset = piece.next_offset
            except (RequestError, OSError) as error:
                logger.warning("%s-%d: offset %d cannot be verified: %s", topic.name, index, offset, error)

    def _known(self) -> Iterable[tuple[str, int, int, int]]:
        for topic in self._topics:
            for part in topic.partitions:
                for damaged in part.log.damage.ranges:
                    yield topic.id.hex, part.index, damaged.first, damaged.end

    async def _load(self) -> Known:
        try:
            found = await self._meta.get(self._key)
            rows = json.loads(found.value) if found is not None else []
            return [(str(UUID(topic).hex), int(index), int(first), int(end)) for topic, index, first, end in rows]
        except (RequestError, ValueError, TypeError, AttributeError) as error:
            logger.warning("cannot load known damage; the scrub must find it again: %s", error)
            return []

    async def _save(self) -> None:
        known = list(self._known())[:RANGES_MAX]
        if self._stored is None or known == self._stored:
            return
        try:
            await self._meta.transact(Put(self._key, json.dumps(known).encode()))
            self._stored = known
        except RequestError as error:
            refusals.warning("cannot store known damage; a restart would forget it: %s", error.detail)
