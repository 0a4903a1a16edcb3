"""Produce requests that arrived together: the compiled kernel where it imports, else its twin in Python.

`pure_runs.py` is the twin and holds the rules. `MILLSTREAM_PURE=1` in the environment forces it, as for records.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("MILLSTREAM_PURE") == "1":
    from millstream.wire.kafka.pure_runs import Part, Shape, answer, answers, take
else:
    try:
        from millstream.wire.kafka._runs import Part, Shape, answer, answers, take
    except ImportError:
        from millstream.wire.kafka.pure_runs import Part, Shape, answer, answers, take

__all__ = ["Part", "Shape", "answer", "answers", "take"]
