"""`millstream log` against the files of a real broker."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.command_line import Cli
from tests.compat import raw
from tests.serving import ServedBroker

TOPIC = "dumped"
SECOND, THIRD = "2" * 200, "3" * 200  # worth compressing


def segment_of(directory: Path) -> Path:
    [path] = (directory / "logs").glob(f"{TOPIC}-*/0/*.log")
    return path


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Cli, Path]:
    """The segment of a broker that has stopped: two batches, of which the second is compressed."""
    with ServedBroker(tmp_path / "data") as broker:
        cli = Cli(broker.address)
        raw.create_topic(broker.address, TOPIC, 1)
        cli("produce", TOPIC, "--key", "user-1", "first")
        cli("produce", TOPIC, "--compression", "zstd", SECOND, THIRD)
    return Cli("127.0.0.1:1"), segment_of(tmp_path / "data")


def test_dump_prints_batches_and_records_in_the_words_of_kafka_dump_log(stopped: tuple[Cli, Path]) -> None:
    cli, path = stopped
    lines = cli("log", "dump", str(path)).splitlines()
    assert lines[:2] == [f"Dumping {path}", "Log starting offset: 0"]
    batches = [line for line in lines if line.startswith("baseOffset: ")]
    assert batches[0].startswith("baseOffset: 0 lastOffset: 0 count: 1 ")
    assert "compresscodec: zstd" in batches[1] and all(line.endswith("isvalid: true") for line in batches)
    records = [line for line in lines if line.startswith("| offset: ")]
    assert "keySize: 6 valueSize: 5" in records[0] and records[0].endswith("key: user-1 payload: first")
    assert [line.rpartition("payload: ")[2] for line in records] == ["first", SECOND, THIRD]


def test_dump_as_json_is_a_line_per_batch_and_record(stopped: tuple[Cli, Path]) -> None:
    cli, path = stopped
    rows = [json.loads(line) for line in cli("log", "dump", str(path), "-o", "json").splitlines()]
    assert [row["value"] for row in rows if "value" in row] == ["first", SECOND, THIRD]
    assert [row["isvalid"] for row in rows if "isvalid" in row] == [True, True]
    batches = [json.loads(line) for line in cli("log", "dump", "--batches", str(path), "-o", "json").splitlines()]
    assert [row["baseOffset"] for row in batches] == [0, 1]


def test_dump_shows_a_damaged_batch_and_exits_with_1(stopped: tuple[Cli, Path]) -> None:
    cli, path = stopped
    data = bytearray(path.read_bytes())
    data[data.index(b"first")] ^= 0x10
    path.write_bytes(data)
    out, err = cli.run("log", "dump", str(path), code=1)
    assert out.count("isvalid: false") == 1 and f"payload: {SECOND}" in out
    assert err == f"{path}: 1 damaged place\n"


def test_dump_of_a_file_that_is_not_there_says_so(stopped: tuple[Cli, Path]) -> None:
    cli, path = stopped
    assert "cannot be read (No such file or directory)" in cli.fails("log", "dump", str(path.with_name("7.log")))
    assert "cannot be read" in cli.fails("log", "dump", str(path.with_name("7.index")))


def test_dump_prints_the_entries_of_an_index(stopped: tuple[Cli, Path], tmp_path: Path) -> None:
    cli, _ = stopped
    index = tmp_path / f"{100:020d}.index"
    index.write_bytes(bytes.fromhex("00000007 00001000 0000000000000064") + bytes(16))
    assert "offset: 107 position: 4096 maxTimestampBefore: 100\n" in cli("log", "dump", str(index))


def test_verify_checks_what_is_stored_and_finds_a_flipped_bit(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data") as broker:
        cli = Cli(broker.address)
        raw.create_topic(broker.address, TOPIC, 1)
        raw.create_topic(broker.address, "sound", 2)
        cli("produce", TOPIC, "balance=1000")
        cli("produce", "sound", "balance=1000")
        out = cli("log", "verify")
        assert out.startswith("Verified ") and out.endswith(" bytes in 3 partitions\nNothing is damaged\n")
        path = segment_of(tmp_path / "data")
        path.write_bytes(path.read_bytes().replace(b"balance=1000", b"balance=9000"))
        assert "Nothing is damaged" in cli("log", "verify", "sound")
        out, _ = cli.run("log", "verify", TOPIC, "-o", "json", code=1)
        report = json.loads(out)
        [damaged] = report["damaged"]
        assert (damaged["topic"], damaged["partition"], damaged["first"], damaged["end"]) == (TOPIC, 0, 0, 1)
        assert damaged["cause"] == "checksum mismatch" and str(path) in damaged["where"]
        assert report["bytes_done"] == 0 < report["bytes_total"]  # of what is sound
        out, _ = cli.run("log", "verify", code=1)
        assert "checksum mismatch" in out
        assert "there is no topic missing" in cli.fails("log", "verify", "missing")


def test_a_verification_is_not_started_by_a_web_page_of_another_site(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data") as broker:
        request = urllib.request.Request(
            f"http://{broker.http}/verify", method="POST", headers={"Origin": "http://elsewhere.example"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 403
        with urllib.request.urlopen(f"http://{broker.http}/verify", timeout=10) as answer:
            assert json.loads(answer.read()) == {"state": "none"}
