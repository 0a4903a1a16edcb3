"""What a gigabyte of produced payload costs the broker in CPU, against a C program that copies a socket to a file.

Both sides get the same number of payload bytes on one connection. Ours come from librdkafka in batches of 1 MB, with
Kafka's framing on top (about 11 bytes a record), which counts against us; the reference's come from a bare sender.
Only the server's own process counts, so the client's speed matters little. `flush=os` on our side, because the C
program does not sync either. Every sample has a fresh server on an empty directory, warmed up by a small part of the
load.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from bench import client, servers
from bench.measure import Measure, Scale, Side

TOPIC = "produce"
CHUNK_BYTES = 1_000_000


def _sink(payload_bytes: int) -> float:
    servers.touch_memory(payload_bytes * 3 // 2)
    chunk = os.urandom(CHUNK_BYTES)
    with (
        servers.scratch() as directory,
        servers.reference("sink", str(directory / "out")) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=client.SECONDS_MAX) as connection,
    ):
        before = server.cpu_seconds()
        for _ in range(payload_bytes // CHUNK_BYTES):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != b"k":
            raise RuntimeError("the sink ended early")
        return (server.cpu_seconds() - before) / (payload_bytes / 1e9)


def _broker(payload_bytes: int, record_bytes: int) -> float:
    servers.touch_memory(payload_bytes * 3 // 2)
    records = payload_bytes // record_bytes
    with servers.millstream(flush="os") as server:
        client.create_topic(server.bootstrap, TOPIC)
        with client.Feeder(server.bootstrap, TOPIC, record_bytes) as feeder:
            feeder.feed(records // 50)
            before = server.cpu_seconds()
            feeder.feed(records)
            cpu = server.cpu_seconds() - before
            feeder.check_arrived()
    return cpu / (payload_bytes / 1e9)


def _measure(key: str, title: str, record_bytes: int, payload_bytes: int, must: float, aim: float) -> Measure:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        size = scale.of(payload_bytes)
        yield (lambda: _sink(size)), (lambda: _broker(size, record_bytes))

    return Measure(key, title, "C, socket to file", "CPU s/GB", must, aim, lower_is_better=True, sides=sides)


MEASURES = [
    _measure("produce", "broker CPU per GB produced, 1 KB records, flush=os", 1000, 1_000_000_000, must=1.5, aim=1.2),
    # a quarter of the bytes: librdkafka needs as long for them
    _measure(
        "produce-small", "broker CPU per GB produced, 100 B records, flush=os", 100, 240_000_000, must=2.2, aim=1.6
    ),
]
