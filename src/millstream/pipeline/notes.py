"""Millstream's own file in a sink's checkpoint, beside the files of Spark.

    <checkpoint>/<sink>/millstream.json

`plan` is the plan of the sink's rows at its first batch: Spark's state belongs to it
(`state.py`). `rows_dropped_by_watermark` counts late rows by step, up to `batch`: a batch that runs again after a
crash counts once. The file is replaced as a whole, and deleted with the checkpoint. A checkpoint of an earlier version
has no notes until the next start of the pipeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "millstream.json"


@dataclass(frozen=True)
class Notes:
    plan: Mapping[str, Any] | None = None
    rows_dropped_by_watermark: Mapping[str, int] = field(default_factory=dict)
    batch: int = -1

    def with_late(self, batch: int, late: Mapping[str, int]) -> Notes:
        if batch <= self.batch:
            return self
        counted = dict(self.rows_dropped_by_watermark)
        for step, rows in late.items():
            counted[step] = counted.get(step, 0) + rows
        return replace(self, rows_dropped_by_watermark=counted, batch=batch)


def has_begun(folder: Path) -> bool:
    """Whether Spark has planned a batch of the sink."""
    try:
        return any(name.isdigit() for name in os.listdir(folder / "offsets"))
    except OSError:
        return False


def read_notes(folder: Path) -> Notes:
    """The notes of one sink; empty if there are none, or none that this version understands."""
    try:
        read = json.loads((folder / FILE).read_bytes())
        late = {str(step): int(rows) for step, rows in read["rows_dropped_by_watermark"].items()}
        return Notes(read["plan"], late, int(read["batch"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Notes()


def write_notes(folder: Path, notes: Notes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.new"
    temporary.write_text(json.dumps(asdict(notes), ensure_ascii=False, indent=1) + "\n")
    os.replace(temporary, folder / FILE)
