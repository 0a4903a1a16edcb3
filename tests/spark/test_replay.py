"""A lake's rows, back in a topic: what they become, and in which order."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from millstream.pipeline.files import write_files
from millstream.pipeline.lake import create_lake
from millstream.pipeline.replay import as_records
from tests import confluent
from tests.serving import ServedBroker

# Yesterday, late: rows of two days, and none so old that the broker's retention would take them away.
START = datetime.now(UTC).replace(hour=22, minute=0, second=0, microsecond=0) - timedelta(days=5)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
RAW = pa.schema(
    [
        ("value", pa.binary()),
        ("_key", pa.binary()),
        ("_topic", pa.string()),
        ("_partition", pa.int32()),
        ("_offset", pa.int64()),
        ("_timestamp", pa.timestamp("us", "UTC")),
        ("_headers", HEADERS),
    ]
)


def fill_lake(path: Path, schema: pa.Schema, batches: list[list[dict[str, Any]]], format: str = "delta") -> None:
    """Each list of rows is a batch of its own."""
    lake = create_lake(str(path), format, schema, "day", "test")
    for number, rows in enumerate(batches):
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        written = write_files([batch], lake.root, "day", "_timestamp", 1 << 20, f"batch-{number}", lake.suffix)
        lake.commit(number, list(written))


def raw_row(partition: int, offset: int) -> dict[str, Any]:
    return {
        "value": None if offset % 10 == 9 else b"%d/%d\xff" % (partition, offset),
        "_key": None if offset % 7 == 0 else b"key-%d" % (offset % 5),
        "_topic": "clicks",
        "_partition": partition,
        "_offset": offset,
        "_timestamp": START + timedelta(minutes=offset),
        "_headers": [{"key": "trace", "value": b"%d" % offset}] if offset % 3 == 0 else None,
    }


def replay(broker: ServedBroker, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millstream", "pipeline", "replay", *arguments, "--broker", broker.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


def create(broker: ServedBroker, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result()


def read(broker: ServedBroker, topic: str, partitions: int, count: int) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: list[Message] = []
    ends = 0
    while ends < partitions:
        message = consumer.poll(10)
        assert message is not None, f"{len(found)} of {count}"
        if message.error() is None:
            found.append(message)
        else:
            ends += 1
    consumer.close()
    assert len(found) == count
    return found


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_a_lake_of_bytes_comes_back_as_the_records_that_they_were(
    broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path, format: str
) -> None:
    rows = [raw_row(partition, offset) for partition in range(3) for offset in range(200)]
    fill_lake(tmp_path / "lake", RAW, [rows[:250], rows[250:]], format)
    topic = unique("again")
    create(broker, topic, 4)
    done = replay(broker, str(tmp_path / "lake"), "--to", topic)
    assert done.stdout.startswith(f"Sent 600 records to {topic} (")
    found = read(broker, topic, 4, 600)
    wanted = {
        (row["value"], row["_key"], row["_timestamp"], repr([(h["key"], h["value"]) for h in row["_headers"] or []]))
        for row in rows
        if row["value"] is not None
    }
    got = {
        (m.value(), m.key(), datetime.fromtimestamp(m.timestamp()[1] / 1000, UTC), repr(list(m.headers() or [])))
        for m in found
        if m.value() is not None
    }
    assert got == wanted
    assert sum(message.value() is None for message in found) == 60


def test_rows_of_a_key_keep_their_order_though_files_lie_across_each_other(
    broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path
) -> None:
    dice = random.Random(3)
    batches: list[list[dict[str, Any]]] = []
    for partition in range(2):
        offsets = iter(range(5000))
        chunks = [[raw_row(partition, next(offsets)) for _ in range(dice.randint(1, 400))] for _ in range(12)]
        # As merging leaves them: some files hold every third chunk, written after those in between.
        batches += [[*chunks[0], *chunks[3], *chunks[6]], chunks[5], chunks[1], [*chunks[2], *chunks[4]], *chunks[7:]]
    dice.shuffle(batches)
    fill_lake(tmp_path / "lake", RAW, batches)
    topic = unique("again")
    create(broker, topic, 3)
    replay(broker, str(tmp_path / "lake"), "--to", topic, "-z", "none")
    total = sum(map(len, batches))
    order: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    places: dict[bytes, set[int]] = defaultdict(set)
    for message in read(broker, topic, 3, total):
        key, value = message.key(), message.value()
        if key is not None:
            places[key].add(confluent.partition(message))
        if key is not None and value is not None:
            number, offset = value.removesuffix(b"\xff").split(b"/")
            order[key, number].append(int(offset))
    assert all(len(partitions) == 1 for partitions in places.values())
    assert len(order) == 10 and all(offsets == sorted(offsets) for offsets in order.values())


def test_from_and_until_choose_rows_by_their_time(
    broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path
) -> None:
    fill_lake(tmp_path / "lake", RAW, [[raw_row(0, offset) for offset in range(300)]])
    topic = unique("again")
    create(broker, topic, 3)
    since, until = START + timedelta(minutes=100), START + timedelta(minutes=150)
    replay(
        broker,
        str(tmp_path / "lake"),
        *("--to", topic, "--from", since.isoformat(), "--until", f"@{int(until.timestamp() * 1000)}"),
    )
    times = sorted(message.timestamp()[1] for message in read(broker, topic, 3, 50))
    assert times == [int((START + timedelta(minutes=offset)).timestamp() * 1000) for offset in range(100, 150)]


def test_kept_partitions_are_what_they_were(broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path) -> None:
    rows = [raw_row(partition, offset) for offset in range(300) for partition in range(3)]
    fill_lake(tmp_path / "lake", RAW, [rows[600:], rows[:600]])
    topic = unique("again")
    create(broker, topic, 3)
    replay(broker, str(tmp_path / "lake"), "--to", topic, "--keep-partitions")
    found = read(broker, topic, 3, 900)
    for partition in range(3):
        values = [message.value() for message in found if message.partition() == partition]
        assert values == [row["value"] for row in rows if row["_partition"] == partition]
    small = unique("small")
    create(broker, small, 2)
    refused = replay(broker, str(tmp_path / "lake"), "--to", small, "--keep-partitions", code=1).stderr
    assert f"a row is for partition 2 of topic {small}, which has partitions 0 to 1" in refused


def test_rows_with_columns_become_json_objects() -> None:
    schema = pa.schema(
        [
            ("user", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("day_", pa.date32()),
            ("price", pa.decimal128(20, 2)),
            ("exact", pa.decimal128(38, 0)),
            ("blob", pa.binary()),
            ("inner", pa.struct([("n", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("none", pa.int64())])),
            ("many", pa.map_(pa.string(), pa.list_(pa.float64()))),
            ('a "name"', pa.float64()),
            ("yes", pa.bool_()),
            ("none", pa.int64()),
            ("_key", pa.binary()),
            ("_timestamp", pa.timestamp("us", "UTC")),
        ]
    )
    moment = datetime(2026, 11, 14, 22, 0, 0, 123456, UTC)
    row = {
        "user": 'ü "quoted"\n',
        "at": datetime(2026, 11, 14, 22, tzinfo=UTC),
        "local": moment.replace(tzinfo=None),
        "day_": date(2026, 11, 14),
        "price": Decimal("12.50"),
        "exact": Decimal(10**37 + 1),
        "blob": b"\x00\xff",
        "inner": {"n": 1, "at": moment, "none": None},
        "many": [("k", [1.5, float("inf")])],
        'a "name"': 0.1,
        "yes": True,
        "none": None,
        "_key": b"k",
        "_timestamp": START,
    }
    records = as_records(pa.RecordBatch.from_pylist([row], schema=schema))
    assert records.schema.names == ["value", "key", "timestamp"]
    text = records.column("value")[0].as_py()
    assert json.loads(text, parse_float=Decimal, parse_int=Decimal) == {
        "user": 'ü "quoted"\n',
        "at": "2026-11-14T22:00:00.000000Z",
        "local": "2026-11-14T22:00:00.123456",
        "day_": "2026-11-14",
        "price": Decimal("12.50"),
        "exact": Decimal(10**37 + 1),
        "blob": "AP8=",
        "inner": {"n": 1, "at": "2026-11-14T22:00:00.123456Z"},
        "many": {"k": [Decimal("1.5"), "Infinity"]},
        'a "name"': Decimal("0.1"),
        "yes": True,
    }


def test_what_spark_reads_back_is_what_the_lake_has(spark: SparkSession) -> None:
    schema = "user STRING, at TIMESTAMP, day DATE, price DECIMAL(20,2), blob BINARY, n STRUCT<x: DOUBLE, t: TIMESTAMP>"
    moment = datetime(2026, 11, 14, 22, 0, 0, 123456)
    row = ("\u2028 ü \\", moment, date(2026, 11, 14), Decimal("1.10"), bytearray(b"\x00\xff"), (1e300, moment))
    lake = spark.createDataFrame([row, (None,) * 6], schema).toArrow()
    texts = [text for batch in lake.to_batches() for text in as_records(batch).column("value").to_pylist()]
    frame = spark.createDataFrame([(text,) for text in texts], "value STRING")
    again = frame.selectExpr(f"from_json(value, '{schema}') AS row").select("row.*").toArrow()
    assert again.to_pylist() == lake.to_pylist()
    assert texts[1] == "{}"


def test_rows_without_a_place_are_sent_too(broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path) -> None:
    schema = pa.schema([("url", pa.string()), ("hits", pa.int64()), ("_timestamp", pa.timestamp("us", "UTC"))])
    rows = [{"url": f"/{number}", "hits": number, "_timestamp": START} for number in range(10)]
    fill_lake(tmp_path / "lake", schema, [rows])
    topic = unique("again")
    create(broker, topic, 2)
    replay(broker, str(tmp_path / "lake"), "--to", topic)
    found = [json.loads(confluent.value(message)) for message in read(broker, topic, 2, 10)]
    assert sorted(found, key=lambda row: row["hits"]) == [{"url": f"/{n}", "hits": n} for n in range(10)]


def test_what_cannot_be_replayed_is_one_sentence(
    broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic = unique("again")
    create(broker, topic, 1)
    missing = replay(broker, str(tmp_path / "nowhere"), "--to", topic, code=1).stderr
    assert (
        missing
        == f"millstream: {tmp_path}/nowhere does not exist; name a folder that a pipeline's lake sink has written\n"
    )
    fill_lake(tmp_path / "lake", RAW, [[raw_row(0, 1)]])
    assert "there is no topic nope" in replay(broker, str(tmp_path / "lake"), "--to", "nope", code=1).stderr
    assert "is not a time" in replay(broker, str(tmp_path / "lake"), "--to", topic, "--from", "17", code=2).stderr
