"""Resets a sink: deletes its output, then its checkpoint.

The order matters after an interruption. The next run refuses a checkpoint without its lake or table, with a
reason, and the reset can be repeated. A lake without its checkpoint would take every row a second time.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from millstream.core.errors import MillstreamError
from millstream.pipeline.lake import is_lake
from millstream.pipeline.spec import LakeSink, PipelineSpec, TableSink
from millstream.pipeline.table import empty_table


class ResetRefused(MillstreamError):
    """The reset would delete more than the sink's own data."""


def delete_output(spec: PipelineSpec, sink: LakeSink | TableSink) -> str:
    """Deletes a lake, or every row of a table; returns a description."""
    if isinstance(sink, TableSink):
        rows = empty_table(sink.url, sink.table, f"{spec.name}/{sink.name}/")
        return f"{rows:,} row{'s' * (rows != 1)} of the table {sink.table}"
    lake = Path(sink.path).resolve()
    kept = [each for each in (spec.path, spec.checkpoint) if each.resolve().is_relative_to(lake)]
    if kept:
        raise ResetRefused(
            f"the lake {sink.path} is not deleted, because {kept[0]} is in its folder; delete it by hand"
        )
    if not is_lake(sink.path):
        return f"no lake, because there is none at {sink.path}"
    shutil.rmtree(lake)
    return f"the lake {sink.path}"


def delete_checkpoint(spec: PipelineSpec, sink: str) -> bool:
    """Whether there was one. It is renamed first: half a checkpoint must not look like a whole one."""
    folder, doomed = spec.checkpoint / sink, spec.checkpoint / f".{sink}.deleted"
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.rename(folder, doomed)
    except FileNotFoundError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True
