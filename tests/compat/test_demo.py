"""What `make demo` runs, with a tenth of its records and, as a slow test, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.standalone import SHORT_LIVED

AS_IT_IS = ["-m", "millstream.demo"]
SMALLER = """
import runpy
from millstream.demo import clicks, orders
orders.RECORDS_PER_COMPRESSION //= 10
orders.RECORDS_UNDER_FIRE //= 10
orders.LINES //= 10
clicks.CLICKS //= 10
runpy.run_module("millstream.demo", run_name="__main__")
"""


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["-c", SMALLER], id="a tenth"), pytest.param(AS_IT_IS, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.timeout(240)
def test_the_demo_ends_with_every_record_accounted_for(arguments: list[str], tmp_path: Path) -> None:
    environ = os.environ | {"JDK_JAVA_OPTIONS": SHORT_LIVED}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Nothing acknowledged was lost." in ran.stdout
