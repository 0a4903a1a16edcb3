"""kcat, the command: a process per producer, reader and member, with JSON lines out and events on standard error."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterable, Sequence
from typing import IO, Any

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.compat.clients import (
    FROM_START,
    HEARTBEAT_MS,
    REQUEST_MS,
    SESSION_MS,
    Client,
    Member,
    Reader,
    Seen,
    Sent,
    Start,
    wait_for,
)

KEY_END, RECORD_END = "\x1e", "\x1f"


class Kcat(Client):
    """It has no command to create a topic: producing to one, or asking for it, creates it with the broker's defaults.

    So topics here have the partitions that the shared broker gives, unless another client made them.
    """

    name = "kcat"
    assignors = ("range", "roundrobin", "cooperative-sticky")

    def create_topic(self, topic: str, partitions: int) -> None:
        if partitions == 1:
            _run([*_command(self.address, "-L"), "-t", topic])
            return
        from tests.compat.client_confluent import Confluent

        Confluent(self.address).create_topic(topic, partitions)

    def produce(
        self, topic: str, records: Iterable[Sent], *, codec: str | None = None, idempotent: bool = False
    ) -> None:
        """A process for each run of records that go to the same partition with the same headers."""
        runs: list[tuple[tuple[Any, ...], list[Sent]]] = []
        for record in records:
            assert record.timestamp_ms is None, "kcat cannot set timestamps"
            shape = (record.partition, record.headers, record.key is None)
            if not runs or runs[-1][0] != shape:
                runs.append((shape, []))
            runs[-1][1].append(record)
        for (partition, headers, is_plain), batch in runs:
            command = [*_command(self.address, "-P"), "-t", topic, "-D", RECORD_END, "-X", "acks=all"]
            command += [
                "-X",
                f"enable.idempotence={str(idempotent).lower()}",
                "-X",
                f"compression.type={codec or 'none'}",
            ]
            command += ["-p", str(partition)] if partition is not None else []
            command += [] if is_plain else ["-K", KEY_END]
            for name, value in headers or ():
                command += ["-H", f"{name}={value.decode()}"]
            lines = [
                (b"" if record.key is None else record.key + KEY_END.encode()) + (record.value or b"")
                for record in batch
            ]
            _run(command, RECORD_END.encode().join(lines))

    def reader(self, topic: str, partitions: Iterable[int], start: Start) -> Reader:
        places = list(partitions)
        assert len(places) == 1, "kcat reads one partition or all"
        offset = "end"
        if start == FROM_START:
            offset = "beginning"
        elif start.offset is not None:
            offset = str(start.offset)
        elif start.timestamp_ms is not None:
            offset = f"s@{start.timestamp_ms}"
        reader = KcatReader([*_command(self.address, "-C"), "-t", topic, "-p", str(places[0]), "-o", offset])
        if start == Start():
            reader.wait_for_event("Reached end of topic")
        return reader

    def member(self, group: str, topic: str, *, assignor: str = "range", instance: str | None = None) -> Member:
        command = [*_command(self.address, "-G"), group]
        settings = {
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": assignor,
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "reconnect.backoff.max.ms": 200,
        }
        if instance is not None:
            settings["group.instance.id"] = instance
        for name, value in settings.items():
            command += ["-X", f"{name}={value}"]
        return _Member([*command, topic], self.address, group, topic)


def _command(address: str, mode: str) -> list[str]:
    # kcat reads options up to -G GROUP; what follows are topics.
    common = ["kcat", "-b", address]
    return [*common, "-J", "-u", mode] if mode in ("-C", "-G") else [*common, mode]


def _run(command: Sequence[str], data: bytes = b"") -> str:
    done = subprocess.run(command, input=data, capture_output=True, timeout=REQUEST_MS / 1000)
    assert done.returncode == 0, (command, done.stderr.decode())
    return done.stdout.decode()


class KcatReader(Reader):
    def __init__(self, command: list[str]) -> None:
        super().__init__()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self.events: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._take_lines, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._take_events, args=(self.process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _take_lines(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)

    def _take_events(self, stream: IO[str]) -> None:
        for line in stream:
            self.events.append(line)

    def wait_for_event(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self.events), f"{text!r} in {self.events}", pause=0.01)

    def _poll(self, seconds: float) -> list[Seen]:
        found = []
        try:
            found.append(_parse(self._lines.get(timeout=seconds)))
            while True:
                found.append(_parse(self._lines.get_nowait()))
        except queue.Empty:
            return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(REQUEST_MS / 1000)
        for thread in self._threads:
            thread.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _parse(line: str) -> Seen:
    record = json.loads(line)
    names, values = record.get("headers", [])[::2], record.get("headers", [])[1::2]
    return Seen(
        record["partition"],
        record["offset"],
        None if record["key"] is None else record["key"].encode(),
        None if record["payload"] is None else record["payload"].encode(),
        [(name, value.encode()) for name, value in zip(names, values, strict=True)],
        record["ts"],
    )


class _Member(KcatReader, Member):
    """It commits by itself: when it loses partitions, when it ends, and every 5 s, which kcat does not let one change.

    Its assignment is in its rebalance messages.
    """

    commits_by_itself = True
    survives_restart = False  # it ends when all brokers are down, mostly: sometimes it does not see that they are

    def __init__(self, command: list[str], address: str, group: str, topic: str) -> None:
        super().__init__(command)
        self._address, self._group, self._topic = address, group, topic

    def give_up(self) -> None:
        self.process.kill()
        self.process.wait(REQUEST_MS / 1000)

    @property
    def assignment(self) -> set[int]:
        owned: set[int] = set()
        for line in list(self.events):
            if " rebalanced" not in line:
                continue
            partitions = {int(number) for number in re.findall(r" \[(\d+)\]", line)}
            owned = owned - partitions if "revoke" in line else owned | partitions
        return owned

    def commit(self) -> None:
        ends = {record.partition: record.offset + 1 for record in self.seen}
        places = [TopicPartition(self._topic, partition) for partition in ends]
        asked = [ConsumerGroupTopicPartitions(self._group, places)]
        admin = AdminClient({"bootstrap.servers": self._address})

        def is_committed() -> bool:
            answer = admin.list_consumer_group_offsets(asked)[self._group].result(REQUEST_MS / 1000)
            return all(each.offset == ends[each.partition] for each in answer.topic_partitions or [])

        wait_for(is_committed, f"commits of {ends}")
