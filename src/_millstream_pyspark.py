"""Spark started by a Python of an environment that is not activated: `venv/bin/python job.py`.

Spark runs `python3` from PATH, unless PYSPARK_PYTHON names another, and looks for data sources in that Python. If PATH
leads to the system's, `format("millstream")` is not found. A job with a SparkSession of its own imports nothing of
Millstream, so `_millstream_pyspark.pth` loads this module whenever a Python of the environment starts. It waits for the
import of `pyspark.sql` and changes one thing: while the Java process starts, PATH begins with the folder of this
Python, as it does in an activated environment. Workers of a cluster still get the name `python3` and look it up in
their own PATH.

Every start of Python pays for this module, so it imports what it needs late.
"""

import os
import sys

TYPE_CHECKING = False  # without `typing`, which takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SQL, CONTEXT = "pyspark.sql", "pyspark.core.context"
NAMED = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
"""Variables by which a user chooses Spark's Python. Nothing changes if one is set."""


class OnImport:
    """A finder on `sys.meta_path` that finds nothing. It learns that pyspark is imported."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == SQL:
            sys.meta_path.remove(cls)
            context: Any = sys.modules.get(CONTEXT)  # pyspark imports it first
            if hasattr(context, "launch_gateway"):
                context.launch_gateway = with_this_python(context.launch_gateway)


def with_this_python(launch: "Callable[..., Any]") -> "Callable[..., Any]":
    from functools import wraps

    @wraps(launch)
    def launched(*args: "Any", **kwargs: "Any") -> "Any":
        folder = folder_to_add()
        if folder is None:
            return launch(*args, **kwargs)
        before = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = folder + os.pathsep + before
        try:
            return launch(*args, **kwargs)
        finally:
            os.environ["PATH"] = before

    return launched


def folder_to_add() -> str | None:
    """The folder of this Python, if `python3` leads to another one and would lead here from there."""
    from shutil import which

    if any(os.environ.get(name) for name in NAMED) or not sys.executable:
        return None
    folder = os.path.dirname(sys.executable)
    ours = os.path.join(folder, "python3")
    if which("python3") == ours or not os.path.exists(ours) or not os.path.samefile(ours, sys.executable):
        return None
    return folder


sys.meta_path.insert(0, OnImport)
