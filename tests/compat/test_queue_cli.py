"""`millstream queue` against a real broker: workers that run commands, dead letters and their way back, figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.connection import Connection
from millstream.admin.redrive_ledger import FROM_HEADER, Ledger, OffsetSet
from tests.command_line import Cli
from tests.compat import raw
from tests.serving import ServedBroker

pytestmark = pytest.mark.timeout(120)
COUNTS = ("available", "leased", "waiting", "done", "dead")


class QueueCli(Cli):
    def __init__(self, broker: ServedBroker) -> None:
        super().__init__(broker.address)
        self._http = broker.http

    def figures(self, group: str) -> dict[str, int]:
        """Straight from the broker's page: a command for every look would take long."""
        with urllib.request.urlopen(f"http://{self._http}/queues", timeout=10) as answer:
            (queue,) = [queue for queue in json.load(answer) if queue["group"] == group]
        return {key: sum(row[key] for row in queue["partitions"]) for key in COUNTS}


@pytest.fixture
def cli(broker: ServedBroker) -> QueueCli:
    return QueueCli(broker)


@pytest.fixture
def topic(cli: QueueCli) -> str:
    name = f"jobs-{uuid.uuid4().hex[:12]}"
    raw.create_topic(cli.address, name, 2)
    return name


@pytest.fixture
def group(topic: str) -> str:
    return f"workers-{topic}"


@pytest.fixture
def dlq(cli: QueueCli, topic: str, group: str) -> str:
    """A dead-letter topic of the test's own."""
    name = f"dead-{topic}"
    cli("queue", "create", group, "-c", f"errors.deadletterqueue.topic.name={name}")
    return name


class Workers:
    """`queue consume` of one topic with a shell script per record."""

    def __init__(self, cli: QueueCli, topic: str, group: str) -> None:
        self._cli = cli
        self._topic = topic
        self._group = group
        self.started: list[subprocess.Popen[bytes]] = []

    def arguments(self, script: str, *options: str) -> list[str]:
        return ["queue", "consume", self._topic, "--group", self._group, *options, "--", "sh", "-c", script]

    def drain(self, script: str, *options: str) -> tuple[str, str]:
        return self._cli.run(*self.arguments(script, "--until-end", *options))

    def start(self, script: str, *options: str) -> subprocess.Popen[bytes]:
        process = self._cli.start(*self.arguments(script, *options))
        self.started.append(process)
        return process


@pytest.fixture
def workers(cli: QueueCli, topic: str, group: str) -> Iterator[Workers]:
    made = Workers(cli, topic, group)
    yield made
    for process in made.started:
        for _ in range(2):  # the second one ends its commands too
            if process.poll() is None:
                process.terminate()
                time.sleep(0.3)
        process.communicate(timeout=20)


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> tuple[int, str]:
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    return process.returncode, err.decode()


def end_at_once(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """By a second signal; and a third, where the first two came so close together that they were taken for one."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return end(process, signal.SIGTERM)


def said_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """What it has said on stderr when that is there. Read past the buffer, of which `communicate` knows nothing."""
    assert process.stderr is not None
    said = b""
    while text not in said:
        more = os.read(process.stderr.fileno(), 4096)
        assert more, said
        said += more
    return said


def has_taken(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Whether a signal has reached its thread, which then does nothing before it has handled it."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return not any(mask >> (number - 1) & 1 for mask in pending)


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """What the condition gave, as soon as it gave something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def records(cli: QueueCli, topic: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cli("consume", topic, "--until-end", "-o", "json").splitlines()]


def test_the_exit_code_of_the_command_is_the_answer(
    cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str
) -> None:
    cli("produce", topic, "good", "flaky", "hopeless", "poison", "odd")
    out, err = workers.drain(
        """read value; echo "$value $MILLSTREAM_RECORD_ATTEMPT"
        case "$value $MILLSTREAM_RECORD_ATTEMPT" in
            good*|flaky\\ 3|odd\\ 2) exit 0;; flaky*|hopeless*) exit 1;; poison*) exit 2;; *) exit 77;;
        esac""",
        "--jobs",
        "2",
    )
    tried = sorted(out.splitlines())
    hopeless = [f"hopeless {attempt}" for attempt in (1, 2, 3, 4, 5)]
    assert tried == ["flaky 1", "flaky 2", "flaky 3", "good 1", *hopeless, "odd 1", "odd 2", "poison 1"]
    assert err == "12 records: 3 accepted, 8 released, 1 rejected\n"
    until(lambda: cli.figures(group)["dead"] == 2)
    assert cli.figures(group) == {"available": 0, "leased": 0, "waiting": 0, "done": 3, "dead": 2}
    reasons = {row["value"]: dict(row["headers"])["millstream-dead-reason"] for row in records(cli, dlq)}
    assert reasons == {"hopeless": "released by sh (exit code 1)", "poison": "rejected by sh (exit code 2)"}


def test_the_command_gets_the_whole_record(
    cli: QueueCli, topic: str, group: str, workers: Workers, tmp_path: Path
) -> None:
    value = bytes(range(256)).replace(b"\n", b"") * 1000
    cli("produce", topic, "-p", "1", "-k", "k 1", "-H", "trace-id=abc", "-H", "trace-id=def", stdin=value)
    workers.drain(f"cat > {tmp_path}/value; env > {tmp_path}/environ")
    assert (tmp_path / "value").read_bytes() == value
    lines = (line.partition("=") for line in (tmp_path / "environ").read_text().splitlines())
    environ = {name: text for name, _, text in lines if name.startswith("MILLSTREAM_RECORD_")}
    assert abs(int(environ.pop("MILLSTREAM_RECORD_TIMESTAMP")) / 1000 - time.time()) < 100
    assert json.loads(environ.pop("MILLSTREAM_RECORD_HEADERS")) == [["trace-id", "abc"], ["trace-id", "def"]]
    assert environ == {
        "MILLSTREAM_RECORD_TOPIC": topic,
        "MILLSTREAM_RECORD_PARTITION": "1",
        "MILLSTREAM_RECORD_OFFSET": "0",
        "MILLSTREAM_RECORD_GROUP": group,
        "MILLSTREAM_RECORD_ATTEMPT": "1",
        "MILLSTREAM_RECORD_KEY": "k 1",
        "MILLSTREAM_RECORD_HEADER_TRACE_ID": "def",
    }


def test_so_many_jobs_run_at_a_time(cli: QueueCli, topic: str, workers: Workers, tmp_path: Path) -> None:
    cli("produce", topic, *"abcdef")
    # Each waits until three are there together: with fewer hands this would never end.
    script = f"""touch {tmp_path}/here-$$
    for i in $(seq 200); do [ $(ls {tmp_path} | wc -l) -ge 3 ] && exit 0; sleep 0.05; done; exit 2"""
    _, err = workers.drain(script, "-j", "3")
    assert err == "6 records: 6 accepted\n"


@pytest.mark.slow
def test_a_lease_is_renewed_while_the_command_runs(
    cli: QueueCli, topic: str, group: str, workers: Workers, tmp_path: Path
) -> None:
    cli("queue", "create", group, "-c", "share.record.lock.duration.ms=8000")
    cli("produce", topic, "slow")
    first = workers.start(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done", "-n", "1")
    until(lambda: cli.figures(group)["leased"] == 1)
    time.sleep(9)
    assert workers.drain("exit 0")[1] == "0 records: 0 accepted\n"
    (tmp_path / "go").touch()
    assert first.communicate(timeout=30)[1] == b"1 record: 1 accepted\n"
    (row,) = [row for row in cli.json("queue", "describe", group)["partitions"] if row["done"]]
    assert row["redeliveries"] == 0


def test_a_command_that_takes_too_long_is_stopped_and_its_record_released(
    cli: QueueCli, topic: str, workers: Workers
) -> None:
    cli("produce", topic, "stuck")
    started = time.monotonic()
    _, err = workers.drain('[ "$MILLSTREAM_RECORD_ATTEMPT" = 2 ] || sleep 60', "--timeout", "4s")
    assert "took longer than 4 s" in err and err.endswith("2 records: 1 accepted, 1 released\n")
    assert time.monotonic() - started < 50


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_what_runs_finish_and_leaves_the_rest(
    cli: QueueCli, topic: str, group: str, workers: Workers, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    cli("produce", topic, *"abcde")
    script = f"touch {tmp_path}/started-$$; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    process = workers.start(script, "-j", "2")
    until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    process.send_signal(number)
    until(lambda: has_taken(process, number))
    assert process.poll() is None
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, b"2 records: 2 accepted\n")
    assert cli.figures(group) == {"available": 3, "leased": 0, "waiting": 0, "done": 2, "dead": 0}
    assert cli.json("queue", "describe", group)["members"] == 0


def test_a_second_signal_stops_the_commands_and_releases_their_records(
    cli: QueueCli, topic: str, group: str, workers: Workers, tmp_path: Path
) -> None:
    cli("produce", topic, "a")
    process = workers.start(f"touch {tmp_path}/started; sleep 60")
    until((tmp_path / "started").exists)
    assert end_at_once(process) == (0, "1 record: 0 accepted, 1 released\n")
    assert cli.figures(group)["available"] == 1


def test_a_worker_that_is_killed_holds_nobody_up(cli: QueueCli, topic: str, workers: Workers, tmp_path: Path) -> None:
    cli("produce", topic, "a")
    process = workers.start(f"touch {tmp_path}/started; sleep 8")
    until((tmp_path / "started").exists)
    process.kill()
    started = time.monotonic()
    out, _ = workers.drain("echo $MILLSTREAM_RECORD_ATTEMPT")
    assert out == "2\n" and time.monotonic() - started < 25  # the lease would have lasted 30 s


def test_workers_go_on_when_the_broker_was_killed_and_is_back(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data") as broker:
        cli = QueueCli(broker)
        cli("topic", "create", "jobs")
        cli("produce", "jobs", "before")
        workers = Workers(cli, "jobs", "workers")
        process = workers.start(
            f"""read v; echo "$v $MILLSTREAM_RECORD_ATTEMPT" >> {tmp_path}/ran
            while [ ! -e {tmp_path}/go ]; do sleep 0.05; done""",
            "-n",
            "3",
        )
        until((tmp_path / "ran").exists)
        broker.kill()
        said = said_until(process, b"lost the broker")
        broker.start()
        cli("produce", "jobs", "after")
        (tmp_path / "go").touch()
        _, more = process.communicate(timeout=60)
        err = said + more
        assert process.returncode == 0, err
        ran = sorted((tmp_path / "ran").read_text().splitlines())
        # A delivery is written down soon after it is made: the one that was just made may have been forgotten.
        assert ran in (["after 1", "before 1", "before 2"], ["after 1", "before 1", "before 1"])
        assert b"lost the lease, so the record may be delivered again" in err
        assert cli.figures("workers") == {"available": 0, "leased": 0, "waiting": 0, "done": 2, "dead": 0}


def test_a_delayed_record_waits_and_is_not_peeked_at(cli: QueueCli, topic: str, group: str, workers: Workers) -> None:
    cli("produce", topic, "-p", "0", "--delay", "1h", "in an hour")
    cli("produce", topic, "-p", "0", "--at", "2199-01-01T00:00Z", "in a century")
    cli("produce", topic, "-p", "0", "now")
    cli("queue", "create", group)
    assert workers.drain("cat; echo")[0] == "now\n"
    cli("produce", topic, "-p", "0", "--delay", "3s", "soon")
    until(lambda: cli("queue", "peek", topic, "--group", group) == "0 3 soon\n")
    assert cli.figures(group)["waiting"] == 2
    assert workers.drain("cat; echo")[0] == "soon\n"
    deliver_at = {row["value"]: dict(row["headers"]).get("millstream-deliver-at") for row in records(cli, topic)}
    assert deliver_at["now"] is None and deliver_at["in a century"] == "7226582400000"
    assert abs(int(deliver_at["in an hour"] or 0) / 1000 - time.time() - 3600) < 60


def test_delayed_lines_are_delayed_from_when_they_were_read(cli: QueueCli, topic: str) -> None:
    process = cli.start("produce", topic, "--delay", "10m")
    assert process.stdin is not None
    time.sleep(2.5)
    moment = time.time()
    process.stdin.write(b"line\n")
    process.stdin.flush()
    assert process.communicate(timeout=30)[0] == b""
    (row,) = records(cli, topic)
    assert int(dict(row["headers"])["millstream-deliver-at"]) / 1000 - moment >= 599.99


def test_peek_shows_what_is_next_and_leases_nothing(cli: QueueCli, topic: str, group: str, workers: Workers) -> None:
    cli("produce", topic, "-p", "0", "-k", "k", *"abcd")
    workers.drain("read v; [ $v != b ]", "-n", "2")  # b is released
    assert cli("queue", "peek", topic, "-g", group, "-f", r"%p %o %k %v\n") == "0 1 k b\n0 2 k c\n0 3 k d\n"
    assert cli("queue", "peek", topic, "-g", group, "-n", "1") == "0 1 b\n"
    (row,) = map(json.loads, cli("queue", "peek", topic, "-g", group, "-n", "1", "-o", "json").splitlines())
    assert (row["offset"], row["value"]) == (1, "b")
    assert cli.figures(group) == {"available": 3, "leased": 0, "waiting": 0, "done": 1, "dead": 0}
    workers.drain("exit 0")
    assert cli.run("queue", "peek", topic, "-g", group) == ("", f"no record of {topic} is available to {group} now\n")


def test_purging_needs_a_yes_and_an_idle_queue(
    cli: QueueCli, topic: str, group: str, workers: Workers, tmp_path: Path
) -> None:
    cli("produce", topic, *"abcdef")
    process = workers.start(f"touch {tmp_path}/started; sleep 60")
    until((tmp_path / "started").exists)
    assert "still has members" in cli.fails("queue", "purge", topic, "-g", group, "--yes")
    end_at_once(process)
    assert "up to 6 records" in cli.fails("queue", "purge", topic, "-g", group)
    assert cli.figures(group)["available"] == 6
    assert cli("queue", "purge", topic, "-g", group, "--yes").startswith(f"Purged {topic} for {group}")
    assert cli.figures(group)["available"] == 0
    cli("produce", topic, "new")
    assert workers.drain("cat; echo")[0] == "new\n"


def test_queues_are_made_listed_set_moved_and_deleted(cli: QueueCli, topic: str, group: str, workers: Workers) -> None:
    cli("produce", topic, "-p", "0", *"abcd")
    assert cli("queue", "create", group, "-c", "share.delivery.count.limit=7") == f"Created {group}\n"
    assert workers.drain("exit 0")[1] == "4 records: 4 accepted\n"
    (row,) = [row for row in cli.json("queue", "list") if row["group"] == group]
    assert (row["topics"], row["done"], row["available"], row["members"]) == ([topic], 4, 0, 0)
    assert cli.json("queue", "describe", group)["settings"] == {
        "share.auto.offset.reset": "earliest",
        "share.delivery.count.limit": "7",
    }
    cli("queue", "set", group, "millstream.retry.backoff.ms=100", "--unset", "share.delivery.count.limit")
    assert cli.json("queue", "describe", group)["settings"] == {
        "millstream.retry.backoff.ms": "100",
        "share.auto.offset.reset": "earliest",
    }
    moved = cli.json("queue", "seek", group, "--topic", topic, "--to", "-2", "--partition", "0")
    assert moved["partitions"] == [{"topic": topic, "partition": 0, "from": 4, "to": 2}]
    assert workers.drain("cat; echo")[0] == "c\nd\n"
    for table in (cli("queue", "list"), cli("queue", "describe", group)):
        assert "AVAILABLE" in table and topic in table
    assert cli("queue", "delete", group) == f"Deleted {group}\n"
    assert group not in [row["group"] for row in cli.json("queue", "list")]


def test_a_new_queue_begins_where_it_is_told(cli: QueueCli, topic: str, group: str, workers: Workers) -> None:
    cli("produce", topic, "old")
    assert workers.drain("cat", "--from", "end")[0] == ""
    cli("produce", topic, "new")
    assert workers.drain("cat; echo", "--from", "start")[0] == "new\n"  # it is not new any more


def test_the_metrics_tell_what_the_queues_hold(
    broker: Any, cli: QueueCli, topic: str, group: str, workers: Workers
) -> None:
    cli("produce", topic, "-p", "1", *"abc")
    workers.drain("exit 0", "-n", "1")
    with urllib.request.urlopen(f"http://{broker.http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    mine = dict(line.rsplit(" ", 1) for line in lines if f'group="{group}"' in line and 'partition="1"' in line)
    values = {name.partition("{")[0]: float(value) for name, value in mine.items()}
    assert 0 < values.pop("millstream_queue_oldest_available_seconds") < 100
    assert values == {
        "millstream_queue_available": 2,
        "millstream_queue_leased": 0,
        "millstream_queue_waiting": 0,
        "millstream_queue_done_total": 1,
        "millstream_queue_dead_total": 0,
        "millstream_queue_redeliveries_total": 0,
    }


# The way back


def kill_all(workers: Workers, cli: QueueCli, group: str, count: int) -> None:
    workers.drain("exit 2", "-j", "4")
    until(lambda: cli.figures(group)["dead"] == count)


def test_dead_letters_go_back_once_and_count_how_often(
    cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str
) -> None:
    cli("produce", topic, "-p", "1", "-k", "key", "-H", "trace=1", "poison")
    kill_all(workers, cli, group, 1)
    redrive = ("queue", "redrive", "--from", dlq)
    would = cli.json(*redrive, "--dry-run")
    assert would["letters"] == [
        {"topic": topic, "group": group, "reason": "rejected by sh (exit code 2)", "records": 1}
    ]
    assert len(records(cli, topic)) == 1
    assert cli.json(*redrive)["sent"] == 1
    again = cli.json(*redrive)
    assert (again["sent"], again["skipped"]) == (0, {"already sent back": 1})
    assert cli.json(*redrive, "--dry-run")["letters"] == []
    first, second = records(cli, topic)
    assert [second[name] for name in ("partition", "key", "value")] == [1, "key", "poison"]
    assert second["headers"] == [["trace", "1"], ["millstream-redriven", "1"], [FROM_HEADER, f"{dlq}/0/0"]]
    assert second["timestamp"] > first["timestamp"]

    kill_all(workers, cli, group, 2)
    assert cli.json(*redrive)["sent"] == 1
    assert dict(records(cli, topic)[2]["headers"])["millstream-redriven"] == "2"


@pytest.mark.slow
def test_a_redrive_takes_only_what_is_asked_for(
    cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str
) -> None:
    cli("produce", topic, "-p", "0", *"abcdef")
    workers.drain("read v; case $v in a|b) exit 1;; *) exit 2;; esac")
    until(lambda: cli.figures(group)["dead"] == 6)
    before = time.time()
    redrive = ("queue", "redrive", "--from", dlq)
    for nothing in (
        ("--topic", "other"),
        ("--group", "other"),
        ("--reason", "no such reason"),
        ("--since", f"@{int(before * 1000) + 60_000}"),
        ("--until", "1h"),
    ):
        assert cli.json(*redrive, *nothing, "--dry-run")["letters"] == [], nothing
    assert cli.json(*redrive, "--reason", "RELEASED")["sent"] == 2
    assert cli.json(*redrive, "--since", "1h", "--topic", topic, "--group", group, "--limit", "3")["sent"] == 3
    assert cli.json(*redrive)["sent"] == 1
    sent = [row["value"] for row in records(cli, topic)[6:]]
    assert sorted(sent) == list("abcdef") and sorted(sent[:2]) == ["a", "b"]


@pytest.mark.slow
def test_a_redrive_keeps_to_its_rate(cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str) -> None:
    cli("produce", topic, "-p", "0", *"abcdefgh")
    kill_all(workers, cli, group, 8)
    assert cli.json("queue", "redrive", "--from", dlq, "--rate", "4/s")["sent"] == 8
    times = [row["timestamp"] for row in records(cli, topic)[8:]]
    assert 900 <= times[-1] - times[0] <= 10_000


def test_a_redrive_that_was_cut_short_is_taken_up_without_repeating_or_forgetting(
    cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str
) -> None:
    cli("produce", topic, "-p", "0", *"abcd")
    kill_all(workers, cli, group, 4)
    ledger = Ledger(Connection(cli.address), dlq, may_write=True)
    ledger.begin({0: OffsetSet([(0, 3)])}, {(topic, 0): 4})
    ledger.close()
    letters = records(cli, dlq)
    cli("produce", topic, "-p", "0", "-H", f"{FROM_HEADER}={dlq}/0/2", str(letters[2]["value"]))
    done = cli.json("queue", "redrive", "--from", dlq)
    assert done["sent"] == 3
    assert done["skipped"] == {"sent back by an interrupted redrive": 1, "already sent back": 1}
    assert sorted(row["value"] for row in records(cli, topic)[4:]) == list("abcd")
    assert cli.json("queue", "redrive", "--from", dlq)["sent"] == 0


@pytest.mark.slow
def test_killed_in_the_middle_a_redrive_still_sends_each_once(
    cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str
) -> None:
    values = [f"value-{number}" for number in range(300)]
    cli("produce", topic, "-p", "0", stdin="\n".join(values).encode())
    cli("queue", "set", group, "share.partition.max.record.locks=1000")
    kill_all_with_a_client(cli, topic, group, 300)
    until(lambda: cli.figures(group)["dead"] == 300)
    for _ in range(2):
        process = cli.start("queue", "redrive", "--from", dlq, "--rate", "20/s")
        before = len(records(cli, topic))
        until(lambda before=before: len(records(cli, topic)) > before)  # type: ignore[misc]
        process.kill()
        process.communicate()
    assert len(records(cli, topic)) < 600
    cli("queue", "redrive", "--from", dlq)
    assert sorted(row["value"] for row in records(cli, topic)[300:]) == sorted(values)


def kill_all_with_a_client(cli: QueueCli, topic: str, group: str, count: int) -> None:
    """With Kafka's own client: a command per record would take long."""
    from confluent_kafka import AcknowledgeType, ShareConsumer

    settings = {"bootstrap.servers": cli.address, "group.id": group, "share.acknowledgement.mode": "explicit"}
    with ShareConsumer(settings) as consumer:
        consumer.subscribe([topic])
        deadline = time.monotonic() + 30
        while count and time.monotonic() < deadline:
            for message in consumer.poll(1.0):
                assert message.error() is None, message.error()
                consumer.acknowledge(message, AcknowledgeType.REJECT)
                count -= 1
            consumer.commit_sync(10)
    assert count == 0


@pytest.mark.slow
def test_one_redrive_at_a_time(cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str) -> None:
    cli("produce", topic, "a")
    kill_all(workers, cli, group, 1)
    ledger = Ledger(Connection(cli.address), dlq, may_write=True)
    try:
        assert "another redrive is running" in cli.fails("queue", "redrive", "--from", dlq)
        ledger.wait(0)
    finally:
        ledger.close()
    assert cli.json("queue", "redrive", "--from", dlq)["sent"] == 1


def test_what_has_no_way_back_is_left_alone(cli: QueueCli, topic: str, group: str, workers: Workers, dlq: str) -> None:
    cli("produce", topic, "a")
    kill_all(workers, cli, group, 1)
    cli("produce", dlq, "from somebody else")
    cli("topic", "delete", topic)
    done = cli.json("queue", "redrive", "--from", dlq)
    assert done["sent"] == 0
    assert done["skipped"] == {"of a deleted topic": 1, "without an original topic": 1}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("queue", "describe", "nobody"), "there is no queue nobody; `millstream queue list` shows"),
        (("queue", "peek", "nowhere", "-g", "nobody"), "there is no topic nowhere"),
        (("queue", "purge", "nowhere", "-g", "nobody", "--yes"), "there is no queue nobody"),
        (("queue", "seek", "nobody", "--topic", "t", "--to", "end"), "there is no queue nobody"),
        (("queue", "set", "nobody", "share.delivery.count.limit=5"), "there is no queue nobody"),
        (("queue", "delete", "nobody"), "there is no queue nobody"),
        (("queue", "create", "x", "-c", "share.delivery.count.limit=0"), "share.delivery.count.limit"),
        (("queue", "create", "x", "-c", "no.such.setting=1"), "no.such.setting"),
        (("queue", "redrive", "--from", "nowhere"), "there is no topic nowhere, so there are no dead letters"),
        (("queue", "consume", "nowhere", "-g", "g", "--", "true"), "there is no topic nowhere"),
        (("queue", "consume", "t", "-g", "g", "--", "no-such-command"), "there is no command no-such-command"),
        (("queue", "list", "-b", "127.0.0.1:1"), "no broker answers at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_ends_in_one_sentence(cli: QueueCli, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in cli.fails(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("queue",),
        ("queue", "consume", "t", "--", "true"),
        ("queue", "consume", "t", "-g", "g"),
        ("queue", "consume", "t", "-g", "g", "-j", "0", "--", "true"),
        ("queue", "consume", "t", "-g", "g", "--timeout", "soon", "--", "true"),
        ("queue", "set", "g"),
        ("queue", "redrive", "--rate", "fast"),
        ("queue", "redrive", "--since", "yesterday"),
        ("queue", "seek", "g", "--topic", "t", "--to", "nowhere"),
        ("produce", "t", "--delay", "soon", "x"),
        ("produce", "t", "--delay", "10", "x"),
        ("produce", "t", "--at", "2001-01-01", "x"),
        ("produce", "t", "--at", "noon", "x"),
        ("produce", "t", "--at", "2199-01-01", "--delay", "1m", "x"),
    ],
)
def test_what_is_not_understood_ends_with_exit_code_2(cli: QueueCli, arguments: tuple[str, ...]) -> None:
    cli.run(*arguments, code=2)


def test_a_stream_group_is_not_taken_for_a_queue(cli: QueueCli, topic: str) -> None:
    reader = f"reader-{topic}"
    cli("produce", topic, "a")
    cli("consume", topic, "--group", reader, "-n", "1")
    assert "is not a queue" in cli.fails("queue", "consume", topic, "-g", reader, "--", "true")
    assert "there is no queue" in cli.fails("queue", "delete", reader)
