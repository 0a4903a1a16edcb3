"""Single records through the Flume door: how many a second, and what durability costs when many clients send them.

`flume` has one connection with one request in flight, as Flume's own client has, against a uvloop server that echoes
the same frame. Flume publishes 6,200 msg/s for this; the figure beside the ratio must not be below that.

`flume-durable` has a hundred such connections. Each record is answered when it is synced; the reference is the same
broker with `flush=os`, which syncs nothing. It is the inlet's figure: how many records share a batch and a sync.

Both get the same bytes from load.c: a Produce request with a payload of 100 B. It checks that every answer is in order
and carries no error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import servers
from bench.measure import Measure, Scale, Side

TOPIC = "flume"
PAYLOAD_BYTES = 100
CONNECTIONS = 100
SAMPLE_SECONDS = 4.0
NO_ERROR_CODE = -1
ERROR_AT = 4 + 4 + 8  # request id, partition, offset
ID_AT = 4 + 2  # size, API key


def _frame(path: Path) -> Path:
    """Produce to partition 0; written out here, for the ruler must not be made from what it measures."""
    topic = TOPIC.encode()
    body = struct.pack(">hi", 0, 0) + struct.pack(">h", len(topic)) + topic
    body += struct.pack(">iii", 0, 0, PAYLOAD_BYTES) + os.urandom(PAYLOAD_BYTES)
    path.write_bytes(struct.pack(">i", len(body)) + body)
    return path


def _rate(port: int, frame: Path, connections: int, seconds: float, error_at: int) -> float:
    requests, counted_s, _ = servers.run_client("load", port, frame, connections, 1, seconds, error_at, ID_AT)
    return requests / counted_s


@contextmanager
def _against_echo(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SAMPLE_SECONDS)
    with ExitStack() as stack:
        frame = _frame(stack.enter_context(servers.scratch()) / "frame")
        echo = stack.enter_context(servers.echo())
        broker = stack.enter_context(servers.millstream("os", "flume"))
        yield (
            lambda: _rate(echo.port, frame, 1, seconds, NO_ERROR_CODE),
            lambda: _rate(broker.door("flume"), frame, 1, seconds, ERROR_AT),
        )


@contextmanager
def _durable(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SAMPLE_SECONDS)
    with ExitStack() as stack:
        frame = _frame(stack.enter_context(servers.scratch()) / "frame")

        def rate(flush: str | None) -> float:
            os.sync()  # what an earlier sample left dirty must not be written during this one
            with servers.millstream(flush, "flume") as broker:
                return _rate(broker.door("flume"), frame, CONNECTIONS, seconds, ERROR_AT)

        yield (lambda: rate("os")), (lambda: rate(None))


MEASURES = [
    Measure(
        key="flume",
        title="Flume produce, 100 B, one connection, one in flight, flush=os",
        reference="uvloop echo server",
        unit="requests/s",
        must=0.35,
        aim=0.5,
        lower_is_better=False,
        sides=_against_echo,
    ),
    Measure(
        key="flume-durable",
        title=f"Flume produce, 100 B, {CONNECTIONS} connections, synced before it is answered",
        reference="the same broker, flush=os",
        unit="requests/s",
        must=0.5,
        aim=0.8,
        lower_is_better=False,
        sides=_durable,
    ),
]
