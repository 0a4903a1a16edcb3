"""Which Python runs Spark's tasks.

A local Spark uses the Python that runs this. So does a cluster whose master is on this machine. The workers of any
other cluster are asked for `pythonX.Y` of this one's version; `PYSPARK_PYTHON` or `spark.pyspark.python` names another.
Spark plans reads with the same name or path on this machine, so it has to lead to a Python here as well.

Spark has its processes import pyspark out of a zip file, of which Python keeps no compiled modules: each of them, and a
stream starts several, spends a second on compiling it. Where pyspark is installed as a package, which is the same code,
`python.sh` takes the zip out of their way.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig

from millstream.spark.jvm import SparkDidNotStart

WITHOUT_ZIP = os.path.join(os.path.dirname(__file__), "python.sh")
BEHIND_IT, SPARK = "PYSPARK_MILLSTREAM_PYTHON", "PYSPARK_MILLSTREAM_SPARK"
"""The variables that tell `python.sh` which Python to run, and which Spark's archives it does not need. Those of
another one, which the same process may start, stay.
"""
_WHERE_NAMED = "PYSPARK_PYTHON"
_before: dict[str, str | None] = {WITHOUT_ZIP: None}
"""What `settle` has put into the environment, and what was named there before."""


def settle(python: str) -> None:
    """Names the Python where Spark looks for it."""
    _before[python] = _named()
    # Spark takes the one for what it runs in the driver's name as the one for tasks of a source it has found by itself.
    os.environ[_WHERE_NAMED] = os.environ["PYSPARK_DRIVER_PYTHON"] = python


def _named() -> str | None:
    """What the user has named: not what an earlier session here, or in the process that started this, was given."""
    named = os.environ.get(_WHERE_NAMED)
    return _before.get(named, named) if named else None


def for_local() -> str:
    if not (_is_package() and os.access(WITHOUT_ZIP, os.X_OK) and _is_told_to_java()):
        return sys.executable
    os.environ[BEHIND_IT] = sys.executable
    os.environ[SPARK] = _spark_home()
    return WITHOUT_ZIP


def _is_told_to_java() -> bool:
    """A Java that runs already gives its processes the environment that it was started with, perhaps by others."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    return gateway is None or gateway.jvm.java.lang.System.getenv(BEHIND_IT) == sys.executable


def _is_package() -> bool:
    """Whether the pyspark that any new process of this Python finds is the very one whose Java classes are started."""
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
                f"the Python for Spark's workers is {named}, which is not on this machine; reads are planned here with "
                "the same, so name one (PYSPARK_PYTHON) that is there on both"
            )
        return named
    if is_here:
        return sys.executable
    # The name alone, because paths differ from machine to machine; here it has to mean this very Python.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
    return f"python{sys.version_info.major}.{sys.version_info.minor}"
