"""Millstream's code, packed for the workers of a cluster.

A worker needs Python of the driver's minor version, pyspark and pyarrow. The other imports of tasks travel with the
job: this package with its compiled kernel, and the few libraries that kernel and codecs need. Spark itself sends the
archive and unpacks it beside each executor (a compiled module cannot be imported from a zip file). PYTHONPATH
names it before the worker's own packages: driver and tasks always run the same Millstream.

The archive holds compiled code, so workers must have the driver's operating system and processor.

It is built once for each version of the code: its name is the hash of its contents.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

PACKAGES = ("millstream", "pyspark_millstream")
LIBRARIES = ("crc32c", "cramjam", "fastavro")
"""Distributions that tasks import; the worker provides pyspark, pyarrow and the like. Absent ones are not needed."""

FOLDER = "millstream-code"
"""The unpacked archive's name, in an executor's working directory."""

SUFFIXES_LEFT_OUT = frozenset((".c", ".h", ".pyc", ".pyi", ".pyx", ".pxd", ".typed"))

FOLDERS_LEFT_OUT = frozenset(("__pycache__",))
"""Holds short-lived files with temporary names whenever a process imports a module for the first time."""

Entry = tuple[str, Path]
"""A file's path in the archive, and on disk."""
Content = tuple[str, bytes]


def pack() -> Path:
    """The archive of the tasks' code, built if this version has none."""
    # Read once: the hash must match the packed files, though the code may change meanwhile.
    contents = [(name, path.read_bytes()) for name, path in sorted({*_packages(), *_libraries()})]
    archive = _folder() / f"millstream-{_fingerprint(contents)}.zip"
    if not archive.exists():
        _write(archive, contents)
    return archive


def check_worker(rows: Iterable[object]) -> None:
    """A task: raises unless this worker's Python can import everything that tasks need."""
    from pyspark.sql.pandas.utils import require_minimum_pyarrow_version

    require_minimum_pyarrow_version()
    import millstream.records.codec
    import millstream.spark.source  # noqa: F401


def _packages() -> Iterator[Entry]:
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        for place in spec.submodule_search_locations or ():
            for path in Path(place).rglob("*"):
                if path.is_file() and _is_wanted(path):
                    yield f"{name}/{path.relative_to(place).as_posix()}", path


def _libraries() -> Iterator[Entry]:
    for name in LIBRARIES:
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            continue
        for file in files:
            inside = PurePosixPath(file)  # the .dist-info too: libraries read their own version
            if ".." not in inside.parts and _is_wanted(inside):
                path = Path(str(file.locate()))
                if path.is_file():
                    yield str(inside), path


def _is_wanted(path: PurePosixPath | Path) -> bool:
    return path.suffix not in SUFFIXES_LEFT_OUT and FOLDERS_LEFT_OUT.isdisjoint(path.parts)


def _fingerprint(contents: list[Content]) -> str:
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:24]


def _folder() -> Path:
    """Private: write access to it would allow running code on the workers."""
    folder = Path(tempfile.gettempdir()) / f"millstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="millstream-"))


def _write(archive: Path, contents: list[Content]) -> None:
    """Atomic: another driver may start at the same moment."""
    handle, unfinished = tempfile.mkstemp(dir=archive.parent, suffix=".unfinished")
    try:
        with (
            os.fdopen(handle, "wb") as out,
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
        ):
            for name, content in contents:
                packed.writestr(name, content)
        os.replace(unfinished, archive)
    except BaseException:
        os.unlink(unfinished)
        raise
