"""What `make demo` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_demo_ends_with_every_record_accounted_for(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "millstream.demo"], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
