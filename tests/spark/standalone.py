"""A real Spark cluster on this machine, from the pyspark wheel alone: one master, two workers, each a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import venv
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millstream.spark.jvm import find_java

JOBS = Path(__file__).parent / "jobs"
START_SECONDS_MAX = 90
JOB_SECONDS_MAX = 300
STOP_SECONDS_MAX = 20

SHORT_LIVED = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Flags for a JVM that ends before a better compiler would have paid off."""

SMALL = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    # Both workers are waited for, so that work is spread over them.
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}
"""Settings of a job that fits the cluster."""

LENT_PACKAGES = ("numpy", "numpy.libs", "pyarrow")


class StandaloneCluster:
    """Workers have one core and 1 GB each, and a Python without Millstream, also as `pythonX.Y` on their PATH."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._worker_count = workers
        self._daemons: list[_Daemon] = []
        self.python = bare_python(folder / "python")
        self.master = ""

    def start(self) -> StandaloneCluster:
        master = self._run("master.Master", r"Starting Spark master at (spark://\S+)")
        self.master = master.wait_for_start()
        workers = [
            self._run(
                "worker.Worker",
                r"Successfully registered with master (\S+)",
                *("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / f"worker-{number}"), self.master),
            )
            for number in range(self._worker_count)
        ]
        for worker in workers:
            worker.wait_for_start()
        return self

    def _run(self, role: str, started: str, *flags: str) -> _Daemon:
        path = os.pathsep.join((str(Path(self.python).parent), os.defpath))
        daemon = _Daemon(role, started, flags, self._folder, path)
        self._daemons.append(daemon)
        return daemon

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._daemons.clear()

    def run(self, job: str, python: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Runs `jobs/JOB.py` with this cluster as its `master`, and answers with its report."""
        return run_job(job, python or self.python, master=self.master, conf=SMALL, **arguments)

    def logs(self) -> str:
        return "\n".join(line for daemon in self._daemons for line in daemon.lines)

    def __enter__(self) -> StandaloneCluster:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Daemon:
    """A process of the cluster, on the loopback address and a port of its own choice."""

    def __init__(self, role: str, started: str, flags: tuple[str, ...], folder: Path, path: str) -> None:
        self._role = role
        self._started = re.compile(started)
        self._is_started = threading.Event()
        self._found = ""
        self.lines: deque[str] = deque(maxlen=1000)
        home = spark_home()
        self._process = subprocess.Popen(
            [
                *(find_java(), "-Xmx256m", *SHORT_LIVED.split(), "-cp", f"{home}/jars/*"),
                *(f"org.apache.spark.deploy.{role}", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"),
                *flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **{name: os.environ[name] for name in ("HOME", "JAVA_HOME") if name in os.environ},
                "PATH": path,
                "SPARK_HOME": str(home),
                "SPARK_SCALA_VERSION": scala_version(home),  # what spark-class exports; executors do not start without
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_LOCAL_DIRS": str(folder),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            found = self._started.search(line)
            if found:
                self._found = found[1]
                self._is_started.set()
        self._is_started.set()  # or never: it has ended

    def wait_for_start(self) -> str:
        self._is_started.wait(START_SECONDS_MAX)
        assert self._found, f"{self._role} did not start:\n" + "\n".join(self.lines)
        return self._found

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def scala_version(home: Path) -> str:
    (core,) = home.glob("jars/spark-core_*.jar")
    return core.name.removeprefix("spark-core_").partition("-")[0]


def bare_python(folder: Path, lent: tuple[str, ...] = LENT_PACKAGES) -> str:
    """An interpreter that has the `lent` packages of this one's and no other, above all no Millstream."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (theirs,) = folder.glob("lib/python*/site-packages")
    for name in lent:
        found = spark_home().parent / name
        if found.exists():
            (theirs / name).symlink_to(found)
    return str(folder / "bin" / "python")


def run_job(
    name: str, python: str | None, environ: Mapping[str, str] | None = None, **arguments: object
) -> dict[str, Any]:
    """Runs `jobs/NAME.py` in a process of its own, since there is one Spark in each, with `python` for the workers.

    It gets the arguments as JSON and prints its report as JSON; what it wrote to `stderr` is added. `environ`
    goes into its environment.
    """
    here = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    around = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_")} | {"PATH": here}
    around |= ({"PYSPARK_PYTHON": python} if python is not None else {}) | dict(environ or {})
    done = subprocess.run(
        [sys.executable, str(JOBS / f"{name}.py"), json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS_MAX,
        env=around,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}
