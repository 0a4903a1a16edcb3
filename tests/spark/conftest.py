"""One Spark session for the tests here, and one cluster: each takes seconds to start, so what uses it runs together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.spark import session
from tests.spark.standalone import SHORT_LIVED, StandaloneCluster

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("xdist_group") is None:
            needs = getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("spark-cluster" if "spark_cluster" in needs else "spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    warehouse = tmp_path_factory.mktemp("warehouse")
    started = session.start(
        "tests",
        "local[2]",
        {
            "spark.driver.extraJavaOptions": SHORT_LIVED,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.task.maxFailures": "1",
        },
    )
    yield started
    started.stop()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A master and two workers. A job on it runs in a process of its own: `spark_cluster.run(...)`."""
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
