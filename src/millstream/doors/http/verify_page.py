"""`/verify`: POST starts a verification of all topics, or of `?topic=NAME`; GET returns the progress of the last one.

One verification runs at a time, at the speed of the disk. It continues after its client disconnects. The broker keeps
the damage that it finds, as with the scrub.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.broker.broker import Broker
from millstream.broker.verification import Verification
from millstream.doors.http.pages import damage_rows
from millstream.doors.http.response import Response


class VerifyPage:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._last: Verification | None = None

    def show(self) -> Response:
        if self._last is None:
            return Response.json(200, {"state": "none"})
        return Response.json(200, self._report(self._last))

    def start(self, query: Mapping[str, str]) -> Response:
        if self._last is not None and not self._last.is_over:
            return Response.json(409, self._report(self._last))
        topics = list(self._broker.topics)
        name = query.get("topic")
        if name is not None:
            topics = [topic for topic in topics if topic.name == name]
            if not topics:
                return Response.json(404, {"error": f"there is no topic {name}"})
        self._last = Verification(topics, self._broker.metrics)
        self._broker.in_background(self._last.run())
        return Response.json(202, self._report(self._last))

    def _report(self, verification: Verification) -> dict[str, object]:
        return {
            "state": "done" if verification.is_over else "running",
            "bytes_total": verification.bytes_total,
            "bytes_done": verification.bytes_done,
            "partitions_total": verification.partitions_total,
            "partitions_done": verification.partitions_done,
            "unread": verification.unread,
            "damaged": damage_rows(verification.damage()),
        }
