"""A Millstream server or any Kafka cluster, over confluent-kafka's clients: the result of `millstream.connect`.

Sending is idempotent: a retry stores nothing twice, and records of a partition keep their order. One `send_many` is one
run of records per partition, but not a transaction: a cluster failure between runs can leave a part.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millstream.client.addresses import check_addresses
from millstream.client.api import Batch, Millstream, Row
from millstream.client.arguments import check_topic, setting_texts
from millstream.client.iterators import (
    Exclusive,
    ExclusiveOptions,
    Queue,
    QueueOptions,
    Reading,
    ReadOptions,
    Stream,
    StreamOptions,
)
from millstream.client.partitioners import Partitioner
from millstream.client.remote_worker import Worker, failure
from millstream.core.errors import BufferFull, Code, UnknownTopic, Unreachable, Unsupported
from millstream.records.compression import Codec

FRESH = frozenset({Code.UNKNOWN_TOPIC_OR_PARTITION, Code.LEADER_NOT_AVAILABLE})
"""The cluster's errors for a topic under creation."""
FRESH_SECONDS_MAX = 5.0
FRESH_PAUSE_SECONDS = 0.05
POLL_SECONDS = 0.1
QUEUED_KBYTES_MAX = 16 * 1024
"""The limit of fetched data, per consumer."""


class Remote(Millstream):
    """Made by `millstream.connect`."""

    def __init__(
        self,
        bootstrap: str = "127.0.0.1:9092",
        *,
        partitioner: str | Partitioner = "murmur2",
        compression: str = "none",
        timeout: float = 30.0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`config` holds librdkafka's settings, such as TLS; `timeout` limits the time of a call."""
        super().__init__(partitioner=partitioner, compression=compression)
        check_addresses(bootstrap)
        self.timeout = timeout
        self.bootstrap = bootstrap
        self._config = dict(config or {})
        self._counts: dict[str, int] = {}
        self._producers: dict[Codec, Producer] = {}
        self._making = threading.Lock()
        self._admin: AdminClient | None = None
        self._worker: Worker | None = None
        self._poller: threading.Thread | None = None
        self._is_polled = False

    # -- the clients underneath --------------------------------------------------------------------------------------

    def settings(self, **more: Any) -> dict[str, Any]:
        """A client's settings; the user's settings override ours."""
        common = {
            "bootstrap.servers": self.bootstrap,
            "client.id": "millstream",
            "log_level": 2,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
        }
        return {**common, **{name.replace("_", "."): value for name, value in more.items()}, **self._config}

    @property
    def is_secured(self) -> bool:
        """Whether only librdkafka can connect to the cluster."""
        return str(self._config.get("security.protocol", "plaintext")).lower() != "plaintext"

    def consumer_settings(self, group: str, **more: Any) -> dict[str, Any]:
        return self.settings(
            **{
                "group.id": group,
                "check.crcs": True,  # librdkafka's default is false
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "queued.max.messages.kbytes": QUEUED_KBYTES_MAX,
                "fetch.wait.max.ms": 250,
                **more,
            }
        )

    @property
    def admin(self) -> AdminClient:
        self.check_open()
        assert self._admin is not None
        return self._admin

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _connect(self) -> None:
        self._worker = Worker("millstream-admin")
        try:
            self._admin = AdminClient(self.settings())
            await self._worker.call(self._admin.list_topics, timeout=self.timeout)
        except BaseException as error:
            await self._worker.end()
            self._admin = None
            if isinstance(error, KafkaException):
                raise failure(error) from None
            if isinstance(error, Unreachable):
                raise Unreachable(f"{error} ({self.bootstrap})") from None
            raise
        self._is_polled = True
        self._poller = threading.Thread(target=self._poll, name="millstream-producer", daemon=True)
        self._poller.start()

    async def _disconnect(self) -> None:
        try:
            for producer in list(self._producers.values()):
                await self.worker.call(producer.flush, self.timeout)
        finally:
            self._is_polled = False
            self._admin = None
            await self.worker.end(*([self._poller.join] if self._poller is not None else []))
            self._producers.clear()

    def _poll(self) -> None:
        """Delivery reports arrive on this thread."""
        while self._is_polled:
            producers = list(self._producers.values())
            if not producers:
                time.sleep(POLL_SECONDS / 10)
            for producer in producers:
                producer.poll(POLL_SECONDS / len(producers))

    def _producer(self, codec: Codec) -> Producer:
        with self._making:  # one thread lists topics, another sends: they must share one client
            producer = self._producers.get(codec)
            if producer is None:
                settings = {
                    "enable.idempotence": True,
                    "linger.ms": 1,
                    "compression.type": codec.name.lower(),
                    "message.timeout.ms": round(self.timeout * 1000),
                    "queue.buffering.max.messages": 10_000_000,
                    "queue.buffering.max.kbytes": 1024 * 1024,
                }
                producer = self._producers[codec] = Producer(self.settings(**settings))
        return producer

    # -- topics ------------------------------------------------------------------------------------------------------

    async def topics(self) -> dict[str, int]:
        found = await self.worker.call(self.admin.list_topics, timeout=self.timeout)
        return {name: len(topic.partitions) for name, topic in found.topics.items()}

    async def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        check_topic(name)
        count = -1 if partitions is None else partitions
        topic = NewTopic(name, num_partitions=count, replication_factor=-1, config=setting_texts(settings))
        futures = self.admin.create_topics([topic], request_timeout=self.timeout)
        await self.worker.call(futures[name].result)

    async def delete_topic(self, name: str) -> None:
        check_topic(name)
        self._counts.pop(name, None)
        futures = self.admin.delete_topics([name], request_timeout=self.timeout)
        try:
            await self.worker.call(futures[name].result)
        finally:
            self._counts.pop(name, None)  # again: another task may have asked for it meanwhile

    async def partition_count(self, topic: str) -> int:
        self.check_open()
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = await self.worker.call(self._find_topic, topic)
        return count

    def _find_topic(self, topic: str) -> int:
        """Asking for a topic creates it, if the cluster allows that; it may take a moment."""
        producer = self._producer(self._codec)
        deadline = time.monotonic() + min(FRESH_SECONDS_MAX, self.timeout)
        while True:
            found = producer.list_topics(topic, self.timeout).topics[topic]
            if found.error is None and found.partitions:
                return len(found.partitions)
            code = found.error.code() if found.error is not None else Code.UNKNOWN_TOPIC_OR_PARTITION
            if code not in FRESH or time.monotonic() > deadline:
                if code in FRESH:
                    raise UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {topic}")
                raise KafkaException(found.error)
            time.sleep(FRESH_PAUSE_SECONDS)

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _append(self, topic: str, partition: int, row: Row) -> int:
        [offsets] = await self.append([Batch(topic, partition, [row])], self._codec)
        return offsets[0]

    def append(self, batches: list[Batch], codec: Codec) -> Awaitable[list[Sequence[int]]]:
        """Hands over nothing after the first record that the client refuses."""
        return self._all_of(self._hand_over(batches, codec, to_the_end=False))

    def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
        return self._each_of(self._hand_over([batch], codec, to_the_end=True))

    def _hand_over(self, batches: list[Batch], codec: Codec, *, to_the_end: bool) -> Delivery:
        self.check_open()  # after a close no one reads the delivery reports
        delivery = Delivery(batches)
        producer = self._producer(codec)
        refused: BaseException | None = None
        for number, batch in enumerate(batches):
            for at, row in enumerate(batch.rows):
                if refused is None or to_the_end:
                    refused = self._produce(producer, batch, row, delivery.report(number, at))
                if refused is not None:
                    delivery.settle(number, at, refused)
        return delivery

    def _produce(self, producer: Producer, batch: Batch, row: Row, report: Callable[..., None]) -> BaseException | None:
        """Hands a record to the client; returns its refusal, or None if a report follows."""
        _, timestamp, key, value, headers = row
        if batch.partition < 0:  # the client would take it as any partition
            detail = f"there is no partition {batch.partition} of a topic {batch.topic}"
            return UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, detail)
        try:
            producer.produce(
                batch.topic,
                value,
                key,
                batch.partition,
                on_delivery=report,
                timestamp=0 if timestamp is None else timestamp,
                headers=list(headers) if headers else None,
            )
        except KafkaException as error:
            return failure(error)
        except BufferError:
            return BufferFull("the client's own buffer is full; send less at a time")
        except Exception as error:  # e.g. a field's type: it fails this record only
            return error
        return None

    async def _all_of(self, delivery: Delivery) -> list[Sequence[int]]:
        offsets: list[Sequence[int]] = []
        for results in await self._results(delivery):
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            offsets.append(results)  # type: ignore[arg-type]  # none of them is an error
        return offsets

    async def _each_of(self, delivery: Delivery) -> Sequence[int | BaseException]:
        [results] = await self._results(delivery)
        return results

    async def _results(self, delivery: Delivery) -> list[list[int | BaseException]]:
        await delivery.future
        for batch, results in zip(delivery.batches, delivery.results, strict=True):
            if any(isinstance(result, UnknownTopic) for result in results):
                self._counts.pop(batch.topic, None)
        return delivery.results

    # -- reading -----------------------------------------------------------------------------------------------------

    def _reading(self, options: ReadOptions) -> Reading[Any]:
        from millstream.client.remote_reading import RemoteReading

        return RemoteReading(self, options)

    def _stream(self, options: StreamOptions) -> Stream[Any]:
        from millstream.client.remote_stream import RemoteStream

        return RemoteStream(self, options)

    def _queue(self, options: QueueOptions) -> Queue[Any]:
        from millstream.client.remote_queue import RemoteQueue

        return RemoteQueue(self, options)

    def _exclusive(self, options: ExclusiveOptions) -> Exclusive[Any]:
        from millstream.client.remote_exclusive import RemoteExclusive

        if options.heartbeat is not None or options.takeover is not None:
            raise Unsupported(
                "a server's session timeout decides when a standby takes over: leave out heartbeat and takeover"
            )
        return RemoteExclusive(self, options)

    def name(self) -> str:
        """A group name for a consumer without a group: librdkafka needs one."""
        return f"millstream-read-{uuid.uuid4().hex}"


class Delivery:
    """The results of one call's records: the loop is notified once, when all are stored or refused."""

    def __init__(self, batches: list[Batch]) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()
        self.batches = batches
        self.results: list[list[int | BaseException]] = [[-1] * len(batch.rows) for batch in batches]
        """The offset of each record, or its error."""
        self._left = sum(len(batch.rows) for batch in batches)
        self._lock = threading.Lock()

    def report(self, batch: int, at: int) -> Callable[[KafkaError | None, Any], None]:
        def delivered(error: KafkaError | None, message: Any) -> None:
            """Runs on the polling thread, or on the flushing one."""
            self.settle(batch, at, failure(error) if error is not None else message.offset())

        return delivered

    def settle(self, batch: int, at: int, result: int | BaseException) -> None:
        self.results[batch][at] = result
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
