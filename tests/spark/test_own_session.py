"""Jobs that start Spark themselves, with the newest PySpark and with the oldest that is declared."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyspark
import pytest

import _millstream_pyspark
from tests.serving import ServedBroker
from tests.spark.standalone import bare_python, run_job
from tests.spark.topics import Sent, Topics

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "pyspark-oldest"
"""What `make test` unpacks there: PySpark of the lowest version that pyproject.toml declares."""

PIPELINE = """
name = "sums"
on_error = "stop"
[source]
topic = "TOPIC"
name = "numbers"
format = "text"
[[step]]
name = "sums"
sql = "SELECT length(value) AS size, count(*) AS records FROM numbers GROUP BY length(value)"
[[sink]]
from = "numbers"
lake = "lake"
[[sink]]
from = "sums"
table = "sqlite:sums.db"
name = "sums"
key = ["size"]
"""


@pytest.fixture
def topics(broker: ServedBroker) -> Topics:
    return Topics(broker.address)


@pytest.fixture
def topic(topics: Topics, unique: Callable[[str], str]) -> str:
    name = topics.create(unique("own"), 2)
    topics.produce(name, (Sent(b"%d" % n, partition=n % 2) for n in range(12)))
    return name


def run_unactivated(folder: Path, environ: Mapping[str, str] | None = None, **arguments: object) -> dict[str, Any]:
    """As `venv/bin/python job.py` where PATH leads to a Python that has no Millstream, and no variable names one."""
    other = os.path.dirname(bare_python(folder / "other"))
    path = other + os.pathsep + os.environ.get("PATH", os.defpath)
    return run_job("own_session", None, {"PATH": path, **(environ or {})}, **arguments)


@pytest.mark.timeout(300)
def test_a_job_finds_the_source_though_its_environment_is_not_activated(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    report = run_unactivated(tmp_path, broker=topics.address, topic=topic)
    assert (report["version"], report["found"]) == (pyspark.__version__, 12)


@pytest.mark.timeout(300)
def test_the_oldest_pyspark_that_is_declared_reads_writes_streams_and_runs_pipelines(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    if not OLDEST.is_dir():
        pytest.skip("`make spark-oldest` downloads it, and `make test` does that first")
    file = tmp_path / "sums.toml"
    file.write_text(PIPELINE.replace("TOPIC", topic))
    copy, streamed = (topics.create(f"{topic}-{kind}") for kind in ("copy", "streamed"))
    report = run_unactivated(
        tmp_path,
        {"PYTHONPATH": str(OLDEST), "SPARK_HOME": str(OLDEST / "deps")},
        broker=topics.address,
        topic=topic,
        copy=copy,
        streamed=streamed,
        checkpoint=str(tmp_path / "checkpoint"),
        files=[str(file)],
    )
    assert (report["version"], report["found"]) == (oldest(), 12)
    for written in (copy, streamed):
        assert sorted(int(row.value or b"") for row in topics.rows(written)) == list(range(12))
    assert report["pipelines"] == {str(file): {"lake-numbers": 12, "table-sums": 2}}


def oldest() -> str:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["spark"]
    (lowest,) = [found[1] for each in extra if (found := re.match(r"pyspark>=([\d.]+)", each))]
    return f"{lowest}.0"


class TestPath:
    def test_this_python_comes_first_only_while_java_starts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in _millstream_pyspark.NAMED:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        seen = _millstream_pyspark.with_this_python(lambda: os.environ["PATH"])()
        assert seen.split(os.pathsep) == [os.path.dirname(sys.executable), str(tmp_path)]
        assert os.environ["PATH"] == str(tmp_path)

    @pytest.mark.parametrize("name", _millstream_pyspark.NAMED)
    def test_a_python_that_the_user_names_is_left_alone(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        for each in _millstream_pyspark.NAMED:
            monkeypatch.delenv(each, raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setenv(name, "/usr/bin/python3")
        assert _millstream_pyspark.folder_to_add() is None

    def test_an_activated_environment_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in _millstream_pyspark.NAMED:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
        assert _millstream_pyspark.folder_to_add() is None
