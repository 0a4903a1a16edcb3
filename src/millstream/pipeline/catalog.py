"""The existing pipelines and their progress, without Spark.

Progress is read from Spark's checkpoint, whose files are plain text:

    <checkpoint>/<sink>/offsets/N    batch N was planned: a version, a line of settings, a line of JSON with the
                                     end offset of each partition
    <checkpoint>/<sink>/commits/N    batch N is done

The last batch in `commits` counts. A batch that is only in `offsets` is running, or was when the process died, and
runs again. Spark keeps the last hundred of each and writes them under names with a dot first, then renames.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.client.cluster import KafkaCluster
from millstream.pipeline import check
from millstream.pipeline.mistakes import Mistake
from millstream.pipeline.spec import DEAD_LETTERS, LakeSink, PipelineSpec, Sink, TableSink, parse, redacted
from millstream.wire.kafka.requests import TopicPartition


@dataclass(frozen=True)
class Progress:
    """The progress of one sink."""

    batch: int | None = None
    """The last one that is done; None before the first."""
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """Its end offsets."""
    done_at: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Entry:
    """One pipeline's file."""

    path: Path
    spec: PipelineSpec | None
    mistakes: list[Mistake]


def read_progress(checkpoint: Path, sink: str) -> Progress:
    folder = checkpoint / sink
    batch = max(_batches(folder / "commits"), default=None)
    if batch is None:
        return Progress()
    try:
        lines = (folder / "offsets" / str(batch)).read_text().splitlines()
        done_at = (folder / "commits" / str(batch)).stat().st_mtime
        planned = json.loads(lines[2])
        offsets = {(topic, int(part)): int(end) for topic, parts in planned.items() for part, end in parts.items()}
    except (OSError, ValueError, IndexError, AttributeError):  # deleted meanwhile, or of a later Spark
        return Progress(batch)
    return Progress(batch, offsets, done_at)


def _batches(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def find_lag(
    broker: str, offsets: dict[TopicPartition, int], timeout_seconds: float = 3.0
) -> dict[TopicPartition, int]:
    """Records behind the end, per partition, without those of deleted topics. Raises ClusterError."""
    cluster = KafkaCluster(broker, "millstream-pipeline-show", timeout_seconds)
    try:
        there = cluster.partitions({topic for topic, _ in offsets}) if offsets else {}
        ends = cluster.latest([place for place in offsets if place[1] in there.get(place[0], ())])
    finally:
        cluster.close()
    return {place: max(end - offsets[place], 0) for place, end in sorted(ends.items())}


def sink_names(spec: PipelineSpec) -> list[str]:
    """Every query of a pipeline, including the dead letters'."""
    return [sink.name for sink in spec.sinks] + [DEAD_LETTERS] * (spec.dead_letters is not None)


def describe_source(spec: PipelineSpec) -> str:
    source = spec.source
    return f"{source.topic or source.pattern} ({source.format})"


def describe_sink(sink: Sink) -> str:
    if isinstance(sink, LakeSink):
        return f"{sink.format} lake {sink.path}"
    if isinstance(sink, TableSink):
        return f"table {sink.table} in {redacted(sink.url)}"
    return f"topic {sink.topic}"


def find_pipelines(folder: Path) -> Iterator[Entry]:
    """Every pipeline file below, valid or not; hidden folders are skipped."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if name.endswith(".toml") and _is_pipeline(path):
                spec, mistakes = parse(path)
                if spec is not None:
                    mistakes = mistakes + check.check(spec, None)
                yield Entry(path, spec, mistakes)


def _is_pipeline(path: Path) -> bool:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError):
        return False
    source, sink = table.get("source"), table.get("sink")
    reads = isinstance(source, dict) and ("topic" in source or "pattern" in source)
    return reads or (isinstance(sink, list) and isinstance(source, dict))
