"""A pipeline as its file declares it, and the parser of that file.

`parse` never raises for a file's contents. It reads on after a mistake, with a default for the wrong value:
a spec with mistakes only serves to find more of them (`check.check`). Paths in the file
are relative to its folder and are absolute here, because Spark's workers have folders of their own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millstream.pipeline.keys import Keys, shown
from millstream.pipeline.lines import KeyPath, Lines
from millstream.pipeline.mistakes import Mistake, closest

FORMATS = ("json", "csv", "avro", "text", "bytes")
TOPIC_FORMATS = ("json", "text", "bytes")
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
DEAD_LETTERS = "dead-letters"
"""The name of the query for bad rows; no sink may have it."""

TABLES = ("source", "step", "sink")
TOP_KEYS = ("name", "broker", "dead_letters", "on_error", "trigger", "rows_per_batch", "checkpoint", *TABLES)
SOURCE_KEYS = (
    "name",
    "topic",
    "pattern",
    "format",
    "schema",
    "schema_ids",
    "watermark",
    "starting",
    "headers",
    "options",
)
SINK_KEYS = {
    "lake": ("from", "id", "lake", "format", "partition_by", "file_mb"),
    "table": ("from", "id", "table", "name", "key"),
    "topic": ("from", "id", "topic", "key", "format", "compression"),
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VIEW = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_BROKER = re.compile(r"\s*(?:\[[^\],\s]+\]|[^\[\]:,\s]+):\d{1,5}\s*(?:,\s*(?:\[[^\],\s]+\]|[^\[\]:,\s]+):\d{1,5}\s*)*")
_SCHEMA_ID = re.compile(r"[0-9]{1,10}")
_TOPIC_RULE = "use 1 to 249 letters, digits, '.', '_' and '-'"
_NAME_RULE = "use letters, digits, '.', '_' and '-'"
_VIEW_RULE = "use letters, digits and '_', as SQL does"


@dataclass(frozen=True)
class Watermark:
    column: str
    delay: str


@dataclass(frozen=True)
class SourceSpec:
    name: str
    """Of the SQL view; the topic's name, with `_` for characters other than letters and digits."""
    topic: str | None = None
    pattern: str | None = None
    """Exactly one of topic and pattern."""
    format: str = "json"
    schema: str | None = None
    """Spark's DDL for json and csv; JSON text for avro, read from its file if one is named."""
    schema_ids: Mapping[int, str] = field(default_factory=dict)
    """Avro schemas by their ids in Confluent's registry, if values have the id in front."""
    watermark: Watermark | None = None
    starting: str = "earliest"
    headers: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    place: KeyPath = field(default=("source",), compare=False, repr=False)


@dataclass(frozen=True)
class StepSpec:
    name: str
    sql: str
    check: bool = True
    """False leaves the SQL to Spark, for false positives of the check."""
    place: KeyPath = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class LakeSink:
    name: str
    source: str
    path: str
    format: str = "delta"
    partition_by: str = "day"
    file_mb: int = 128
    place: KeyPath = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class TableSink:
    name: str
    source: str
    url: str = field(repr=False)  # may hold a password
    table: str
    key: tuple[str, ...]
    place: KeyPath = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class TopicSink:
    name: str
    source: str
    topic: str
    key: str | None = None
    format: str = "json"
    compression: str = "zstd"
    place: KeyPath = field(default=(), compare=False, repr=False)


Sink = LakeSink | TableSink | TopicSink


@dataclass(frozen=True)
class PipelineSpec:
    name: str
    path: Path
    source: SourceSpec
    steps: tuple[StepSpec, ...]
    sinks: tuple[Sink, ...]
    checkpoint: Path
    broker: str | None = None
    dead_letters: str | None = None
    """None if no row can go there: values are not decoded, or `on_error = "stop"`."""
    on_error: str = "dead-letter"
    trigger: str = "1 second"
    rows_per_batch: int | None = None
    """None: the default of each sink."""
    lines: Lines = field(default_factory=Lines, compare=False, repr=False)


def parse(path: Path, text: str | None = None) -> tuple[PipelineSpec | None, list[Mistake]]:
    """The file's spec and every mistake of form; None if too little is left for further checks."""
    if text is None:
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            return None, [Mistake(0, f"cannot be read: {error.strerror or error}")]
        except UnicodeDecodeError as error:
            return None, [Mistake(0, f"is not UTF-8 at byte {error.start}; save it as UTF-8")]
    try:
        table = tomllib.loads(text)
        lines = Lines(text)
    except tomllib.TOMLDecodeError as error:
        return None, [_syntax(str(error), text)]
    except (ValueError, RecursionError):
        return None, [Mistake(0, "is not a pipeline: its numbers are too long or its tables are nested too deep")]
    mistakes: list[Mistake] = []
    spec = _Reader(path, Keys(table, (), "", lines, mistakes), lines).read()
    return spec, mistakes


def redacted(url: str) -> str:
    """A table's URL for display: without its password."""
    hidden = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|pwd)=)[^&\s]*", r"\1***", hidden)


def _syntax(message: str, text: str) -> Mistake:
    where = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    cause = re.sub(r" \(at [^)]*\)$", "", message)
    cause = cause[:1].lower() + cause[1:] if cause != "Cannot overwrite a value" else "the key occurs twice"
    if where is None:
        return Mistake(text.rstrip().count("\n") + 1, f"is not valid TOML: {cause} at the end of the file")
    return Mistake(int(where[1]), f"is not valid TOML: {cause} (column {where[2]})")


class _Reader:
    """Reads the file once; the result for each table depends on the names before it."""

    def __init__(self, path: Path, top: Keys, lines: Lines) -> None:
        self._path = path
        self._folder = path.absolute().parent
        self._top = top
        self._lines = lines
        self._views: dict[str, str] | None = {}
        """Names of rows for SQL and sinks, in lower case as Spark compares them; None if one is unknown."""
        self._sinks: list[Sink] = []

    def read(self) -> PipelineSpec | None:
        top = self._top
        top.only(TOP_KEYS)
        name = top.named("name", _NAME, _NAME_RULE, 'name = "clicks"') or "pipeline"
        broker = top.named("broker", _BROKER, 'write HOST:PORT, as in "127.0.0.1:9092"')
        on_error = top.choice("on_error", ("dead-letter", "stop"), "dead-letter")
        trigger = top.duration("trigger", "1 second", '"1 second"') or "1 second"
        rows_per_batch = top.number("rows_per_batch", None, 1, 2**31 - 1)
        checkpoint = self._folder / (top.text("checkpoint") or f".millstream/{name}")
        source = self._source(name)
        steps = tuple(step for keys in top.tables("step") if (step := self._step(keys)) is not None)
        sinks = top.tables("sink")
        if not sinks and "sink" not in top:
            top.missing("[[sink]]", '[[sink]] from = "clicks" lake = "lake/clicks"')
        for keys in sinks:
            self._sink(keys)
        if source is None:
            return None
        dead_letters = self._dead_letters(source, name, on_error)
        self._refuse_loops(source, dead_letters)
        return PipelineSpec(
            name=name,
            path=self._path,
            source=source,
            steps=steps,
            sinks=tuple(self._sinks),
            checkpoint=checkpoint,
            broker=broker,
            dead_letters=dead_letters,
            on_error=on_error,
            trigger=trigger,
            rows_per_batch=rows_per_batch,
            lines=self._lines,
        )

    # -- source ------------------------------------------------------------------------------------------------------

    def _source(self, pipeline: str) -> SourceSpec | None:
        keys = self._top.table("source", '[source] topic = "clicks"', must=True)
        if keys is None:
            self._views = None
            return None
        keys.only(SOURCE_KEYS)
        topic = keys.named("topic", _TOPIC, _TOPIC_RULE)
        pattern = self._pattern(keys)
        if "topic" in keys and "pattern" in keys:
            keys.wrong("source has a topic and a pattern; keep one", "pattern")
        elif "topic" not in keys and "pattern" not in keys:
            keys.missing("topic", 'topic = "clicks" (or pattern = "clicks-.*" for many topics)')
        plain = re.sub(r"[^A-Za-z0-9_]", "_", topic or pipeline)
        view = keys.named("name", _VIEW, _VIEW_RULE)
        if view is None and ("name" in keys or (topic is None and "pattern" not in keys)):
            self._views = None
        else:
            self._add_view(keys, view or plain)
        kind = keys.choice("format", FORMATS, "json")
        source = SourceSpec(
            name=view or plain,
            topic=topic,
            pattern=pattern if topic is None else None,
            format=kind,
            schema=self._schema(keys, kind),
            schema_ids=self._schema_ids(keys, kind),
            watermark=self._watermark(keys),
            starting=keys.choice("starting", ("earliest", "latest"), "earliest"),
            headers=keys.flag("headers", False),
            options=options.plain() if (options := keys.table("options", "[source.options]")) else {},
        )
        return source if topic is not None or pattern is not None else None

    def _pattern(self, keys: Keys) -> str | None:
        pattern = keys.text("pattern")
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            keys.wrong(f"source.pattern is not a regular expression: {error}", "pattern")
            return None
        return pattern

    def _schema(self, keys: Keys, kind: str) -> str | None:
        if kind in ("text", "bytes"):
            if "schema" in keys:
                keys.wrong(f"source.schema has no meaning for format {kind}, whose rows have a column value", "schema")
            return None
        if "schema" not in keys:
            example = 'schema = "clicks.avsc"' if kind == "avro" else 'schema = "user STRING, ms LONG, at TIMESTAMP"'
            keys.missing("schema", example)
            return None
        return self._avro(keys, "schema") if kind == "avro" else keys.text("schema")

    def _avro(self, keys: Keys, key: str) -> str | None:
        """A schema, or the path of its file."""
        text = keys.text(key)
        if text is None or not text.strip().endswith(".avsc"):
            return text
        try:
            return (self._folder / text.strip()).read_bytes().decode()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            cause = getattr(error, "strerror", None) or "it is not text"
            keys.wrong(f"{keys.title}.{key} {shown(text)} cannot be read: {cause}", key)
            return None

    def _schema_ids(self, keys: Keys, kind: str) -> dict[int, str]:
        ids = keys.table("schema_ids", 'schema_ids = { 17 = "orders.avsc" }')
        if ids is None:
            return {}
        if kind != "avro":
            keys.wrong(f"source.schema_ids has no meaning for format {kind}, whose values have no id", "schema_ids")
            return {}
        found = {}
        for key in ids:
            if not _SCHEMA_ID.fullmatch(key):
                ids.wrong(f"source.schema_ids: {shown(key)} is not the id of a schema, which is a number", key)
            elif (schema := self._avro(ids, key)) is not None:
                found[int(key)] = schema
        if not found and not any(True for _ in ids):
            keys.wrong('source.schema_ids is empty; write schema_ids = { 17 = "orders.avsc" }', "schema_ids")
        return found

    def _watermark(self, keys: Keys) -> Watermark | None:
        example = '{ column = "at", delay = "10 minutes" }'
        inner = keys.table("watermark", f"watermark = {example}")
        if inner is None:
            return None
        inner.only(("column", "delay"))
        column = inner.text("column", f"watermark = {example}")
        delay = inner.duration("delay", None, '"10 minutes"')
        if "delay" not in inner:
            inner.missing("delay", f"watermark = {example}")
        return Watermark(column, delay or "0 seconds") if column is not None else None

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, keys: Keys) -> StepSpec | None:
        keys.only(("name", "sql", "check"))
        name = keys.named("name", _VIEW, _VIEW_RULE, 'name = "per_minute"')
        sql = keys.text("sql", 'sql = "SELECT ... FROM ..."')
        if name is None:
            if "name" in keys:
                self._views = None
            return None
        self._add_view(keys, name)
        return StepSpec(name, sql or "", keys.flag("check", True), keys.place)

    def _add_view(self, keys: Keys, name: str) -> None:
        if self._views is None:
            return
        if name.lower() in self._views:
            keys.wrong(f"the name {name} is taken by another step or the source; give each its own", "name")
        self._views.setdefault(name.lower(), name)

    # -- sinks -------------------------------------------------------------------------------------------------------

    def _sink(self, keys: Keys) -> None:
        kinds = [kind for kind in SINK_KEYS if kind in keys]
        if len(kinds) != 1:
            keys.only(tuple(dict.fromkeys(key for known in SINK_KEYS.values() for key in known)))
            if kinds:
                keys.wrong(f"this sink has {' and '.join(kinds)}; make a [[sink]] of each", kinds[1])
            else:
                keys.wrong("this sink has no destination; add lake = FOLDER, table = URL or topic = NAME")
        source = self._from(keys)
        if len(kinds) != 1:
            return
        keys.only(SINK_KEYS[kinds[0]])
        make = {"lake": self._lake, "table": self._table, "topic": self._topic}[kinds[0]]
        sink = make(keys, keys.named("id", _NAME, _NAME_RULE), source or "")
        if sink is None:
            return
        if sink.name in (DEAD_LETTERS, *(other.name for other in self._sinks)):
            key = "id" if "id" in keys else None
            keys.wrong(f"another sink is called {sink.name} already; give this one an id of its own", key)
        if source is not None:
            self._sinks.append(sink)

    def _from(self, keys: Keys) -> str | None:
        name = keys.text("from", 'from = "clicks"')
        if name is None or self._views is None:
            return name
        if name.lower() not in self._views:
            known = closest(name, self._views.values())
            keys.wrong(f"from = {shown(name)} is neither the source nor a step{known}", "from")
        return self._views.get(name.lower())

    def _lake(self, keys: Keys, name: str | None, source: str) -> LakeSink | None:
        path = keys.text("lake")
        kind = keys.choice("format", ("delta", "parquet"), "delta")
        partition_by = keys.choice("partition_by", ("day", "hour", "none"), "day")
        file_mb = keys.number("file_mb", 128, 1, 4096)
        if path is None:
            return None
        full = path if re.match(r"\w+://", path) else str(self._folder / path)
        if any(isinstance(other, LakeSink) and other.path == full for other in self._sinks):
            keys.wrong(f"another sink writes to the lake {shown(path)} already; give each a folder of its own", "lake")
        return LakeSink(name or f"lake-{source}", source, full, kind, partition_by, file_mb, keys.place)

    def _table(self, keys: Keys, name: str | None, source: str) -> TableSink | None:
        url = keys.text("table")
        table = keys.text("name", 'name = "hits"')
        key = keys.texts("key", 'key = ["minute", "url"]')
        if url is None or table is None:
            return None
        if url.startswith("sqlite:") and len(url) > len("sqlite:"):
            url = f"sqlite:{self._folder / url.removeprefix('sqlite:')}"
        if any(isinstance(other, TableSink) and (other.url, other.table) == (url, table) for other in self._sinks):
            keys.wrong(f"another sink writes to the table {shown(table)} already; give each its own", "name")
        derived = "table-" + re.sub(r"[^A-Za-z0-9._-]", "_", table)
        return TableSink(name or derived, source, url, table, key, keys.place)

    def _topic(self, keys: Keys, name: str | None, source: str) -> TopicSink | None:
        topic = keys.named("topic", _TOPIC, _TOPIC_RULE)
        key = keys.text("key")
        kind = keys.choice("format", TOPIC_FORMATS, "json")
        compression = keys.choice("compression", COMPRESSIONS, "zstd")
        if topic is None:
            return None
        return TopicSink(name or f"topic-{topic}", source, topic, key, kind, compression, keys.place)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def _dead_letters(self, source: SourceSpec, name: str, on_error: str) -> str | None:
        top = self._top
        topic = top.named("dead_letters", _TOPIC, _TOPIC_RULE)
        if on_error == "stop":
            if topic is not None:
                top.wrong('dead_letters has no meaning with on_error = "stop"; keep one of them', "dead_letters")
            return None
        if topic is None and source.format == "bytes":
            return None
        return topic or f"{source.topic or name}.dead"

    def _refuse_loops(self, source: SourceSpec, dead_letters: str | None) -> None:
        """A pipeline that reads its own output never ends."""
        written = [((*sink.place, "topic"), sink.topic) for sink in self._sinks if isinstance(sink, TopicSink)]
        if dead_letters is not None:
            written.append((("dead_letters",) if "dead_letters" in self._top else ("source",), dead_letters))
        for place, topic in written:
            if _reads(source, topic):
                line = self._lines.line(*place)
                self._top.add(
                    Mistake(line, f"{topic} is read by the source, so this would never end; name another topic")
                )


def _reads(source: SourceSpec, topic: str) -> bool:
    if source.topic is not None:
        return topic == source.topic
    return source.pattern is not None and re.fullmatch(source.pattern, topic) is not None
