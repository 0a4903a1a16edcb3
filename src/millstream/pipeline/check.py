"""Every mistake of a pipeline at once, before Spark starts: schemas, SQL, sinks and topics.

A mistake is a future failure, or an effect that the author cannot want: Spark would report them one at a time, and
after its start. This module also answers a run's questions about a spec, because they need the same analysis of each
view.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.pipeline import source as sources
from millstream.pipeline import state
from millstream.pipeline.ddl import NESTED
from millstream.pipeline.mistakes import BadPipeline, Mistake, closest
from millstream.pipeline.notes import has_begun, read_notes
from millstream.pipeline.sight import UNNAMED, Rows
from millstream.pipeline.spec import LakeSink, PipelineSpec, Sink, TableSink, TopicSink, parse
from millstream.pipeline.sql import UNKNOWN, Columns
from millstream.pipeline.views import View, analyse, unknown_view

TIMES = ("TIMESTAMP", "TIMESTAMP_NTZ")
USUAL_TIMES = ("at", "timestamp")
PARTITIONS = {"none": (), "day": ("day",), "hour": ("day", "hour")}
"""Columns that a lake adds."""

_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::(?:[0-5]?\d{0,4}|6[0-5]\d{3}))?")
_REFUSED_BY_DELTA = re.compile(r"[ ,;{}()\n\t=]")


# -- questions of a run ----------------------------------------------------------------------------------------------


def load(path: Path, cluster: KafkaCluster | None = None) -> PipelineSpec:
    """A pipeline that can run. Raises BadPipeline with every mistake."""
    spec, mistakes = parse(path)
    if spec is not None:
        mistakes = mistakes + check(spec, cluster)
    if spec is None or mistakes:
        raise BadPipeline(path, mistakes)
    return spec


def step_columns(spec: PipelineSpec) -> dict[str, Columns]:
    """The columns of each view, names and Spark's types ("?" if unknown), without views of which too little is
    known.
    """
    names = {spec.source.name.lower(): spec.source.name, **{step.name.lower(): step.name for step in spec.steps}}
    return {names[key]: view.columns for key, view in _views(spec)[0].items() if view.columns is not None}


def stateful_steps(spec: PipelineSpec, view: str) -> list[str]:
    """The stateful steps on the way to a view, from the source on."""
    return [step.name for step in state.stateful_steps(spec, _views(spec)[0], view)]


def output_mode(spec: PipelineSpec, sink: Sink) -> str:
    """Spark's output mode for a sink: `update` sends an aggregate's row again whenever it changes, `append` sends it
    once, when it is final. A lake cannot change rows, and Spark itself cannot update everything.
    """
    rows = _rows(spec, sink.source)
    is_updated = rows.aggregations == 1 and rows.append_only is None and not isinstance(sink, LakeSink)
    return "update" if is_updated else "append"


def is_untransformed(spec: PipelineSpec, sink: Sink) -> bool:
    """Whether a lake gets the source's rows unchanged."""
    return isinstance(sink, LakeSink) and sink.source.lower() == spec.source.name.lower()


def time_column(spec: PipelineSpec, sink: LakeSink, columns: Sequence[tuple[str, str]] | None = None) -> str | None:
    """The column whose days or hours partition a lake: the record's timestamp, else the watermark's, else `at` or
    `timestamp`, else the only time column. `columns` are the sink's columns from Spark, if known.
    """
    found = columns if columns is not None else step_columns(spec).get(sink.source, [])
    times = {name.lower(): name for name, kind in found if kind.upper() in TIMES}
    mark = [spec.source.watermark.column.lower()] if spec.source.watermark is not None else []
    for name in ("_timestamp", *mark, *USUAL_TIMES):
        if name in times:
            return times[name]
    return next(iter(times.values())) if len(times) == 1 else None


# -- mistakes --------------------------------------------------------------------------------------------------------


def check(spec: PipelineSpec, cluster: KafkaCluster | None = None) -> list[Mistake]:
    """All detectable mistakes of a pipeline; topics are looked up if there is a cluster."""
    views, mistakes = _views(spec)
    mistakes = sources.check(spec) + mistakes
    for sink in spec.sinks:
        view = views.get(sink.source.lower(), unknown_view(""))
        mistakes.extend(_Checked(spec, sink, view).mistakes())
        mistakes.extend(_check_state(spec, sink, views))
    if cluster is not None:
        mistakes.extend(_check_topics(spec, cluster))
    return sorted({*mistakes})


def _views(spec: PipelineSpec) -> tuple[dict[str, View], list[Mistake]]:
    """Every view, by its name in lower case, and the mistakes in the steps."""
    columns = sources.columns(spec)
    names = [name for name, _ in columns] if columns is not None else None
    views = {spec.source.name.lower(): View(columns, Rows(names, is_stream=True))}
    mistakes = []
    later = {step.name.lower() for step in spec.steps}
    mark = spec.source.watermark.column if spec.source.watermark is not None else None
    for step in spec.steps:
        view, findings = analyse(step.sql, views, mark, later) if step.sql else (unknown_view(""), [])
        if step.check:
            place = (*step.place, "sql")
            mistakes += [
                Mistake(spec.lines.line_within(place, at), f"step {step.name}: {text}") for at, text in findings
            ]
        views[step.name.lower()] = view
        later.discard(step.name.lower())
    return views, mistakes


def _rows(spec: PipelineSpec, view: str) -> Rows:
    return _views(spec)[0].get(view.lower(), unknown_view("")).rows


def _check_state(spec: PipelineSpec, sink: Sink, views: dict[str, View]) -> list[Mistake]:
    """Changes that a started sink cannot take: Spark's state belongs to another plan."""
    folder = spec.checkpoint / sink.name
    plan = read_notes(folder).plan if has_begun(folder) else None
    if plan is None:
        return []
    before, view = state.spec_of(plan, spec)
    was, is_now = state.kept(before, _views(before)[0], view), state.kept(spec, views, sink.source)
    places = {step.name: (*step.place, "sql") for step in spec.steps}
    mistakes = []
    for step, text in state.differences(was, is_now):
        line = spec.lines.line(*places[step]) if step is not None else spec.lines.line(*sink.place, "from")
        which = f"step {step}: " if step is not None else ""
        advice = f"undo that, or start the sink again with `millstream pipeline reset {spec.path} {sink.name}`"
        mistakes.append(Mistake(line, f"{which}{text}, since the sink {sink.name} began; {advice}"))
    return mistakes


class _Checked:
    """One sink during its check."""

    def __init__(self, spec: PipelineSpec, sink: Sink, view: View) -> None:
        self._spec = spec
        self._sink = sink
        self._view = view
        self._kinds = {name.lower(): kind for name, kind in view.columns} if view.columns is not None else None
        self._found: list[Mistake] = []

    def mistakes(self) -> list[Mistake]:
        sink = self._sink
        if isinstance(sink, LakeSink):
            self._lake(sink)
        elif isinstance(sink, TableSink):
            self._table(sink)
        else:
            self._topic(sink)
        self._names()
        self._mode()
        return self._found

    def _wrong(self, text: str, *keys: str) -> None:
        self._found.append(Mistake(self._spec.lines.line(*self._sink.place, *keys), text))

    def _names(self) -> None:
        """Columns that are stored by name need unique names."""
        source, columns = self._sink.source, self._view.columns or []
        names = [name for name, _ in columns if name != UNNAMED]
        twice = {name for name in names if [each.lower() for each in names].count(name.lower()) > 1}
        if twice:
            self._wrong(f"{source} has more than one column {min(twice)}; give each a name of its own with AS", "from")
        if len(names) < len(columns) and not isinstance(self._sink, TopicSink):
            at = [index for index, (name, _) in enumerate(columns, 1) if name == UNNAMED]
            which = f"column {at[0]} of {source} has" if len(at) == 1 else f"columns {_list(at)} of {source} have"
            self._wrong(f"{which} no name; add AS NAME", "from")

    def _mode(self) -> None:
        """An aggregate can only be appended once it is final, and only a watermark makes it final."""
        rows = self._view.rows
        if rows.aggregations == 0 or output_mode(self._spec, self._sink) != "append":
            return
        what = rows.append_only or "one aggregate on another"
        why = "a lake takes" if isinstance(self._sink, LakeSink) else f"with {what} Spark sends"
        if self._spec.source.watermark is None:
            advice = "add a watermark to [source]"
        elif rows.untimed:
            advice = f"group by window({self._spec.source.watermark.column}, ...)"
        else:
            return
        self._wrong(
            f"{why} only rows that are final, and an aggregate's in {self._sink.source} never are: {advice}", "from"
        )

    def _lake(self, sink: LakeSink) -> None:
        if re.match(r"\w+://", sink.path):
            self._wrong("a lake is a folder, and not a URL; mount the store, and name the folder", "lake")
        kinds = self._kinds
        if kinds is None:
            return
        if sink.format == "delta":
            odd = [name for name, _ in self._view.columns or [] if _REFUSED_BY_DELTA.search(name)]
            if odd:
                self._wrong(f"a Delta lake cannot have a column named {odd[0]!r}; rename it with AS", "from")
        for name in PARTITIONS[sink.partition_by]:
            if name in kinds:
                advice = f'rename it with AS, or set partition_by = "{"day" if name == "hour" else "none"}"'
                self._wrong(f"{sink.source} has a column {name}, as the lake's partitions are called; {advice}", "from")
        if sink.partition_by != "none" and UNKNOWN not in kinds.values() and time_column(self._spec, sink) is None:
            times = [name for name, kind in kinds.items() if kind in TIMES]
            why = f"several times ({', '.join(times)}) and none called at" if times else "no TIMESTAMP"
            advice = 'add _timestamp to its SELECT, or set partition_by = "none"'
            self._wrong(f"{sink.source} has {why}, so the {sink.partition_by} of a row is unknown; {advice}", "from")

    def _table(self, sink: TableSink) -> None:
        wrong = _wrong_url(sink.url)
        if wrong is not None:
            self._wrong(wrong, "table")
        if len({name.lower() for name in sink.key}) < len(sink.key):
            self._wrong("key names a column twice; name each once", "key")
        for name in sink.key:
            self._has(name, "key")

    def _topic(self, sink: TopicSink) -> None:
        if sink.key is not None:
            self._has(sink.key, "key")
        if sink.format != "json" and self._kinds is not None:
            wanted = "STRING" if sink.format == "text" else "BINARY"
            kind = self._kinds.get("value")
            if kind not in (wanted, UNKNOWN):
                text = f'format = "{sink.format}" sends the column value, which must be {wanted}'
                self._wrong(f"{text}; {sink.source} has {f'it as {kind}' if kind else 'none'}", "format")

    def _has(self, name: str, key: str) -> None:
        kinds = self._kinds
        if kinds is None:
            return
        if name.lower() not in kinds:
            known = closest(name, [each for each, _ in self._view.columns or [] if each != UNNAMED])
            self._wrong(f"key: {self._sink.source} has no column {name}{known}", key)
        elif kinds[name.lower()].startswith(NESTED):
            kind = kinds[name.lower()].partition("<")[0]
            self._wrong(f"key: {name} is a {kind}, which cannot be a key; select a plain value from it with AS", key)


def _wrong_url(url: str) -> str | None:
    """The mistake in a table's URL; never contains a password."""
    advice = "write sqlite:FILE or postgresql://USER@HOST/DATABASE"
    scheme, colon, rest = url.partition(":")
    if scheme == "sqlite":
        is_file = rest.strip("/") and not rest.startswith("//") and not rest.endswith("/:memory:")
        if not is_file:
            return "the table's URL names no file; write sqlite:FILE, as in sqlite:hits.db"
        folder = os.path.dirname(rest)
        return None if os.path.isdir(folder) else f"there is no folder {folder} for the SQLite file; make it first"
    if scheme not in ("postgresql", "postgres"):
        shown = f"{scheme}:" if colon and scheme.isalnum() else "this"
        return f"{shown} is not a supported database; {advice}"
    hosts = re.match(r"//(?:[^/]*@)?([^/?]*)", rest)
    if hosts is None:
        return f"the table's URL is not complete; {advice}"
    if not all(_HOST.fullmatch(host) for host in hosts[1].split(",")):
        return f"the table's URL has a host or port that is not valid; {advice}"
    return None


def _check_topics(spec: PipelineSpec, cluster: KafkaCluster) -> list[Mistake]:
    """Topics of a source's pattern may be created later; the run creates the dead-letter topic."""
    wanted = [((*sink.place, "topic"), sink.topic) for sink in spec.sinks if isinstance(sink, TopicSink)]
    if spec.source.topic is not None:
        wanted.append(((*spec.source.place, "topic"), spec.source.topic))
    try:
        there = cluster.partitions([topic for _, topic in wanted]) if wanted else cluster.topics()
    except ClusterError as error:
        line = spec.lines.line("broker")
        return [Mistake(line, f"the broker cannot be reached, so topics could not be looked up: {error}")]
    return [
        Mistake(spec.lines.line(*place), f"there is no topic {topic}; create it with `millstream topic create {topic}`")
        for place, topic in wanted
        if topic not in there
    ]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
