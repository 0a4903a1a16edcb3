"""The connector on a Spark standalone cluster whose workers have never heard of Millstream."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ServedBroker
from tests.spark.standalone import StandaloneCluster
from tests.spark.topics import Sent, Topics

pytestmark = pytest.mark.timeout(400)

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
def report(spark_cluster: StandaloneCluster, topics: Topics, topic: str, tmp_path_factory: Any) -> dict[str, Any]:
    """What one run of the job says: it takes as long to start as all tests of its results together."""
    return spark_cluster.run(
        "connector",
        PYTHON_BY_NAME,
        broker=topics.address,
        topic=topic,
        copy=topics.create("clustered-copy", PARTITIONS),
        streamed=topics.create("clustered-stream", PARTITIONS),
        checkpoint=str(tmp_path_factory.mktemp("checkpoint")),
    )


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


def test_spark_starts_and_ends_without_chatter(report: dict[str, Any]) -> None:
    assert "WARN" not in report["stderr"]
    assert "log4j" not in report["stderr"]


def test_a_python_named_by_its_path_gets_the_code_for_planning_too(
    spark_cluster: StandaloneCluster, topics: Topics, topic: str
) -> None:
    report = spark_cluster.run("connector", spark_cluster.python, broker=topics.address, topic=topic)
    assert [value.encode() for value in report["values"]] == VALUES
