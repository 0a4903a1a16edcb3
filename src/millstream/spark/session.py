"""Starting Spark: a local one by default, quiet, in UTC.

Spark ships Millstream's code to the workers of a cluster (`shipping.py`), to a Python that `interpreter.py`
chooses. A first job checks that workers can run it: a task with a failed import would report it in forty lines of
stack trace.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from millstream.spark import interpreter, jvm, shipping
from millstream.spark.jvm import SparkDidNotStart

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
LOOPBACK = "127.0.0.1"
MASTER_SECONDS_MAX = 5.0
"""For a master to accept a connection. Spark itself would try for a minute and then give no reason."""

LOG_LEVEL = "spark.log.level"
PYTHON = "spark.pyspark.python"
ARCHIVES = "spark.archives"
WORKERS_PATH = "spark.executorEnv.PYTHONPATH"

ARROW_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Java's Arrow checks bounds and nulls of every value; Spark has checked before. Saves a tenth of a read."""

DEFAULTS = {
    LOG_LEVEL: "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.driver.defaultJavaOptions": ARROW_UNCHECKED,
    "spark.executor.defaultJavaOptions": ARROW_UNCHECKED,
}


def start(app: str, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session; the existing one of this process if there is one. `conf` overrides the defaults here."""
    try:
        from pyspark import SparkContext
    except ModuleNotFoundError as error:
        raise SparkDidNotStart("Spark is not installed here; it needs pip install 'millstream[spark]'") from error

    given = dict(conf or {})
    if SparkContext._active_spark_context is not None:
        return _session(given)
    settings = _settle(app, master or LOCAL, given)
    session = _start(settings, quiet=LOG_LEVEL not in given)
    if shipping.FOLDER in settings.get(WORKERS_PATH, ""):
        try:
            _lead_to_code(session)
            ask_workers(session)
        except BaseException:
            session.stop()
            raise
    return session


def _session(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _settle(app: str, master: str, given: dict[str, str]) -> dict[str, str]:
    """Every setting of the session; sets the environment variables for the choice of Python."""
    settings: dict[str, str] = {**DEFAULTS, "spark.app.name": app, "spark.master": master}
    is_local = master == "local" or master.startswith("local[")
    if is_local:
        settings |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
        is_here = True
    elif master.startswith("spark://"):
        settings["spark.driver.host"], is_here = _reach(master)
    else:
        is_here = False
    settings |= given
    python = interpreter.for_local() if is_local else interpreter.for_cluster(settings.get(PYTHON), is_here)
    interpreter.settle(python)
    if not is_local:
        _ship(settings)
    return settings


def _reach(master: str) -> tuple[str, bool]:
    """Our address as the master sees it, at which workers reach the driver; and whether the master is local."""
    cause = ""
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise SparkDidNotStart(f"{master} is not the address of a Spark master; one looks like spark://HOST:7077")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), MASTER_SECONDS_MAX) as link:
                ours, theirs = link.getsockname()[0], link.getpeername()[0]
                return ours, ours == theirs
        except (OSError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or str(error)
    raise SparkDidNotStart(f"no Spark master answers at {master} ({cause}); start it, or name another with --master")


def _ship(settings: dict[str, str]) -> None:
    archive = f"{shipping.pack()}#{shipping.FOLDER}"
    settings[ARCHIVES] = ",".join(filter(None, (archive, settings.get(ARCHIVES))))
    settings[WORKERS_PATH] = os.pathsep.join(filter(None, (shipping.FOLDER, settings.get(WORKERS_PATH))))


def _start(settings: Mapping[str, str], quiet: bool) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext, __version__

    conf: SparkConf = SparkConf().setAll(list(settings.items()))
    java = jvm.launch(conf) if SparkContext._gateway is None else None
    try:
        SparkContext(conf=conf, gateway=java.gateway if java else None)
        session = _session(settings)
    except Py4JError as error:
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        cause = jvm.last_words(java.kept() if java else str(error).splitlines())
        raise SparkDidNotStart(f"Spark {__version__} did not start on {settings['spark.master']}: {cause}") from error
    if java is not None:
        if quiet:
            jvm.quieten(java.gateway)
        java.be_heard()
    return session


def _lead_to_code(session: SparkSession) -> None:
    """Spark runs Python code on the driver with the workers' Python, which may need the shipped code there."""
    from pyspark import SparkFiles
    from pyspark.errors import AnalysisException

    from millstream.spark.source import MillstreamSource

    session.sparkContext.environment["PYTHONPATH"] += os.pathsep + SparkFiles.get(shipping.FOLDER)
    try:
        session.dataSource.register(MillstreamSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":  # Spark found it by itself
            raise


def ask_workers(session: SparkSession) -> None:
    """Raises one sentence unless tasks can run. Waits while a cluster has no free worker, and Spark warns."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = session.sparkContext
    tasks = context.defaultParallelism
    try:
        context.parallelize(range(tasks), tasks).foreachPartition(shipping.check_worker)
    except (Py4JError, PySparkException) as error:
        cause = jvm.last_words(str(error).splitlines())
        raise SparkDidNotStart(
            f"the workers of {context.master} cannot run tasks with {context.pythonExec}: {cause}"
        ) from error
