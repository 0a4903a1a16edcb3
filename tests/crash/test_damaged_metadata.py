"""A damaged metadata file: the broker does not start, and says which file it is and how to restore it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import millstream
import millstream.sync
from millstream.core.errors import StartupError
from tests.compat import raw
from tests.serving import MILLSTREAM, ServedBroker

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a broker that had topics, settings, groups, and values of several pages."""
    directory = tmp_path_factory.mktemp("stored") / "data"
    with ServedBroker(directory) as broker:
        for number in range(30):
            raw.create_topic(broker.address, f"topic-{number}", 1, **{"retention.ms": "100000"})
        producer = Producer({"bootstrap.servers": broker.address})
        producer.produce("topic-0", b"value", partition=0)
        assert producer.flush(20) == 0
        for number in range(20):
            consumer = Consumer({"bootstrap.servers": broker.address, "group.id": f"group-{number}"})
            place = TopicPartition("topic-0", 0, 1, metadata="m" * 4000)
            consumer.commit(offsets=[place], asynchronous=False)
            consumer.close()
        member = {"bootstrap.servers": broker.address, "group.id": "joined", "auto.offset.reset": "earliest"}
        consumer = Consumer(member)
        consumer.subscribe(["topic-0"])
        assert consumer.poll(20) is not None
        consumer.close()
        with millstream.sync.connect(broker.address) as ms, ms.queue("topic-0", group="workers") as jobs:
            next(iter(jobs)).accept()
        broker.stop()
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def pages(directory: Path) -> int:
    return (directory / "meta.db").stat().st_size // PAGE_BYTES


def zero(directory: Path, page: int) -> None:
    with (directory / "meta.db").open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))


async def start(directory: Path) -> str | None:
    """The sentence with which a start is refused."""
    try:
        async with millstream.open(f"file:{directory}"):
            return None
    except StartupError as error:
        return str(error)


def check(sentence: str, directory: Path) -> None:
    assert f"the metadata file {directory / 'meta.db'} is damaged" in sentence
    assert "Restore it from a backup" in sentence and "sqlite3 DAMAGED .dump" in sentence
    assert f"The records in {directory / 'logs'} are not affected" in sentence


async def test_every_zeroed_page_is_told_with_the_file_and_the_remedy(stored: Path, tmp_path: Path) -> None:
    count = pages(stored)
    assert count > 20
    with sqlite3.connect(stored / "meta.db") as database:
        (free,) = database.execute("PRAGMA freelist_count").fetchone()
    database.close()
    refused = 0
    for page in range(count):
        directory = tmp_path / str(page)
        shutil.copytree(stored, directory)
        zero(directory, page)
        sentence = await start(directory)
        if sentence is not None:
            refused += 1
            check(sentence, directory)
            assert names(directory / "logs") == names(stored / "logs"), "logs are where they were"
    assert refused >= count - free, "only a page without content may go unnoticed"


@pytest.mark.parametrize("prefix", ["topics/", "offsets/", "groups/", "queues/"])
@pytest.mark.parametrize("value", [b"\0" * 40, b'{"id', b"[1, 2]", b"\xff"], ids=repr)
async def test_so_is_a_value_that_makes_no_sense(stored: Path, tmp_path: Path, prefix: str, value: bytes) -> None:
    directory = tmp_path / "data"
    shutil.copytree(stored, directory)
    with sqlite3.connect(directory / "meta.db") as database:
        keys = [key for (key,) in database.execute("SELECT key FROM meta WHERE key LIKE ?", (f"{prefix}%",))]
        assert keys
        database.execute("UPDATE meta SET value = ? WHERE key = ?", (value, keys[0]))
    database.close()
    sentence = await start(directory)
    assert sentence is not None
    check(sentence, directory)


async def test_the_remedy_saves_the_keys_of_all_other_pages(stored: Path, tmp_path: Path) -> None:
    """The command of the sentence, run by a shell as an operator runs it."""
    saved = {}
    for page in range(1, pages(stored)):
        directory, damaged = tmp_path / str(page), tmp_path / f"{page}.damaged"
        shutil.copytree(stored, directory)
        zero(directory, page)
        sentence = await start(directory)
        if sentence is None:
            continue
        damaged.mkdir()
        for path in directory.glob("meta.db*"):
            path.rename(damaged / path.name)
        remedy = sentence.partition("with: ")[2].partition(". The records in")[0]
        command = remedy.replace("DAMAGED", str(damaged / "meta.db"))
        await asyncio.to_thread(subprocess.run, command, shell=True, check=True, timeout=30, capture_output=True)
        with sqlite3.connect(directory / "meta.db") as database:  # values that had a part in that page
            database.execute("DELETE FROM meta WHERE instr(value, zeroblob(64))")
        database.close()
        assert await start(directory) is None, (page, command)
        with sqlite3.connect(directory / "meta.db") as database:
            (saved[page],) = database.execute("SELECT count(*) FROM meta").fetchone()
        database.close()
    with sqlite3.connect(stored / "meta.db") as database:
        (count,) = database.execute("SELECT count(*) FROM meta").fetchone()
    database.close()
    complete = sorted(saved.values())
    assert complete[len(complete) // 2] > count // 2, "half of the pages, at least, cost less than half of the keys"


def test_the_command_prints_it(stored: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    shutil.copytree(stored, directory)
    zero(directory, pages(directory) // 2)
    done = subprocess.run(
        [MILLSTREAM, "serve", "--data", directory, "--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr and "bug" not in done.stderr
    check(" ".join(done.stderr.split()), directory)
