"""The pages that a monitoring system asks for: `/metrics`, `/healthz`, `/readyz`; and `/queues`, for the command line.

`/healthz` answers 503 when only a restart helps (a log went read-only): an orchestrator restarts on it. `/readyz`
answers 503 while the broker is starting or stopping: a load balancer waits on it. That the answer comes at all shows
that the event loop lives, since the door runs on it.

`/queues` says of every queue what Kafka's protocol has no words for: how many records are available, leased, waiting,
done and dead in each partition.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from millstream.doors.http.response import Response
from millstream.metrics import CONTENT_TYPE, Scrape

Route = Callable[[], Response | Awaitable[Response]]


def routes(
    scrape: Scrape,
    failures: Callable[[], Sequence[str]],
    ready: Callable[[], bool],
    queues: Callable[[], Sequence[object]] = tuple,
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Route]:
    """`failures` gives a sentence for each thing that is broken for good; `ready` whether clients are served; `prepare`
    is awaited before figures are asked for.
    """

    async def metrics_page() -> Response:
        if prepare is not None:
            await prepare()
        # With thousands of partitions the text takes longer to write than producers should have to wait.
        return Response(200, await asyncio.to_thread(scrape.text, scrape.snapshot()), CONTENT_TYPE)

    def health_page() -> Response:
        reasons = list(failures())
        return Response.json(503 if reasons else 200, {"status": "failed" if reasons else "ok", "reasons": reasons})

    def ready_page() -> Response:
        serving = ready()
        return Response.json(200 if serving else 503, {"status": "ready" if serving else "not serving"})

    async def queues_page() -> Response:
        if prepare is not None:
            await prepare()
        body = await asyncio.to_thread(json.dumps, queues())
        return Response(200, body.encode() + b"\n", "application/json")

    return {"/metrics": metrics_page, "/healthz": health_page, "/readyz": ready_page, "/queues": queues_page}
