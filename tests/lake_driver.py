"""A driver of a lake sink without Spark, to be killed at any moment: `python -m tests.lake_driver LAKE FORMAT BATCHES`.

As Spark does, it notes a batch as done after it is in the lake, and brings the batch again when the note is missing.
Each step is a line on its standard output.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from millstream.pipeline import lake_delta
from millstream.pipeline.files import write_files
from millstream.pipeline.lake import create_lake

ROWS_PER_BATCH = 50
SCHEMA = pa.schema([("value", pa.binary()), ("_offset", pa.int64()), ("_timestamp", pa.timestamp("us", "UTC"))])
START = datetime(2024, 5, 1, 23, 30, tzinfo=UTC)


def rows(batch: int, count: int = ROWS_PER_BATCH) -> pa.RecordBatch:
    """Always the same rows for the same batch, over two days."""
    offsets = range(batch * count, (batch + 1) * count)
    table = [
        {"value": b"value %d" % at, "_offset": at, "_timestamp": START + timedelta(hours=at % 2, seconds=at)}
        for at in offsets
    ]
    return pa.RecordBatch.from_pylist(table, schema=SCHEMA)


def run(path: str, format: str, batches: int) -> None:
    lake_delta.SMALL_FILES_MAX = 4
    lake_delta.CHECKPOINT_EVERY = 7
    note = Path(path + ".done")
    lake = create_lake(path, format, SCHEMA, "day", "killed/sink/1")
    for batch in range(int(note.read_text() or -1) + 1 if note.exists() else 0, batches):
        print("began", batch, flush=True)
        if not lake.has(batch):
            entries = list(write_files([rows(batch)], lake.root, "day", "_timestamp", 1 << 20, f"{batch}", lake.suffix))
            print("wrote", batch, flush=True)
            lake.commit(batch, entries)
            print("committed", batch, flush=True)
        if batch % 3 == 0:
            lake.tidy()
            print("tidied", batch, flush=True)
        note.write_text(str(batch))
    print("finished", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
