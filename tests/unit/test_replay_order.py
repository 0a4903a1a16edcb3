"""The order in which a lake's rows are sent, without a broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.pipeline import lake_delta, lake_rows, replay
from millstream.pipeline.files import write_files
from millstream.pipeline.lake import create_lake, open_lake

SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("_topic", pa.string()),
        ("_partition", pa.int32()),
        ("_offset", pa.int64()),
        ("_timestamp", pa.timestamp("us", "UTC")),
    ]
)
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


class Sent:
    """In place of a broker."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def add(self, records: pa.RecordBatch) -> None:
        self.values += records.column("value").to_pylist()

    def finish(self) -> None:
        pass

    def stop(self) -> None:
        pass


def test_a_merged_file_is_sent_in_the_order_of_offsets_though_the_later_rows_lie_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_rows, "BATCH_ROWS", 100)
    monkeypatch.setattr(lake_delta, "SMALL_FILES_MAX", 1)
    lake = create_lake(str(tmp_path), "delta", SCHEMA, "day", "test")
    for batch, modified_ms in enumerate((2000, 1000)):  # the second worker's clock is behind
        rows = [
            {"value": b"%d" % at, "_topic": "clicks", "_partition": 0, "_offset": at, "_timestamp": NOON}
            for at in range(batch * 300, (batch + 1) * 300)
        ]
        written = write_files(
            [pa.RecordBatch.from_pylist(rows, schema=SCHEMA)], lake.root, "day", "_timestamp", 1 << 20, "batch"
        )
        lake.commit(batch, [replace(entry, modified_ms=modified_ms) for entry in written])
    lake.tidy()
    assert len(open_lake(str(tmp_path)).split()) == 1
    sent = Sent()
    monkeypatch.setattr(replay, "Writing", lambda options, spread: sent)
    *_, count = replay.Replay(str(tmp_path), replay.Span(), "127.0.0.1:9092", "again")
    assert count == 600
    assert sent.values == [b"%d" % at for at in range(600)]


def test_a_column_that_begins_with_an_underscore_is_sent_unless_it_is_about_the_source(tmp_path: Path) -> None:
    schema = pa.schema([("_id", pa.string()), ("x", pa.int64()), *list(SCHEMA)[1:]])
    row = {"_id": "a", "x": 1, "_topic": "clicks", "_partition": 0, "_offset": 0, "_timestamp": NOON}
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    assert replay.as_records(batch).column("value").to_pylist() == ['{"_id":"a","x":1}']
    assert replay._needed(schema, "lake")[:2] == ["_id", "x"]
