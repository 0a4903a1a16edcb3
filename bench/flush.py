"""What durability costs: throughput with the default flush (synced before it is acknowledged) against `flush=os`.

The same batched librdkafka client, the same records of 1 KB, a fresh broker on an empty directory for every sample.
`acks=all` on both sides, which is what a client that asks for durability sets. The disk is in this figure: on one
that is slower than the client produces, the ratio is the disk's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bench import client, servers
from bench.measure import Measure, Scale, Side

TOPIC = "flush"
RECORD_BYTES = 1000
PAYLOAD_BYTES = 800_000_000


def _throughput(flush: str | None, payload_bytes: int) -> float:
    servers.touch_memory(payload_bytes * 3 // 2)
    os.sync()  # what an earlier sample left dirty must not be written during this one
    records = payload_bytes // RECORD_BYTES
    with servers.millstream(flush) as server:
        client.create_topic(server.bootstrap, TOPIC)
        with client.Feeder(server.bootstrap, TOPIC, RECORD_BYTES, acks="all") as feeder:
            feeder.feed(records // 20)
            seconds = feeder.feed(records)
            feeder.check_arrived()
    return records * RECORD_BYTES / 1e6 / seconds


@contextmanager
def _sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    size = scale.of(PAYLOAD_BYTES)
    yield (lambda: _throughput("os", size)), (lambda: _throughput(None, size))


MEASURES = [
    Measure(
        key="flush",
        title="produce throughput with the default flush, batched client",
        reference="the same broker, flush=os",
        unit="MB/s",
        must=0.8,
        aim=0.95,
        lower_is_better=False,
        sides=_sides,
    )
]
