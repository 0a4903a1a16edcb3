"""Spark's Java process: what it says, and what is said when there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark import SparkConf

from millstream.spark import jvm
from millstream.spark.jvm import Relay, SparkDidNotStart

OLD_JAVA = """#!/bin/sh
if [ "$1" = -version ]; then echo 'openjdk version "1.8.0_302"' >&2; exit 0; fi
echo 'Exception in thread "main" java.lang.UnsupportedClassVersionError: compiled by a more recent version' >&2
exit 1
"""


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def test_what_is_said_while_starting_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = os.pipe()
    relay = Relay(os.fdopen(ours, "rb"))
    with os.fdopen(theirs, "w") as spark:
        spark.write(f"Using Spark's default log4j profile\n{relay.token}\nERROR something happened\n")
    relay.wait_for_end()
    assert relay.kept() == ["Using Spark's default log4j profile"]
    assert capsys.readouterr().err == "ERROR something happened\n"


def test_without_java_it_is_said_what_to_install(no_java: None) -> None:
    with pytest.raises(SparkDidNotStart, match=r"there is no Java here; install it .*openjdk-17-jre-headless"):
        jvm.find_java()


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkDidNotStart, match=f"JAVA_HOME is {tmp_path}, where there is no bin/java"):
        jvm.find_java()


def test_an_old_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(OLD_JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkDidNotStart, match=f"Spark needs Java 17 or newer, and {java} is Java 8"):
        jvm.launch(SparkConf())


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Exception in thread main", "Caused by: java.io.IOException: no such file", "\tat A.b"], "no such file"),
        (["ERROR Backend: Application has been killed. Reason: All masters are unresponsive!"] * 2, "All masters are"),
        (["pyspark.errors.PySparkImportError: [PACKAGE_NOT_INSTALLED] PyArrow must be installed"], "PyArrow must be"),
        (["something", "else"], "else"),
        ([], "it does not say why"),
    ],
)
def test_the_cause_is_found_among_many_lines(lines: list[str], cause: str) -> None:
    assert jvm.last_words(lines).startswith(cause)
