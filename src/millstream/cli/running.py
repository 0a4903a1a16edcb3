"""What `millstream pipeline run` does once the file is known to be right.

How it ends
-----------
SIGTERM and Ctrl-C ask the pipeline to stop: batches that are on their way may end, for a while, and nothing is lost
either way. A second Ctrl-C does not wait. SIGTERM ends with 0, Ctrl-C with 130, a failure with 1 and one sentence.

Ctrl-C reaches every process of the terminal. Spark's Java process ignores it, so that it is there for a clean stop. A
supervisor may send SIGTERM to all processes; then Java is gone first, and what Spark says about that is not a failure.
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

from millstream.cli.connection import INT32_MAX, Connection
from millstream.cli.failure import Failure
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
"""All cores, and as many tries for a task as a cluster gives it."""
RECORD_BYTES, LETTER_BYTES_MORE = 1 << 20, 64 << 10
"""What a topic takes by default, and what headers add that say what is wrong with a dead letter."""


@dataclass(frozen=True)
class Wish:
    """What the command line asked for."""

    once: bool
    master: str | None
    settings: dict[str, str]
    metrics: str | None


class Stop:
    """Signals, remembered. From then on standard error is closed to what Java says about its own end."""

    def __init__(self) -> None:
        self.is_asked = False  # no Event: its lock may be held by the very thread that a handler interrupts
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
        """After Spark has started: it takes Ctrl-C for itself then."""
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
    for report in pipeline.news():  # batches that ended meanwhile
        _tell(report, view, gauges)


def _tell(report: BatchReport, view: View, gauges: Gauges) -> None:
    gauges.take(report)  # first: a program that reads the line may ask for the metrics at once
    view.take(report)


@contextmanager
def _as_sentence(stop: Stop) -> Iterator[None]:
    """What Spark throws as one sentence; after a stop was asked for, nothing: it may be gone already."""
    try:
        yield
    except BrokenPipeError:  # of standard output, and nothing of Spark's
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
    """Dead letters must have somewhere to go before the first one comes, however large what is read may be."""
    connection = Connection(broker)
    if topic in connection.metadata().topics:
        return
    from confluent_kafka.admin import NewTopic

    settings = {"max.message.bytes": str(_record_bytes_max(connection, source) + LETTER_BYTES_MORE)}
    wanted = NewTopic(topic, num_partitions=1, replication_factor=-1, config=settings)
    future = connection.admin.create_topics([wanted])[topic]
    try:
        connection.settle(future, topic)
    except Failure:
        if topic not in connection.metadata().topics:  # another pipeline may have made it meanwhile
            raise


def _record_bytes_max(connection: Connection, source: SourceSpec) -> int:
    """What the topics that are read take. A broker that does not say so has Kafka's default."""
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
