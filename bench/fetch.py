"""What a gigabyte of fetched payload costs the broker in CPU, against a C program that sendfiles a file to a socket.

The client of both sides is drain.c, which discards what it gets: only the server's CPU counts, and a real consumer
would spend most of the run decoding. Against the broker it speaks Fetch v11 as librdkafka does with its defaults: 1
MiB a partition, one request in flight, the next offset taken from the last whole batch. The log holds 1 KB records in
batches of 1 MB, written by librdkafka; both files are in the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side

TOPIC = "fetch"
RECORD_BYTES = 1000
STORED_BYTES = 500_000_000
PASSES = 5
"""A sendfile of half a gigabyte is over in 0.15 seconds, and which core the client runs on matters as much as the work:
several passes make a sample long enough and mix the placements."""
PARTITION_BYTES_MAX = 1 << 20  # librdkafka's default fetch.message.max.bytes


def _write_file(path: Path, size: int) -> None:
    chunk = os.urandom(1_000_000)
    with path.open("wb") as file:
        for _ in range(size // len(chunk)):
            file.write(chunk)


def _sendfile(path: Path) -> float:
    size, cpu = path.stat().st_size, 0.0
    for _ in range(PASSES):
        with servers.reference("sendfile", str(path)) as server:
            before = server.cpu_seconds()
            servers.run_client("drain", "raw", server.port, size)
            cpu += server.cpu_seconds() - before
    return cpu / (PASSES * size / 1e9)


def _fetch(server: servers.Server, request: Path, size: int) -> float:
    before = server.cpu_seconds()
    got = sum(servers.run_client("drain", "kafka", server.port, size, request)[0] for _ in range(PASSES))
    return (server.cpu_seconds() - before) / (got / 1e9)


@contextmanager
def _sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    size = scale.of(STORED_BYTES)
    with ExitStack() as stack:
        directory = stack.enter_context(servers.scratch())
        broker = stack.enter_context(servers.millstream(flush="os"))
        _write_file(directory / "plain", size)
        request = directory / "request"
        request.write_bytes(frames.fetch_one_partition(TOPIC, PARTITION_BYTES_MAX))
        client.create_topic(broker.bootstrap, TOPIC)
        with client.Feeder(broker.bootstrap, TOPIC, RECORD_BYTES) as feeder:
            feeder.feed(size // RECORD_BYTES)
            feeder.check_arrived()
        _fetch(broker, request, size // 10)
        yield (lambda: _sendfile(directory / "plain")), (lambda: _fetch(broker, request, size))


MEASURES = [
    Measure(
        key="fetch",
        title="broker CPU per GB fetched",
        reference="C, sendfile",
        unit="CPU s/GB",
        must=3,
        aim=2,
        lower_is_better=True,
        sides=_sides,
    )
]
