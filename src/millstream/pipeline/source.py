"""The columns of a pipeline's source: the decoded ones, and the origin of each record."""

from __future__ import annotations

import json
from typing import NamedTuple

from millstream.pipeline import ddl
from millstream.pipeline.lines import KeyPath
from millstream.pipeline.mistakes import Mistake, closest
from millstream.pipeline.spec import PipelineSpec, SourceSpec
from millstream.pipeline.sql import Columns

ORIGIN: Columns = [
    ("_key", "BINARY"),
    ("_topic", "STRING"),
    ("_partition", "INT"),
    ("_offset", "BIGINT"),
    ("_timestamp", "TIMESTAMP"),
]
HEADERS = ("_headers", "ARRAY<STRUCT<key: STRING, value: BINARY>>")
RESERVED = frozenset({*(name for name, _ in ORIGIN), HEADERS[0], "_value", "_cause", "_column", "_bad", "_parsed"})

_TIMES = ("timeZone", "dateFormat", "timestampFormat", "timestampNTZFormat", "enableDateTimeParsingFallback", "locale")
_JSON = (
    *("allowComments", "allowUnquotedFieldNames", "allowSingleQuotes", "allowNumericLeadingZeros"),
    *("allowBackslashEscapingAnyCharacter", "allowUnquotedControlChars", "allowNonNumericNumbers"),
    *("primitivesAsString", "prefersDecimal", "multiLine", "lineSep", "encoding"),
)
_CSV = (
    *("sep", "delimiter", "quote", "escape", "comment", "nullValue", "nanValue", "positiveInf", "negativeInf"),
    *("emptyValue", "ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace", "maxColumns", "maxCharsPerColumn"),
    *("charToEscapeQuoteEscaping", "unescapedQuoteHandling", "multiLine", "lineSep", "encoding", "charset"),
)
DATA_LOSS = "failOnDataLoss"
"""An option of reading, not of decoding: whether lost records stop the pipeline."""
OPTIONS = {"json": (*_TIMES, *_JSON), "csv": (*_TIMES, *_CSV), "avro": ()}
OURS = ("mode", "columnnameofcorruptrecord")
"""Spark's options for bad rows, which `on_error` replaces."""


class _Wrong(NamedTuple):
    text: str
    offset: int = 0


def columns(spec: PipelineSpec) -> Columns | None:
    """The columns of the source's view; None if the schema has mistakes."""
    return _columns(spec.source)[0]


def check(spec: PipelineSpec) -> list[Mistake]:
    source, lines = spec.source, spec.lines
    found, wrong = _columns(source)
    place: KeyPath = (*source.place, "schema")
    mistakes = [Mistake(lines.line_within(place, each.offset), f"source.schema: {each.text}") for each in wrong]
    mistakes.extend(_check_options(spec))
    if found is not None:
        mistakes.extend(_check_schema_ids(spec))
    mark = source.watermark
    if mark is not None and found is not None:
        kinds = {name.lower(): kind for name, kind in found}
        line = lines.line(*source.place, "watermark", "column")
        kind = kinds.get(mark.column.lower())
        if kind is None:
            known = closest(mark.column, [name for name, _ in found])
            mistakes.append(Mistake(line, f"the watermark's column {mark.column} is not in the schema{known}"))
        elif kind != "TIMESTAMP":
            text = f"the watermark's column {mark.column} is {kind}; make it TIMESTAMP in the schema"
            mistakes.append(Mistake(line, text))
    return mistakes


def _columns(source: SourceSpec) -> tuple[Columns | None, list[_Wrong]]:
    origin = [*ORIGIN, HEADERS] if source.headers else ORIGIN
    if source.format in ("text", "bytes"):
        return [("value", "STRING" if source.format == "text" else "BINARY"), *origin], []
    if source.schema is None:
        return None, []
    found, wrong = _avro(source.schema) if source.format == "avro" else _ddl(source.schema)
    for name, kind in found:
        if name.lower() in RESERVED:
            wrong.append(_Wrong(f"{name} is a name that the pipeline reserves; rename the column"))
        if source.format == "csv" and kind.startswith((*ddl.NESTED, "BINARY", "VARIANT")):
            wrong.append(_Wrong(f"{name} is {kind}, which CSV cannot hold; use plain types"))
    return ([*found, *origin] if found and not wrong else None), wrong


def _ddl(schema: str) -> tuple[Columns, list[_Wrong]]:
    try:
        return ddl.columns(schema), []
    except ddl.BadDDL as error:
        return [], [_Wrong(str(error), error.offset)]


def _avro(schema: str) -> tuple[Columns, list[_Wrong]]:
    try:
        read = json.loads(schema)
    except json.JSONDecodeError as error:
        return [], [_Wrong(f"is not an Avro schema, which is JSON or a .avsc file: {error.msg}", error.pos)]
    import fastavro

    from millstream.pipeline import avro

    try:
        fastavro.parse_schema(read)
        fields = avro.columns(schema)
        return [(field.name, ddl.columns(f"x {field.dataType.simpleString()}")[0][1]) for field in fields], []
    except avro.BadAvro as error:
        return [], [_Wrong(str(error))]
    except RecursionError:
        return [], [_Wrong("a recursive record cannot be columns")]
    except Exception as error:  # fastavro raises many kinds of exceptions
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return [], [_Wrong(f"is not an Avro schema: {cause[:200]}")]


def _check_schema_ids(spec: PipelineSpec) -> list[Mistake]:
    from millstream.pipeline import avro

    source, mistakes = spec.source, []
    for number, written_by in source.schema_ids.items():
        wrong = [each.text for each in _avro(written_by)[1]]
        if not wrong and source.schema is not None:
            try:
                avro.refuse_writer(source.schema, written_by)
            except avro.BadAvro as error:
                wrong = [str(error)]
        line = spec.lines.line(*source.place, "schema_ids", str(number))
        mistakes += [Mistake(line, f"source.schema_ids.{number}: {text}") for text in wrong]
    return mistakes


def _check_options(spec: PipelineSpec) -> list[Mistake]:
    source, mistakes = spec.source, []
    known = {name.lower(): name for name in OPTIONS.get(source.format, ())}
    for name, value in source.options.items():
        line = spec.lines.line(*source.place, "options", name)
        if name.lower() == DATA_LOSS.lower():
            if value.lower() not in ("true", "false"):
                mistakes.append(Mistake(line, f"source.options: {name} must be true or false"))
        elif name.lower() == "confluent" and source.format == "avro":
            advice = 'say which schema each id is, as in schema_ids = { 17 = "orders.avsc" }'
            mistakes.append(Mistake(line, f"source.options: confluent alone cannot tell schemas apart; {advice}"))
        elif not known:
            mistakes.append(Mistake(line, f"source.options: format {source.format} has no options; leave them out"))
        elif name.lower() in OURS:
            mistakes.append(Mistake(line, f"source.options: {name} is decided by on_error; leave it out"))
        elif name.lower() not in known:
            mistakes.append(Mistake(line, f"source.options: {name} is not known{closest(name, known.values())}"))
    return mistakes
