"""Starting Spark, and the one sentence when it does not start."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.spark import interpreter, session, shipping
from millstream.spark.jvm import SparkDidNotStart


@pytest.fixture
def none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has no Spark yet: the tests' own would be taken."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of something that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"spark://127.0.0.1:{server.getsockname()[1]}"


def test_a_session_is_in_utc_and_on_the_loopback_address_alone(spark: SparkSession) -> None:
    assert spark.sql("SELECT current_timezone()").first()[0] == "UTC"  # type: ignore[index]
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"


def test_tasks_run_with_this_python_and_the_installed_pyspark(spark: SparkSession) -> None:
    def look(_: object) -> tuple[str, str | None, str]:
        import pyspark

        return sys.prefix, pyspark.__file__, sys.version

    import pyspark

    assert spark.sparkContext.parallelize([0]).map(look).collect() == [(sys.prefix, pyspark.__file__, sys.version)]


def test_the_session_of_the_process_is_taken(spark: SparkSession) -> None:
    assert session.start("another").sparkContext is spark.sparkContext


def test_without_pyspark_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(SparkDidNotStart, match=r"pip install 'millstream\[spark\]'"):
        session.start("app")


@pytest.mark.usefixtures("none_running")
class TestMaster:
    def test_one_that_does_not_answer_is_one_clear_error_at_once(self) -> None:
        began = time.monotonic()
        with pytest.raises(SparkDidNotStart, match=r"no Spark master answers at spark://127.0.0.1:1 \(Connection refu"):
            session.start("app", "spark://127.0.0.1:1")
        assert time.monotonic() - began < session.MASTER_SECONDS_MAX

    @pytest.mark.parametrize("address", ["spark://host", "spark://:7077", "spark://host:port"])
    def test_an_address_without_host_or_port_is_refused(self, address: str) -> None:
        with pytest.raises(SparkDidNotStart, match="one looks like spark://HOST:7077"):
            session.start("app", address)

    def test_a_python_that_is_not_here_is_refused(self, listener: str) -> None:
        with pytest.raises(
            SparkDidNotStart, match="Spark's workers use the Python /opt/none, which this machine does not have"
        ):
            session.start("app", listener, {"spark.pyspark.python": "/opt/none"})


@pytest.mark.usefixtures("none_running")
class TestPython:
    def test_of_another_spark_than_the_installed_one_nothing_is_taken_away(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert interpreter.for_local() == interpreter.WITHOUT_ZIP
        monkeypatch.setenv("SPARK_HOME", str(tmp_path))
        assert interpreter.for_local() == sys.executable

    def test_a_pyspark_that_is_not_beside_millstream_is_left_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As with one in the user's own folder, or of the system in a venv that sees it."""
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
        assert interpreter.for_local() == sys.executable

    def test_a_java_that_others_have_started_is_not_told_what_to_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: dict[str, str] = {}
        system = SimpleNamespace(getenv=told.get)
        java = SimpleNamespace(jvm=SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(System=system))))
        monkeypatch.setattr(SparkContext, "_gateway", java)
        assert interpreter.for_local() == sys.executable
        told[interpreter.BEHIND_IT] = sys.executable
        assert interpreter.for_local() == interpreter.WITHOUT_ZIP

    @pytest.mark.parametrize("named", ["", "/bin/sh"])
    def test_what_a_local_session_was_given_is_nothing_to_a_cluster(
        self, monkeypatch: pytest.MonkeyPatch, named: str
    ) -> None:
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            monkeypatch.setenv(name, named)
        monkeypatch.setattr(interpreter, "_before", dict(interpreter._before))
        for _ in range(2):
            interpreter.settle(interpreter.for_local())
            assert os.environ["PYSPARK_PYTHON"] == interpreter.WITHOUT_ZIP
        assert interpreter.for_cluster(None, is_here=True) == (named or sys.executable)

    def test_what_the_local_session_of_a_parent_was_given_is_nothing_either(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYSPARK_PYTHON", interpreter.WITHOUT_ZIP)
        assert interpreter.for_cluster(None, is_here=True) == sys.executable

    def test_what_spark_puts_on_its_path_is_taken_away_and_nothing_else(self) -> None:
        """As in a Spark process that starts a stream: Spark's own entries occur twice."""
        home, other = "/opt/a spark", "/opt/other"
        added = f"{home}/python/lib/pyspark.zip:{home}/python/lib/py4j-0.10.9.9-src.zip:{home}/jars/spark-core.jar"
        kept = f"/mods.zip:{other}/python/lib/pyspark.zip:/b*/c"
        asked = subprocess.run(
            [interpreter.WITHOUT_ZIP, "-c", "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])", "a b", ""],
            env={
                interpreter.BEHIND_IT: sys.executable,
                interpreter.SPARK: home,
                "PYTHONPATH": f"{added}:{added}:{kept}",
            },
            capture_output=True,
            check=True,
            text=True,
        )
        assert asked.stdout == f"{kept} ['a b', '']\n"

    def test_a_source_that_spark_has_found_by_itself_runs_with_pyspark_as_it_was_installed(
        self, spark: SparkSession
    ) -> None:
        with pytest.raises(PySparkException, match="choose one of subscribe"):
            spark.read.format("millstream").load().count()
        paths = []
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # those of tests before may be about to end, or be zombies
                if "pyspark.daemon" in each.cmdline():
                    paths.append(each.environ().get("PYTHONPATH", ""))
        assert paths and not [path for path in paths if "pyspark.zip" in path]

    def test_on_this_machine_it_is_this_one(self) -> None:
        assert interpreter.for_cluster(None, is_here=True) == sys.executable

    def test_elsewhere_it_is_the_same_version_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", os.defpath)
        name = interpreter.for_cluster(None, is_here=False)
        assert name == f"python{sys.version_info.major}.{sys.version_info.minor}"
        assert os.path.samefile(os.path.join(os.environ["PATH"].split(os.pathsep)[0], name), sys.executable)

    def test_one_that_is_named_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYSPARK_PYTHON", "/bin/sh")
        assert interpreter.for_cluster(None, is_here=True) == "/bin/sh"
        assert interpreter.for_cluster("/bin/cat", is_here=True) == "/bin/cat"


def test_workers_that_cannot_run_tasks_are_one_clear_error(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: Iterable[object]) -> None:
        raise ImportError("PyArrow must be installed")

    session.ask_workers(spark)
    monkeypatch.setattr(shipping, "check_worker", fail)
    with pytest.raises(SparkDidNotStart) as caught:
        session.ask_workers(spark)
    assert str(caught.value).endswith(f"cannot run tasks with {interpreter.WITHOUT_ZIP}: PyArrow must be installed")
