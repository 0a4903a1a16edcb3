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
from millstream.broker.session import Inlet, Partition, Session, Topic
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
from millstream.core.errors import Code, MillstreamError, RequestError, StartupError, refusal
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records import codec as codecs
from millstream.records.batch import BatchHeader
from millstream.records.compression import Codec
from millstream.security.principal import EMBEDDED
from millstream.security.rights import Authorizer, Operation
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
        authorizer: Authorizer | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are fields of `millstream.config.Config`, e.g. `default_partitions=4`; `stores` and `authorizer`
        are for tests.
        """
        super().__init__(partitioner=partitioner, compression=compression, clock=clock)
        if not isinstance(store, str):
            raise StartupError(f"a store is a URL, as 'sqlite:app.db' or 'file:data', not {store!r}")
        if is_shared(store):
            settings = {"node_id": random.randrange(*NODE_IDS), **settings}
        self._config = configure(store=store, **settings)
        self._given = stores
        self._authorizer = authorizer
        self._broker: Broker | None = None
        self._session: Session | None = None
        self._inlets: dict[tuple[str, int], Inlet] = {}
        """Partitions that the session may write, until its `changes` differ."""
        self._changes = -1
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
        """The way into the broker. It has no address: its groups have no limit (`broker/groups/founders.py`)."""
        if self._session is None:
            self._session = Session(self.broker, "embedded", "", principal=EMBEDDED, client_id="python")
        return self._session

    @property
    def atomic_across(self) -> bool:  # type: ignore[override]  # the class attribute; here it depends on the store
        return self.session.atomic

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
        self._broker = Broker(config, logs, meta, self.clock, Metrics(), cluster, self._authorizer)
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
            broker, self._broker, self._session = self._broker, None, None
            self._inlets.clear()
            await broker.close()

    async def is_coordinator(self, group: str) -> bool:
        """Whether this process is the group's coordinator; it becomes one if the group has none."""
        try:
            await self.session.coordinate(group)
        except RequestError as error:
            if error.code in ELSEWHERE:
                return False
            raise refusal(error.code, error.detail) from None
        return True

    # -- topics ------------------------------------------------------------------------------------------------------

    async def topics(self) -> dict[str, int]:
        self.check_open()
        session = self.session
        async with refusals():
            await session.refresh_topics()  # another process may have changed them
        return {topic.name: topic.partition_count for topic in session.topics()}

    async def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.check_open()
        check_topic(name)
        count = self._config.default_partitions if partitions is None else partitions
        async with refusals():
            await self.session.admin.create_topic(name, count, setting_texts(settings), validate_only=False)

    async def delete_topic(self, name: str) -> None:
        self.check_open()
        check_topic(name)
        async with refusals():
            await self.session.admin.delete_topic(name)

    async def topic(self, name: str, operation: Operation) -> Topic:
        """The topic, created where that is allowed."""
        async with refusals():
            return await self.session.ensure_topic(name, operation)

    async def partition_count(self, topic: str) -> int:
        self.check_open()
        try:
            found = (self._session or self.session).find(topic, Operation.DESCRIBE)
        except RequestError as error:
            raise refusal(error.code, error.detail) from None
        return (found or await self.topic(topic, Operation.DESCRIBE)).partition_count

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _append(self, topic: str, partition: int, row: Row) -> int:
        try:
            changes = (self._session or self.session).changes
            if self._changes != changes:
                self._changes = changes
                self._inlets.clear()
            inlet = self._inlets.get((topic, partition)) or await self._open(topic, partition)
            if self._codec is Codec.NONE:
                _, timestamp, key, value, headers = row
                return await inlet.put(value, key, headers, timestamp)
        except RequestError as error:
            raise refusal(error.code, error.detail) from None
        [offsets] = await self.append([Batch(topic, partition, [row])], self._codec)
        return offsets[0]

    async def _open(self, topic: str, partition: int) -> Inlet:
        """The inlet of a partition, whose topic is created where that is allowed."""
        session = self.session
        await session.ensure_topic(topic, Operation.WRITE)
        inlet = self._inlets[topic, partition] = session.inlet(session.partition(topic, partition, Operation.WRITE))
        return inlet

    def append(self, batches: list[Batch], codec: Codec) -> Awaitable[list[Sequence[int]]]:
        """Checks all batches before the first write; writes all in this turn of the loop."""
        try:
            admitted = [self._admit(batch, codec) for batch in batches]
            with self.session.together():
                answers = [partition.append_own(data, header, self.clock) for partition, data, header in admitted]
        except RequestError as error:
            return Promise.failed(refusal(error.code, error.detail))
        except MillstreamError as error:
            return Promise.failed(error)
        return self._appended(batches, answers)

    def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
        return self._appended_each(self._append_parts(batch, codec), self.session.metrics)

    def _append_parts(self, batch: Batch, codec: Codec) -> list[tuple[int, Promise[Appended]]]:
        """In this turn of the loop. A batch that is refused for its content is split into halves, down to one record:
        so only the bad record fails, and records that are too large together are stored one after the other.
        """
        count = len(batch.rows)
        try:
            partition, data, header = self._admit(batch, codec)
            return [(count, partition.append_own(data, header, self.clock))]
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

    def _admit(self, batch: Batch, codec: Codec) -> tuple[Partition, memoryview, BatchHeader]:
        partition = self.session.partition(batch.topic, batch.partition, Operation.WRITE)
        now = self.clock.now_ms()
        rows = [row if row[1] is not None else (0, now, row[2], row[3], row[4]) for row in batch.rows]
        try:
            data = memoryview(codecs.encode(rows, codec=codec))
        except Exception as error:
            raise RequestError(Code.INVALID_RECORD, f"a record cannot be stored: {error}") from None
        return partition, data, partition.admit_own(data, now)

    async def _appended(self, batches: list[Batch], answers: list[Promise[Appended]]) -> list[Sequence[int]]:
        offsets: list[Sequence[int]] = []
        metrics = self.session.metrics  # now: the broker may close during the wait
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
