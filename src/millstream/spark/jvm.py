"""Spark's Java process, started silently unless it fails.

Spark prints a dozen lines at start that mean nothing to a pipeline's user, some of them from Java itself, so no
logging configuration could stop them all. Its standard error is therefore a pipe: lines during the start are kept,
and shown only if the start fails; later lines are passed on. Those are errors, without the ones that reach the caller
as an exception anyway.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, BinaryIO

from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf

JAVA_MIN = 17
INSTALL_JAVA = "install it (on Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME to where it is"
LINES_KEPT_MAX = 500
LAST_WORDS_SECONDS_MAX = 5.0

SILENT = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.util.Utils",
    "org.apache.spark.sql.execution.datasources",
    "org.apache.spark.sql.execution.streaming",
)
"""Loggers of failures in a task or a query: the exception reports them."""

SILENT_IN_PYTHON = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers of PySpark itself, which repeat every raised error on standard error."""

TALKATIVE = ("org.apache.spark.scheduler.TaskSchedulerImpl",)
"""Warns when a cluster gives no worker to a waiting job, which otherwise looks like a hang."""


class SparkDidNotStart(MillstreamError):
    """Spark cannot start here: the sentence says what is missing."""


class Relay:
    """Keeps the pipe's lines until one equals `token`, then passes the rest on to standard error."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.token = uuid.uuid4().hex
        self._pipe = pipe
        self._kept: deque[str] = deque(maxlen=LINES_KEPT_MAX)
        self._thread = threading.Thread(target=self._run, name="spark-stderr", daemon=True)
        self._thread.start()

    def kept(self) -> list[str]:
        return list(self._kept)

    def wait_for_end(self) -> None:
        self._thread.join(LAST_WORDS_SECONDS_MAX)

    def _run(self) -> None:
        is_open = False
        with self._pipe:
            for raw in self._pipe:
                line = raw.decode(errors="replace")
                if is_open:
                    _pass_on(line)
                elif line.strip() == self.token:
                    is_open = True
                else:
                    self._kept.append(line.rstrip())


def _pass_on(line: str) -> None:
    try:
        sys.stderr.write(line)  # looked up each time: a live view replaces it
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # closed; the JVM must not block on a full pipe


class Jvm:
    """One per process, as in Spark: `launch` creates it, and it lives until the process ends."""

    def __init__(self, gateway: JavaGateway, relay: Relay) -> None:
        self.gateway = gateway
        self._relay = relay

    def be_heard(self) -> None:
        """Passes its standard error on from here."""
        self.gateway.jvm.java.lang.System.err.println(self._relay.token)

    def kept(self) -> list[str]:
        return self._relay.kept()


def launch(conf: SparkConf) -> Jvm:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    find_java()
    ours, theirs = os.pipe()
    relay = Relay(os.fdopen(ours, "rb"))
    try:
        gateway = launch_gateway(conf, {"stderr": theirs})  # type: ignore[no-untyped-call]
    except (PySparkRuntimeError, OSError) as error:
        os.close(theirs)
        relay.wait_for_end()
        check_java_version()
        raise SparkDidNotStart(f"Spark's Java process did not start: {last_words(relay.kept())}") from error
    os.close(theirs)
    return Jvm(gateway, relay)


def find_java() -> str:
    home = os.environ.get("JAVA_HOME")
    if home:
        found = os.path.join(home, "bin", "java")
        if not os.access(found, os.X_OK):
            raise SparkDidNotStart(
                f"Spark runs on Java {JAVA_MIN}, and JAVA_HOME is {home}, where there is no bin/java; {INSTALL_JAVA}"
            )
        return found
    on_path = shutil.which("java")
    if on_path is None:
        raise SparkDidNotStart(f"Spark runs on Java {JAVA_MIN} or newer, and there is no Java here; {INSTALL_JAVA}")
    return on_path


def check_java_version() -> None:
    java = find_java()
    asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    named = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    if named and int(named[1]) < JAVA_MIN:
        raise SparkDidNotStart(f"Spark needs Java {JAVA_MIN} or newer, and {java} is Java {named[1]}; {INSTALL_JAVA}")


def last_words(lines: list[str]) -> str:
    """The line with the cause: Spark's reason, else the innermost exception's, else the last line."""
    for cause in (r"Reason: (.+)", r"[\w.$]+(?:Exception|Error): (?:\[[A-Z_.]+\] )?(.+)"):
        for line in reversed(lines):
            found = re.search(cause, line)
            if found:
                return found[1]
    return lines[-1] if lines else "it does not say why"


def quieten(gateway: JavaGateway) -> None:
    from pyspark.logger import PySparkLogger

    for name in SILENT_IN_PYTHON:
        PySparkLogger.getLogger(name).disabled = True
    log4j = gateway.jvm.org.apache.logging.log4j
    for name in SILENT:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    for name in TALKATIVE:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.WARN)
