"""What a gigabyte of produced payload costs the broker in CPU, against a C program that copies a socket to a file.

Both sides have the same client, librdkafka with batches of 1 MB, so both see the same frames at the same pace and
share the machine with the same work. The reference, kafka_sink.c, writes what follows a request's header to a file
as it comes and sends an answer that was prepared for it; it looks at nothing. Only the server's own process counts.
`flush=os` on our side, because the C program does not sync either. Every sample has a fresh server on an empty
directory, warmed up by a small part of the load.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side
from millstream.wire.kafka import api_versions, metadata, produce

TOPIC = "produce"
CHUNK_BYTES = 1_000_000
IN_FLIGHT = 5
RECORD_OVERHEAD_MAX = 12  # bytes around the value of a record without key and headers


def _write_answers(directory: Path, port: int) -> None:
    """What the reference sends: one file per API and version that librdkafka may choose from the first of them."""
    ranges = [(0, 3, 7), (1, 4, 11), (2, 1, 2), (3, 0, 4), (18, 0, 3)]
    topics = [metadata.TopicEntry(0, TOPIC, UUID(int=1), 1, [metadata.Leads(1, 0, (1,), (1,))])]
    brokers = [metadata.BrokerEntry(1, "127.0.0.1", port)]
    bodies = {
        **{(18, version): api_versions.encode(version, 0, ranges) for version in range(4)},
        **{(3, version): metadata.encode(version, brokers, "bench", 1, topics) for version in range(5)},
        **{(0, version): produce.encode([produce.PartitionAnswer(TOPIC, 0, 0, 0)], version) for version in range(3, 8)},
    }
    for (key, version), body in bodies.items():
        (directory / f"{key}.{version}").write_bytes((4 + len(body)).to_bytes(4, "big") + bytes(4) + body)


def _sink(payload_bytes: int, record_bytes: int) -> float:
    records = payload_bytes // record_bytes
    with (
        servers.scratch() as directory,
        servers.reference("kafka_sink", str(directory / "out"), str(directory)) as server,
    ):
        _write_answers(directory, server.port)
        with client.Feeder(f"127.0.0.1:{server.port}", TOPIC, record_bytes) as feeder:
            feeder.feed(records // 50)
            servers.touch_memory(payload_bytes * 3 // 2)
            before = server.cpu_seconds()
            feeder.feed(records)
            cpu = server.cpu_seconds() - before
        if (directory / "out").stat().st_size < payload_bytes:
            raise RuntimeError("the reference has not written everything")
    return cpu / (payload_bytes / 1e9)


def _bare_sink(payload_bytes: int, _record_bytes: int) -> float:
    """The same bytes from a sender that does nothing else, and leaves the machine and its caches to the server."""
    chunk = os.urandom(CHUNK_BYTES)
    with (
        servers.scratch() as directory,
        servers.reference("sink", str(directory / "out")) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=client.SECONDS_MAX) as connection,
    ):
        servers.touch_memory(payload_bytes * 3 // 2)
        before = server.cpu_seconds()
        for _ in range(payload_bytes // CHUNK_BYTES):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != b"k":
            raise RuntimeError("the sink ended early")
        return (server.cpu_seconds() - before) / (payload_bytes / 1e9)


def _broker(payload_bytes: int, record_bytes: int) -> float:
    records = payload_bytes // record_bytes
    with servers.millstream(flush="os") as server:
        client.create_topic(server.bootstrap, TOPIC)
        with client.Feeder(server.bootstrap, TOPIC, record_bytes) as feeder:
            feeder.feed(records // 50)
            servers.touch_memory(payload_bytes * 3 // 2)
            before = server.cpu_seconds()
            feeder.feed(records)
            cpu = server.cpu_seconds() - before
            feeder.check_arrived()
    return cpu / (payload_bytes / 1e9)


def _bare_broker(payload_bytes: int, record_bytes: int) -> float:
    """Prepared requests, from a sender as bare as the one of `_bare_sink`."""
    values = [os.urandom(record_bytes)] * (CHUNK_BYTES // (record_bytes + RECORD_OVERHEAD_MAX))
    with servers.millstream(flush="os") as server:
        client.create_topic(server.bootstrap, TOPIC)
        with socket.create_connection(("127.0.0.1", server.port), timeout=client.SECONDS_MAX) as connection:
            frame = frames.produce(TOPIC, values)
            count = payload_bytes // (len(values) * record_bytes)
            _send_frames(connection, frame, count // 50)
            servers.touch_memory(payload_bytes * 3 // 2)
            before = server.cpu_seconds()
            _send_frames(connection, frame, count)
            cpu = server.cpu_seconds() - before
    return cpu / (payload_bytes / 1e9)


def _send_frames(connection: socket.socket, frame: bytes, count: int) -> None:
    error_at = 4 + frames.produce_error_at(TOPIC)
    answers = connection.makefile("rb")
    for sent in range(count + IN_FLIGHT):
        if sent < count:
            connection.sendall(frame)
        if sent >= IN_FLIGHT:
            size = answers.read(4)
            answer = size + answers.read(int.from_bytes(size, "big"))
            if answer[error_at : error_at + 2] != b"\0\0":
                raise RuntimeError("the broker refused a batch")


Fed = Callable[[int, int], float]


def _measure(
    key: str,
    title: str,
    reference: str,
    record_bytes: int,
    payload_bytes: int,
    sources: tuple[Fed, Fed],
    must: float | None = None,
    aim: float | None = None,
) -> Measure:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        size = scale.of(payload_bytes)
        yield (lambda: sources[0](size, record_bytes)), (lambda: sources[1](size, record_bytes))

    return Measure(key, title, reference, "CPU s/GB", must, aim, lower_is_better=True, sides=sides)


GB = 1_000_000_000
QUARTER = 240_000_000  # of the bytes, where records are small: librdkafka needs as long for them
BOTH, NEITHER, OURS = (_sink, _broker), (_bare_sink, _bare_broker), (_bare_sink, _broker)
C = "C, socket to file"

MEASURES = [
    _measure("produce", "broker CPU per GB produced, 1 KB records, flush=os", C, 1000, GB, BOTH, 1.5, 1.2),
    _measure("produce-small", "broker CPU per GB produced, 100 B records, flush=os", C, 100, QUARTER, BOTH, 2.2, 1.6),
    _measure("produce-bare", "1 KB, bare senders on both sides", f"{C}, bare", 1000, GB, NEITHER),
    _measure("produce-small-bare", "100 B, bare senders on both sides", f"{C}, bare", 100, QUARTER, NEITHER),
    _measure("produce-mixed", "1 KB, librdkafka to us, a bare sender to C", f"{C}, bare", 1000, GB, OURS),
    _measure("produce-small-mixed", "100 B, librdkafka to us, a bare sender to C", f"{C}, bare", 100, QUARTER, OURS),
]
