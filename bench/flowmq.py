"""FlowMQ from publish to deliver: how long a message is under way, against the round trip of a uvloop echo server.

A C client publishes on one connection and is subscribed on another; the time from sending the PUBLISH to having the
whole MESSAGE counts, one message at a time, its acknowledgement outside the clock. The message is stored (`flush=os`)
before it is delivered. The echo server sends a frame of the same size back on the connection it came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench import servers
from bench.measure import Measure, Scale, Side

TOPIC = "deliver"
MESSAGE_BYTES = 100
SAMPLE_SECONDS = 4.0
NO_ERROR_CODE = -1
FLOWMQ_HEAD_BYTES = 5


@contextmanager
def _sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SAMPLE_SECONDS)
    with ExitStack() as stack:
        directory = stack.enter_context(servers.scratch())
        echo = stack.enter_context(servers.echo())
        broker = stack.enter_context(servers.millstream("os", "flowmq"))
        size = FLOWMQ_HEAD_BYTES + len(TOPIC) + 1 + MESSAGE_BYTES
        frame = directory / "frame"
        frame.write_bytes((size - 4).to_bytes(4, "big") + os.urandom(size - 4))

        def round_trip_us() -> float:
            return servers.run_client("load", echo.port, frame, 1, 1, seconds, NO_ERROR_CODE)[2]

        def deliver_us() -> float:
            return servers.run_client("deliver", broker.door("flowmq"), TOPIC, MESSAGE_BYTES, seconds)[2]

        yield round_trip_us, deliver_us


MEASURES = [
    Measure(
        key="flowmq",
        title="FlowMQ publish to deliver, median, flush=os",
        reference="uvloop echo round trip",
        unit="µs",
        must=4.0,
        aim=3.0,
        lower_is_better=True,
        sides=_sides,
    ),
]
