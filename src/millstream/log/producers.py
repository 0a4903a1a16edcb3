"""The idempotent producers of one partition (KIP-98).

For each producer id: its epoch and its last five batches (first and last sequence number, offset), because a
producer has at most five requests in flight and may retry any of them.

Rules
-----
1. A batch that matches one of the five is a retry: the log does not store it again, and answers with its first offset.
2. A batch whose first sequence follows the last one is new. Sequences wrap from 2^31 - 1 to 0.
3. Any other batch is refused (OUT_OF_ORDER_SEQUENCE_NUMBER), as in Kafka. After a skip, the skipped batch may still
   arrive. A batch before the five need not have been stored (rule 5), and clients take DUPLICATE_SEQUENCE_NUMBER for
   success. It may be the first of several in flight, refused when the others were not.
4. An older epoch is stale (INVALID_PRODUCER_EPOCH); a newer one must start at sequence 0.
5. A producer that the partition does not know may start anywhere: at `PRODUCERS_MAX` producers the partition drops the
   one that was idle longest.

The table is part of the log's checkpoint. Recovery adds the batches after the checkpoint.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.records.batch import NO_PRODUCER, BatchHeader

WINDOW = 5
PRODUCERS_MAX = 10_000
SEQUENCES = 1 << 31

Batch = tuple[int, int, int]
"""First sequence, last sequence, base offset."""


class Producer:
    __slots__ = ("batches", "epoch", "seen_ms")

    def __init__(self, epoch: int, batches: list[Batch], seen_ms: int) -> None:
        self.epoch = epoch
        self.batches = batches
        self.seen_ms = seen_ms


class Producers:
    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[int, Producer] = {}

    def find_repeat(self, header: BatchHeader) -> int | None:
        """The first offset of a retried batch, or None for a new one; raises by rules 3 and 4."""
        producer = self.by_id.get(header.producer_id)
        if producer is None:
            return None
        first = header.base_sequence
        if header.producer_epoch != producer.epoch:
            if header.producer_epoch < producer.epoch:
                raise RequestError(
                    Code.INVALID_PRODUCER_EPOCH,
                    f"producer {header.producer_id} has epoch {header.producer_epoch}, but its current epoch is "
                    f"{producer.epoch}",
                )
            if first != 0:
                raise RequestError(
                    Code.OUT_OF_ORDER_SEQUENCE_NUMBER, f"a new epoch starts at sequence 0, not at {first}"
                )
            return None
        last = (first + header.last_offset_delta) % SEQUENCES
        newest = producer.batches[-1][1]
        if first == (newest + 1) % SEQUENCES:
            return None
        for known_first, known_last, offset in producer.batches:
            if known_first == first and known_last == last:
                return offset
        raise RequestError(
            Code.OUT_OF_ORDER_SEQUENCE_NUMBER, f"expected sequence {(newest + 1) % SEQUENCES}, got {first}"
        )

    def note(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Adds an appended batch."""
        if header.producer_id == NO_PRODUCER:
            return
        first = header.base_sequence
        batch = (first, (first + header.last_offset_delta) % SEQUENCES, base_offset)
        producer = self.by_id.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            if producer is None and len(self.by_id) >= PRODUCERS_MAX:
                del self.by_id[min(self.by_id, key=lambda known: self.by_id[known].seen_ms)]
            self.by_id[header.producer_id] = Producer(header.producer_epoch, [batch], now_ms)
            return
        producer.seen_ms = now_ms
        producer.batches.append(batch)
        if len(producer.batches) > WINDOW:
            del producer.batches[0]

    def forget_from(self, offset: int) -> None:
        """Drops batches at or above an offset, after a truncation."""
        for producer_id, producer in list(self.by_id.items()):
            producer.batches = [batch for batch in producer.batches if batch[2] < offset]
            if not producer.batches:
                del self.by_id[producer_id]

    def to_state(self) -> list[list[object]]:
        return [[known, item.epoch, item.seen_ms, item.batches] for known, item in self.by_id.items()]

    @classmethod
    def from_state(cls, state: list[list[object]]) -> Producers:
        table = cls()
        for known, epoch, seen_ms, batches in state:
            assert isinstance(known, int) and isinstance(epoch, int) and isinstance(seen_ms, int)
            assert isinstance(batches, list)
            table.by_id[known] = Producer(epoch, [(int(a), int(b), int(c)) for a, b, c in batches], seen_ms)
        return table
