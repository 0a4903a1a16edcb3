"""Produce requests that arrived together: the compiled kernel if it imports, else its twin in Python.

`pure_runs.py` is the twin and states the rules. `MILLSTREAM_PURE=1` in the environment selects it, as for records.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

from millstream.wire.kafka import pure_runs


def _pick() -> ModuleType:
    if os.environ.get("MILLSTREAM_PURE") != "1":
        try:
            from millstream.wire.kafka import _runs
        except ImportError:
            return pure_runs
        return _runs
    return pure_runs


if TYPE_CHECKING:
    from millstream.wire.kafka.pure_runs import Part, Request, Shape, answer, answers, find, take
else:
    _kernel = _pick()
    Part, Request, Shape = _kernel.Part, pure_runs.Request, _kernel.Shape
    answer, answers, find, take = _kernel.answer, _kernel.answers, _kernel.find, _kernel.take

__all__ = ["Part", "Request", "Shape", "answer", "answers", "find", "take"]
