"""The ledger of redriven dead letters: a topic of its own, `__redriven__`, so that none is sent twice.

    {"of": ID, "sending": {"0": [[5, 8]]}, "ends": {"jobs/2": 100}}     before a send: which letters, the target's end
    {"of": ID, "sent": {"0": [[5, 8]]}}                                 when they are durable

ID is the dead-letter topic's (a recreated topic has another id), "0" its partition, 5 to 8 the offsets.

Rules
-----
1. Nothing is sent before it is in the ledger as `sending`, and nothing else is begun before it is there as `sent`.
2. An interrupted redrive leaves a `sending` at the end. The next redrive searches the target topic for those records,
   from its end at that time: a header of each names its dead letter. The records that it finds count as
   `sent`, the others do not. So a crash repeats nothing and forgets nothing.
3. One redrive at a time: the ledger has one partition, and only its owner in the consumer group may write.
4. Entries about dead letters that retention has deleted are deleted too.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure, explain
from millstream.admin.position import TopicPartition, spans
from millstream.admin.reading import headers_of, read

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

TOPIC = "__redriven__"
GROUP = "millstream-redrive"
LOCK_SECONDS = 10.0
SESSION_MS = 6_000
FROM_HEADER = "millstream-redriven-from"


class OffsetSet:
    """Offsets, stored as runs of consecutive numbers."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs: list[tuple[int, int]] = []
        for first, last in runs:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        start = stop = bisect_right(self._runs, (first, first))
        while start > 0 and self._runs[start - 1][1] >= first - 1:
            start -= 1
        while stop < len(self._runs) and self._runs[stop][0] <= last + 1:
            stop += 1
        touched = [*self._runs[start:stop], (first, last)]
        self._runs[start:stop] = [(min(run[0] for run in touched), max(run[1] for run in touched))]

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._runs, (offset, 1 << 63))
        return at > 0 and self._runs[at - 1][1] >= offset

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._runs)


Letters = Mapping[int, OffsetSet]
"""Dead letters: partitions and offsets."""


class _Entry(NamedTuple):
    at: int
    of: str
    lasts: dict[int, int]


class Ledger:
    def __init__(self, connection: Connection, dlq: str, *, may_write: bool) -> None:
        self._connection = connection
        self._dlq = dlq
        self._of = _topic_id(connection, dlq)
        self._sent: dict[int, OffsetSet] = {}
        self._open: dict[str, Any] | None = None
        """A `sending` without its `sent`."""
        self._entries: list[_Entry] = []
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        if may_write:
            connection.create_missing(TOPIC, {"retention.ms": "-1"})
            self._lock()
        elif TOPIC in connection.metadata().topics:
            self._look()

    def has(self, partition: int, offset: int) -> bool:
        return offset in self._sent.get(partition, ())

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()

    def wait(self, seconds: float) -> None:
        """Waits, and keeps the ledger's partition."""
        assert self._consumer is not None
        deadline = time.monotonic() + seconds
        while True:
            self._consumer.poll(min(max(deadline - time.monotonic(), 0), 1.0))
            if not self._consumer.assignment():
                raise Failure("another redrive has taken over; run this one again when it has ended")
            if time.monotonic() >= deadline:
                return

    # Writing

    def begin(self, letters: Letters, ends: Mapping[TopicPartition, int]) -> None:
        targets = {f"{topic}/{partition}": end for (topic, partition), end in ends.items()}
        self._write({"of": self._of, "sending": _listed(letters), "ends": targets})

    def end(self, letters: Letters) -> None:
        self._write({"of": self._of, "sent": _listed(letters)})
        self._note(letters)

    def recover(self) -> int:
        """Finds the records that an interrupted redrive has sent; returns their number."""
        if self._open is None:
            return 0
        wanted = {
            f"{self._dlq}/{partition}/{offset}": (int(partition), offset)
            for partition, runs in self._open["sending"].items()
            for first, last in runs
            for offset in range(first, last + 1)
        }
        found: dict[int, OffsetSet] = {}
        topics = self._connection.metadata().topics
        for target, end in self._open["ends"].items():
            topic, _, partition = target.rpartition("/")
            if topic not in topics or int(partition) not in topics[topic].partitions:
                continue
            for message in read(self._connection, {(topic, int(partition)): end}):
                letter = wanted.get(dict(headers_of(message)).get(FROM_HEADER, b"").decode("utf-8", "replace"))
                if letter is not None:
                    found.setdefault(letter[0], OffsetSet()).add(letter[1], letter[1])
        self._open = None
        self.end(found)
        return sum(last - first + 1 for runs in found.values() for first, last in runs)

    def tidy(self) -> None:
        """Deletes entries from the front that no dead letter needs any more."""
        import confluent_kafka

        held = spans(self._connection, [(self._dlq, number) for number in self._connection.partitions(self._dlq)])
        starts = {number: start for (_, number), (start, _) in held.items()}
        keep_from = None
        for at, of, lasts in self._entries:
            if of != self._of or any(last >= starts.get(partition, 0) for partition, last in lasts.items()):
                break
            keep_from = at + 1
        if keep_from is not None:
            deleted = confluent_kafka.TopicPartition(TOPIC, 0, keep_from)
            (future,) = self._connection.admin.delete_records([deleted]).values()
            self._connection.settle(future, TOPIC)

    def _write(self, entry: dict[str, Any]) -> None:
        failed: list[Any] = []
        if self._producer is None:
            self._producer = self._connection.producer({"enable.idempotence": True, "message.timeout.ms": 30_000})
        self._producer.produce(
            TOPIC, json.dumps(entry).encode(), partition=0, on_delivery=lambda error, _: failed.append(error)
        )
        self._producer.flush()
        if failed[0] is not None:
            raise explain(failed[0], self._connection.address, TOPIC)

    # Reading

    def _look(self) -> None:
        """Without the right to write."""
        for message in read(self._connection, {(TOPIC, 0): 0}):
            self._take(message)

    def _lock(self) -> None:
        self._consumer = self._connection.consumer(
            {
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "session.timeout.ms": SESSION_MS,
                # The owner of the ledger keeps it when other members join.
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        self._consumer.subscribe([TOPIC])
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is None:
                self._take(message)
                deadline = time.monotonic() + LOCK_SECONDS
            elif error.code() == error._PARTITION_EOF:
                return
            elif not error.retriable():
                self.close()
                raise explain(error, self._connection.address, TOPIC)
        self.close()
        raise Failure("another redrive is running; wait until it has ended")

    def _take(self, message: Message) -> None:
        entry = json.loads(message.value() or b"{}")
        listed = entry.get("sent", entry.get("sending", {}))
        lasts = {int(partition): max(last for _, last in runs) for partition, runs in listed.items() if runs}
        self._entries.append(_Entry(message.offset() or 0, entry.get("of", ""), lasts))
        if entry.get("of") != self._of:
            return
        if "sending" in entry:
            self._open = entry
            return
        self._open = None
        self._note({int(partition): OffsetSet(map(tuple, runs)) for partition, runs in listed.items()})

    def _note(self, letters: Letters) -> None:
        for partition, runs in letters.items():
            for first, last in runs:
                self._sent.setdefault(partition, OffsetSet()).add(first, last)


def _listed(letters: Letters) -> dict[str, list[tuple[int, int]]]:
    return {str(partition): list(runs) for partition, runs in letters.items()}


def _topic_id(connection: Connection, name: str) -> str:
    from confluent_kafka import TopicCollection

    connection.topic(name)
    described = connection.admin.describe_topics(TopicCollection([name]))[name]
    return str(connection.settle(described, name).topic_id)
