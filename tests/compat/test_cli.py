"""The command line against a real broker: what a new user types, what comes out, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from millstream.admin.failure import explain
from millstream.admin.position import Kind, Position
from millstream.cli.template import compile_template
from tests.command_line import CLEAN, Cli
from tests.compat import raw
from tests.compat.clients import wait_for
from tests.serving import ServedBroker


@pytest.fixture
def cli(broker: Any) -> Cli:
    return Cli(broker.address)


@pytest.fixture
def topic(cli: Cli) -> str:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    raw.create_topic(cli.address, name, 3)
    return name


def test_a_new_users_first_five_minutes(cli: Cli) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    assert cli("topic", "create", name, "-p", "6") == f"Created {name} with 6 partitions\n"
    out = cli("produce", name, "--key", "user-123", '{"item":"widget"}')
    assert out.startswith(f"Produced to {name} partition ") and out.endswith(" at offset 0\n")
    partition = out.split()[4]
    out = cli("consume", name, "--from", "start", "-n", "1", "-f", r"%p %o %k %v\n")
    assert out == f'{partition} 0 user-123 {{"item":"widget"}}\n'


def test_topics_are_listed_and_described(cli: Cli, topic: str) -> None:
    cli("produce", topic, "--partition", "1", "a", "b")
    assert {"topic": topic, "partitions": 3, "records": 2} in cli.json("topic", "list")
    assert topic in cli("topic", "list", "-b", cli.address)
    described = cli.json("topic", "describe", topic)
    assert [row["records"] for row in described["partitions"]] == [0, 2, 0]
    assert any(row["name"] == "retention.ms" for row in described["settings"])
    assert "PARTITION" in cli("topic", "describe", topic)


def test_topic_settings_are_set_changed_and_unset(cli: Cli) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    cli("topic", "create", name, "-c", "retention.ms=60000", "-c", "cleanup.policy=compact")

    def settings() -> dict[str, tuple[str, str]]:
        return {row["name"]: (row["value"], row["source"]) for row in cli.json("topic", "describe", name)["settings"]}

    assert settings()["retention.ms"] == ("60000", "topic")
    assert settings()["cleanup.policy"] == ("compact", "topic")
    cli("topic", "alter", name, "-c", "retention.ms=90000", "--unset", "cleanup.policy", "-p", "4")
    assert settings()["retention.ms"] == ("90000", "topic")
    assert settings()["cleanup.policy"][0] == "delete"
    assert len(cli.json("topic", "describe", name)["partitions"]) == 4


def test_a_setting_that_is_not_there_is_not_said_to_be_at_its_default(cli: Cli, topic: str) -> None:
    assert "has no setting retention; did you mean retention.ms?" in cli.fails(
        "topic", "alter", topic, "--unset", "retention"
    )
    assert f"{topic}: retention.ms is now at its default" in cli("topic", "alter", topic, "--unset", "retention.ms")


def test_output_that_has_no_room_is_no_bug_of_ours(cli: Cli, topic: str) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "millstream", "topic", "describe", topic],
            env=CLEAN | {"MILLSTREAM_BROKER": cli.address},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert process.returncode == 1
    assert b"the output cannot be written (No space left on device)" in process.stderr, process.stderr


def test_trim_deletes_the_oldest_records(cli: Cli, topic: str) -> None:
    cli("produce", topic, "-p", "0", *"abcdef")
    out = cli("topic", "trim", topic, "--before", "4", "--partition", "0")
    assert out == f"{topic} partition 0 starts at offset 4 now\n"
    assert cli("consume", topic, "--until-end") == "e\nf\n"


def test_a_deleted_topic_is_gone(cli: Cli, topic: str) -> None:
    assert cli("topic", "delete", topic) == f"Deleted {topic}\n"
    assert topic not in [row["topic"] for row in cli.json("topic", "list")]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_lines_from_a_pipe_come_back_equal_and_in_order(cli: Cli, compression: str) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    cli("topic", "create", name, "-p", "1")
    lines = b"".join(b"%d\n" % number for number in range(50_000)) + b"\nno newline at the end"
    _, err = cli.run("produce", name, "-z", compression, stdin=lines)
    assert err.startswith(f"Produced 50,002 records to {name} (")
    out, _ = cli.run("consume", name, "--until-end")
    assert out.encode() == lines + b"\n"


def test_lines_from_a_file_with_key_headers_and_partition(cli: Cli, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\n")
    cli("produce", topic, "--file", str(file), "-k", "k", "-H", "a=1", "-H", "b=", "-p", "2")
    rows = [json.loads(line) for line in cli("consume", topic, "-e", "-o", "json").splitlines()]
    assert [row["value"] for row in rows] == ["one", "two"]
    assert {(row["partition"], row["key"], json.dumps(row["headers"])) for row in rows} == {
        (2, "k", '[["a", "1"], ["b", ""]]')
    }


def test_bytes_that_are_not_text_survive_both_formats(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"\xff\xfe\n")
    (row,) = map(json.loads, cli("consume", topic, "-e", "-o", "json").splitlines())
    assert row["value"] == {"base64": "//4="}
    process = cli.start("consume", topic, "-e")
    assert process.communicate(timeout=30)[0] == b"\xff\xfe\n"


def test_consume_starts_at_an_offset_a_time_the_end_or_so_many_before_it(cli: Cli, topic: str) -> None:
    cli("produce", topic, "-p", "0", *"abc")
    time.sleep(0.01)
    moment = int(time.time() * 1000)
    cli("produce", topic, "-p", "0", *"def")
    assert cli("consume", topic, "-e", "--from", "4") == "e\nf\n"
    assert cli("consume", topic, "-e", "--partition", "0", "--offset", "5") == "f\n"
    assert cli("consume", topic, "-e", "--from", f"@{moment}") == "d\ne\nf\n"
    assert cli("consume", topic, "-e", "--from", "2999-01-01") == ""
    assert cli("consume", topic, "-e", "--from", "2001-01-01T00:00:00Z", "-n", "2") == "a\nb\n"
    assert cli("consume", topic, "-e", "--from", "-2") == "e\nf\n"
    assert cli("consume", topic, "-e", "--from", "end") == ""
    assert cli.run("consume", topic, "-e", "-p", "0", "--offset", "6") == ("", ""), "that comes next"
    out, said = cli.run("consume", topic, "-e", "-p", "0", "--offset", "99")
    assert out == "" and said == f"no partition has offset 99: {topic} partition 0 ends at 6; reading from there\n"
    out, said = cli.run("consume", topic, "-e", "--from", "99")
    assert out == "" and "partition 0 ends at 6, " in said and "partition 2 ends at 0;" in said


def test_max_bytes_ends_consume_before_it_shows_more_but_one_record_is_always_shown(cli: Cli, topic: str) -> None:
    cli("produce", topic, "-p", "0", "aaaa", "bbbb", "cccc")
    start = ("consume", topic, "--partition", "0", "--offset", "0")
    assert cli(*start, "--max-bytes", "8") == "aaaa\nbbbb\n"
    assert cli(*start, "--max-bytes", "11") == "aaaa\nbbbb\n"
    assert cli(*start, "--max-bytes", "1") == "aaaa\n"
    assert cli(*start, "--max-bytes", "12") == "aaaa\nbbbb\ncccc\n", "it does not wait for a record without bytes"
    assert cli(*start, "--max-bytes", "100", "-e", "-f", r"[%o] %v\n") == "[0] aaaa\n[1] bbbb\n[2] cccc\n"


def test_consume_waits_for_new_records_at_the_end(cli: Cli, topic: str) -> None:
    cli("produce", topic, "old")
    process = cli.start("consume", topic, "-n", "1")
    producer = Producer({"bootstrap.servers": cli.address})
    deadline = time.monotonic() + 30
    while process.poll() is None:  # nothing tells when it has found the end, so new ones come until it has
        assert time.monotonic() < deadline, "it waits for more than what is new"
        producer.produce(topic, b"new")
        assert producer.flush(10) == 0
        time.sleep(0.1)
    assert process.communicate(timeout=30)[0] == b"new\n"
    assert process.returncode == 0


def test_a_group_goes_on_where_it_left_off(cli: Cli, topic: str) -> None:
    group = f"group-{topic}"
    cli("produce", topic, "-p", "0", *"abcd")
    assert cli("consume", topic, "--group", group, "-n", "2") == "a\nb\n"
    assert cli("consume", topic, "--group", group, "--until-end") == "c\nd\n"
    assert cli("consume", topic, "--group", group, "--until-end") == ""


def test_groups_are_listed_described_moved_and_deleted(cli: Cli, topic: str) -> None:
    group = f"group-{topic}"
    cli("produce", topic, "-p", "0", *"abcd")
    cli("consume", topic, "--group", group, "-n", "3")
    assert group in [row["group"] for row in cli.json("group", "list")]
    described = cli.json("group", "describe", group)
    assert described["state"] == "empty" and described["lag"] == 1
    assert {row["partition"]: row["committed"] for row in described["partitions"]}[0] == 3

    seek = ("group", "seek", group, "--topic", topic, "--partition", "0", "--to")
    assert cli.json(*seek, "-2", "--dry-run")["partitions"] == [{"topic": topic, "partition": 0, "from": 3, "to": 1}]
    assert cli.json("group", "describe", group)["lag"] == 1
    for to, committed in (("-2", 1), ("+1", 2), ("end", 4), ("start", 0), ("3", 3), ("99", 4), ("@1", 0)):
        cli(*seek, to)
        (row,) = [row for row in cli.json("group", "describe", group)["partitions"] if row["partition"] == 0]
        assert (row["committed"], row["lag"]) == (committed, 4 - committed), to
    assert cli("consume", topic, "--group", group, "-n", "1") == "a\n"
    assert "LAG" in cli("group", "describe", group)
    assert cli("group", "delete", group) == f"Deleted {group}\n"
    assert "there is no group" in cli.fails("group", "describe", group)


def test_a_group_with_members_shows_them_and_is_not_moved(cli: Cli, topic: str) -> None:
    group = f"group-{topic}"
    process = cli.start("consume", topic, "--group", group)
    try:
        admin = AdminClient({"bootstrap.servers": cli.address})

        def has_all() -> bool:
            time.sleep(0.05)
            try:
                members = admin.describe_consumer_groups([group])[group].result(10).members
            except KafkaException:  # the group is not there yet
                return False
            return [len(member.assignment.topic_partitions) for member in members] == [3]

        wait_for(has_all, "the member's partitions")
        assert [member["partitions"] for member in cli.json("group", "describe", group)["members"]] == [3]
        assert "stop" in cli.fails("group", "seek", group, "--topic", topic, "--to", "start")
        assert "stop" in cli.fails("group", "delete", group)
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ctrl_c_ends_a_group_member_whose_broker_does_not_answer(tmp_path: Path, number: signal.Signals) -> None:
    with ServedBroker(tmp_path) as broker:
        cli = Cli(broker.address)
        raw.create_topic(broker.address, "orders", 1)
        cli("produce", "orders", "a")
        process = cli.start("consume", "orders", "--group", "g")
        assert process.stdout is not None and process.stdout.readline() == b"a\n"
        os.kill(broker.pid, number)
        try:
            if number == signal.SIGKILL:  # so that librdkafka is about to say so, in a callback
                assert process.stderr is not None and b"lost the broker" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=40)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert process.returncode == 130 and err in (
            b"",
            b"millstream: the broker does not answer; the last records may be delivered again\n",
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("topic", "describe", "nowhere"), "there is no topic nowhere; `millstream topic list` shows"),
        (("topic", "delete", "nowhere"), "there is no such topic"),
        (("consume", "nowhere"), "there is no topic nowhere"),
        (("group", "describe", "nobody"), "there is no group nobody; `millstream group list` shows"),
        (("group", "seek", "g", "--topic", "nowhere", "--to", "end"), "there is no topic nowhere"),
        (("topic", "create", "bad name"), "use 1 to 249 letters, digits, '.', '_' and '-'"),
        (("topic", "create", "x", "-c", "retention.ms=soon"), "retention.ms"),
        (("topic", "create", "x", "-c", "no.such.setting=1"), "no.such.setting"),
        (("topic", "list", "-b", "127.0.0.1:1"), "no broker answers at 127.0.0.1:1; start one with `millstream serve`"),
        (("topic", "list", "-b", "no.such.host.invalid:9092"), "no broker answers"),
        (("topic", "list", "-b", "9092"), "is not HOST:PORT"),
        (("produce", "x", "--file", "/nowhere"), "/nowhere cannot be read"),
        (("produce", "x", "--file", "/"), "/ cannot be read (Is a directory); name another file with --file"),
    ],
)
def test_what_cannot_be_done_ends_in_one_sentence_and_exit_code_1(
    cli: Cli, arguments: tuple[str, ...], sentence: str
) -> None:
    started = time.monotonic()
    assert sentence in cli.fails(*arguments)
    assert time.monotonic() - started < 50, "a client would try for a minute"


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic",),
        ("topic", "create"),
        ("topic", "create", "x", "-c", "novalue"),
        ("topic", "alter", "x"),
        ("topic", "create", "x", "-p", "100001"),
        ("topic", "alter", "x", "-p", "100001"),
        ("consume", "x", "-f", "%q"),
        ("consume", "x", "--from", "sometime"),
        ("consume", "x", "--from", "group"),
        ("consume", "x", "--offset", "3"),
        ("consume", "x", "-g", "g", "--from", "7"),
        ("produce", "x", "-H", "novalue", "v"),
        ("nonsense",),
    ],
)
def test_what_is_not_understood_ends_with_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    cli.run(*arguments, code=2)


def test_an_existing_topic_is_not_created_again(cli: Cli, topic: str) -> None:
    assert "exists already" in cli.fails("topic", "create", topic)


def test_records_that_are_refused_are_counted_and_fail_the_command(cli: Cli) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    cli("topic", "create", name, "-c", "max.message.bytes=1000")
    sentence = cli.fails("produce", name, "x" * 5000)
    assert f"1 of 1 records were not acknowledged by {name}" in sentence and "larger than" in sentence
    assert "2 of 2 records were not acknowledged" in cli.fails("produce", name, "-p", "7", "a", "b")


def test_a_closed_pipe_ends_consume_quietly(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"line\n" * 100_000)
    process = cli.start("consume", topic, "--from", "start")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()


def test_a_million_lines_are_a_million_records(cli: Cli) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    _, err = cli.run("produce", name, stdin=b"".join(b"%d\n" % number for number in range(1_000_000)))
    assert "1,000,000 records" in err, err
    assert {"topic": name, "partitions": 1, "records": 1_000_000} in cli.json("topic", "list")


def test_the_http_door_serves_metrics_with_lag(broker: Any, cli: Cli, topic: str) -> None:
    group = f"group-{topic}"
    cli("produce", topic, "-p", "0", *"abcd")
    cli("consume", topic, "--group", group, "-n", "3")
    with urllib.request.urlopen(f"http://{broker.http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (lag,) = [line for line in lines if line.startswith("kafka_consumergroup_lag{") and group in line and '"0"' in line]
    assert lag.endswith(" 1.0")
    for page in ("healthz", "readyz"):
        with urllib.request.urlopen(f"http://{broker.http}/{page}", timeout=10) as answer:
            assert answer.status == 200


def test_config_show_tells_where_a_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("node_id = 7\n")
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "config", "show", "-o", "json"],
        env=CLEAN | {"MILLSTREAM_FLUSH": "os"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    assert (shown["node_id"]["value"], shown["node_id"]["source"]) == (7, "file millstream.toml")
    assert shown["flush"]["source"] == "environment MILLSTREAM_FLUSH"
    assert shown["kafka"]["source"] == "default"


def test_help_and_serve_do_not_load_the_client() -> None:
    code = (
        "import sys, millstream.cli.app; print({'confluent_kafka', 'rich.table', 'prometheus_client'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


class Record:
    """As much of a message as a template asks for."""

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 2

    def offset(self) -> int:
        return 41

    def timestamp(self) -> tuple[int, int]:
        return 1, 1700000000000

    def headers(self) -> list[tuple[str, bytes | None]]:
        return [("a", b"1"), ("b", None)]

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes:
        return b"\xffv"


def test_a_broker_that_stores_nothing_is_not_said_to_be_away() -> None:
    """As with a database that is away: clients get a retriable error until their time is over."""
    sentence = str(explain(KafkaError(KafkaError._MSG_TIMED_OUT), "127.0.0.1:9092"))
    assert sentence.startswith("the broker at 127.0.0.1:9092 did not acknowledge them in time")
    sentence = str(explain(KafkaError(KafkaError.KAFKA_STORAGE_ERROR), "127.0.0.1:9092"))
    assert "its database is unavailable; the broker's log says which" in sentence


def test_a_template_knows_kcats_letters_and_escapes() -> None:
    render = compile_template(r"%t/%p@%o %T [%h] %k:%K %v=%s:%S 100%%\t\x41\\\n")
    assert render(Record()) == b"orders/2@41 1700000000000 [a=1,b=] :-1 \xffv=\xffv:2 100%\tA\\\n"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("start", Kind.START, 0),
        ("end", Kind.END, 0),
        ("15", Kind.OFFSET, 15),
        ("-3", Kind.RELATIVE, -3),
        ("+3", Kind.RELATIVE, 3),
        ("@1700000000000", Kind.TIME, 1700000000000),
        ("2023-11-14T22:13:20Z", Kind.TIME, 1700000000000),
        ("2023-11-14T22:13:20.5+00:00", Kind.TIME, 1700000000500),
    ],
)
def test_positions_are_read_as_people_write_them(text: str, kind: Kind, number: int) -> None:
    assert Position.parse(text) == Position(kind, number)
