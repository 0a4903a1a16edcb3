"""The Prometheus metrics of a running pipeline, on an address of its own.

| metric | what |
|---|---|
| `millstream_pipeline_rows_total` | rows that a sink has written |
| `millstream_pipeline_batches_total` | its batches |
| `millstream_pipeline_batch_seconds` | their durations, as a histogram |
| `millstream_pipeline_lag` | records behind the end of each partition, when the last batch was planned |
| `millstream_pipeline_dead_letters_total` | rows that could not be decoded |
| `millstream_pipeline_rows_dropped_by_watermark_total` | late rows that a step dropped, as Spark counts them |
| `millstream_pipeline_last_batch_timestamp_seconds` | the end of the last batch, for alerts |

All count from the start of the process, as counters do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from millstream.config import Address
from millstream.core.errors import MillstreamError
from millstream.pipeline.spec import DEAD_LETTERS

if TYPE_CHECKING:
    from millstream.pipeline.run import BatchReport

BATCH_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "millstream_pipeline"


class CannotServeMetrics(MillstreamError):
    """The address of `--metrics` cannot be bound."""


class Gauges:
    def __init__(self, pipeline: str, sinks: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._pipeline = pipeline
        by_sink: dict[str, Any] = {"labelnames": ("pipeline", "sink"), "registry": self.registry}
        self._rows = Counter(f"{_PREFIX}_rows", "Rows that a sink has written", **by_sink)
        self._batches = Counter(f"{_PREFIX}_batches", "Batches that a sink has written", **by_sink)
        self._seconds = Histogram(f"{_PREFIX}_batch_seconds", "Duration of a batch", buckets=BATCH_SECONDS, **by_sink)
        self._last = Gauge(f"{_PREFIX}_last_batch_timestamp_seconds", "Time at which the last batch ended", **by_sink)
        self._lag = Gauge(
            f"{_PREFIX}_lag",
            "Lag of a partition when the last batch was planned",
            labelnames=("pipeline", "sink", "topic", "partition"),
            registry=self.registry,
        )
        self._dead = Counter(
            f"{_PREFIX}_dead_letters",
            "Rows that could not be decoded",
            labelnames=("pipeline",),
            registry=self.registry,
        )
        self._dead.labels(pipeline)
        self._late = Counter(
            f"{_PREFIX}_rows_dropped_by_watermark",
            "Late rows that a step dropped",
            labelnames=("pipeline", "sink", "step"),
            registry=self.registry,
        )
        for sink in sinks:  # so that a rate exists from the first batch on
            self._rows.labels(pipeline, sink)
            self._batches.labels(pipeline, sink)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def take(self, report: BatchReport) -> None:
        labels = self._pipeline, report.sink
        self._rows.labels(*labels).inc(report.rows)
        self._batches.labels(*labels).inc()
        self._seconds.labels(*labels).observe(report.seconds)
        self._last.labels(*labels).set(time.time())
        for place, count in report.lag.items():
            topic, _, partition = place.rpartition("-")
            self._lag.labels(*labels, topic, partition).set(count)
        for step, rows in report.late.items():
            self._late.labels(*labels, step).inc(rows)
        if report.sink == DEAD_LETTERS:
            self._dead.labels(self._pipeline).inc(report.rows)

    def serve(self, address: str) -> Address:
        """Serves `/metrics` from a thread of its own; returns the address, with the real port if 0 was given."""
        host, port = wanted = Address.parse(address)
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or error
            raise CannotServeMetrics(f"metrics cannot be served at {wanted}: {cause}; choose another port") from error
        return Address(host, self._server.server_port)

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
