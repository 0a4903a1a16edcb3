"""Shared by commands on Spark: a check for Spark, local settings, and a spinner during the start."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.admin.failure import Failure

PARTS = ("pyspark", "pyarrow", "deltalake", "sqlglot", "fastavro")


def need_spark(command: str) -> None:
    """The base install lacks Spark; checked before any import that would fail."""
    if any(importlib.util.find_spec(part) is None for part in PARTS):
        raise Failure(f"{command} needs pip install 'millstream[spark]'")


def local_settings(master: str | None) -> dict[str, str]:
    """A local Spark shuffles between its own threads: Spark's 200 partitions would be 200 tasks for nothing."""
    local = re.fullmatch(r"local(?:\[(\*|\d+)(?:,\d+)?\])?", master or "local[*]")
    if local is None:
        return {}
    threads = os.cpu_count() or 1 if local[1] == "*" else int(local[1] or 1)
    return {"spark.sql.shuffle.partitions": str(threads)}


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield
