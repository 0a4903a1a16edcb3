"""The pages for monitoring systems: `/metrics`, `/healthz`, `/readyz`; and `/queues` and `/damage`, for the command
line.

`/healthz` returns 503 when only a restart helps (a log went read-only): an orchestrator restarts the broker. `/readyz`
returns 503 while the broker starts or stops: a load balancer waits. Any response shows that the event loop is alive,
since the door runs on it. A restart does not help against a full disk: `/healthz` returns "degraded" with 200, and
`/readyz` returns 503, because the broker refuses producers.

Damaged data causes no 503: a restart cannot repair it, and all other data is served. `/healthz` then returns `damaged`
instead of `ok`, with a reason for each range of offsets. `/damage` lists all ranges, for programs.

`/queues` shows for every queue what Kafka's protocol cannot express: the numbers of available, leased, waiting, done
and dead records in each partition.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

from millstream.core.metrics import CONTENT_TYPE, Scrape
from millstream.doors.http.response import Response
from millstream.log.damage import DamagedRange

URGENT = frozenset({"/healthz", "/readyz"})
"""Pages that the door serves at its connection limit."""
Damaged = tuple[str, int, DamagedRange]
"""Topic, partition and range of offsets."""

DAMAGE_REASONS_MAX = 100
"""Damaged ranges that `/healthz` lists; it counts the rest."""

Route = Callable[[], Response | Awaitable[Response]]
Action = Callable[[Mapping[str, str]], Response | Awaitable[Response]]
READY = Response.json(200, {"status": "ready"})


def damage_rows(damaged: Sequence[Damaged]) -> list[dict[str, object]]:
    """Damaged ranges for programs to read."""
    return [{"topic": topic, "partition": index, **place._asdict()} for topic, index, place in damaged]


def routes(
    scrape: Scrape,
    failures: Callable[[], Sequence[str]],
    ready: Callable[[], bool],
    queues: Callable[[], Sequence[object]] = tuple,
    prepare: Callable[[], Awaitable[None]] | None = None,
    damage: Callable[[], Sequence[Damaged]] = tuple,
    shortages: Callable[[], Sequence[str]] = tuple,
) -> dict[str, Route]:
    """`failures` returns a sentence for each permanent failure; `ready` whether the broker serves clients; `prepare` is
    awaited before metrics and queues are read; `damage` returns the damaged ranges by topic and partition; `shortages`
    a sentence for each temporary reason to refuse producers.
    """

    async def metrics_page() -> Response:
        if prepare is not None:
            await prepare()
        # With thousands of partitions the text takes too long to format on the event loop.
        return Response(200, await asyncio.to_thread(scrape.text, scrape.snapshot()), CONTENT_TYPE)

    def health_page() -> Response:
        broken, short, damaged = list(failures()), list(shortages()), list(damage())
        named = [f"{topic}-{index}: {place}" for topic, index, place in damaged[:DAMAGE_REASONS_MAX]]
        if len(damaged) > DAMAGE_REASONS_MAX:
            named.append(f"{len(damaged) - DAMAGE_REASONS_MAX} more damaged ranges; /damage has them all")
        status = "failed" if broken else "degraded" if short else "damaged" if damaged else "ok"
        return Response.json(503 if broken else 200, {"status": status, "reasons": broken + short + named})

    def damage_page() -> Response:
        return Response.json(200, damage_rows(damage()))

    def ready_page() -> Response:
        if not ready():
            return Response.json(503, {"status": "not serving"})
        reasons = list(shortages())
        return Response.json(503, {"status": "read-only", "reasons": reasons}) if reasons else READY

    async def queues_page() -> Response:
        if prepare is not None:
            await prepare()
        body = await asyncio.to_thread(json.dumps, queues())
        return Response(200, body.encode() + b"\n", "application/json")

    return {
        "/metrics": metrics_page,
        "/healthz": health_page,
        "/readyz": ready_page,
        "/queues": queues_page,
        "/damage": damage_page,
    }
