"""Millstream's code, packed for the workers of a cluster.

A worker needs Python of the driver's minor version, pyspark and pyarrow. What else tasks import travels with the job:
this package with its compiled kernel, and the few libraries that kernel and codecs stand on. Spark itself sends the
archive and unpacks it beside each executor (a compiled module cannot be imported out of a zip file), and PYTHONPATH
leads there, before anything that is installed on the worker: driver and tasks always run the same Millstream.

The archive holds compiled code, so workers must have the driver's operating system and processor.

It is built once for each state of the code: its name is the hash of what is in it.
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
"""Distributions that tasks import; pyspark, pyarrow and their like are the worker's own. Absent ones are not needed."""

FOLDER = "millstream-code"
"""What the archive is unpacked as, in the folder that an executor runs in."""

SUFFIXES_LEFT_OUT = frozenset((".c", ".h", ".pyc", ".pyi", ".pyx", ".pxd", ".typed"))

FOLDERS_LEFT_OUT = frozenset(("__pycache__",))
"""In which files come and go under passing names, whenever some process imports something for the first time."""

Entry = tuple[str, Path]
"""Where a file goes in the archive, and where it is."""
Content = tuple[str, bytes]


def pack() -> Path:
    """The archive of what tasks need, made if there is none of this state yet."""
    # Read once: what is hashed and what is packed must be the same, though the code may change meanwhile.
    contents = [(name, path.read_bytes()) for name, path in sorted({*_packages(), *_libraries()})]
    archive = _folder() / f"millstream-{_fingerprint(contents)}.zip"
    if not archive.exists():
        _write(archive, contents)
    return archive


def check_worker(rows: Iterable[object]) -> None:
    """A task: raises unless this worker's Python has what tasks need."""
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
            inside = PurePosixPath(file)  # the .dist-info too: libraries ask for their own version
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
    """Ours alone: whoever could write there could run code on the workers."""
    folder = Path(tempfile.gettempdir()) / f"millstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="millstream-"))


def _write(archive: Path, contents: list[Content]) -> None:
    """Appears whole or not at all: another driver may start at the same moment."""
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
