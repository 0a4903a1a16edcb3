"""The pages for monitoring systems: `/metrics`, `/healthz`, `/readyz`; and `/queues`, `/damage` and `/verify`, for the
command line. Each page asks the broker through a session of its client.

`/healthz` returns 503 when only a restart helps (a log went read-only): an orchestrator restarts the broker. `/readyz`
returns 503 while the broker starts or stops: a load balancer waits. Any response shows that the event loop is alive,
since the door runs on it. A restart does not help against a full disk: `/healthz` returns "degraded" with 200, and
`/readyz` returns 503, because the broker refuses producers.

Damaged data causes no 503: a restart cannot repair it, and all other data is served. `/healthz` then returns `damaged`
instead of `ok`, with a reason for each range of offsets. `/damage` lists all ranges, for programs.

`/queues` shows for every queue what Kafka's protocol cannot express: the numbers of available, leased, waiting, done
and dead records in each partition.

`/verify`: POST starts a verification of all topics, or of `?topic=NAME`; GET returns the progress of the last one. One
verification runs at a time, at the speed of the disk. The broker keeps the damage that it finds, as with the scrub.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import parse_qsl

from millstream.broker.health import Health
from millstream.broker.session import Sessions
from millstream.broker.verification import Verification
from millstream.core.metrics import CONTENT_TYPE, Scrape
from millstream.doors.http.request import Request
from millstream.doors.http.response import Response
from millstream.log.damage import DamagedRange
from millstream.security.rights import Operation

URGENT = frozenset({"/healthz", "/readyz"})
"""Pages that the door serves at its connection limit."""
DAMAGE_REASONS_MAX = 100
"""Damaged ranges that `/healthz` lists; it counts the rest."""

Page = Callable[[Request], Response | Awaitable[Response]]
READY = Response.json(200, {"status": "ready"})


class Pages:
    def __init__(
        self, sessions: Sessions, scrape: Scrape, ready: Callable[[], bool], prepare: Callable[[], Awaitable[None]]
    ) -> None:
        """`ready` returns whether the broker serves clients; `prepare` runs before metrics and queues are read."""
        self._sessions = sessions
        self._scrape = scrape
        self._ready = ready
        self._prepare = prepare
        self.routes: dict[str, Page] = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/queues": self._queues,
            "/damage": lambda request: Response.json(200, _rows(self._ask(request).damage())),
            "/verify": self._verification,
        }
        self.actions: dict[str, Page] = {"/verify": self._verify}

    def _ask(self, request: Request) -> Health:
        return self._sessions.open("http", request.peer).health

    async def _metrics(self, request: Request) -> Response:
        self._ask(request).check_cluster(Operation.DESCRIBE)
        await self._prepare()
        # With thousands of partitions the text takes too long to format on the event loop.
        snapshot = self._scrape.snapshot(await self._scrape.gather())
        return Response(200, await asyncio.to_thread(self._scrape.text, snapshot), CONTENT_TYPE)

    def _health(self, request: Request) -> Response:
        health = self._ask(request)
        broken, short, damaged = health.failures(), health.shortages(), health.damage()
        named = [f"{topic}-{index}: {place}" for topic, index, place in damaged[:DAMAGE_REASONS_MAX]]
        if len(damaged) > DAMAGE_REASONS_MAX:
            named.append(f"{len(damaged) - DAMAGE_REASONS_MAX} more damaged ranges; /damage has them all")
        status = "failed" if broken else "degraded" if short else "damaged" if damaged else "ok"
        return Response.json(503 if broken else 200, {"status": status, "reasons": broken + short + named})

    def _readiness(self, request: Request) -> Response:
        if not self._ready():
            return Response.json(503, {"status": "not serving"})
        reasons = self._ask(request).shortages()
        return Response.json(503, {"status": "read-only", "reasons": reasons}) if reasons else READY

    async def _queues(self, request: Request) -> Response:
        await self._prepare()
        body = await asyncio.to_thread(json.dumps, self._ask(request).queue_reports())
        return Response(200, body.encode() + b"\n", "application/json")

    def _verification(self, request: Request) -> Response:
        last = self._ask(request).verification()
        return Response.json(200, _report(last) if last is not None else {"state": "none"})

    def _verify(self, request: Request) -> Response:
        verification, is_new = self._ask(request).verify(dict(parse_qsl(request.query)).get("topic"))
        return Response.json(202 if is_new else 409, _report(verification))


def _rows(damaged: Sequence[tuple[str, int, DamagedRange]]) -> list[dict[str, object]]:
    """Damaged ranges for programs to read."""
    return [{"topic": topic, "partition": index, **place._asdict()} for topic, index, place in damaged]


def _report(verification: Verification) -> dict[str, object]:
    return {
        "state": "done" if verification.is_over else "running",
        "bytes_total": verification.bytes_total,
        "bytes_done": verification.bytes_done,
        "partitions_total": verification.partitions_total,
        "partitions_done": verification.partitions_done,
        "unread": verification.unread,
        "damaged": _rows(verification.damage()),
    }
