"""Memory at rest: what a broker on an empty store holds after it started. The only figure that is not a ratio."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import servers
from bench.measure import Measure, Scale, Side

SETTLE_SECONDS = 1.0


def _rss_mb() -> float:
    with servers.millstream(flush=None) as server:
        time.sleep(SETTLE_SECONDS)
        return server.rss_mb()


@contextmanager
def _sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    yield None, _rss_mb


MEASURES = [
    Measure("memory", "memory at rest", "", "MB", must=60, aim=40, lower_is_better=True, sides=_sides),
]
