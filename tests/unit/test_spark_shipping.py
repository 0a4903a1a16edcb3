"""What is packed for the workers of a cluster while the code is being compiled, or changed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from millstream.spark import shipping


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one that is packed."""
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("before")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shipping, "PACKAGES", (folder.name,))
    monkeypatch.setattr(shipping, "LIBRARIES", ())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def test_what_the_compiler_is_just_writing_is_not_packed(package: Path) -> None:
    cache = package / "__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc.140012345").write_bytes(b"half")  # importlib's passing name
    with zipfile.ZipFile(shipping.pack()) as archive:
        assert archive.namelist() == ["some_package/__init__.py"]


def test_what_is_packed_is_what_its_name_is_the_hash_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = shipping._fingerprint

    def change_after(contents: Any) -> str:
        made = fingerprint(contents)
        (package / "__init__.py").write_text("after")
        return made

    monkeypatch.setattr(shipping, "_fingerprint", change_after)
    with zipfile.ZipFile(shipping.pack()) as archive:
        assert archive.read("some_package/__init__.py") == b"before"
