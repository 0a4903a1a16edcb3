"""Changes of a pipeline that the state of a sink does not survive, told before Spark starts; and a sink's reset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.pipeline import check, reset, state
from millstream.pipeline.lake import create_lake, is_lake
from millstream.pipeline.notes import FILE, Notes, read_notes, write_notes
from millstream.pipeline.run import _late
from millstream.pipeline.spec import LakeSink, PipelineSpec, parse

HEAD = """
name = "shop"
[source]
topic = "orders"
schema = "{schema}"
watermark = {{ column = "{mark}", delay = "{delay}" }}
"""
SCHEMA = "item STRING, price LONG, cost LONG, at TIMESTAMP, sent TIMESTAMP"
SUMS = "SELECT window.start AS s, item, sum(price) AS total FROM orders GROUP BY window(at, '1 hour'), item"
COUNTS = "SELECT {}, count(*) AS n FROM orders GROUP BY {}"
PAIRS = "SELECT a.item FROM orders a, orders b WHERE a.item = b.item"
JOIN = "SELECT a.item FROM orders a JOIN orders b ON a.item = b.item AND a.at = b.at"

Written = Callable[..., PipelineSpec]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A pipeline of steps one, two, ... that a table takes the last of."""

    def write(*steps: str, schema: str = SCHEMA, mark: str = "at", delay: str = "1 hour") -> PipelineSpec:
        names = ["one", "two", "three"][: len(steps)]
        text = HEAD.format(schema=schema, mark=mark, delay=delay)
        text += "".join(
            f'[[step]]\nname = "{name}"\nsql = """{sql}"""\n' for name, sql in zip(names, steps, strict=True)
        )
        text += f'[[sink]]\nfrom = "{names[-1] if names else "orders"}"\ntopic = "out"\n'
        spec, mistakes = parse(tmp_path / "shop.toml", text)
        assert spec is not None and mistakes == []
        return spec

    return write


def begin(spec: PipelineSpec, *, batches: int = 1) -> None:
    """As a run leaves a checkpoint: what Spark has planned, and our notes."""
    [sink] = spec.sinks
    folder = spec.checkpoint / sink.name
    write_notes(folder, Notes(state.plan_of(spec, sink.source)))
    (folder / "offsets").mkdir(exist_ok=True)
    for number in range(batches):
        (folder / "offsets" / str(number)).touch()


def told(spec: PipelineSpec) -> list[str]:
    return [f"{each.line}: {each.text}" for each in check.check(spec)]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (SUMS, SUMS.replace("sum(price)", "sum(cost)"), "aggregates changed from SUM(price) to SUM(cost)"),
        (SUMS, SUMS.replace("sum(price)", "avg(price)"), "aggregates changed from SUM(price) to AVG(price)"),
        (SUMS, SUMS.replace("sum(price)", "count(*)"), "aggregates changed from SUM(price) to COUNT(*)"),
        (SUMS, SUMS.replace("1 hour", "5 minutes"), "GROUP BY changed from WINDOW(at, '1 hour'), item to"),
        (SUMS, SUMS.replace("'), item", "'), cost").replace("item,", "cost,"), "GROUP BY changed from WINDOW(at, '1"),
        (COUNTS.format("item AS i", 1), COUNTS.format("at AS i", 1), "GROUP BY changed from item to at"),
        (COUNTS.format("lower(item) AS i", "i"), COUNTS.format("upper(item) AS i", "i"), "from LOWER(item) to UPPER"),
        ("SELECT DISTINCT item FROM orders", "SELECT DISTINCT at FROM orders", "DISTINCT changed from item to at"),
        (JOIN, JOIN.replace("a.at = b.at", "a.price = b.price"), "JOIN changed from"),
        (PAIRS, PAIRS.replace("item", "price"), "JOIN changed from"),
        ("SELECT item FROM orders", COUNTS.format("item", "item"), "it keeps state, which the earlier batches did not"),
        (COUNTS.format("item", "item"), "SELECT item FROM orders", "the state of the step one is no longer used"),
    ],
)  # fmt: skip
def test_a_change_that_state_does_not_survive_is_told_with_its_line(
    written: Written, before: str, after: str, wanted: str
) -> None:
    begin(written(before))
    [mistake] = told(written(after))
    assert wanted in mistake
    assert mistake.split(": ")[0] in ("9", "11")  # the step's SQL; the sink's `from`, where no step is left
    assert (
        "since the sink topic-out began; undo that, or start the sink again with `millstream pipeline reset " in mistake
    )
    assert mistake.endswith("shop.toml topic-out`")
    assert told(written(before)) == []


@pytest.mark.parametrize(
    "after",
    [
        SUMS.replace("AS total", "AS sum"),
        SUMS.replace("FROM orders", "FROM orders WHERE price > 0"),
        SUMS.replace("SELECT ", "SELECT window.end AS e, "),
        SUMS.lower().replace("group by", "\nGROUP  BY"),
        SUMS + " HAVING sum(price) > 10",
    ],
)  # fmt: skip
def test_names_filters_and_projections_may_change(written: Written, after: str) -> None:
    begin(written(SUMS))
    assert told(written(after)) == []


def test_types_and_the_watermarks_column_belong_to_the_state_and_its_delay_does_not(written: Written) -> None:
    begin(written(SUMS))
    [mistake] = told(written(SUMS, schema=SCHEMA.replace("price LONG", "price DOUBLE")))
    assert "column price changed from BIGINT to DOUBLE" in mistake
    assert told(written(SUMS, schema=SCHEMA + ", colour STRING")) == []
    assert told(written(SUMS, delay="2 days")) == []
    moved = written(SUMS.replace("window(at", "window(sent"), mark="sent")
    assert ["the watermark's column changed from at to sent" in text for text in told(moved)] == [False, True]


def test_a_step_above_or_below_the_state_may_change(written: Written) -> None:
    top = "SELECT item, total FROM two"
    begin(written("SELECT * FROM orders", SUMS.replace("orders", "one"), top))
    changed = written("SELECT * FROM orders WHERE cost > 1", SUMS.replace("orders", "one"), top + " WHERE total > 0")
    assert told(changed) == []


def test_nothing_is_told_of_a_sink_that_has_not_begun_or_has_no_notes(written: Written) -> None:
    changed = written(SUMS.replace("price", "cost"))
    begin(written(SUMS), batches=0)
    assert told(changed) == []
    begin(written(SUMS))
    (changed.checkpoint / "topic-out" / FILE).unlink()
    assert told(changed) == []


def test_late_rows_of_a_batch_that_is_done_again_count_once(tmp_path: Path) -> None:
    notes = Notes().with_late(0, {"one": 2}).with_late(1, {"one": 1, "two": 4}).with_late(1, {"one": 1, "two": 4})
    write_notes(tmp_path, notes)
    assert read_notes(tmp_path) == notes and notes.rows_dropped_by_watermark == {"one": 3, "two": 4}
    (tmp_path / FILE).write_text('{"plan": 7}')
    assert read_notes(tmp_path) == Notes()


def test_late_rows_are_counted_by_step_though_spark_lists_operators_backwards() -> None:
    assert _late([], []) == {}
    assert _late([5], ["one"]) == {"one": 5}
    assert _late([1, 2], ["one", "two"]) == {"one": 2, "two": 1}
    assert _late([1, 2, 4], ["one", "two"]) == {"one": 0, "two": 7}


def test_a_reset_deletes_a_lake_and_never_what_else_is_in_its_folder(written: Written, tmp_path: Path) -> None:
    import pyarrow as pa

    spec, sink = written(), LakeSink("lake-orders", "orders", str(tmp_path / "lake"), "delta", "none")
    create_lake(sink.path, "delta", pa.schema([("x", pa.int64())]), "none", "shop/lake-orders/1")
    assert reset.delete_output(spec, sink) == f"the lake {sink.path}"
    assert not is_lake(sink.path)
    assert "there is none" in reset.delete_output(spec, sink)
    create_lake(str(tmp_path), "delta", pa.schema([("x", pa.int64())]), "none", "shop/lake-orders/1")
    with pytest.raises(reset.ResetRefused, match=r"shop\.toml is in its folder"):
        reset.delete_output(spec, replace(sink, path=str(tmp_path)))
    assert is_lake(str(tmp_path))


def test_a_reset_deletes_the_checkpoint_of_one_sink(written: Written) -> None:
    spec = written(SUMS)
    begin(spec)
    (spec.checkpoint / "another").mkdir()
    assert reset.delete_checkpoint(spec, "topic-out")
    assert not reset.delete_checkpoint(spec, "topic-out")
    assert [each.name for each in spec.checkpoint.iterdir()] == ["another"]
    assert told(written(SUMS.replace("price", "cost"))) == []
