"""A broker in this process, over a store, without sockets: the result of `millstream.open`.

The event loop that opens the broker runs it: only syncs and database work use other threads. Code that blocks the
loop also blocks the broker, its timers and its heartbeats.

Several processes may open one `sqlite:` file or one `postgresql://` database. Reading, sending and `exclusive` need no
coordinator and work in all processes at once. Of each `stream` or `queue` group one process at a time is the
coordinator: members in other processes are standbys, and take over when it ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from millstream.broker.broker import Broker
from millstream.broker.record_rules import check_time
from millstream.broker.session import Session
from millstream.broker.setting import LONG_MAX
from millstream.broker.topics import Topic
from millstream.client.api import Batch, Millstream, Row
from millstream.client.arguments import check_topic, setting_texts
from millstream.client.consuming import Consuming
from millstream.client.embedded_exclusive import EmbeddedExclusive
from millstream.client.embedded_queue import ELSEWHERE, EmbeddedQueue
from millstream.client.embedded_reading import EmbeddedReading
from millstream.client.embedded_stream import EmbeddedStream
from millstream.client.iterators import ExclusiveOptions, QueueOptions, ReadOptions, StreamOptions
from millstream.client.partitioners import Partitioner
from millstream.cluster.base import Cluster, Solo
from millstream.cluster.shared import SharedCluster
from millstream.config import configure
from millstream.core.clock import Clock
from millstream.core.errors import Code, MillstreamError, RequestError, StartupError, UnknownTopic, refusal
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records import codec as codecs
from millstream.records.compression import Codec
from millstream.security.principal import EMBEDDED
from millstream.stores.base import LogStore, MetaStore
from millstream.stores.url import is_shared, open_store

NODE_IDS = 1 << 20, 1 << 31
"""Node ids of embedded brokers over a shared store: far above those that operators give to servers."""

OF_RECORDS = frozenset(
    {Code.INVALID_RECORD, Code.INVALID_TIMESTAMP, Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE}
)
"""Errors of a batch's records, not of its partition."""


class Embedded(Millstream):
    """Made by `millstream.open`."""

    def __init__(
        self,
        store: str = "memory:",
        *,
        partitioner: str | Partitioner = "murmur2",
        compression: str = "none",
        clock: Clock | None = None,
        stores: tuple[LogStore, MetaStore] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are fields of `millstream.config.Config`, e.g. `default_partitions=4`; `stores` is for tests."""
        super().__init__(partitioner=partitioner, compression=compression, clock=clock)
        if not isinstance(store, str):
            raise StartupError(f"a store is a URL, as 'sqlite:app.db' or 'file:data', not {store!r}")
        if is_shared(store):
            settings = {"node_id": random.randrange(*NODE_IDS), **settings}
        self._config = configure(store=store, **settings)
        self._given = stores
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.streams_of: dict[str, set[EmbeddedStream[Any]]] = {}
        """Members in this process, by group: they notify each other of changes."""

    @property
    def broker(self) -> Broker:
        """The broker underneath, for uses beyond the verbs."""
        if self._broker is None:
            self.check_open()
        assert self._broker is not None
        return self._broker

    @property
    def session(self) -> Session:
        return Session(self.broker, "embedded", "embedded", principal=EMBEDDED, client_id="python")

    @property
    def atomic_across(self) -> bool:  # type: ignore[override]  # the class attribute; here it depends on the store
        return self.broker.atomic

    def check_open(self) -> None:
        super().check_open()
        if asyncio.get_running_loop() is not self._loop:  # a future of another loop would never wake
            raise MillstreamError(
                "the instance was opened on another event loop and works only on that loop; a fixture of "
                "pytest-asyncio and the tests that use it need the same loop_scope"
            )

    def opened(self, consuming: Consuming[object]) -> None:
        self.check_open()
        super().opened(consuming)

    async def _connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = self._config
        logs, meta = self._given or open_store(config.store, self.clock, lambda seconds: None, config.meta)
        cluster: Cluster = Solo(config.node_id)
        if is_shared(config.store):
            cluster = SharedCluster(meta, self.clock, config.node_id, config.lease_ms)
        self._broker = Broker(config, logs, meta, self.clock, Metrics(), cluster)
        try:
            await self._broker.start()
            await cluster.join("", 0)  # no address: no client is redirected here
        except RequestError as error:
            await self._broker.close()
            self._broker = None
            raise StartupError(f"the store cannot be opened: {error.detail}") from error
        except BaseException:
            await self._broker.close()
            self._broker = None
            raise

    async def _disconnect(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            await broker.close()

    async def is_coordinator(self, group: str) -> bool:
        """Whether this process is the group's coordinator; it becomes one if the group has none."""
        try:
            return await self.broker.cluster.find_coordinator(group) is None
        except RequestError as error:
            if error.code in ELSEWHERE:
                return False
            raise refusal(error.code, error.detail) from None

    # -- topics ------------------------------------------------------------------------------------------------------

    async def topics(self) -> dict[str, int]:
        self.check_open()
        async with refusals():
            await self.broker.topics.refresh()  # another process may have changed them
        return {topic.name: topic.partition_count for topic in self.broker.topics}

    async def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.check_open()
        check_topic(name)
        topics = self.broker.topics
        async with refusals():
            await topics.create(
                name, topics.default_partitions if partitions is None else partitions, setting_texts(settings)
            )

    async def delete_topic(self, name: str) -> None:
        self.check_open()
        check_topic(name)
        async with refusals():
            await self.broker.delete_topic(name)

    async def topic(self, name: str) -> Topic:
        """The topic, created where that is allowed."""
        found = self.broker.topics.get(name)
        if found is None:
            async with refusals():
                found = await self.broker.topics.ensure(name)
        return found

    async def partition_count(self, topic: str) -> int:
        self.check_open()
        found = self.broker.topics.get(topic) or await self.topic(topic)
        return found.partition_count

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _append(self, topic: str, partition: int, row: Row) -> int:
        found = self.broker.topics.get(topic) or await self.topic(topic)
        if not 0 <= partition < found.partition_count:
            raise _no_partition(topic, partition)
        if self._codec is not Codec.NONE:
            [offsets] = await self.append([Batch(topic, partition, [row])], self._codec)
            return offsets[0]
        _, timestamp, key, value, headers = row
        try:
            return await self.broker.inlet(found.partitions[partition]).put(value, key, headers, timestamp)
        except RequestError as error:
            raise refusal(error.code, error.detail) from None

    def append(self, batches: list[Batch], codec: Codec) -> Awaitable[list[Sequence[int]]]:
        """Checks all batches before the first write; writes all in this turn of the loop."""
        answers: list[Promise[Appended]] = []
        try:
            admitted = [self._admit(batch, codec) for batch in batches]
            with self.broker.together():
                for partition, data in admitted:
                    answers.append(partition.append(memoryview(data), self.clock)[1])
        except RequestError as error:
            return Promise.failed(refusal(error.code, error.detail))
        except MillstreamError as error:
            return Promise.failed(error)
        return self._appended(batches, answers)

    def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
        return self._appended_each(self._append_parts(batch, codec), self.broker.metrics)

    def _append_parts(self, batch: Batch, codec: Codec) -> list[tuple[int, Promise[Appended]]]:
        """In this turn of the loop. A batch that is refused for its content is split into halves, down to one record:
        so only the bad record fails, and records that are too large together are stored one after the other.
        """
        count = len(batch.rows)
        try:
            partition, data = self._admit(batch, codec)
            return [(count, partition.append(memoryview(data), self.clock)[1])]
        except RequestError as error:
            if count == 1 or error.code not in OF_RECORDS:
                return [(count, Promise.failed(error))]
        except Exception as error:
            return [(count, Promise.failed(error))]
        halves = batch.rows[: count // 2], batch.rows[count // 2 :]
        return [part for rows in halves for part in self._append_parts(batch._replace(rows=rows), codec)]

    async def _appended_each(
        self, parts: list[tuple[int, Promise[Appended]]], metrics: Metrics
    ) -> Sequence[int | BaseException]:
        results: list[int | BaseException] = []
        for count, answer in parts:
            try:
                async with refusals():
                    base = (await answer).base_offset
            except Exception as error:
                results += [error] * count
                continue
            metrics.batches_in += 1
            metrics.records_in += count
            offsets = range(base, base + count)
            if len(parts) == 1:
                return offsets
            results += offsets
        return results

    def _admit(self, batch: Batch, codec: Codec) -> tuple[Any, bytearray]:
        topic = self.broker.topics.get(batch.topic)
        if topic is None or not 0 <= batch.partition < topic.partition_count:
            raise _no_partition(batch.topic, batch.partition)
        now = self.clock.now_ms()
        rows = [row if row[1] is not None else (0, now, row[2], row[3], row[4]) for row in batch.rows]
        partition = topic.partitions[batch.partition]
        if topic.settings.log.compact and any(row[2] is None for row in rows):
            raise RequestError(Code.INVALID_RECORD, "a record without a key cannot go to a compacted topic")
        if topic.settings.timestamp_before_max_ms < LONG_MAX:
            for row in batch.rows:
                check_time(topic.settings, now if row[1] is None else row[1], now)
        try:
            data = codecs.encode(rows, codec=codec)
        except Exception as error:
            raise RequestError(Code.INVALID_RECORD, f"a record cannot be stored: {error}") from None
        partition.admit(memoryview(data), now)
        return partition, data

    async def _appended(self, batches: list[Batch], answers: list[Promise[Appended]]) -> list[Sequence[int]]:
        offsets: list[Sequence[int]] = []
        metrics = self.broker.metrics  # now: the broker may close during the wait
        async with refusals():
            for batch, answer in zip(batches, answers, strict=True):
                base = (await answer).base_offset
                offsets.append(range(base, base + len(batch.rows)))
        metrics.batches_in += len(batches)
        metrics.records_in += sum(map(len, offsets))
        return offsets

    # -- reading -----------------------------------------------------------------------------------------------------

    def _reading(self, options: ReadOptions) -> EmbeddedReading[Any]:
        return EmbeddedReading(self, options)

    def _stream(self, options: StreamOptions) -> EmbeddedStream[Any]:
        return EmbeddedStream(self, options)

    def _queue(self, options: QueueOptions) -> EmbeddedQueue[Any]:
        return EmbeddedQueue(self, options)

    def _exclusive(self, options: ExclusiveOptions) -> EmbeddedExclusive[Any]:
        return EmbeddedExclusive(self, options)


@asynccontextmanager
async def refusals() -> AsyncIterator[None]:
    """Converts a broker's refusal to the public errors."""
    try:
        yield
    except RequestError as error:
        if type(error) is not RequestError:
            raise
        raise refusal(error.code, error.detail) from None


def _no_partition(topic: str, partition: int) -> UnknownTopic:
    return UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {partition} of a topic {topic}")
