"""`millstream query`: one SQL query over topics, on a local Spark."""

from __future__ import annotations

import csv
import enum
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli import hush
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.output import show_table
from millstream.cli.spark import local_settings, need_spark, waiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE_ROWS_MAX = 1000
"""A table is laid out as a whole, so without --limit it is bounded; JSON and CSV are not."""


class Values(enum.StrEnum):
    AUTO = "auto"
    JSON = "json"
    TEXT = "text"
    BYTES = "bytes"


class Shape(enum.StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    sql: Annotated[str, typer.Argument(show_default=False, help="The query in Spark SQL; its tables are topics.")],
    values: Annotated[
        Values, typer.Option("--format", "-f", help="Format of the values; auto guesses it from a sample.")
    ] = Values.AUTO,
    schema: Annotated[
        str | None,
        typer.Option(metavar="DDL", help='Columns of JSON values, as in "user STRING, ms LONG"; guessed by default.'),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many rows.")] = None,
    output: Annotated[Shape, typer.Option("--output", "-o", help="json: one object per line.")] = Shape.TABLE,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Run an SQL query over topics, with Spark on this machine.

    A topic is a table. Its columns are the fields of its JSON objects, or value;
    and _key, _topic, _partition, _offset and _timestamp.

    Conditions on _topic, _partition, _offset and _timestamp reduce the records that are read.
    Put a name with dots or dashes in backticks.
    """
    need_spark("millstream query")
    if schema is not None and values in (Values.TEXT, Values.BYTES):
        raise typer.BadParameter(f"--schema is for JSON values, not for --format {values}")
    Connection(broker)  # checks that a broker responds there
    from millstream.pipeline.question import Question, as_json, rows
    from millstream.spark import session

    question = Question(sql, broker, values, schema)
    try:
        question.check_topics()
        with waiting("starting Spark"):
            spark = session.start("millstream-query", None, local_settings(None))
        try:
            with waiting("running the query"):
                answer = question.ask(spark)
                if limit is not None:
                    answer = answer.limit(limit)
                found = as_json(answer) if output is Shape.JSON else rows(answer)
                found = _begun(found)
            _show(found, answer, output, limit)
        except BrokenPipeError:
            hush()
        finally:
            spark.stop()
    finally:
        question.close()


def _begun(found: Iterator[Any]) -> Iterator[Any]:
    """Computes the first row: Spark's waits come before it."""
    first = list(itertools.islice(found, 1))
    return itertools.chain(first, found)


def _show(found: Iterator[Any], answer: DataFrame, output: Shape, limit: int | None) -> None:
    if output is Shape.JSON:
        for line in found:
            print(line)
    elif output is Shape.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows([_text(cell, "") for cell in row] for row in found)
    else:
        _show_table(found, answer.columns, limit)


def _show_table(found: Iterator[Any], names: list[str], limit: int | None) -> None:
    shown = list(itertools.islice(found, limit or TABLE_ROWS_MAX))
    table = [{str(at): _cell(cell) for at, cell in enumerate(row)} for row in shown]
    show_table({str(at): name for at, name in enumerate(names)}, table, "no rows")
    if limit is None and next(found, None) is not None:
        print(f"the first {TABLE_ROWS_MAX:,} rows; --limit shows more, --output csv or json all", file=sys.stderr)


def _cell(value: object) -> object:
    """Integers stay integers, for right alignment."""
    return value if value is None or type(value) is int else _text(value, "-")


def _text(value: object, null: str) -> str:
    """Nested values in Spark's notation, not in Python's."""
    match value:
        case None:
            return null
        case bool():
            return str(value).lower()
        case bytes() | bytearray():
            return _decoded(bytes(value))
        case dict():
            return _joined("{", (f"{_text(key, 'null')}: {_text(item, 'null')}" for key, item in value.items()), "}")
        case tuple() if hasattr(value, "asDict"):
            pairs = value.asDict().items()
            return _joined("{", (f"{name}: {_text(item, 'null')}" for name, item in pairs), "}")
        case list() | tuple():
            return _joined("[", (_text(item, "null") for item in value), "]")
        case _:
            return str(value)


def _joined(opening: str, parts: Iterable[str], closing: str) -> str:
    return f"{opening}{', '.join(parts)}{closing}"


def _decoded(value: bytes) -> str:
    """Text if it is UTF-8, else hexadecimal."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
