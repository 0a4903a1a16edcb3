"""Arrow batches into Parquet files, as a lake sink's tasks write them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.pipeline import files, parquet
from millstream.pipeline.files import OWN_NAME, FileEntry, write_files, write_partition

INSTANT = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("value", pa.binary()), ("_offset", pa.int64()), ("_timestamp", INSTANT)])
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


def rows(times: Iterable[datetime | int | None], first: int = 0) -> pa.RecordBatch:
    times = list(times)
    values = [b"value %d" % (first + at) for at in range(len(times))]
    offsets = range(first, first + len(times))
    return pa.RecordBatch.from_arrays([pa.array(values), pa.array(offsets), pa.array(times, INSTANT)], schema=SCHEMA)


def write(batches: Iterable[pa.RecordBatch], root: Path, by: str = "day", file_bytes: int = 1 << 27) -> list[FileEntry]:
    return list(write_files(batches, str(root), by, None if by == "none" else "_timestamp", file_bytes, "test"))


def offsets(root: Path, entries: Iterable[FileEntry]) -> list[int]:
    return [
        at for entry in entries for at in pq.read_table(root / entry.path, partitioning=None)["_offset"].to_pylist()
    ]


def test_a_batch_of_one_day_becomes_one_file_and_keeps_its_order(tmp_path: Path) -> None:
    [entry] = write([rows([NOON, NOON + timedelta(hours=3)]), rows([NOON], 2)], tmp_path)
    assert entry.partition == {"day": "2024-05-01"}
    assert entry.path.startswith("day=2024-05-01/mill-test-")
    assert (entry.rows, entry.size) == (3, (tmp_path / entry.path).stat().st_size)
    assert abs(entry.modified_ms / 1000 - time.time()) < 60
    assert offsets(tmp_path, [entry]) == [0, 1, 2]


def test_midnight_in_utc_parts_days_whatever_the_batches_are(tmp_path: Path) -> None:
    midnight = datetime(2024, 5, 2, tzinfo=UTC)
    just_before = midnight - timedelta(microseconds=1)
    entries = write([rows([midnight, just_before, midnight]), rows([just_before], 3)], tmp_path)
    by_day = {entry.partition["day"]: offsets(tmp_path, [entry]) for entry in entries}
    assert by_day == {"2024-05-01": [1, 3], "2024-05-02": [0, 2]}


def test_hours_are_a_second_folder(tmp_path: Path) -> None:
    entries = write([rows([NOON, NOON + timedelta(hours=1), NOON - timedelta(hours=3)])], tmp_path, "hour")
    assert sorted(entry.path.rsplit("/", 1)[0] for entry in entries) == [
        f"day=2024-05-01/hour={hour}" for hour in (12, 13, 9)
    ]


def test_without_partitions_files_lie_in_the_root(tmp_path: Path) -> None:
    [entry] = write([rows([NOON, None])], tmp_path, "none")
    assert entry.partition == {}
    assert "/" not in entry.path


def test_rows_without_a_time_or_with_one_no_calendar_has_get_a_partition_of_their_own(tmp_path: Path) -> None:
    entries = write([rows([None, NOON, 2**63 - 1, -(2**63) + 1, None])], tmp_path)
    by_day = {entry.partition["day"]: offsets(tmp_path, [entry]) for entry in entries}
    assert by_day == {"2024-05-01": [1], None: [0, 2, 3, 4]}
    alone = write([rows([2**63 - 1]), rows([None], 1)], tmp_path)
    assert [entry.partition["day"] for entry in alone] == [None]
    assert all(entry.path.startswith("day=__HIVE_DEFAULT_PARTITION__/") for entry in alone)


def test_times_before_1970_and_dates_work_as_well(tmp_path: Path) -> None:
    [entry] = write([rows([datetime(1969, 12, 31, 23, 59, tzinfo=UTC)])], tmp_path)
    assert entry.partition == {"day": "1969-12-31"}
    dates = pa.RecordBatch.from_pydict({"at": pa.array([date(2024, 2, 29), date(1900, 1, 1)])})
    entries = write_files([dates], str(tmp_path), "day", "at", 1 << 20, "dates")
    assert sorted(entry.partition["day"] or "" for entry in entries) == ["1900-01-01", "2024-02-29"]


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.none() | st.integers(-(10**15), 10**16), max_size=20), max_size=5),
    by=st.sampled_from(["day", "hour", "none"]),
)
def test_every_row_is_written_once_and_where_it_belongs(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int | None]], by: str
) -> None:
    root = tmp_path_factory.mktemp("files")
    written, first = [], 0
    for times in batches:
        written.append(rows(times, first))
        first += len(times)
    entries = write(written, root, by)
    assert sorted(offsets(root, entries)) == list(range(first))
    for entry in entries:
        for at in pq.read_table(root / entry.path, partitioning=None)["_timestamp"].to_pylist():
            expected: dict[str, str | None] = {} if by == "none" else {"day": at and at.date().isoformat()}
            if by == "hour":
                expected["hour"] = at and str(at.hour)
            assert entry.partition == expected


def test_a_file_that_is_large_enough_is_handed_on_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROW_GROUP_ROWS", 100)
    pulled = []

    def batches() -> Iterable[pa.RecordBatch]:
        for number in range(10):
            pulled.append(number)
            yield rows([NOON] * 100, number * 100)

    writing = write_files(batches(), str(tmp_path), "day", "_timestamp", 1, "roll")
    first = next(iter(writing))
    assert (first.rows, pulled) == (100, [0])
    entries = [first, *writing]
    assert len(entries) == 10
    assert offsets(tmp_path, entries) == list(range(1000))


def test_memory_is_bounded_by_writing_the_largest_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BUFFERED_BYTES_MAX", 4_000)
    monkeypatch.setattr(files, "OPEN_FILES_MAX", 3)
    days = [NOON + timedelta(days=day) for day in range(5)]
    batches = [rows(days * 10, first) for first in range(0, 1000, 50)]
    entries = write(batches, tmp_path)
    assert sorted(offsets(tmp_path, entries)) == list(range(1000))
    assert len(entries) > 5


def test_random_bytes_are_stored_plain_and_text_is_compressed(tmp_path: Path) -> None:
    size = 10_000
    batch = pa.RecordBatch.from_pydict(
        {
            "noise": pa.array([os.urandom(100) for _ in range(size)]),
            "text": pa.array([f"the quick brown fox number {at}" for at in range(size)]),
            "word": pa.array([("red", "green", "blue")[at % 3] for at in range(size)]),
            "_offset": pa.array(range(size)),
            "nested": pa.array([[{"key": "a", "value": b"b"}]] * size),
        }
    )
    [entry] = write([batch], tmp_path, "none")
    group = pq.read_metadata(tmp_path / entry.path).row_group(0)
    columns = {group.column(at).path_in_schema: group.column(at) for at in range(group.num_columns)}
    assert columns["noise"].compression == "UNCOMPRESSED"
    assert columns["text"].compression == "ZSTD"
    assert "RLE_DICTIONARY" in columns["word"].encodings
    assert "DELTA_BINARY_PACKED" in columns["_offset"].encodings
    assert columns["_offset"].total_compressed_size < size
    assert pq.read_table(tmp_path / entry.path).to_pylist() == batch.to_pylist()


def test_all_types_of_a_row_come_back(tmp_path: Path) -> None:
    row = {
        "flag": True,
        "small": 3,
        "long": 1 << 40,
        "real": 0.25,
        "exact": Decimal("12.30"),
        "text": "grüße\0",
        "bytes": b"\xff\0",
        "day_": date(2024, 1, 2),
        "at": NOON,
        "local": datetime(2024, 5, 1, 12),
        "list": ["a", None],
        "struct": {"x": 1, "y": None},
        "map": [("k", 1.5)],
    }
    kinds = {
        "flag": pa.bool_(),
        "small": pa.int8(),
        "long": pa.int64(),
        "real": pa.float32(),
        "exact": pa.decimal128(10, 2),
        "text": pa.large_string(),
        "bytes": pa.large_binary(),
        "day_": pa.date32(),
        "at": pa.timestamp("ns", "UTC"),
        "local": pa.timestamp("us"),
        "list": pa.list_(pa.string()),
        "struct": pa.struct([("x", pa.int32()), ("y", pa.string())]),
        "map": pa.map_(pa.string(), pa.float64()),
    }
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=pa.schema(list(kinds.items())))
    [entry] = write([batch], tmp_path, "none")
    read = pq.read_table(tmp_path / entry.path)
    assert read.to_pylist() == batch.to_pylist()
    assert read.schema.field("at").type == INSTANT


def test_times_that_no_calendar_has_take_no_others_along(tmp_path: Path) -> None:
    entries = write([rows([-(2**62), NOON, 2**62])], tmp_path, "day")
    assert {entry.partition["day"]: entry.rows for entry in entries} == {None: 2, NOON.date().isoformat(): 1}


def test_a_task_that_fails_takes_its_unfinished_file_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROW_GROUP_ROWS", 1)

    def breaking() -> Iterable[pa.RecordBatch]:
        yield rows([NOON])
        raise OSError("the broker is gone")

    with pytest.raises(OSError, match="the broker is gone"):
        write(breaking(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_entry_is_handed_on_only_when_file_and_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def spy(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    entry = next(write_files([rows([NOON])], str(tmp_path), "hour", "_timestamp", 1, "sync"))
    folder = tmp_path / "day=2024-05-01"
    for needed in (tmp_path / entry.path, folder / "hour=12", folder, tmp_path):
        assert str(needed) in synced


def test_names_are_our_own_and_never_the_same(tmp_path: Path) -> None:
    named = [
        entry
        for _ in range(2)
        for entry in write_files([rows([NOON])], str(tmp_path), "none", None, 1 << 20, "tøpic/../x y" * 50)
    ]
    assert len({entry.path for entry in named}) == 2
    assert all(OWN_NAME.fullmatch(entry.path) for entry in named)


def test_a_known_partition_is_written_without_looking_at_times(tmp_path: Path) -> None:
    [entry] = write_partition([rows([NOON, None])], str(tmp_path), {"day": "1999-01-01"}, 1 << 20, "merged")
    assert entry.path.startswith("day=1999-01-01/mill-merged-")


def test_entries_travel_as_rows(tmp_path: Path) -> None:
    entries = write([rows([NOON, None])], tmp_path)
    assert [FileEntry.from_row(entry.to_batch().to_pylist()[0]) for entry in entries] == entries


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    assert write([], tmp_path) == []
    assert write([rows([])], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_sample_decides_each_leaf_of_a_nested_column() -> None:
    table = pa.table({"nested": [{"word": "x" * 50, "noise": os.urandom(50)} for _ in range(1000)]})
    chosen = parquet.choose_storage(table)
    assert chosen["compression"]["nested.noise"] == "none"
    assert set(chosen["compression"]) == {"nested.noise", "nested.word"}


def test_the_pages_say_for_how_long_an_orphan_stays() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert files.ORPHAN_SECONDS == 7 * 24 * 3600
    for page in ("pipelines.md", "decisions/0006-once-per-batch.md"):
        assert "removed after a week" in (docs / page).read_text(), page
