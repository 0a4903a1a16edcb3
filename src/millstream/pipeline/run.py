"""A running pipeline: one Spark query per sink, watched until it ends, is stopped, or fails.

Each sink has a query, a checkpoint and a consumer group of its own (`<pipeline>.<sink>`), so each has its own pace,
a sink that is added later reads from the beginning, and every Kafka tool shows the lag of each. Undecodable rows have
one more query, `dead-letters`.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.core.errors import MillstreamError
from millstream.pipeline import check, decode, mover, state
from millstream.pipeline.deliveries import (
    DeadLetterDelivery,
    Delivery,
    LakeDelivery,
    MovedDelivery,
    TableDelivery,
    TopicDelivery,
)
from millstream.pipeline.lake import task_folder
from millstream.pipeline.notes import Notes, has_begun, read_notes, write_notes
from millstream.pipeline.source import DATA_LOSS
from millstream.pipeline.spec import LakeSink, PipelineSpec, Sink, TableSink

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamReader

DEAD_LETTERS = "dead-letters"
STOP_SECONDS_MAX = 10.0
"""The time for a running batch to end after a stop request, before its interruption. Nothing is lost either way."""
BEGIN_SECONDS_MAX = 30.0
BEGINNINGS_MAX = 4
WORKER_LATE = "Python worker failed to connect back"
"""Spark gives a new Python process ten seconds, too few on a busy machine. That is no failure: retry."""
OTHER_STATE = re.compile(r"\[((?:STATE_STORE|STREAMING_STATEFUL|STATEFUL)_\w+|STREAM_FAILED_STATE\w*)\b")
"""Spark's error names for state of another plan."""
BUSY = " The machine is too busy to start Python within Spark's ten seconds; nothing is lost, run the pipeline again."
POLL_SECONDS = 0.1
ROWS_PER_BATCH = 1_000_000
"""The default."""


class PipelineFailed(MillstreamError):
    """A sink's query ended with an error."""

    def __init__(self, sink: str, why: str) -> None:
        super().__init__(f"{sink}: {why}")
        self.sink = sink


@dataclass(frozen=True)
class BatchReport:
    sink: str
    batch: int
    rows: int
    """Written by the sink; 0 for a batch that it has already."""
    seconds: float
    lag: dict[str, int]
    """Records behind the end of each partition, `topic-partition`, when the batch was planned."""
    late: dict[str, int] = field(default_factory=dict)
    """Rows behind the watermark that each step dropped, as Spark counts them: rows of one key that arrive together in a
    task count once.
    """

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass
class _Running:
    """One sink's query. The sink stores batches under the query's id: a new checkpoint starts a new count."""

    name: str
    deliver: Callable[[str, int], Delivery]
    begin: Callable[[], StreamingQuery] | None = None
    begun: int = 0
    query: StreamingQuery | None = None
    delivery: Delivery | None = None
    written: dict[int, int] = field(default_factory=dict)
    failure: Exception | None = None
    known: threading.Event = field(default_factory=threading.Event)
    reported: int = -1
    stateful: list[str] = field(default_factory=list)
    """Steps that keep state, from the source on."""
    folder: Path | None = None
    """The checkpoint, if there are notes to keep."""

    def start(self) -> None:
        assert self.begin is not None
        self.begun += 1
        self.failure = None
        self.query = self.begin()
        self.known.set()

    def on_batch(self, rows: DataFrame, batch: int) -> None:
        self.known.wait()
        assert self.query is not None
        try:
            if self.delivery is None:
                self.delivery = self.deliver(str(self.query.id), batch)
            self.written[batch] = self.delivery.deliver(rows, batch)
            self.begun = 1  # it works: a later failure gets all its retries again
        except Exception as error:
            self.failure = error
            # Short: on a long text Spark's search pattern overflows Java's stack, and Spark dies.
            raise PipelineFailed(self.name, first_line(error)) from None


class Pipeline:
    def __init__(self, spec: PipelineSpec, spark: SparkSession, broker: str) -> None:
        self._spec = spec
        self._spark = spark
        self._broker = broker
        self._running: list[_Running] = []

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, *, once: bool) -> None:
        try:
            for sink in self._spec.sinks:
                self._start_sink(sink, once)
            if self._spec.source.format != "bytes" and self._spec.on_error != "stop":
                self._start_dead_letters(once)
        except BaseException:
            self.stop()
            raise

    def _start_sink(self, sink: Sink, once: bool) -> None:
        spec = self._spec
        session = self._spark.newSession()
        self._note_plan(sink)
        if isinstance(sink, LakeSink) and check.is_untransformed(spec, sink) and spec.source.format == "bytes":
            self._start_mover(session, sink, once)
            return
        rows = self._view(session, sink)
        mode, stateful = check.output_mode(spec, sink), check.stateful_steps(spec, sink.source)
        self._start_query(
            sink.name, rows, lambda query, batch: self._delivery(sink, rows, query, batch), mode, once, stateful
        )

    def _note_plan(self, sink: Sink) -> None:
        folder = self._spec.checkpoint / sink.name
        plan, notes = state.plan_of(self._spec, sink.source), read_notes(folder)
        if not has_begun(folder):
            write_notes(folder, Notes(plan))
        elif notes.plan is None:
            write_notes(folder, replace(notes, plan=plan))

    def _delivery(self, sink: Sink, rows: DataFrame, query: str, batch: int) -> Delivery:
        app_id = f"{self._spec.name}/{sink.name}/{query}"
        if isinstance(sink, LakeSink):
            columns = [(field.name, field.dataType.simpleString()) for field in rows.schema]
            return LakeDelivery(sink, rows.schema, check.time_column(self._spec, sink, columns), app_id, batch)
        if isinstance(sink, TableSink):
            return TableDelivery(sink, rows.schema, app_id, batch)
        return TopicDelivery(sink, self._broker)

    def _start_mover(self, session: SparkSession, sink: LakeSink, once: bool) -> None:
        session.dataSource.register(mover.Mover)
        root, suffix = task_folder(sink.path, sink.format)
        move = mover.Move(root, suffix, sink.partition_by, sink.file_mb << 20, self._spec.source.headers)
        reader = self._reader(session, sink.name, mover.FORMAT, mover.ROWS_PER_BATCH)
        described = reader.option(mover.MOVE, move.to_option()).load()
        schema = decode.good(decode.decode(self._reader(session, sink.name).load(), self._spec.source)).schema

        def deliver(query: str, batch: int) -> Delivery:
            return MovedDelivery(sink, schema, "_timestamp", f"{self._spec.name}/{sink.name}/{query}", batch)

        self._start_query(sink.name, described, deliver, "append", once)

    def _start_dead_letters(self, once: bool) -> None:
        topic = self._spec.dead_letters
        assert topic is not None
        reader = self._reader(self._spark.newSession(), DEAD_LETTERS).option("includeHeaders", "true")
        rows = decode.decode(reader.load(), self._spec.source)
        delivery = DeadLetterDelivery(topic, self._broker, self._spec.name)
        self._start_query(DEAD_LETTERS, rows, lambda *_: delivery, "append", once)

    def _start_query(
        self,
        name: str,
        rows: DataFrame,
        deliver: Callable[[str, int], Delivery],
        mode: str,
        once: bool,
        stateful: Sequence[str] = (),
    ) -> None:
        self._let_others_begin()
        running = _Running(name, deliver, stateful=list(stateful), folder=self._spec.checkpoint / name)
        writer = rows.writeStream.foreachBatch(running.on_batch).outputMode(mode).queryName(f"{self._spec.name}.{name}")
        writer = writer.option("checkpointLocation", str(self._spec.checkpoint / name))
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=self._spec.trigger)
        running.begin = writer.start
        running.start()
        self._running.append(running)

    def _let_others_begin(self) -> None:
        """To plan its reads each query starts a Python process, for which Spark waits ten seconds: many at once
        on few cores would be too slow.
        """
        deadline = time.monotonic() + BEGIN_SECONDS_MAX
        while sum(_is_beginning(running) for running in self._running) >= (os.cpu_count() or 1):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _view(self, session: SparkSession, sink: Sink) -> DataFrame:
        """A sink's rows: the source's view and the steps that the sink needs."""
        spec = self._spec
        rows = decode.decode(self._reader(session, sink.name).load(), spec.source)
        rows = decode.good_or_stop(rows) if spec.on_error == "stop" else decode.good(rows)
        if spec.source.watermark is not None:
            rows = rows.withWatermark(spec.source.watermark.column, spec.source.watermark.delay)
        rows.createOrReplaceTempView(spec.source.name)
        for step in spec.steps:
            try:
                session.sql(step.sql).createOrReplaceTempView(step.name)
            except AnalysisException as error:
                raise PipelineFailed(f"step {step.name}", first_line(error)) from error
        return session.table(sink.source)

    def _reader(
        self, session: SparkSession, sink: str, kind: str = "millstream", rows_per_batch: int = ROWS_PER_BATCH
    ) -> DataStreamReader:
        source = self._spec.source
        options: dict[str, Any] = {
            "bootstrap.servers": self._broker,
            "startingOffsets": source.starting,
            "maxOffsetsPerTrigger": self._spec.rows_per_batch or rows_per_batch,
            "includeHeaders": str(source.headers).lower(),
            "group.id": f"{self._spec.name}.{sink}",
            "client.id": f"millstream-pipeline-{self._spec.name}",
        }
        for name, value in source.options.items():
            if name.lower() == DATA_LOSS.lower():
                options[DATA_LOSS] = value
        which = {"subscribe": source.topic} if source.topic is not None else {"subscribePattern": source.pattern}
        return session.readStream.format(kind).options(**options, **which)

    # -- watching ----------------------------------------------------------------------------------------------------

    def watch(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchReport]:
        """Every batch when it is done, until all queries end or a stop is requested. Raises a query's error."""
        while True:
            ended = not any(running.query is not None and running.query.isActive for running in self._running)
            for running in self._running:
                yield from _news(running)
                ended = not self._begin_again(running) and ended
            if ended or is_stopping():
                return
            time.sleep(POLL_SECONDS)

    def news(self) -> Iterator[BatchReport]:
        """Batches that were not reported yet; after `stop`, those that ended meanwhile."""
        for running in self._running:
            yield from _news(running)

    def stop(self) -> None:
        """Gives running batches some time to end, and stops all queries."""
        deadline = time.monotonic() + STOP_SECONDS_MAX
        for running in self._running:
            query = running.query
            while query is not None and query.isActive and query.status["isTriggerActive"]:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
            if query is not None:
                query.stop()
            if running.delivery is not None:
                running.delivery.close()

    def _begin_again(self, running: _Running) -> bool:
        """Whether a failed query was started again; else raises its error."""
        assert running.query is not None
        error = running.failure or running.query.exception()
        if error is None:
            return False
        if other := OTHER_STATE.search(str(error)):
            raise PipelineFailed(running.name, self._other_state(running.name, other[1])) from error
        if WORKER_LATE not in str(error) or running.begun >= BEGINNINGS_MAX:
            late = BUSY if WORKER_LATE in str(error) else ""
            raise PipelineFailed(running.name, first_line(error) + late) from error
        running.query.stop()
        running.start()
        return True

    def _other_state(self, sink: str, name: str) -> str:
        return (
            f"Spark cannot continue from the state in the checkpoint ({name}): the keys, aggregates or types of a step "
            "are not those that built it; undo the change, or start the sink again with "
            f"`millstream pipeline reset {self._spec.path} {sink}`"
        )


def _is_beginning(running: _Running) -> bool:
    query = running.query
    if query is None or not query.isActive or query.lastProgress is not None:
        return False
    return str(query.status["message"]).startswith(("Initializing", "Getting offsets"))


def _news(running: _Running) -> Iterator[BatchReport]:
    assert running.query is not None
    for progress in running.query.recentProgress:
        if progress.batchId <= running.reported or "addBatch" not in progress.durationMs:
            continue
        running.reported = progress.batchId
        seconds = progress.durationMs.get("triggerExecution", 0) / 1000
        rows = running.written.pop(progress.batchId, 0)
        late = _late([each.numRowsDroppedByWatermark for each in progress.stateOperators], running.stateful)
        if running.folder is not None and any(late.values()):
            write_notes(running.folder, read_notes(running.folder).with_late(progress.batchId, late))
        yield BatchReport(running.name, progress.batchId, rows, seconds, _lag(progress.sources[0]), late)


def _late(dropped: list[int], steps: list[str]) -> dict[str, int]:
    """By step. Spark lists operators from the sink to the source. If a step has several, it is unknown which of them
    dropped a row, and the last step counts all.
    """
    if not steps:
        return {}
    if len(dropped) == len(steps):
        return dict(zip(steps, reversed(dropped), strict=True))
    return {**dict.fromkeys(steps, 0), steps[-1]: sum(dropped)}


def _lag(source: Any) -> dict[str, int]:
    end, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
    return {place: max(offset - end.get(place, 0), 0) for place, offset in latest.items()}


def _offsets(text: str | None) -> dict[str, int]:
    read = json.loads(text) if text else {}
    return {f"{topic}-{part}": offset for topic, parts in (read or {}).items() for part, offset in parts.items()}


def first_line(error: BaseException) -> str:
    """The sentence in a Spark error, without the stack of the JVM or of a Python worker."""
    if isinstance(error, MillstreamError):
        return str(error)
    said = str(error).partition("=== Streaming Query ===")[0]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("millstream.") and ": " in line]
    python = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b", line)]
    java = [found[1] for line in lines if (found := re.match(r"(?:Caused by)?: [\w.$]+: (.+)", line))]
    return (ours[-1:] or python[-1:] or java[-1:] or lines[:1] or [type(error).__name__])[0]
