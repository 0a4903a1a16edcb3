"""The connector on a Spark standalone cluster whose workers have never heard of Millstream."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.serving import ServedBroker
from tests.spark.standalone import StandaloneCluster
from tests.spark.topics import Sent, Topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECORDS = 400
PARTITIONS = 4
PYTHON_BY_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def topics(broker: ServedBroker) -> Topics:
    return Topics(broker.address)


@pytest.fixture(scope="module")
def topic(topics: Topics) -> str:
    name = topics.create("clustered", PARTITIONS)
    for partition, codec in enumerate(("gzip", "snappy", "lz4", "zstd")):
        numbers = range(partition, RECORDS, PARTITIONS)
        topics.produce(name, (Sent(b"%03d" % n, b"key", partition) for n in numbers), codec)
    return name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pipelines are, and what they make."""
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def report(
    spark_cluster: StandaloneCluster, topics: Topics, topic: str, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one run of the job says: it takes as long to start as all tests of its results together."""
    return spark_cluster.run(
        "connector",
        PYTHON_BY_NAME,
        broker=topics.address,
        topic=topic,
        copy=topics.create("clustered-copy", PARTITIONS),
        streamed=topics.create("clustered-stream", PARTITIONS),
        checkpoint=str(tmp_path_factory.mktemp("checkpoint")),
        files=[write_pipeline(home / f"{name}.toml", topic) for name in PIPELINES],
    )


def write_pipeline(file: Path, topic: str) -> str:
    file.write_text(PIPELINES[file.stem].replace("TOPIC", topic))
    return str(file)


PIPELINES = {
    "steps": """
name = "steps"
on_error = "stop"
[source]
topic = "TOPIC"
name = "numbers"
format = "text"
[[step]]
name = "tens"
sql = "SELECT substring(value, 1, 2) AS ten, count(*) AS numbers FROM numbers GROUP BY ALL"
[[sink]]
from = "numbers"
lake = "decoded"
[[sink]]
from = "tens"
table = "sqlite:tens.db"
name = "tens"
key = ["ten"]
""",
    "moved": """
name = "moved"
[source]
topic = "TOPIC"
name = "numbers"
format = "bytes"
[[sink]]
from = "numbers"
lake = "moved"
""",
}


VALUES = [b"%03d" % number for number in range(RECORDS)]


def test_the_code_travels_to_both_workers(report: dict[str, Any], spark_cluster: StandaloneCluster) -> None:
    for task in report["tasks"]:
        assert task["prefix"] == str(Path(spark_cluster.python).parents[1])
        assert Path(task["code"]).is_relative_to(task["folder"])
        assert task["kernel"] == "compiled"
    assert len({task["folder"] for task in report["tasks"]}) == 2


def test_a_batch_is_read_on_the_cluster(report: dict[str, Any]) -> None:
    assert [value.encode() for value in report["values"]] == VALUES


def test_a_batch_is_written_on_the_cluster(report: dict[str, Any], topics: Topics) -> None:
    assert sorted(row.value for row in topics.rows("clustered-copy") if row.value) == VALUES


def test_a_stream_is_read_and_written_on_the_cluster(report: dict[str, Any], topics: Topics) -> None:
    assert sorted(row.value for row in topics.rows("clustered-stream") if row.value) == VALUES


def test_pipelines_run_on_the_cluster(report: dict[str, Any], home: Path) -> None:
    steps, moved = report["pipelines"].values()
    assert steps == {"lake-numbers": RECORDS, "table-tens": RECORDS // 10}
    assert moved == {"lake-numbers": RECORDS}
    decoded = DeltaTable(home / "decoded").to_pyarrow_table(columns=["value"]).column("value").to_pylist()
    assert sorted(value.encode() for value in decoded) == VALUES
    copied = DeltaTable(home / "moved").to_pyarrow_table(columns=["value"]).column("value").to_pylist()
    assert sorted(copied) == VALUES
    with sqlite3.connect(home / "tens.db") as database:
        assert database.execute("SELECT count(*), sum(numbers) FROM tens").fetchone() == (RECORDS // 10, RECORDS)


def test_spark_starts_and_ends_without_chatter(report: dict[str, Any]) -> None:
    assert "WARN" not in report["stderr"]
    assert "log4j" not in report["stderr"]


def test_a_python_named_by_its_path_gets_the_code_for_planning_too(
    spark_cluster: StandaloneCluster, topics: Topics, topic: str
) -> None:
    report = spark_cluster.run("connector", spark_cluster.python, broker=topics.address, topic=topic)
    assert [value.encode() for value in report["values"]] == VALUES
