"""One Parquet file of a lake during its writing, and the storage of its columns.

The first rows decide: a column gets a dictionary if that makes it smaller, and compression if that makes it smaller by
a tenth. Random bytes are stored uncompressed, at twice the speed of a compressor that gains nothing.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.disk import Disk

SAMPLE_ROWS = 8_192
WORTH_COMPRESSING = 0.9
_disk = Disk()


class ParquetFile:
    """Buffers rows, and writes them as one row group on request. The first row group creates the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows = 0
        self.buffered_bytes = 0
        self.buffered_rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._sink: Any = None
        self._writer: Any = None

    @property
    def size(self) -> int:
        return self._sink.tell() if self._sink is not None else 0

    def add(self, batch: pa.RecordBatch) -> int:
        """Returns the growth of the buffer in bytes."""
        size: int = batch.nbytes
        self._batches.append(batch)
        self.buffered_bytes += size
        self.buffered_rows += batch.num_rows
        return size

    def flush(self) -> None:
        if not self._batches:
            return
        table = pa.Table.from_batches(self._batches)
        if self._writer is None:
            self._open(table)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self.rows += table.num_rows
        self._batches = []
        self.buffered_bytes = self.buffered_rows = 0

    def _open(self, table: pa.Table) -> None:
        _disk.make_directory(os.path.dirname(self.path))
        self._sink = pa.OSFile(self.path, "wb")
        self._writer = _writer(self._sink, table.schema, None, choose_storage(table))

    def close(self) -> int:
        """Completes the file and syncs it; returns its size."""
        self._writer.close()
        self._sink.close()
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        self._sink = None
        return size

    def abandon(self) -> None:
        if self._sink is not None:
            with contextlib.suppress(OSError):  # the disk may be full, which may be the reason for the abort
                self._writer.close()
            self._sink.close()
            _disk.remove(self.path)


def _writer(sink: Any, schema: pa.Schema, metadata: list[Any] | None, storage: dict[str, Any]) -> Any:
    # Spark and Delta Lake count in microseconds.
    return pq.ParquetWriter(
        sink,
        schema,
        coerce_timestamps="us",
        allow_truncated_timestamps=True,
        store_schema=False,
        metadata_collector=metadata,
        **storage,
    )


# -- storage ---------------------------------------------------------------------------------------------------------


def choose_storage(table: pa.Table) -> dict[str, Any]:
    """The Parquet writer's settings, by the leaves of the columns. Numbers without a dictionary are delta-encoded, and
    only numbers get statistics in the file: those of text cost more than a lake's readers gain.
    """
    sample = table.slice(0, SAMPLE_ROWS)
    with_dictionary = _leaves(sample, {"use_dictionary": True})
    numbers = [path for path, leaf in with_dictionary.items() if leaf.kind in ("INT32", "INT64")]
    steps = dict.fromkeys(numbers, "DELTA_BINARY_PACKED")
    without = _leaves(sample, {"use_dictionary": False, "column_encoding": steps})
    dictionary = [path for path, leaf in with_dictionary.items() if leaf.cost < without[path].cost]
    best = {**without, **{path: with_dictionary[path] for path in dictionary}}
    squeezed = {path for path, leaf in best.items() if leaf.compressed < WORTH_COMPRESSING * leaf.plain}
    return {
        "use_dictionary": dictionary,
        "column_encoding": {path: encoding for path, encoding in steps.items() if path not in dictionary},
        "compression": {path: "zstd" if path in squeezed else "none" for path in best},
        "compression_level": dict.fromkeys(squeezed, 1),
        "write_statistics": [path for path in numbers if path in table.schema.names],
    }


@dataclass(frozen=True)
class _Leaf:
    kind: str
    plain: int
    compressed: int

    @property
    def cost(self) -> int:
        """The size on disk, and a little for the decompression by readers."""
        return self.compressed + self.plain // 8


def _leaves(sample: pa.Table, storage: dict[str, Any]) -> dict[str, _Leaf]:
    """The size of each leaf when the sample is written."""
    squeeze = {"compression": "zstd", "compression_level": 1, "write_statistics": False}
    metadata: list[Any] = []
    with _writer(pa.BufferOutputStream(), sample.schema, metadata, {**squeeze, **storage}) as writer:
        writer.write_table(sample)
    group = metadata[0].row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    return {
        each.path_in_schema: _Leaf(each.physical_type, each.total_uncompressed_size, each.total_compressed_size)
        for each in columns
    }
