"""Small requests: how many a second, and how long one takes, against a uvloop server that echoes frames.

Both sides get the same bytes from the same C load generator: a Produce v7 request with one record of 100 B and a
valid checksum. The echo server sends each frame back; the broker checks, stores (`flush=os`) and answers it. The
generator checks that every answer is in order and carries no error.

`requests` goes to one partition, so on each connection every request is like the one before. `requests-spread` sends
them to six partitions in turn, as a producer with keys does: it shows how much of the figure rests on that likeness.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side, Sides

TOPIC = "requests"
RECORD_BYTES = 100
SAMPLE_SECONDS = 4.0
SPREAD_PARTITIONS = 6
NO_ERROR_CODE = -1


def _sides(connections: int, in_flight: int, figure: Callable[[list[float]], float], partitions: int = 1) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        with ExitStack() as stack:
            directory = stack.enter_context(servers.scratch())
            echo = stack.enter_context(servers.echo())
            broker = stack.enter_context(servers.millstream(flush="os"))
            client.create_topic(broker.bootstrap, TOPIC, partitions)
            frame = directory / "frame"
            values = [os.urandom(RECORD_BYTES)]
            frame.write_bytes(b"".join(frames.produce(TOPIC, values, index) for index in range(partitions)))

            def load(server: servers.Server, error_at: int) -> float:
                seconds = scale.seconds(SAMPLE_SECONDS)
                return figure(servers.run_client("load", server.port, frame, connections, in_flight, seconds, error_at))

            yield (lambda: load(echo, NO_ERROR_CODE)), (lambda: load(broker, frames.produce_error_at(TOPIC)))

    return sides


def _rate(numbers: list[float]) -> float:
    requests, seconds, _ = numbers
    return requests / seconds


def _round_trip_us(numbers: list[float]) -> float:
    return numbers[2]


MEASURES = [
    Measure(
        key="requests",
        title="one-record requests per second, 10 connections × 10 in flight, flush=os",
        reference="uvloop echo server",
        unit="requests/s",
        must=0.45,
        aim=0.7,
        lower_is_better=False,
        sides=_sides(10, 10, _rate),
    ),
    Measure(
        key="requests-spread",
        title=f"the same, each connection to {SPREAD_PARTITIONS} partitions in turn",
        reference="uvloop echo server",
        unit="requests/s",
        must=None,
        aim=None,
        lower_is_better=False,
        sides=_sides(10, 10, _rate, SPREAD_PARTITIONS),
    ),
    Measure(
        key="round-trip",
        title="round trip of one request in flight, median, flush=os",
        reference="uvloop echo server",
        unit="µs",
        must=2.2,
        aim=1.8,
        lower_is_better=True,
        sides=_sides(1, 1, _round_trip_us),
    ),
]
