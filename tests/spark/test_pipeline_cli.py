"""`millstream pipeline` as one types it: check, run, stop, go on, list, show."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millstream.admin.failure import Failure
from millstream.cli import spark as cli_spark
from tests import confluent
from tests.serving import ServedBroker

pytestmark = pytest.mark.slow

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
WITHOUT_JAVA: dict[str, Any] = {"JAVA_HOME": "/nowhere"}
"""Whatever would start Spark fails."""
SECONDS_MAX = 240

PIPELINE = """
name = "shop"
[source]
topic = "TOPIC"
name = "orders"
schema = "item STRING, price LONG"
[[step]]
name = "per_item"
sql = "SELECT item, count(*) AS orders, sum(price) AS price FROM orders GROUP BY item"
[[sink]]
from = "orders"
lake = "lake"
[[sink]]
from = "per_item"
table = "sqlite:shop.db"
name = "items"
key = ["item"]
"""


class Cli:
    def __init__(self, address: str, home: Path) -> None:
        self.home = home
        self.environ = CLEAN | {"MILLSTREAM_BROKER": address}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "millstream", "pipeline", *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(command, env=self.environ, cwd=self.home, text=True, **pipes)

    def run(self, *arguments: str, code: int = 0, **environ: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "millstream", "pipeline", *arguments]
        done = subprocess.run(
            command, env=self.environ | environ, cwd=self.home, capture_output=True, text=True, timeout=SECONDS_MAX
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--output", "json", **WITHOUT_JAVA)[0])


@pytest.fixture
def cli(broker: ServedBroker, tmp_path: Path) -> Cli:
    return Cli(broker.address, tmp_path)


def write_pipeline(home: Path, topic: str, text: str = PIPELINE) -> Path:
    file = home / "shop.toml"
    file.write_text(text.replace("TOPIC", topic))
    return file


def create(broker: ServedBroker, topic: str, partitions: int = 2) -> str:
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result()
    return topic


def send(broker: ServedBroker, topic: str, numbers: range, bad: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.address})
    for number in numbers:
        value = json.dumps({"item": f"i{number % 3}", "price": number})
        producer.produce(topic, value, partition=number % 2)
    for number in range(bad):
        producer.produce(topic, f"bad {number}", partition=0)
    assert producer.flush(30) == 0


def table(home: Path) -> dict[str, tuple[int, int]]:
    with sqlite3.connect(home / "shop.db") as database:
        return {
            item: (orders, price) for item, orders, price in database.execute("SELECT item, orders, price FROM items")
        }


def sums(numbers: range) -> dict[str, tuple[int, int]]:
    return {f"i{rest}": (len(numbers[rest::3]), sum(numbers[rest::3])) for rest in range(3)}


# -- without Spark ---------------------------------------------------------------------------------------------------


def test_check_tells_every_mistake_with_its_line_and_needs_no_spark(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    wrong = PIPELINE.replace("price LONG", "price LNG").replace('key = ["item"]', 'key = ["itm"]\ncolour = "red"')
    write_pipeline(cli.home, unique("missing"), wrong)
    out, err = cli.run("check", "shop.toml", code=1, **WITHOUT_JAVA)
    lines = [int(line.split(":")[1]) for line in out.splitlines()]
    assert err == "" and lines == sorted(lines) and {4, 6, 17, 18} <= set(lines)
    assert re.search(r"^shop\.toml:4: there is no topic missing-\d+; create it", out, re.MULTILINE)
    told = json.loads(cli.run("check", "shop.toml", "-o", "json", code=1, **WITHOUT_JAVA)[0])
    assert told["valid"] is False and [each["line"] for each in told["mistakes"]] == lines


def test_check_of_a_good_file_says_so_also_without_a_broker(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    write_pipeline(cli.home, create(broker, unique("orders")))
    assert cli.run("check", "shop.toml", **WITHOUT_JAVA) == ("shop.toml: no mistakes\n", "")
    assert "no broker answers at 127.0.0.1:9" in cli.run("check", "shop.toml", "-b", "127.0.0.1:9", code=1)[1]
    write_pipeline(cli.home, "nowhere", 'broker = "127.0.0.1:9"' + PIPELINE)
    del cli.environ["MILLSTREAM_BROKER"]
    assert cli.run("check", "shop.toml", **WITHOUT_JAVA) == (
        "shop.toml: no mistakes\n",
        "no broker answers at 127.0.0.1:9, so topics were not looked up\n",
    )


def test_run_refuses_a_file_with_mistakes_before_spark_starts(cli: Cli, unique: Callable[[str], str]) -> None:
    write_pipeline(cli.home, unique("missing"))
    out, err = cli.run("run", "shop.toml", code=1, **WITHOUT_JAVA)
    lines = err.splitlines()
    assert out == "" and lines[0].startswith("shop.toml:4: there is no topic")
    assert lines[-1] == "millstream: shop.toml has 1 mistake, so nothing was started"
    assert "cannot be read" in cli.run("run", "nothing.toml", code=1, **WITHOUT_JAVA)[1]
    assert "is not KEY=VALUE" in cli.run("run", "shop.toml", "--conf", "x", code=2, **WITHOUT_JAVA)[1]


def test_without_java_a_run_ends_with_one_sentence(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    write_pipeline(cli.home, create(broker, unique("orders")))
    err = cli.run("run", "shop.toml", "--once", code=1, **WITHOUT_JAVA)[1]
    assert err.startswith("millstream: ") and err.count("\n") == 1 and "Java" in err


def test_list_finds_pipelines_and_nothing_else(cli: Cli, unique: Callable[[str], str]) -> None:
    write_pipeline(cli.home, "orders")
    (cli.home / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (cli.home / "broken.toml").write_text("not toml at all")
    (cli.home / "below" / ".hidden").mkdir(parents=True)
    (cli.home / "below" / ".hidden" / "no.toml").write_text(PIPELINE)
    (cli.home / "below" / "wrong.toml").write_text('name = "wrong"\n[source]\ntopic = "a"\nschema = "x NOPE"\n')
    listed = cli.json("list")
    assert [row["file"] for row in listed] == ["shop.toml", "below/wrong.toml"]
    assert listed[0]["source"] == "orders (json)" and listed[0]["steps"] == ["per_item"]
    assert listed[0]["sinks"] == {"lake-orders": None, "table-items": None, "dead-letters": None}
    assert listed[0]["mistakes"] == [] and len(listed[1]["mistakes"]) >= 2
    out = cli.run("list", ".", **WITHOUT_JAVA)[0]
    assert "lake-orders (not begun)" in out and "`pipeline check` lists them" in out
    assert "is not a folder" in cli.run("list", "shop.toml", code=1, **WITHOUT_JAVA)[1]


def test_show_has_the_columns_of_every_view(cli: Cli, unique: Callable[[str], str]) -> None:
    write_pipeline(cli.home, "orders", 'broker = "127.0.0.1:9"' + PIPELINE)
    del cli.environ["MILLSTREAM_BROKER"]
    shown = cli.json("show", "shop.toml")
    assert shown["views"]["per_item"] == {"item": "STRING", "orders": "BIGINT", "price": "BIGINT"}
    assert [*shown["views"]["orders"]][:3] == ["item", "price", "_key"]
    assert shown["unreachable"] and shown["broker"] == "127.0.0.1:9"
    assert shown["dead_letters"] == "orders.dead"
    out, err = cli.run("show", "shop.toml", **WITHOUT_JAVA)
    assert "table items in sqlite:" in out and "so the lag is not known" in err


def test_a_base_install_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"^millstream query needs pip install 'millstream\[spark\]'$"):
        cli_spark.need_spark("millstream query")


@pytest.mark.parametrize(
    ("master", "partitions"), [("local[3]", "3"), ("local", "1"), ("local[2,4]", "2"), ("spark://host:7077", None)]
)
def test_a_local_spark_shuffles_between_as_many_partitions_as_threads(master: str, partitions: str | None) -> None:
    assert cli_spark.local_settings(master).get("spark.sql.shuffle.partitions") == partitions


# -- with Spark ------------------------------------------------------------------------------------------------------


@contextmanager
def running(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.timeout(2 * SECONDS_MAX)
def test_a_pipeline_runs_stops_on_sigterm_and_goes_on_where_it_was(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = create(broker, unique("orders"))
    write_pipeline(cli.home, topic)
    send(broker, topic, range(300), bad=7)
    with running(cli.start("run", "shop.toml", "--metrics", "127.0.0.1:0")) as process:
        assert process.stdout is not None and process.stderr is not None
        metrics = process.stderr.readline().split()[-1]
        seen: dict[str, dict[str, Any]] = {}
        while len(seen) < 3:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            report = json.loads(line)
            seen.setdefault(report["sink"], report)
        assert {name: report["rows"] for name, report in seen.items()} == {
            "lake-orders": 300,
            "table-items": 3,
            "dead-letters": 7,
        }
        assert seen["lake-orders"] | {"seconds": 0, "rows_per_second": 0} == {
            "pipeline": "shop",
            "sink": "lake-orders",
            "batch": 0,
            "rows": 300,
            "rows_per_second": 0,
            "seconds": 0,
            "lag": {f"{topic}-0": 0, f"{topic}-1": 0},
            "rows_dropped_by_watermark": {},
        }
        with urllib.request.urlopen(metrics, timeout=10) as answer:
            text = answer.read().decode()
        assert 'millstream_pipeline_rows_total{pipeline="shop",sink="lake-orders"} 300.0' in text
        assert 'millstream_pipeline_dead_letters_total{pipeline="shop"} 7.0' in text
        refused = cli.run("run", "shop.toml", code=1)[1]
        assert refused.startswith(f"millstream: the pipeline shop is running already (process {process.pid}, ")
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0, errors
        assert errors == "" and all(json.loads(line)["sink"] in seen for line in rest.splitlines())
    assert table(cli.home) == sums(range(300))

    send(broker, topic, range(300, 420))
    shown = cli.json("show", "shop.toml")["sinks"]
    assert {sink["sink"]: (sink["batch"], sink["lag"]) for sink in shown} == {
        "lake-orders": (0, 120),
        "table-items": (0, 120),
        "dead-letters": (0, 120),
    }
    assert shown[0]["offsets"] == {f"{topic}-0": 157, f"{topic}-1": 150}

    lines = [json.loads(line) for line in cli.run("run", "shop.toml", "--once")[0].splitlines()]
    assert lines[-1]["total"] == {
        "lake-orders": {"batches": 1, "rows": 120, "rows_dropped_by_watermark": 0},
        "table-items": {"batches": 1, "rows": 3, "rows_dropped_by_watermark": 0},
        "dead-letters": {"batches": 1, "rows": 0, "rows_dropped_by_watermark": 0},
    }
    assert table(cli.home) == sums(range(420))
    from deltalake import DeltaTable

    assert sorted(DeltaTable(cli.home / "lake").to_pyarrow_table().column("price").to_pylist()) == list(range(420))
    assert cli.json("list")[0]["sinks"] == {"lake-orders": 1, "table-items": 1, "dead-letters": 1}


LAKE_ONLY = """
name = "moved"
[source]
topic = "TOPIC"
name = "orders"
format = "bytes"
[[sink]]
from = "orders"
lake = "moved"
"""


@pytest.mark.timeout(SECONDS_MAX)
def test_on_a_terminal_there_is_a_live_view_until_ctrl_c(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = create(broker, unique("orders"))
    write_pipeline(cli.home, topic, LAKE_ONLY)
    send(broker, topic, range(50))
    ours, theirs = pty.openpty()
    process = cli.start(
        "run", "shop.toml", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_own_terminal
    )
    os.close(theirs)
    with running(process):
        shown = _read_until(ours, "lake-orders +0 +50 ")
        assert "starting Spark" in shown
        os.write(ours, b"\x03")  # reaches every process of the terminal, as a key does
        shown += _read_until(ours, "stopped")
        assert process.wait(60) == 130
    os.close(ours)
    assert "Traceback" not in shown and "Exception" not in shown


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")


def _read_until(terminal: int, pattern: str) -> str:
    text = ""
    deadline = time.monotonic() + SECONDS_MAX
    while not re.search(pattern, text):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1)[0]:
            try:
                read = os.read(terminal, 65536)
            except OSError:  # closed by the last process
                read = b""
            assert read, text
            text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read.decode(errors="replace"))
    return text


@pytest.mark.timeout(2 * SECONDS_MAX)
def test_a_dead_letter_keeps_its_headers_and_may_be_as_large_as_what_is_read(
    cli: Cli, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = create(broker, unique("orders"))
    write_pipeline(cli.home, topic)
    producer = Producer(
        {"bootstrap.servers": broker.address, "compression.type": "zstd", "message.max.bytes": 10_000_000}
    )
    producer.produce(topic, b"bad " * 700_000, headers=[("trace", b"7")])
    assert producer.flush(30) == 0
    cli.run("run", "shop.toml", "--once")
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "none", "enable.partition.eof": True})
    consumer.assign([TopicPartition(f"{topic}.dead", 0, 0)])
    letter = consumer.poll(30)
    assert letter is not None and letter.value() == b"bad " * 700_000
    headers = confluent.headers(letter)
    assert headers[0] == ("trace", b"7") and headers[1] == ("millstream-pipeline", b"shop")
    consumer.close()
