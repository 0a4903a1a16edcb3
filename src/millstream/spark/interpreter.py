"""The choice of the Python that runs Spark's tasks.

A local Spark uses the Python that runs this. So does a cluster whose master is on this machine. The workers of any
other cluster run `pythonX.Y` of this one's version; `PYSPARK_PYTHON` or `spark.pyspark.python` names another.
Spark plans reads with the same name or path on this machine, so it must exist here as well.

Spark's processes import pyspark from a zip file, for which Python caches no compiled modules: each process, and a
stream starts several, compiles for a second. If pyspark is installed as a package, which is the same code,
`python.sh` removes the zip from their path.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig

from millstream.spark.jvm import SparkDidNotStart

WITHOUT_ZIP = os.path.join(os.path.dirname(__file__), "python.sh")
BEHIND_IT, SPARK = "PYSPARK_MILLSTREAM_PYTHON", "PYSPARK_MILLSTREAM_SPARK"
"""Variables for `python.sh`: the Python to run, and the Spark whose archives it does not need. Archives of another
Spark, which the same process may start, stay.
"""
_WHERE_NAMED = "PYSPARK_PYTHON"
_before: dict[str, str | None] = {WITHOUT_ZIP: None}
"""The values that `settle` has set, each with the user's value before it."""


def settle(python: str) -> None:
    """Names the Python in the variables that Spark reads."""
    _before[python] = _named()
    # For tasks of a source that Spark finds by itself, Spark uses the driver's Python.
    os.environ[_WHERE_NAMED] = os.environ["PYSPARK_DRIVER_PYTHON"] = python


def _named() -> str | None:
    """The user's choice: not the value of an earlier session here, or of the parent process."""
    named = os.environ.get(_WHERE_NAMED)
    return _before.get(named, named) if named else None


def for_local() -> str:
    if not (_is_package() and os.access(WITHOUT_ZIP, os.X_OK) and _is_told_to_java()):
        return sys.executable
    os.environ[BEHIND_IT] = sys.executable
    os.environ[SPARK] = _spark_home()
    return WITHOUT_ZIP


def _is_told_to_java() -> bool:
    """A running Java passes the environment of its own start, perhaps by another program, to its processes."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    return gateway is None or gateway.jvm.java.lang.System.getenv(BEHIND_IT) == sys.executable


def _is_package() -> bool:
    """Whether a new process of this Python finds the same pyspark whose Java classes are started."""
    installed = os.path.join(sysconfig.get_path("purelib"), "pyspark")
    return os.path.isdir(installed) and all(
        os.path.isdir(each) and os.path.samefile(each, installed)
        for each in (_spark_home(), os.path.dirname(sys.modules["pyspark"].__file__ or ""))
    )


def _spark_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(_find_spark_home())


def for_cluster(named: str | None, is_here: bool) -> str:
    named = named or _named()
    if named:
        if shutil.which(named) is None:
            raise SparkDidNotStart(
                f"Spark's workers use the Python {named}, which this machine does not have; the driver plans reads "
                "with the same Python, so set PYSPARK_PYTHON to one that both have"
            )
        return named
    if is_here:
        return sys.executable
    # The name only, because paths differ between machines; here it must resolve to this Python.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
    return f"python{sys.version_info.major}.{sys.version_info.minor}"
