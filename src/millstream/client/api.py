"""The verbs, the same for a broker in this process (`millstream.open`) and a server (`millstream.connect`).

    async with millstream.open("memory:") as ms:
        await ms.send("orders", b"one widget", key=b"user-1")
        async for record in ms.read("orders", follow=False):
            print(record.offset, record.key, record.value)

What each verb promises

    send        returns when the record is durable, with its partition and offset
    send_many   records of one partition are one batch: all of them or none. Across partitions and topics that holds
                if the store has transactions over all of its logs (see `atomic_across`). Other stores check all
                records before the first write, and a store failure between writes can leave a part
    read        no group: from a position or a time, any number of times
    stream      the members of a group share the partitions; progress is committed as records are processed
    queue       any worker of a group gets any record; each record is acknowledged on its own
    exclusive   one member of a group reads all of a topic in order, the other members are standbys

Both kinds raise the errors of `millstream.core.errors`: a broker's refusal is a `RequestError` with its code.

A cancelled send may or may not have happened. Repeat any other cancelled call.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, Self, TypeVar, overload

from millstream.client import partitioners
from millstream.client.arguments import (
    Start,
    check_partition,
    check_topic,
    checked,
    checked_codec,
    checked_group,
    checked_start,
    checked_time,
    checked_topics,
    setting_texts,
)
from millstream.client.closing import Closable, Once, close_all
from millstream.client.consuming import Consuming, Decoder
from millstream.client.iterators import (
    Exclusive,
    ExclusiveOptions,
    Queue,
    QueueOptions,
    Reading,
    ReadOptions,
    Stream,
    StreamOptions,
    Streams,
)
from millstream.client.partitioners import Partitioner
from millstream.client.records import Message, Sent
from millstream.client.sending import Sender
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import Closed, MillstreamError
from millstream.records.compression import Codec
from millstream.records.record import Headers

V = TypeVar("V")
X = TypeVar("X")
Encoder = Callable[[X], bytes]
HEARTBEAT_SECONDS = 28.0
TAKEOVER_SECONDS = 60.0
Row = tuple[int, int | None, bytes | None, bytes | None, Headers]
"""The codec's fields: offset (unused), timestamp (None: now), key, value, headers."""


class Batch(NamedTuple):
    """Records for one partition."""

    topic: str
    partition: int
    rows: list[Row]


class Millstream(Closable):
    atomic_across = False
    """Whether one `send_many` is atomic across partitions and topics."""

    def __init__(
        self,
        *,
        partitioner: str | Partitioner = "murmur2",
        compression: str = "none",
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._partitioner = partitioners.make(partitioner)
        self._codec = checked_codec(compression)
        self._consuming: set[Consuming[object]] = set()
        self._senders: set[Sender] = set()
        self._is_open = False
        self._is_clean = True
        self._closing = Once(self._close)

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise Closed("the instance is already open")
        await self._connect()
        self._closing = Once(self._close)
        self._is_open = True
        return self

    async def close(self, *, clean: bool = True) -> None:
        """Ends all iterators, flushes the senders and disconnects from the broker."""
        if not self._is_open and not self._closing.is_begun:
            return
        if not self._closing.is_begun:
            self._is_clean = clean
        await self._closing.done()

    async def _close(self) -> None:
        ends = [sender.close() for sender in list(self._senders)]
        ends += [each.close(clean=self._is_clean) for each in list(self._consuming)]
        try:
            await close_all(ends)
        finally:
            self._is_open = False
            await self._disconnect()

    def opened(self, consuming: Consuming[object]) -> None:
        if self._closing.is_begun:  # the closing has already listed its iterators
            raise Closed("the instance is being closed")
        self._consuming.add(consuming)

    def closed(self, consuming: Consuming[object]) -> None:
        self._consuming.discard(consuming)

    def check_open(self) -> None:
        if not self._is_open:
            raise Closed("the instance is not open: use it inside `async with`")

    # -- sending -----------------------------------------------------------------------------------------------------

    @overload
    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Sent: ...

    @overload
    async def send(
        self,
        topic: str,
        value: X,
        *,
        encode: Encoder[X],
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Sent: ...

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        encode: Encoder[Any] | None = None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Sent:
        """Stores one record; returns its partition and offset when it is durable.

        sent = await ms.send("orders", b"one widget", key=b"user-1")
        sent = await ms.send("orders", {"item": "widget"}, encode=lambda order: json.dumps(order).encode())
        """
        self.check_open()
        check_topic(topic)
        row = (0, *checked(timestamp, key, encoded(encode, value), headers))
        if partition is not None:
            check_partition(partition)
        else:
            partition = partitioners.place(self._partitioner, key, await self.partition_count(topic))
        return Sent(topic, partition, await self._append(topic, partition, row))

    async def send_many(
        self, messages: Iterable[Message | tuple[Any, ...]], *, encode: Encoder[Any] | None = None
    ) -> list[Sent]:
        """Stores several records in one call, in order; returns their positions when all are durable.

        await ms.send_many([("orders", b"a"), ("audit", b"b", b"key"), Message("audit", b"c", headers=(("h", b"1"),))])

        Records without a key go to one partition of their topic, and so stay together.
        """
        self.check_open()
        batches: dict[tuple[str, int], Batch] = {}
        places: list[tuple[tuple[str, int], int]] = []
        for topic, partition, row in await self._place(messages, encode):
            batch = batches.setdefault((topic, partition), Batch(topic, partition, []))
            places.append(((topic, partition), len(batch.rows)))
            batch.rows.append(row)
        if not batches:
            return []
        offsets = await self.append(list(batches.values()), self._codec)
        found = dict(zip(batches, offsets, strict=True))
        return [Sent(*place, found[place][at]) for place, at in places]

    async def _place(
        self, messages: Iterable[Message | tuple[Any, ...]], encode: Encoder[Any] | None
    ) -> list[tuple[str, int, Row]]:
        placed = []
        together: dict[str, int] = {}
        if not isinstance(messages, Iterable):
            raise MillstreamError(f"messages are a list, as [('orders', b'a')], not {type(messages).__name__}")
        for each in messages:
            message = Message.of(each)
            check_topic(message.topic)
            row = (0, *checked(message.timestamp, message.key, encoded(encode, message.value), message.headers))
            partition = message.partition
            count = await self.partition_count(message.topic)
            if partition is not None:
                check_partition(partition)
            elif row[2] is not None or not isinstance(self._partitioner, partitioners.ByKey):
                partition = partitioners.place(self._partitioner, row[2], count)
            else:
                partition = together.get(message.topic)
                if partition is None:
                    partition = together[message.topic] = partitioners.place(self._partitioner, None, count)
            placed.append((message.topic, partition, row))
        return placed

    def sender(
        self,
        topic: str | None = None,
        *,
        records_max: int = 1_000,
        bytes_max: int = 256 * 1024,
        linger: float = 0.005,
        buffer_bytes_max: int = 32 * 1024 * 1024,
        when_full: Literal["wait", "raise"] = "wait",
        partitioner: str | Partitioner | None = None,
        compression: str | None = None,
        encode: Encoder[Any] | None = None,
        on_sent: Callable[[Message, Sent | BaseException], None] | None = None,
    ) -> Sender:
        """Buffered sending: a batch leaves when it reaches a limit of count, bytes or time.

        async with ms.sender("clicks", compression="zstd") as out:
            for click in clicks:
                await out.send(click)          # returns when buffered; waits while the buffer is full
        # here all records are durable, or an error named those that are not

        `on_sent` is called for each record, with its position or its error. Exceptions that it raises are logged.
        """
        sender = Sender(
            self,
            topic,
            records_max=records_max,
            bytes_max=bytes_max,
            linger=linger,
            buffer_bytes_max=buffer_bytes_max,
            when_full=when_full,
            partitioner=self._partitioner if partitioner is None else partitioners.make(partitioner),
            codec=self._codec if compression is None else checked_codec(compression),
            encode=encode,
            on_sent=on_sent,
        )
        self._senders.add(sender)
        sender.on_close = self._senders.discard
        return sender

    # -- reading -----------------------------------------------------------------------------------------------------

    @overload
    def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int | Literal["start", "end"] = "start",
        time: datetime | int | None = None,
        follow: bool = True,
    ) -> Reading[bytes | None]: ...

    @overload
    def read(
        self,
        topic: str,
        *,
        decode: Decoder[V],
        partition: int = 0,
        offset: int | Literal["start", "end"] = "start",
        time: datetime | int | None = None,
        follow: bool = True,
    ) -> Reading[V | None]: ...

    def read(
        self,
        topic: str,
        *,
        decode: Decoder[Any] | None = None,
        partition: int = 0,
        offset: int | Literal["start", "end"] = "start",
        time: datetime | int | None = None,
        follow: bool = True,
    ) -> Reading[Any]:
        """One partition from an offset, or from the first record at or after a time (milliseconds or a datetime).

        async for record in ms.read("orders", partition=2, offset=1_000): ...
        async for record in ms.read("orders", time=datetime.now(UTC) - timedelta(hours=1), follow=False): ...

        Without `follow` it ends at the offset where the partition ended at opening.
        """
        check_topic(topic)
        time = checked_time(time, offset)
        check_partition(partition)
        return self._reading(ReadOptions(topic, partition, offset, time, follow, decode))

    @overload
    def stream(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        start: Start = "earliest",
        commit_every: float = 1.0,
    ) -> Stream[bytes | None]: ...

    @overload
    def stream(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        decode: Decoder[V],
        start: Start = "earliest",
        commit_every: float = 1.0,
    ) -> Stream[V | None]: ...

    def stream(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        decode: Decoder[Any] | None = None,
        start: Start = "earliest",
        commit_every: float = 1.0,
    ) -> Stream[Any]:
        """One member of a group: it reads a share of the partitions, from the group's committed offsets.

        async with ms.stream("orders", group="analytics") as orders:
            async for record in orders:
                await store(record)

        `start` applies to partitions without a committed offset.
        """
        names, group, start = checked_topics(topics), checked_group(group), checked_start(start)
        return self._stream(StreamOptions(names, group, start, commit_every, decode))

    def streams(
        self,
        counts: Mapping[str, int],
        *,
        group: str,
        decode: Decoder[Any] | None = None,
        start: Start = "earliest",
        commit_every: float = 1.0,
    ) -> Streams[Any]:
        """Several members of one group at once: for each topic the number asked for."""
        for topic, count in counts.items():
            if count < 1:
                raise MillstreamError(f"{topic} needs at least one stream, not {count}")
        group, start = checked_group(group), checked_start(start)
        made = {topic: StreamOptions((topic,), group, start, commit_every, decode) for topic in counts}
        return Streams({topic: [self._stream(made[topic]) for _ in range(count)] for topic, count in counts.items()})

    @overload
    def queue(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        start: Start = "earliest",
        prefetch: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> Queue[bytes | None]: ...

    @overload
    def queue(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        decode: Decoder[V],
        start: Start = "earliest",
        prefetch: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> Queue[V | None]: ...

    def queue(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        decode: Decoder[Any] | None = None,
        start: Start = "earliest",
        prefetch: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> Queue[Any]:
        """One worker of a queue: each record goes to one worker, which acknowledges it.

        async with ms.queue("jobs", group="workers") as jobs:
            async for job in jobs:
                try:
                    await work(job.value)
                    await job.accept()
                except Temporary:
                    await job.release(delay=30)
                except Exception as error:
                    await job.reject(reason=str(error))

        `prefetch` jobs are leased at a time; `start` and `settings` (Kafka's share-group names) are for new groups.
        A job that comes back counts as delivered: keep `prefetch` small if a delivery is costly.
        """
        if prefetch < 1:
            raise MillstreamError(f"a worker takes at least one job at a time, not {prefetch}")
        reset = {"share.auto.offset.reset": checked_start(start)}
        texts = {**reset, **setting_texts(settings)}
        return self._queue(QueueOptions(checked_topics(topics), checked_group(group), prefetch, texts, decode))

    @overload
    def exclusive(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        heartbeat: float | None = None,
        takeover: float | None = None,
        on_change: Callable[[bool], None] | None = None,
    ) -> Exclusive[bytes | None]: ...

    @overload
    def exclusive(
        self,
        topic: str,
        *,
        group: str,
        decode: Decoder[V],
        start: Start = "earliest",
        heartbeat: float | None = None,
        takeover: float | None = None,
        on_change: Callable[[bool], None] | None = None,
    ) -> Exclusive[V | None]: ...

    def exclusive(
        self,
        topic: str,
        *,
        group: str,
        decode: Decoder[Any] | None = None,
        start: Start = "earliest",
        heartbeat: float | None = None,
        takeover: float | None = None,
        on_change: Callable[[bool], None] | None = None,
    ) -> Exclusive[Any]:
        """One member of an exclusive group: the active member reads all of the topic in order.

        async with ms.exclusive("ledger", group="projector") as ledger:
            async for event in ledger:
                await project(event)
                await event.commit()

        `heartbeat` and `takeover` are seconds since the group's last change (28 and 60); a server sets its own times.
        """
        first = HEARTBEAT_SECONDS if heartbeat is None else heartbeat
        last = TAKEOVER_SECONDS if takeover is None else takeover
        if not 0 < first < last:
            raise MillstreamError(f"the heartbeat ({first:g} s) must be shorter than the takeover ({last:g} s)")
        check_topic(topic)
        start, group = checked_start(start), checked_group(group)
        return self._exclusive(ExclusiveOptions(topic, group, start, heartbeat, takeover, on_change, decode))

    # -- topics ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def topics(self) -> dict[str, int]:
        """Every topic's name and number of partitions."""

    @abc.abstractmethod
    async def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """Raises `TopicExists` if the topic exists. The first record sent to a topic also creates it."""

    @abc.abstractmethod
    async def delete_topic(self, name: str) -> None:
        """Raises `UnknownTopic` if the topic does not exist."""

    # -- what embedded and remote do differently ---------------------------------------------------------------------

    @abc.abstractmethod
    async def _connect(self) -> None: ...

    @abc.abstractmethod
    async def _disconnect(self) -> None: ...

    @abc.abstractmethod
    async def partition_count(self, topic: str) -> int:
        """The partition count of a topic before a write; creates the topic where that is allowed."""

    @abc.abstractmethod
    async def _append(self, topic: str, partition: int, row: Row) -> int: ...

    @abc.abstractmethod
    def append(self, batches: list[Batch], codec: Codec) -> Awaitable[list[Sequence[int]]]:
        """Stores batches, each as a whole; returns their records' offsets. Calls are stored in order."""

    @abc.abstractmethod
    def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
        """Stores records of one partition in order, each on its own: its offset, or its error."""

    @abc.abstractmethod
    def _reading(self, options: ReadOptions) -> Reading[Any]: ...

    @abc.abstractmethod
    def _stream(self, options: StreamOptions) -> Stream[Any]: ...

    @abc.abstractmethod
    def _queue(self, options: QueueOptions) -> Queue[Any]: ...

    @abc.abstractmethod
    def _exclusive(self, options: ExclusiveOptions) -> Exclusive[Any]: ...


def encoded(encode: Encoder[Any] | None, value: Any) -> Any:
    return value if encode is None or value is None else encode(value)
