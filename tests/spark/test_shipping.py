"""What travels to the workers is enough for them."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from millstream.spark import shipping
from tests.spark.standalone import bare_python, spark_home

TASK = """
from millstream.spark.shipping import check_worker
check_worker(())
import fastavro, millstream.spark.sink, millstream.spark.stream, millstream.pipeline.files
from millstream.records import codec
from millstream.records.compression import Codec, compress
for name in Codec:
    compress(name, b"bytes")
print(codec.KERNEL, codec.__file__)
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(shipping.pack()) as archive:
        archive.extractall(folder)
    return folder


def run_task(python: str, unpacked: Path) -> subprocess.CompletedProcess[str]:
    """As an executor does: with Spark's own Python code, and the archive unpacked beside it."""
    path = os.pathsep.join([str(unpacked), *map(str, (spark_home() / "python" / "lib").glob("*.zip"))])
    return subprocess.run([python, "-c", TASK], capture_output=True, text=True, env={"PYTHONPATH": path}, timeout=60)


def test_a_python_with_pyarrow_alone_can_run_tasks(unpacked: Path, tmp_path: Path) -> None:
    done = run_task(bare_python(tmp_path / "bare"), unpacked)
    assert done.stdout.split() == ["compiled", str(unpacked / "millstream" / "records" / "codec.py")], done.stderr


def test_a_python_without_pyarrow_says_so(unpacked: Path, tmp_path: Path) -> None:
    done = run_task(bare_python(tmp_path / "poor", lent=()), unpacked)
    assert "PyArrow >=" in done.stderr.splitlines()[-1]


def test_the_archive_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = shipping.pack()
    made = first.stat().st_mtime_ns
    assert shipping.pack() == first
    assert first.stat().st_mtime_ns == made
    assert list(first.parent.iterdir()) == [first]


def test_other_code_is_another_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = shipping.pack()
    monkeypatch.setattr(shipping, "LIBRARIES", ("crc32c", "cramjam"))
    assert shipping.pack() != first


def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_all = tmp_path / f"millstream-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert shipping.pack().parent != open_to_all
