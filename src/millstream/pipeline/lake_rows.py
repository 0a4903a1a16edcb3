"""The rows of a lake, for replays, reports and tests: read in batches of bounded size, in no particular order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from millstream.pipeline.lake_schema import LakeError

TIME = "_timestamp"
BATCH_ROWS = 65_536


class LakeRows:
    """A snapshot of the lake at this object's creation; later writes do not affect it."""

    def __init__(self, path: str, dataset: Any, partition_columns: Sequence[str]) -> None:
        self._path = path
        self._dataset = dataset
        self._partition_columns = tuple(partition_columns)

    @property
    def schema(self) -> pa.Schema:
        """Without the lake's partition columns: only the pipeline's own."""
        return pa.schema([field for field in self._dataset.schema if field.name not in self._partition_columns])

    def count(self) -> int:
        return int(self._dataset.count_rows())

    def read(
        self, columns: Sequence[str] | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows whose `_timestamp` is in [since, until), from those days only. Times without a zone are UTC."""
        names = list(columns) if columns is not None else self.schema.names
        missing = [name for name in names if name not in self._dataset.schema.names]
        if missing:
            raise LakeError(
                f"the lake {self._path} has no column {', '.join(missing)}; it has {', '.join(self.schema.names)}"
            )
        scanner = self._dataset.scanner(
            columns=names,
            filter=self._between(since, until),
            batch_size=BATCH_ROWS,
            # Memory holds the batches read ahead, and a value may have a megabyte.
            batch_readahead=2,
            fragment_readahead=1,
        )
        return (batch for batch in scanner.to_batches() if batch.num_rows)

    def split(self) -> list[LakeRows]:
        """The rows of each file, for reads in another order."""
        whole = self._dataset
        return [
            LakeRows(
                self._path,
                ds.FileSystemDataset([file], whole.schema, file.format, file.filesystem),
                self._partition_columns,
            )
            for file in whole.get_fragments()
        ]

    def _between(self, since: datetime | None, until: datetime | None) -> Any:
        if since is None and until is None:
            return None
        if TIME not in self._dataset.schema.names:
            raise LakeError(f"the lake {self._path} has no column {TIME}, so it cannot be read by time")
        wanted = ds.scalar(True)
        # Rows with a time outside the calendar have no day.
        in_no_day = ds.field("day").is_null() if "day" in self._partition_columns else None
        if since is not None:
            since = _in_utc(since)
            wanted &= ds.field(TIME) >= pa.scalar(since, pa.timestamp("us", "UTC"))
            if in_no_day is not None:
                wanted &= (ds.field("day") >= since.date()) | in_no_day
        if until is not None:
            until = _in_utc(until)
            wanted &= ds.field(TIME) < pa.scalar(until, pa.timestamp("us", "UTC"))
            if in_no_day is not None:
                wanted &= (ds.field("day") <= until.date()) | in_no_day
        return wanted


def _in_utc(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
