"""A task's reading, over answers that a broker with transactions, damage or holes would give."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from millstream.client.cluster import ClusterError
from millstream.core.errors import Code
from millstream.records import codec
from millstream.records.batch import CONTROL, TRANSACTIONAL, read_header
from millstream.records.compression import Codec
from millstream.spark import reading
from millstream.spark.options import parse_source
from millstream.spark.ranges import OffsetRange
from millstream.spark.reading import Damaged, DataLost, read_range
from millstream.spark.schema import TYPES, Shape, full_schema
from millstream.wire.kafka.requests import Fetched, TopicPartition

NOW = 1_700_000_000_000


@dataclass
class Log:
    """One partition as a broker answers from it: some batches at a time, the last of them cut off."""

    batches: list[bytearray] = field(default_factory=list)
    aborted: list[tuple[int, int, int]] = field(default_factory=list)
    """Producer, first offset and the marker's offset of each transaction that was taken back."""
    per_answer: int = 3
    start: int = 0
    end: int = 0

    def add(self, *values: bytes | None, **batch: Any) -> None:
        records = [(self.end + at, NOW + self.end + at, None, value, ()) for at, value in enumerate(values)]
        self.batches.append(codec.encode(records, base_offset=self.end, **batch))
        self.end += len(values)

    def fetch(self, place: TopicPartition, offset: int, bytes_max: int, wait_ms_max: int) -> Fetched:
        if not self.start <= offset <= self.end:
            return Fetched(Code.OFFSET_OUT_OF_RANGE, self.end, self.start, memoryview(b""), [])
        bases = [read_header(batch).base_offset for batch in self.batches]
        first = max(bisect_right(bases, offset) - 1, 0)
        if first < len(bases) and read_header(self.batches[first]).last_offset < offset:
            first += 1
        answer = b"".join(self.batches[first : first + self.per_answer])
        if first + self.per_answer < len(self.batches):
            answer += self.batches[first + self.per_answer][:-1]
        aborted = [(producer, begun) for producer, begun, marker in self.aborted if marker >= offset]
        return Fetched(0, self.end, self.start, memoryview(answer), aborted)

    def earliest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self.start)

    def latest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self.end)


def read(log: Any, start: int, end: int, schema: StructType | None = None, **options: str) -> list[pa.RecordBatch]:
    given = parse_source({"bootstrap.servers": "none:1", "subscribe": "t", **options}, streaming=False)
    return list(read_range(log, given, OffsetRange("t", 4, start, end), Shape(schema or full_schema(True))))


def values(batches: list[pa.RecordBatch]) -> list[bytes | None]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def random_log(pick: random.Random) -> tuple[Log, dict[int, bytes]]:
    """Plain records between transactions of three producers, and what of it may be seen."""
    log = Log(per_answer=pick.randrange(1, 6))
    seen: dict[int, bytes] = {}
    open_: dict[int, tuple[int, dict[int, bytes]]] = {}
    for _ in range(pick.randrange(40)):
        producer = pick.choice((-1, 1, 2, 3))
        if producer in open_ and pick.random() < 0.4:
            begun, pending = open_.pop(producer)
            if pick.random() < 0.5:
                log.aborted.append((producer, begun, log.end))
            else:
                seen.update(pending)
            log.add(b"marker", producer_id=producer, attributes=TRANSACTIONAL | CONTROL)
            continue
        written = {log.end + at: pick.randbytes(pick.randrange(50)) for at in range(pick.randrange(1, 6))}
        if producer > 0:
            open_.setdefault(producer, (log.end, {}))[1].update(written)
        else:
            seen.update(written)
        attributes = TRANSACTIONAL if producer > 0 else 0
        log.add(*written.values(), producer_id=producer, attributes=attributes, codec=pick.choice(list(Codec)))
    # A broker shows nothing from the first open transaction on.
    log.end = min([log.end, *(begun for begun, _ in open_.values())])
    log.batches = [batch for batch in log.batches if read_header(batch).base_offset < log.end]
    return log, {offset: value for offset, value in seen.items() if offset < log.end}


@pytest.mark.parametrize("seed", range(60))
def test_aborted_and_control_records_never_appear_wherever_a_range_begins(seed: int) -> None:
    pick = random.Random(seed)
    log, seen = random_log(pick)
    for _ in range(5):
        start = pick.randrange(log.end + 1)
        end = pick.randrange(start, log.end + 1)
        batches = read(log, start, end)
        expected = {offset: value for offset, value in sorted(seen.items()) if start <= offset < end}
        offsets = [offset for batch in batches for offset in batch.column("offset").to_pylist()]
        assert dict(zip(offsets, values(batches), strict=True)) == expected
        assert offsets == list(expected)
        assert all(batch.num_rows for batch in batches)


def test_only_the_columns_of_the_schema_are_built_in_its_order() -> None:
    log = Log()
    log.add(b"a", b"b", b"c")
    for names in (["value"], ["partition", "topic"], ["timestampType", "value", "offset"], list(TYPES)):
        schema = StructType([each for each in full_schema(True).fields if each.name in names])
        schema = StructType(sorted(schema.fields, key=lambda each: names.index(each.name)))
        (batch,) = read(log, 1, 3, schema)
        assert batch.schema.names == names
        everything = {
            "key": [None, None],
            "value": [b"b", b"c"],
            "topic": ["t", "t"],
            "partition": [4, 4],
            "offset": [1, 2],
            "timestampType": [0, 0],
            "headers": [None, None],
        }
        for name in set(names) - {"timestamp"}:
            assert batch.column(name).to_pylist() == everything[name]
    assert Shape(StructType([full_schema(False)["value"]])).decoded == {"value"}


def test_a_hole_that_compaction_left_is_stepped_over() -> None:
    log = Log(per_answer=1)
    log.add(b"0", b"1")
    log.batches.append(codec.encode([(8, NOW, None, b"8", ())], base_offset=2, last_offset_delta=9))
    log.batches.append(codec.encode([], base_offset=12, last_offset_delta=3))
    log.end = 50
    log.add(b"50")
    assert values(read(log, 0, 51)) == [b"0", b"1", b"8", b"50"]
    assert values(read(log, 3, 8)) == []
    assert values(read(log, 13, 40)) == []
    assert values(read(log, 8, 9)) == [b"8"]


def test_what_was_trimmed_is_an_error_or_left_out() -> None:
    log = Log()
    for number in range(10):
        log.add(b"%d" % number)
    log.start, log.batches = 6, log.batches[6:]
    with pytest.raises(DataLost, match="t-4: offsets 2 to 7 cannot be read, the partition starts at 6 and ends at 10"):
        read(log, 2, 8)
    assert values(read(log, 2, 8, failOnDataLoss="false")) == [b"6", b"7"]
    assert read(log, 2, 5, failOnDataLoss="false") == []
    with pytest.raises(DataLost, match="offsets 10 to 29 cannot be read, the partition ends at 10"):
        read(log, 8, 30)
    assert values(read(log, 8, 30, failOnDataLoss="false")) == [b"8", b"9"]
    assert read(log, 20, 30, failOnDataLoss="false") == []


def test_a_partition_that_is_deleted_while_it_is_read_is_lost_data() -> None:
    class Gone(Log):
        def fetch(self, place: TopicPartition, offset: int, bytes_max: int, wait_ms_max: int) -> Fetched:
            if offset > 0:
                raise ClusterError("t-4 has no leader, or does not exist", Code.UNKNOWN_TOPIC_OR_PARTITION)
            return super().fetch(place, offset, bytes_max, wait_ms_max)

    log = Gone(per_answer=1)
    log.add(b"0")
    log.add(b"1")
    with pytest.raises(DataLost, match="offsets 1 to 1 cannot be read, the partition no longer exists"):
        read(log, 0, 2)
    assert values(read(log, 0, 2, failOnDataLoss="false")) == [b"0"]


def test_a_broker_that_never_gets_on_is_not_asked_for_ever() -> None:
    class Stuck(Log):
        asked = 0

        def fetch(self, place: TopicPartition, offset: int, bytes_max: int, wait_ms_max: int) -> Fetched:
            self.asked += 1
            return Fetched(0, 100, 0, memoryview(b""), [])

    log = Stuck()
    with pytest.raises(DataLost, match="offsets 0 to 9 cannot be read"):
        read(log, 0, 10)
    assert log.asked <= reading.EMPTY_ANSWERS_MAX + 2


def test_a_broker_that_has_not_heard_of_the_last_batch_is_asked_to_look() -> None:
    class Behind(Log):
        """Of two brokers over one store the one that did not write: it looks when it is asked where the log ends."""

        has_looked = False

        def fetch(self, place: TopicPartition, offset: int, bytes_max: int, wait_ms_max: int) -> Fetched:
            known = self if self.has_looked else Log(self.batches[:-1], end=self.end - 1)
            return Log.fetch(known, place, offset, bytes_max, wait_ms_max)

        def latest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
            self.has_looked = True
            return super().latest(places)

    for loss in ("true", "false"):
        log = Behind()
        for value in (b"a", b"b", b"c"):
            log.add(value)
        assert values(read(log, 0, 3, failOnDataLoss=loss)) == [b"a", b"b", b"c"]


def test_a_damaged_batch_is_named_and_what_comes_before_it_is_read() -> None:
    log = Log(per_answer=10)
    for number in range(8):
        log.add(b"%d" % number)
    log.batches[5][-1] ^= 1
    seen = []
    with pytest.raises(Damaged, match=r"t-4: the batch at offset 5 cannot be read: .*CRC-32C.*start after it"):
        given = parse_source({"bootstrap.servers": "none:1", "subscribe": "t"}, streaming=False)
        for batch in read_range(log, given, OffsetRange("t", 4, 0, 8), Shape(full_schema(False))):  # type: ignore[arg-type]
            seen += values([batch])
    assert seen == [b"0", b"1", b"2", b"3", b"4"]
    assert values(read(log, 6, 8)) == [b"6", b"7"]
    log.batches[5][16] = 1
    with pytest.raises(Damaged, match="t-4: the batch at offset 5 cannot be read: it has format 1 and"):
        read(log, 5, 8)
    log.batches[5][8:12] = (-61).to_bytes(4, "big", signed=True)
    with pytest.raises(Damaged, match="the batch at offset 5"):
        read(log, 5, 8)


def test_batches_that_decompress_to_much_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DECODED_BYTES_MAX", 100_000)
    log = Log(per_answer=100)
    for number in range(40):
        log.add(b"%d" % number + bytes(10_000), codec=Codec.ZSTD)
    log.add(bytes(300_000), codec=Codec.GZIP)  # more than the bound alone
    batches = read(log, 3, 41)
    sizes = [len(value or b"") for value in values(batches)]
    assert sizes == [10_000 + len(str(at)) for at in range(3, 40)] + [300_000]
    assert max(batch.nbytes for batch in batches[:-1]) < 150_000


def test_a_time_too_large_for_spark_becomes_the_largest_and_stops_nobody() -> None:
    log = Log()
    times = [NOW, 2**62, -(2**62), -1]
    log.batches.append(codec.encode([(at, time, None, b"", ()) for at, time in enumerate(times)], base_offset=0))
    log.end = 4
    (batch,) = read(log, 0, 4)
    largest = (2**63 - 1) // 1000 * 1000
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [NOW * 1000, largest, -largest, -1000]


def test_records_without_headers_have_null_and_not_an_empty_list() -> None:
    log = Log()
    records = [(0, NOW, None, b"a", (("h", b"1"), ("n", None))), (1, NOW, None, b"b", ()), (2, NOW, None, b"c", ())]
    log.batches.append(codec.encode(records))
    log.end = 3
    pair = [{"key": "h", "value": b"1"}, {"key": "n", "value": None}]
    assert [row for batch in read(log, 0, 3) for row in batch.column("headers").to_pylist()] == [pair, None, None]
    assert [row for batch in read(log, 0, 1) for row in batch.column("headers").to_pylist()] == [pair]
