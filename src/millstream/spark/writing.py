"""A task's work: Arrow batches, written to the partitions of topics.

Rows are encoded straight from Arrow's buffers, into one body per partition. A full body becomes a batch of the task's
own idempotent producer; a thread sends it while the next one is encoded.

Rules
-----
1. Batches of a partition are numbered when they are closed, and sent one after the other, so their order holds. A
   retry has the same numbers, and is stored once.
2. `finish` returns when everything is acknowledged. A failed delivery is an error of the task, which Spark runs again:
   with another producer, so that rows of the failed attempt may be stored twice, but none is missing.
3. A row goes to its partition, if it names one; else to its key's, as with Kafka's Java clients; else to the partition
   whose batch is being filled. When that batch is full the next partition follows, and tasks start at different
   partitions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.core.errors import Code, MillstreamError
from millstream.records import codec
from millstream.records.compression import Codec
from millstream.records.rows import BAD_PARTITION, RowRefused, from_arrow
from millstream.spark.options import SinkOptions
from millstream.wire.kafka.requests import TopicPartition

UNSENT_MAX = 3
"""Batches that are closed and not yet acknowledged: one in flight, the others ready."""
OPEN_BYTES_MAX = 32 << 20
"""Of the open batches, all partitions together."""
SEQUENCES = 1 << 31


class SinkError(MillstreamError):
    """Rows that cannot be written to their destination."""


class MissingTopic(SinkError):
    def __init__(self, topic: str, bootstrap: str) -> None:
        super().__init__(
            f"there is no topic {topic} at {bootstrap}; create it, as with "
            f"`millstream topic create {topic} --broker {bootstrap}`"
        )


@dataclass(frozen=True)
class Delivered:
    """The rows that one task has written to one partition, all acknowledged."""

    topic: str
    partition: int
    rows: int
    first_offset: int
    last_offset: int


def connect(options: SinkOptions) -> KafkaCluster:
    client = options.client
    return KafkaCluster(client.bootstrap, client.client_id, client.timeout_seconds)


def count_partitions(cluster: KafkaCluster, topic: str, options: SinkOptions) -> int:
    found = cluster.partitions([topic])
    if not found.get(topic):
        raise MissingTopic(topic, options.client.bootstrap)
    return len(found[topic])


class _Partition:
    """The open batch of one partition, and the numbers of those before it."""

    def __init__(self, topic: str, index: int) -> None:
        self.place: TopicPartition = (topic, index)
        self.body: codec.Body | None = None
        self.sequence = 0
        self.rows = 0
        self.first_offset = self.last_offset = -1

    def note(self, offset: int, count: int) -> None:
        self.rows += count
        # A duplicate of a batch that the broker stored long ago has no offset.
        if offset >= 0:
            self.first_offset = offset if self.first_offset < 0 else min(self.first_offset, offset)
            self.last_offset = offset + count - 1


class _Topic:
    def __init__(self, name: str, count: int, first: int) -> None:
        self.name = name
        self.partitions = [_Partition(name, index) for index in range(count)]
        self.turn = first % count
        """The partition for rows without a partition or a key."""


class Writing:
    """The output of a task, from its first row to the acknowledgement of its last."""

    def __init__(self, options: SinkOptions, spread: int) -> None:
        self._options = options
        self._codec = Codec.parse(options.compression)
        self._spread = spread
        self._cluster = connect(options)
        self._topics: dict[str, _Topic] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._unsent: deque[Future[None]] = deque()
        self._is_broken = False
        self.producer: tuple[int, int] | None = None
        """Id and epoch, after the first row."""

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self.producer is None:
            self.producer = self._cluster.init_producer()
        rows = codec.open_rows(from_arrow(batch, time.time_ns() // 1_000_000))
        is_placed = "partition" in batch.schema.names or "key" in batch.schema.names
        for name, picked, count in self._by_topic(batch):
            topic = self._topics.get(name) or self._find(name)
            if is_placed:
                self._add_placed(topic, rows, picked, count, batch)
            else:
                self._add_anywhere(topic, rows, picked, 0, count)
        if sum(body.size for _, body in self._open()) > OPEN_BYTES_MAX:
            self._close_all()

    def finish(self) -> list[Delivered]:
        """Sends the rest, and waits for every acknowledgement."""
        self._close_all()
        while self._unsent:
            self._unsent.popleft().result()
        return [
            Delivered(*partition.place, partition.rows, partition.first_offset, partition.last_offset)
            for topic in self._topics.values()
            for partition in topic.partitions
            if partition.rows
        ]

    def stop(self) -> None:
        """Drops batches that are not in flight yet."""
        self._is_broken = True
        self._thread.shutdown(cancel_futures=True)
        self._cluster.close()

    # -- the destination of rows -------------------------------------------------------------------------------------

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, Any, int]]:
        """Topics, the numbers of their rows (None: all), and the count of these."""
        if self._options.topic is not None:
            yield self._options.topic, None, batch.num_rows
            return
        column = batch.column("topic")
        encoded = column.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if column.null_count or "" in names:
            raise SinkError("a row has no topic: fill the column topic in every row, or set the option topic")
        if len(names) == 1:
            yield names[0], None, batch.num_rows
            return
        order = pc.array_sort_indices(encoded.indices).cast(pa.int32())
        counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(encoded.indices).to_pylist()}
        numbers, start = memoryview(order.buffers()[1]), 0
        for index, name in enumerate(names):
            yield name, numbers[4 * start : 4 * (start + counts[index])], counts[index]
            start += counts[index]

    def _find(self, name: str) -> _Topic:
        # In the sending thread: the cluster's links are for one thread at a time.
        count = self._thread.submit(count_partitions, self._cluster, name, self._options).result()
        self._topics[name] = topic = _Topic(name, count, self._spread)
        return topic

    def _add_placed(self, topic: _Topic, rows: Any, picked: Any, count: int, batch: pa.RecordBatch) -> None:
        size = len(topic.partitions)
        try:
            order, ends = codec.pick(rows, size, picked)
        except RowRefused as refused:
            if refused.reason != BAD_PARTITION:
                raise
            wanted = batch.column("partition")[refused.row].as_py()
            raise SinkError(
                f"a row is for partition {wanted} of topic {topic.name}, which has partitions 0 to {size - 1}"
            ) from None
        start = 0
        for index, end in enumerate(ends):
            # If all rows go to one partition they need no reordering.
            chosen, first, stop = (picked, 0, count) if end - start == count else (order, start, end)
            if index == size:
                self._add_anywhere(topic, rows, chosen, first, stop)
            elif start < end:
                self._add(topic.partitions[index], rows, chosen, first, stop)
            start = end

    def _add(self, partition: _Partition, rows: Any, picked: Any, first: int, stop: int) -> None:
        while first < stop:
            first = self._fill(partition, rows, picked, first, stop)
            if first < stop:
                self._close(partition)

    def _add_anywhere(self, topic: _Topic, rows: Any, picked: Any, first: int, stop: int) -> None:
        while first < stop:
            partition = topic.partitions[topic.turn]
            first = self._fill(partition, rows, picked, first, stop)
            if first < stop:
                self._close(partition)
                topic.turn = (topic.turn + 1) % len(topic.partitions)

    def _fill(self, partition: _Partition, rows: Any, picked: Any, first: int, stop: int) -> int:
        if partition.body is None:
            partition.body = codec.begin(self._options.batch_bytes)
        return partition.body.add(rows, picked, first, stop)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[tuple[_Partition, codec.Body]]:
        for topic in self._topics.values():
            for partition in topic.partitions:
                if partition.body is not None:
                    yield partition, partition.body

    def _close_all(self) -> None:
        for partition, _ in self._open():
            self._close(partition)

    def _close(self, partition: _Partition) -> None:
        body, partition.body = partition.body, None
        assert body is not None and self.producer is not None
        producer_id, epoch = self.producer
        count = body.count
        batch = codec.finish(
            body,
            codec=self._codec,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=partition.sequence,
        )
        partition.sequence = (partition.sequence + count) % SEQUENCES
        while len(self._unsent) >= UNSENT_MAX:
            self._unsent.popleft().result()
        self._unsent.append(self._thread.submit(self._send, partition, batch, count))

    def _send(self, partition: _Partition, batch: bytearray, count: int) -> None:
        if self._is_broken:
            return  # a batch before this one failed, and the task with it
        try:
            partition.note(self._cluster.produce(partition.place, batch), count)
        except ClusterError as error:
            self._is_broken = True
            if error.code in (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE):
                raise _too_large(partition.place[0], len(batch), count) from error
            raise
        except BaseException:
            self._is_broken = True
            raise


def _too_large(topic: str, size: int, count: int) -> SinkError:
    if count == 1:
        return SinkError(
            f"a record of {size} bytes is larger than topic {topic} takes; raise its max.message.bytes, or leave out "
            "rows as large as that"
        )
    return SinkError(
        f"topic {topic} takes no batch of {size} bytes; set the option max.request.size to its max.message.bytes, or "
        "to less"
    )
