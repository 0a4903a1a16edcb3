"""What a running pipeline shows: on a terminal, as JSON lines, to Prometheus; and that it runs once at a time."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from millstream.pipeline import ddl, guess
from millstream.pipeline.gauges import CannotServeMetrics, Gauges
from millstream.pipeline.live import JsonLines, LiveView, SinkTally, Tally
from millstream.pipeline.lock import CheckpointLock, CheckpointUnusable, PipelineRunning
from millstream.pipeline.run import BatchReport

REPORTS = [
    BatchReport("lake-clicks", 0, 1000, 2.0, {"clicks-0": 40, "clicks-1": 2}),
    BatchReport("lake-clicks", 1, 500, 0.5, {"clicks-0": 7, "clicks-1": 0}, {"per_minute": 4}),
    BatchReport("dead-letters", 0, 3, 0.25, {"clicks-0": 0, "clicks-1": 0}),
]


def tally() -> Tally:
    return Tally("clicks", {name: SinkTally() for name in ("lake-clicks", "topic-alerts", "dead-letters")})


def test_each_batch_is_a_line_of_json_and_the_last_line_has_the_totals() -> None:
    out = io.StringIO()
    with JsonLines(tally(), out) as view:
        for report in REPORTS:
            view.take(report)
        view.sum_up()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] == {
        "pipeline": "clicks",
        "sink": "lake-clicks",
        "batch": 0,
        "rows": 1000,
        "rows_per_second": 500.0,
        "seconds": 2.0,
        "lag": {"clicks-0": 40, "clicks-1": 2},
        "rows_dropped_by_watermark": {},
    }
    assert lines[1]["rows_dropped_by_watermark"] == {"per_minute": 4}
    assert lines[3]["total"] == {
        "lake-clicks": {"batches": 2, "rows": 1500, "rows_dropped_by_watermark": 4},
        "topic-alerts": {"batches": 0, "rows": 0, "rows_dropped_by_watermark": 0},
        "dead-letters": {"batches": 1, "rows": 3, "rows_dropped_by_watermark": 0},
    }


def drawn(view: LiveView) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(view.render())
    return console.export_text()


def test_the_live_view_has_a_line_per_sink_with_rate_lag_and_who_is_behind() -> None:
    view = LiveView(tally(), Console(file=io.StringIO()))
    assert "starting" in drawn(view) and "topic-alerts" in drawn(view)
    with view:
        view.say("running")
        for report in REPORTS:
            view.take(report)
        text = drawn(view)
    lake = next(line for line in text.splitlines() if line.startswith("lake-clicks"))
    assert lake.split() == ["lake-clicks", "1", "1,500", "1,000", "0.5", "s", "4", "7", "clicks-0", "7"]
    assert "running" in text and "3 dead letters" in text


def test_of_many_partitions_the_live_view_names_those_furthest_behind() -> None:
    view = LiveView(tally(), Console(file=io.StringIO()))
    view.take(BatchReport("lake-clicks", 0, 1, 1.0, {f"clicks-{number}": number for number in range(20)}))
    text = " ".join(drawn(view).split())
    assert "clicks-19 19, clicks-18 18" in text and "13 more" in text and "clicks-3 " not in text


def test_a_view_that_ends_with_an_error_says_so() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError), LiveView(tally(), Console(file=out, force_terminal=True, width=100)):
        raise ValueError
    assert "failed" in out.getvalue()


def test_prometheus_reads_rows_lag_and_dead_letters() -> None:
    gauges = Gauges("clicks", ["lake-clicks", "dead-letters"])
    address = gauges.serve("127.0.0.1:0")
    try:
        for report in REPORTS:
            gauges.take(report)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        gauges.close()
    for line in (
        'millstream_pipeline_rows_total{pipeline="clicks",sink="lake-clicks"} 1500.0',
        'millstream_pipeline_batches_total{pipeline="clicks",sink="lake-clicks"} 2.0',
        'millstream_pipeline_batch_seconds_sum{pipeline="clicks",sink="lake-clicks"} 2.5',
        'millstream_pipeline_lag{partition="0",pipeline="clicks",sink="lake-clicks",topic="clicks"} 7.0',
        'millstream_pipeline_dead_letters_total{pipeline="clicks"} 3.0',
    ):
        assert line in text
    assert "millstream_pipeline_last_batch_timestamp_seconds{" in text


def test_a_taken_port_for_metrics_is_one_sentence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CannotServeMetrics, match="choose another port"),
    ):
        Gauges("clicks", []).serve(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_checkpoint_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    with (
        CheckpointLock("clicks", checkpoint),
        pytest.raises(PipelineRunning, match=f"process {os.getpid()}"),
        CheckpointLock("clicks", checkpoint),
    ):
        pass
    with CheckpointLock("clicks", checkpoint):
        pass


def test_a_killed_process_leaves_its_checkpoint_free(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from millstream.pipeline.lock import CheckpointLock\n"
        f"with CheckpointLock('clicks', Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(PipelineRunning, match=f"process {holder.pid}"), CheckpointLock("clicks", tmp_path):
            pass
        holder.kill()
    with CheckpointLock("clicks", tmp_path):
        pass


def test_a_checkpoint_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnusable, match="name another folder"), CheckpointLock("clicks", tmp_path / "file"):
        pass


def test_columns_are_guessed_from_json_values() -> None:
    values = [
        {"user": "a", "ms": 1, "tags": ["x"], "at": {"lat": 1.5}, "big": 2**70, "never": None},
        {"user": "b", "ms": 2.5, "tags": [], "at": {"lon": 2}, "mixed": 1, "two words": True},
        {"mixed": "x", "User": "the same to SQL", "of": [{"n": 1}, {"m": 2}]},
    ]
    assert guess.columns(json.dumps(value).encode() for value in values) == (
        "user STRING, ms DOUBLE, tags ARRAY<STRING>, at STRUCT<lat: DOUBLE, lon: BIGINT>, big DECIMAL(38,0), "
        "never STRING, mixed STRING, `two words` BOOLEAN, of ARRAY<STRUCT<n: BIGINT, m: BIGINT>>"
    )


def test_a_few_bad_values_do_not_make_a_topic_text_but_many_do() -> None:
    assert guess.columns([b'{"a": 1}'] * 95 + [b"bad"] * 5) == "a BIGINT"
    assert guess.columns([b'{"a": 1}'] * 80 + [b"bad"] * 20) is None
    assert guess.columns([b"[1]", b"2", b'"x"']) is None
    assert guess.columns([]) is None


def test_columns_that_are_guessed_can_be_read_whatever_their_names() -> None:
    guessed = guess.columns(['{"größe": 1, "a b": {"straße`n": 2}}'.encode()])
    assert guessed is not None
    assert ddl.columns(guessed) == [("größe", "BIGINT"), ("a b", "STRUCT<`straße``n`: BIGINT>")]
