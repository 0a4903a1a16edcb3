"""How the work of a batch is shared among the tasks that move records into a lake."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructType

from millstream.pipeline.mover import ROWS_PER_TASK_MAX, Move, MovingReader, RangesPartition
from millstream.spark.options import parse_source


def plan(sizes: list[int]) -> list[list[tuple[int, int, int, bool]]]:
    """For each task its ranges: partition, start, end, and whether it is the partition's last."""
    options = parse_source({"bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}, streaming=True)
    reader = MovingReader(options, StructType(), Move("lake", ".parquet", "day", 1 << 27))
    start = {"t": {str(partition): 0 for partition in range(len(sizes))}}
    end = {"t": {str(partition): size for partition, size in enumerate(sizes)}}
    planned = []
    for task in reader.partitions(start, end):
        assert isinstance(task, RangesPartition)
        planned.append([(p.range.partition, p.range.start, p.range.end, p.is_last) for p in task.parts])
    return planned


def test_small_ranges_share_one_task() -> None:
    assert plan([10, 0, 20, 30]) == [[(0, 0, 10, True), (2, 0, 20, True), (3, 0, 30, True)]]


def test_a_batch_without_records_has_no_task() -> None:
    assert plan([0, 0]) == []


@pytest.mark.parametrize("sizes", [[260_000, 260_000, 240_000, 240_000], [300_000, 700_000], [250_000] * 4])
def test_tasks_have_about_as_much_to_do_as_each_other(sizes: list[int]) -> None:
    loads = [sum(end - start for _, start, end, _ in task) for task in plan(sizes)]
    assert len(loads) == 2
    assert max(loads) <= 1.4 * sum(loads) / 2


def test_one_long_partition_is_read_by_several_tasks_and_every_record_by_one() -> None:
    tasks = plan([4 * ROWS_PER_TASK_MAX])
    assert len(tasks) == 4
    assert sorted(piece for task in tasks for piece in task) == [
        (0, at * ROWS_PER_TASK_MAX, (at + 1) * ROWS_PER_TASK_MAX, at == 3) for at in range(4)
    ]


def test_every_partition_has_one_last_range() -> None:
    pieces = [piece for task in plan([10, 3_333_333, 1_200_000, 700_001]) for piece in task]
    assert sorted(piece[0] for piece in pieces if piece[3]) == [0, 1, 2, 3]


def test_the_last_range_of_a_partition_is_read_last() -> None:
    """Its task tells the group how far the partition was read."""
    assert [task[0][3] for task in plan([3 * ROWS_PER_TASK_MAX + 333_333])] == [False, False, False, True]
