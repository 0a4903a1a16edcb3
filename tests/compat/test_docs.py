"""Every command that the documents show is run, in order, against a broker of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import MILLSTREAM, ServedBroker
from tests.spark.standalone import SHORT_LIVED

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    for match in _BLOCK.finditer(page.read_text()):
        if match[2].lstrip().startswith("make "):
            continue  # these run this test, or the demo, which has a test of its own
        yield match[1], match[2]


def shown(page: Path) -> object:
    needs_spark = page.name in ("spark.md", "pipelines.md")
    return pytest.param(
        page, id=page.name, marks=[pytest.mark.timeout(600), *([pytest.mark.slow] if needs_spark else [])]
    )


@pytest.mark.parametrize("page", [shown(page) for page in PAGES if any(blocks(page))])
def test_every_command_of_the_page_works(page: Path, tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "millstream-data", "--flowmq", "127.0.0.1:0") as broker:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")},
            "MILLSTREAM_BROKER": broker.address,
            "JDK_JAVA_OPTIONS": SHORT_LIVED,
        }
        for language, text in blocks(page):
            text = text.replace("127.0.0.1:9092", broker.address).replace("127.0.0.1:8092", broker.http)
            text = text.replace('("127.0.0.1", 9876)', repr(("127.0.0.1", int(broker.doors["flowmq"].split(":")[1]))))
            text = text.replace(".venv/bin/millstream", MILLSTREAM)
            if re.search(r"\bserve\b", text):
                assert_serves(text.strip(), tmp_path)
                continue
            command = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
            ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180)
            assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"


def assert_serves(command: str, directory: Path) -> None:
    """A `serve` line is run as it stands, but for ports that are free and a directory that is not in use."""
    environ = {
        **os.environ,
        "MILLSTREAM_KAFKA": "127.0.0.1:0",
        "MILLSTREAM_HTTP": "127.0.0.1:0",
        "MILLSTREAM_DATA": str(directory / "served"),
    }
    command = command.replace("--flowmq 127.0.0.1", "--flowmq 127.0.0.1:0")
    with subprocess.Popen(
        command.split(), env=environ, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        rest = process.stdout.read()
    assert re.fullmatch(r"ready kafka=127\.0\.0\.1:\d+( \w+=127\.0\.0\.1:\d+)* http=127\.0\.0\.1:\d+\n", line)
    assert rest == "" and process.returncode == 0


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_that_the_guarantees_name_exist() -> None:
    for path in re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text()):
        assert (ROOT / path).exists(), f"docs/guarantees.md names {path}"
