"""Replays a lake's rows into a topic.

The record of a row
-------------------
A lake of `bytes` or `text` gives back the original records: value, key, headers and time. The rows of any other
lake are JSON objects of all columns but those about the source, without null ones, as a topic sink writes them. Their
keys and times are kept if the rows have them (`_key`, `_timestamp`). A record without a value, or with one that
did not fit the columns, comes back as `{}`.

Partition and order
-------------------
Keys choose the partition as with Kafka's Java producers, so the same key goes to the same partition. Rows with their
origin (`_topic`, `_partition`, `_offset`) are sent one source partition after the other, each in the
order of its offsets: rows of a key that came from one partition keep their order. If partitions are kept, each row
goes to the partition with its original number, and the partition has the order of its source, including rows without
a key. Rows without their origin are sent in the lake's order, which is arbitrary.

To order the offsets, a first pass finds the offsets of each file. A file is opened when its turn
comes and is read a batch at a time, so memory does not grow with the lake.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import MillstreamError
from millstream.pipeline.lake import LakeRows, open_lake
from millstream.pipeline.lake_rows import BATCH_ROWS
from millstream.pipeline.objects import as_objects
from millstream.spark.options import parse_sink
from millstream.spark.writing import Writing

PLACE = ("_topic", "_partition", "_offset")
RECORD = {"_key": "key", "_timestamp": "timestamp", "_headers": "headers"}


class NothingToReplay(MillstreamError):
    """A lake whose rows cannot be records."""


@dataclass(frozen=True)
class Span:
    """A time range by `_timestamp`: from `since` on and before `until`."""

    since: datetime | None = None
    until: datetime | None = None


class Replay:
    """`for sent in Replay(...)` sends everything; after the last row all rows are acknowledged."""

    def __init__(
        self, lake: str, span: Span, broker: str, topic: str, compression: str = "none", keep_partitions: bool = False
    ) -> None:
        self._rows = open_lake(lake)
        self._span = span
        self._columns = _needed(self._rows.schema, lake)
        self._keep_partitions = keep_partitions
        if keep_partitions and "_partition" not in self._columns:
            raise NothingToReplay(f"the rows of {lake} have no column _partition; leave out --keep-partitions")
        options = {"bootstrap.servers": broker, "topic": topic, "compression": compression, "client.id": "millstream"}
        self._options = parse_sink(options)
        self._runs = _plan(self._rows, span) if set(PLACE) <= set(self._columns) else None

    @property
    def total(self) -> int | None:
        """The number of rows to send, if known before the read."""
        if self._runs is not None:
            return sum(run.rows for runs in self._runs.values() for run in runs)
        return self._rows.count() if self._span == Span() else None

    def __iter__(self) -> Iterator[int]:
        """Yields the number of rows sent so far, again and again."""
        writing = Writing(self._options, spread=0)
        sent = 0
        try:
            for batch in self._batches():
                writing.add(as_records(batch, self._keep_partitions))
                sent += batch.num_rows
                yield sent
            writing.finish()
        finally:
            writing.stop()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if self._runs is None:
            yield from self._rows.read(self._columns, self._span.since, self._span.until)
            return
        for place in sorted(self._runs):
            yield from _in_order(self._runs[place], place, self._columns, self._span)


# -- order -----------------------------------------------------------------------------------------------------------


@dataclass(order=True)
class Run:
    """The rows of one source partition in one file."""

    first: int
    """The lowest offset."""
    rows: int
    file: LakeRows = field(compare=False)
    is_mixed: bool = field(default=False, compare=False)
    """Whether its offsets decrease somewhere, as after a merge in another order."""
    last: int = field(default=-1, compare=False)


def _plan(lake: LakeRows, span: Span) -> dict[tuple[str, int], list[Run]] | None:
    """The files with rows of each source partition, by their lowest offset; None if some rows lack it."""
    runs: dict[tuple[str, int], list[Run]] = {}
    for file in lake.split():
        found: dict[tuple[str, int], Run] = {}
        for batch in file.read(PLACE, span.since, span.until):
            if any(column.null_count for column in batch.columns):
                return None
            grouped = pa.Table.from_batches([batch]).group_by(["_topic", "_partition"])
            for row in grouped.aggregate([("_offset", "min"), ("_offset", "max"), ("_offset", "count")]).to_pylist():
                run = found.setdefault((row["_topic"], row["_partition"]), Run(row["_offset_min"], 0, file))
                run.is_mixed |= row["_offset_min"] < run.last
                run.first = min(run.first, row["_offset_min"])
                run.last = max(run.last, row["_offset_max"])
                run.rows += row["_offset_count"]
        for place, run in found.items():
            runs.setdefault(place, []).append(run)
    return {place: sorted(files) for place, files in runs.items()}


def _in_order(runs: list[Run], place: tuple[str, int], columns: list[str], span: Span) -> Iterator[pa.RecordBatch]:
    """Merges the files of one source partition: most follow each other, but merged files may overlap others."""
    waiting = list(reversed(runs))
    opened: list[tuple[int, int, pa.RecordBatch, Iterator[pa.RecordBatch]]] = []
    number = 0
    while waiting or opened:
        while waiting and (not opened or waiting[-1].first <= opened[0][0]):
            run = waiting.pop()
            batches = _of_place(run.file.read(columns, span.since, span.until), place)
            if run.is_mixed:  # in memory, but at most one file
                batches = iter(pa.Table.from_batches(batches).sort_by("_offset").to_batches(max_chunksize=BATCH_ROWS))
            number = _push(opened, batches, number)
        if not opened:
            continue
        _, _, batch, batches = heapq.heappop(opened)
        others = [opened[0][0]] if opened else []
        others += [waiting[-1].first] if waiting else []
        offsets = batch.column("_offset").to_numpy()
        cut = int(np.searchsorted(offsets, min(others))) if others else len(offsets)
        cut = max(cut, 1)  # the same offset twice: either may go first
        yield batch.slice(0, cut)
        if cut < batch.num_rows:
            rest = batch.slice(cut)
            heapq.heappush(opened, (rest.column("_offset")[0].as_py(), number, rest, batches))
            number += 1
        else:
            number = _push(opened, batches, number)


def _push(opened: list[Any], batches: Iterator[pa.RecordBatch], number: int) -> int:
    batch = next(batches, None)
    if batch is not None:
        heapq.heappush(opened, (batch.column("_offset")[0].as_py(), number, batch, batches))
    return number + 1


def _of_place(batches: Iterator[pa.RecordBatch], place: tuple[str, int]) -> Iterator[pa.RecordBatch]:
    topic, partition = place
    for batch in batches:
        mine = pc.and_(pc.equal(batch.column("_topic"), topic), pc.equal(batch.column("_partition"), partition))
        chosen = batch.filter(mine)
        if chosen.num_rows:
            yield chosen.take(pc.sort_indices(chosen.column("_offset"))) if _is_mixed(chosen) else chosen


def _is_mixed(batch: pa.RecordBatch) -> bool:
    offsets = batch.column("_offset").to_numpy()
    return bool((np.diff(offsets) < 0).any())


# -- records ---------------------------------------------------------------------------------------------------------


def _needed(schema: pa.Schema, lake: str) -> list[str]:
    data = _data(schema)
    if not data:
        raise NothingToReplay(f"the rows of {lake} have no columns that could be a record's value")
    about = [name for name in (*RECORD, *PLACE) if name in schema.names]
    return [*data, *about]


def _data(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name not in RECORD and name not in PLACE]


def as_records(rows: pa.RecordBatch, keep_partitions: bool = False) -> pa.RecordBatch:
    """The writer's columns: value, and key, timestamp and headers if the rows have them."""
    data = _data(rows.schema)
    is_raw = data == ["value"] and _is_bytes(rows.column("value").type)
    columns = {"value": rows.column("value") if is_raw else as_objects(rows, data)}
    for name, record in RECORD.items():
        if name in rows.schema.names:
            columns[record] = rows.column(name)
    if keep_partitions:
        columns["partition"] = rows.column("_partition")
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        is_it(kind) for is_it in (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string)
    )
