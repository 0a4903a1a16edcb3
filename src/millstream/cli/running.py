"""`millstream pipeline run`, after the check of its file.

How it ends
-----------
SIGTERM and Ctrl-C ask the pipeline to stop: running batches get some time to end, and nothing is lost
either way. A second Ctrl-C does not wait. SIGTERM ends with 0, Ctrl-C with 130, a failure with 1 and one sentence.

Ctrl-C reaches every process of the terminal. Spark's Java process ignores it, so that it can stop cleanly. A
supervisor may send SIGTERM to all processes; then Java ends first, and Spark's errors about that are not a failure.
"""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.admin.failure import Failure
from millstream.cli.connection import INT32_MAX, Connection
from millstream.cli.spark import local_settings
from millstream.core.errors import MillstreamError
from millstream.pipeline.catalog import sink_names
from millstream.pipeline.gauges import Gauges
from millstream.pipeline.live import View, view_for
from millstream.pipeline.lock import CheckpointLock
from millstream.pipeline.run import BatchReport, Pipeline, first_line
from millstream.pipeline.spec import PipelineSpec, SourceSpec
from millstream.spark import session

LOCAL = "local[*,4]"
"""All cores, and as many attempts per task as on a cluster."""
RECORD_BYTES, LETTER_BYTES_MORE = 1 << 20, 64 << 10
"""A topic's default record limit, and the size of a dead letter's error headers."""


@dataclass(frozen=True)
class Wish:
    """The options of the command line."""

    once: bool
    master: str | None
    settings: dict[str, str]
    metrics: str | None


class Stop:
    """Records signals. After a signal, Java's messages about its own end no longer reach standard error."""

    def __init__(self) -> None:
        self.is_asked = False  # no Event: the thread that a handler interrupts may hold its lock
        self.is_interrupted = False
        self._stderr = sys.stderr

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, self._on_term)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr = self._stderr

    def take_interrupts(self) -> None:
        """After the start of Spark, which installs its own Ctrl-C handler."""
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_term(self, number: int, frame: Any) -> None:
        self.is_asked = True
        sys.stderr = io.StringIO()

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self._on_term(number, frame)


def run(spec: PipelineSpec, broker: str, wish: Wish) -> None:
    names = sink_names(spec)
    with (
        Stop() as stop,
        CheckpointLock(spec.name, spec.checkpoint),
        _gauges(spec.name, names, wish.metrics) as gauges,
        view_for(spec.name, names) as view,
    ):
        if spec.dead_letters is not None:
            _create_missing(broker, spec.dead_letters, spec.source)
        view.say("starting Spark")
        with _as_sentence(stop), _spark(spec, wish) as spark:
            stop.take_interrupts()
            _run(Pipeline(spec, spark, broker), wish.once, stop, view, gauges)
        if wish.once and not stop.is_asked:
            view.sum_up()
        else:
            view.say("stopped")
    if stop.is_interrupted:
        raise KeyboardInterrupt


@contextmanager
def _spark(spec: PipelineSpec, wish: Wish) -> Iterator[SparkSession]:
    master = wish.master or LOCAL
    spark = session.start(f"millstream {spec.name}", master, local_settings(master) | wish.settings)
    try:
        yield spark
    finally:
        spark.stop()


def _run(pipeline: Pipeline, once: bool, stop: Stop, view: View, gauges: Gauges) -> None:
    if stop.is_asked:
        return
    view.say("starting")
    pipeline.start(once=once)
    view.say("running")
    try:
        for report in pipeline.watch(lambda: stop.is_asked):
            _tell(report, view, gauges)
        view.say("stopping")
    finally:
        pipeline.stop()
    for report in pipeline.news():  # batches that ended in the meantime
        _tell(report, view, gauges)


def _tell(report: BatchReport, view: View, gauges: Gauges) -> None:
    gauges.take(report)  # first: a reader of the line may request the metrics at once
    view.take(report)


@contextmanager
def _as_sentence(stop: Stop) -> Iterator[None]:
    """Raises Spark's errors as one sentence; after a stop request, none: Spark may be gone already."""
    try:
        yield
    except BrokenPipeError:  # of standard output, not of Spark
        raise
    except (PySparkException, Py4JError, ConnectionError, MillstreamError) as error:
        if stop.is_asked:
            return
        if isinstance(error, MillstreamError):
            raise
        raise Failure(first_line(error)) from error


@contextmanager
def _gauges(pipeline: str, sinks: list[str], address: str | None) -> Iterator[Gauges]:
    gauges = Gauges(pipeline, sinks)
    if address is not None:
        print(f"metrics are at http://{gauges.serve(address)}/metrics", file=sys.stderr)
    try:
        yield gauges
    finally:
        gauges.close()


def _create_missing(broker: str, topic: str, source: SourceSpec) -> None:
    """Creates the dead-letter topic before the first dead letter, with room for the largest record."""
    connection = Connection(broker)
    if topic in connection.metadata().topics:
        return
    settings = {"max.message.bytes": str(_record_bytes_max(connection, source) + LETTER_BYTES_MORE)}
    connection.create_missing(topic, settings)


def _record_bytes_max(connection: Connection, source: SourceSpec) -> int:
    """The record limit of the source topics. Kafka's default if the broker does not report it."""
    from confluent_kafka.admin import ConfigResource, ResourceType

    found = [RECORD_BYTES]
    for name in connection.metadata().topics:
        if name != source.topic and not re.fullmatch(source.pattern or "(?!)", name):
            continue
        resource = ConfigResource(ResourceType.TOPIC, name)
        with suppress(Failure, KeyError):
            entries = connection.settle(connection.admin.describe_configs([resource])[resource], name)
            found.append(int(entries["max.message.bytes"].value))
    return min(max(found), INT32_MAX - LETTER_BYTES_MORE)
