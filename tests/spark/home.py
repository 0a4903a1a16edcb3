"""A home for Spark without its zipped copy of pyspark, so that the processes it starts take the installed one.

Python keeps no compiled modules for a zip: each of the many processes that Spark starts for a stream would compile
pyspark anew, which takes a second, and a third of a second otherwise.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.spark.standalone import SHORT_LIVED


def make_home(directory: Path) -> str:
    found = find_spec("pyspark")
    assert found is not None and found.origin is not None
    for name in ("bin", "jars", "sbin"):
        (directory / name).symlink_to(Path(found.origin).parent / name)
    return str(directory)


def short_lived(directory: Path) -> dict[str, str]:
    """The environment of a command that starts a Spark of its own; `directory` does not exist yet."""
    directory.mkdir()
    return {"SPARK_HOME": make_home(directory), "JDK_JAVA_OPTIONS": SHORT_LIVED}
