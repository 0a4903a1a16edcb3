"""Sinks that are not what their checkpoint takes them for: another folder or file in the same sink. Without Spark."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from millstream.pipeline.deliveries import Delivery, LakeDelivery, MovedDelivery, NotTheSame, TableDelivery
from millstream.pipeline.files import write_files
from millstream.pipeline.lake import create_lake
from millstream.pipeline.spec import LakeSink, TableSink

ROWS = StructType().add("user", StringType()).add("ms", LongType())
ARROW = pa.schema([("user", pa.string()), ("ms", pa.int64())])
APP = "clicks/sink/1"


class Batch:
    """Rows as far as a delivery looks at them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def mapInArrow(self, *_: Any) -> Batch:
        return Batch([])

    def collect(self) -> list[Any]:
        return []

    def toArrow(self) -> pa.Table:
        return pa.Table.from_pylist(self._rows, ARROW)


def lake(path: Path, batch: int, kind: str = "delta", made: type[LakeDelivery] = LakeDelivery) -> Delivery:
    return made(LakeSink("lake-clicks", "clicks", str(path), kind, "none"), ROWS, None, APP, batch)


def table(path: Path, batch: int, app: str = APP) -> Delivery:
    return TableDelivery(TableSink("table-hits", "clicks", f"sqlite:{path}", "hits", ("user",)), ROWS, app, batch)


def put_rows(path: Path, kind: str, app: str) -> None:
    """By another sink."""
    lake = create_lake(str(path), kind, ARROW, "none", app)
    rows = pa.RecordBatch.from_pylist([{"user": "z", "ms": 9}], ARROW)
    (entry,) = write_files([rows], lake.root, "none", None, 1 << 20, "batch-0", lake.suffix)
    lake.commit(0, [entry])


def deliver(delivery: Delivery, batch: int, *rows: dict[str, Any]) -> int:
    try:
        return delivery.deliver(Batch(list(rows)), batch)  # type: ignore[arg-type]
    finally:
        delivery.close()


@pytest.mark.parametrize("made", [LakeDelivery, MovedDelivery])
@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_lake_that_is_not_there_does_not_begin_in_the_middle(
    tmp_path: Path, kind: str, made: type[LakeDelivery]
) -> None:
    deliver(lake(tmp_path / "old", 0, kind, made), 0)  # without rows: there is a lake all the same
    deliver(lake(tmp_path / "old", 1, kind, made), 1)
    with pytest.raises(NotTheSame, match=r"the lake .*/new does not have the batches before batch 2: .*lake-clicks"):
        lake(tmp_path / "new", 2, kind, made)
    assert not (tmp_path / "new").exists()  # else the next start would take it for the one


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_lake_of_others_does_not_begin_in_the_middle(tmp_path: Path, kind: str) -> None:
    deliver(lake(tmp_path / "old", 0, kind), 0)
    put_rows(tmp_path / "theirs", kind, "views/sink/2")
    with pytest.raises(NotTheSame, match=r"the lake .*/theirs does not have the batches before batch 2: .*lake-clicks"):
        lake(tmp_path / "theirs", 2, kind)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_lake_that_is_shared_knows_of_a_sink_that_had_no_rows_yet(tmp_path: Path, kind: str) -> None:
    deliver(lake(tmp_path / "ours", 0, kind), 0)
    put_rows(tmp_path / "ours", kind, "views/sink/2")
    deliver(lake(tmp_path / "ours", 1, kind), 1)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_lake_without_any_rows_may_be_one_that_an_older_version_made(tmp_path: Path, kind: str) -> None:
    create_lake(str(tmp_path / "ours"), kind, ARROW, "none", APP)
    deliver(lake(tmp_path / "ours", 3, kind), 3)


def test_a_lake_may_be_moved(tmp_path: Path) -> None:
    deliver(lake(tmp_path / "old", 0), 0)
    (tmp_path / "old").rename(tmp_path / "new")
    deliver(lake(tmp_path / "new", 1), 1)


def test_a_table_that_lacks_a_batch_does_not_go_on(tmp_path: Path) -> None:
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    assert deliver(table(old, 0), 0, {"user": "a", "ms": 1}) == 1
    assert deliver(table(old, 1), 1) == 0
    for _ in range(2):
        with pytest.raises(NotTheSame, match=r"the table hits in sqlite:.*new.db does not have the batches before"):
            table(new, 2)
    assert deliver(table(old, 2), 2, {"user": "b", "ms": 2}) == 1


def test_who_renames_a_pipeline_and_keeps_its_checkpoint_is_told_of_the_name(tmp_path: Path) -> None:
    path = tmp_path / "hits.db"
    assert deliver(table(path, 0), 0, {"user": "a", "ms": 1}) == 1
    with pytest.raises(NotTheSame, match="or the pipeline, whose name identifies its batches, was renamed"):
        table(path, 1, APP.replace("clicks", "views"))


@pytest.mark.parametrize("statement", ["DROP TABLE hits", "ALTER TABLE hits RENAME TO visits"])
def test_a_table_that_went_from_its_database_does_not_begin_in_the_middle(tmp_path: Path, statement: str) -> None:
    """The numbers of its batches are in a table of their own, which stays."""
    path = tmp_path / "hits.db"
    assert deliver(table(path, 0), 0, {"user": "a", "ms": 1}) == 1
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        for _ in range(2):
            with pytest.raises(NotTheSame, match=r"the table hits in .* does not have the batches before batch 1"):
                table(path, 1)
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'hits'").fetchall() == []


def test_a_batch_that_comes_again_after_a_crash_is_no_other_sink(tmp_path: Path) -> None:
    path = tmp_path / "hits.db"
    assert deliver(table(path, 0), 0, {"user": "a", "ms": 1}) == 1
    assert deliver(table(path, 0), 0, {"user": "a", "ms": 1}) == 0
    assert deliver(table(path, 1), 1, {"user": "a", "ms": 2}) == 1
