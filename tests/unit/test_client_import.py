"""What importing costs, and what the base install can do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import millstream

ROOT = Path(__file__).parents[2]
BASE = {"uvloop", "crc32c", "cramjam", "kio", "confluent_kafka", "typer", "rich", "h11", "prometheus_client"}
EXTRAS = {
    "pyspark",
    "pandas",
    "pyarrow",
    "deltalake",
    "sqlglot",
    "fastavro",
    "psycopg",
    "asyncpg",
    "aiokafka",
    "thriftpy2",
}


def run(code: str, directory: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_nothing_but_itself() -> None:
    loaded = run("import sys, millstream; print(*sorted(m for m in sys.modules if '.' not in m))").split()
    assert not BASE & set(loaded) and "asyncio" not in loaded


def test_everything_it_offers_is_there() -> None:
    for name in millstream.__all__:
        assert getattr(millstream, name) is not None
    assert set(dir(millstream)) == set(millstream.__all__)


def test_the_embedded_example_of_the_readme_runs_with_the_base_install_alone(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [example] = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "millstream.open" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    blocked = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(EXTRAS))
    assert run(blocked + example, tmp_path) != ""
