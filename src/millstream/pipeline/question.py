"""`millstream query`: one SQL query over topics, run by Spark's batch engine.

Every table of the SQL that is a topic becomes a view: the decoded columns (json), or `value` (text, bytes), and after
them `_key` as text, `_topic`, `_partition`, `_offset` and `_timestamp`. Filters on the last four reach the source if
the SQL names a topic only once, so a query over an hour reads an hour. Unlike in a pipeline, a value that
cannot be decoded is a row of nulls: a query shows all records.

Spark does not tell a Python source which columns a query needs. The SQL does: columns that it does not name are not
read. If the query has a mistake, it runs again with all columns, so that Spark can suggest the right one.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlglot
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.scope import traverse_scope

from millstream.client.cluster import KafkaCluster
from millstream.core.errors import MillstreamError
from millstream.pipeline import guess
from millstream.pipeline.ddl import columns as read_ddl
from millstream.pipeline.mistakes import closest
from millstream.pipeline.run import first_line
from millstream.spark.schema import TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

META = {"_key": "key", "_topic": "topic", "_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}
TABLES_MAX = 100
OPENINGS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "(", "DESCRIBE", "DESC", "SHOW", "EXPLAIN")
_NOT_FOUND = "TABLE_OR_VIEW_NOT_FOUND"


class BadQuestion(MillstreamError):
    """An SQL text that cannot run; the sentence is ours or Spark's."""


@dataclass(frozen=True)
class Wording:
    """The facts about an SQL text that need no Spark."""

    tables: tuple[str, ...]
    """Tables that must be topics; Spark may find more."""
    names: frozenset[str] | None
    """Every name in it, in lower case; None if it may read columns that it does not name."""
    once: frozenset[str] = frozenset()
    """Tables, in lower case, that Spark reads in one place only: their filters may limit the fetches."""


def read_wording(sql: str) -> Wording:
    """SQL that sqlglot does not understand is left to Spark."""
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
    try:
        opening = sqlglot.tokenize(sql, read="spark")[:1]
        if opening and opening[0].text.upper() not in OPENINGS:
            raise BadQuestion(f"{opening[0].text} is not a query; queries begin with {', '.join(OPENINGS[:5])} or SHOW")
        parsed = sqlglot.parse_one(sql, dialect="spark")
        if not isinstance(parsed, exp.Query):
            return Wording((), None)
        tables = [
            source.name
            for scope in traverse_scope(parsed)
            for source in scope.sources.values()
            if isinstance(source, exp.Table) and isinstance(source.this, exp.Identifier) and not source.db
        ]
    except (SqlglotError, RecursionError):
        return Wording((), None)
    return Wording(tuple(dict.fromkeys(tables)), None if _asks_for_all(parsed) else _names(parsed), _once(parsed))


def _asks_for_all(parsed: exp.Query) -> bool:
    stars = any(not isinstance(star.parent, exp.Count) for star in parsed.find_all(exp.Star))
    natural = any(join.method.upper() == "NATURAL" for join in parsed.find_all(exp.Join))
    pivots = parsed.find(exp.Pivot) is not None  # groups by every column that it does not name
    return stars or natural or pivots or any(not select.expressions for select in parsed.find_all(exp.Select))


def _names(parsed: exp.Query) -> frozenset[str]:
    return frozenset(identifier.name.lower() for identifier in parsed.find_all(exp.Identifier))


def _once(parsed: exp.Query) -> frozenset[str]:
    """Empty if the query reads a part of itself several times, and with it the tables inside."""
    counts = Counter(table.name.lower() for table in parsed.find_all(exp.Table))
    if any(counts[cte.alias.lower()] > 1 for cte in parsed.find_all(exp.CTE)):
        return frozenset()
    return frozenset(name for name, count in counts.items() if count == 1)


class Question:
    """One SQL text, and its topics."""

    def __init__(self, sql: str, broker: str, kind: str = "auto", schema: str | None = None) -> None:
        self._sql = sql
        self._broker = broker
        self._kind = kind
        self._schema = schema
        if schema is not None:
            read_ddl(schema)
        self._wording = read_wording(sql)
        self._cluster = KafkaCluster(broker, "millstream-query")
        self._schemas: dict[str, tuple[str, str | None]] = {}

    def check_topics(self) -> None:
        """Before Spark starts, so that a typo does not cost ten seconds."""
        for topic in self._cluster.topics():
            bare = rf"(?:from|join|,)\s+{re.escape(topic)}(?![\w.-])"
            if re.search(r"[.-]", topic) and re.search(bare, self._sql, re.IGNORECASE):
                raise BadQuestion(f"a topic with dots or dashes in its name needs backticks: write `{topic}`")
        for name in self._wording.tables:
            self._partitions(name)

    def ask(self, spark: SparkSession) -> DataFrame:
        """The result, not yet computed."""
        with as_sentence():
            try:
                return self._analyse(spark, self._wording.names)
            except AnalysisException:
                if self._wording.names is None:
                    raise
            return self._analyse(spark, None)

    def _analyse(self, spark: SparkSession, names: frozenset[str] | None) -> DataFrame:
        """Adds a view for each table that Spark does not find: Spark knows best what is a table."""
        views: list[str] = []
        wanted = list(self._wording.tables)
        while True:
            for topic in wanted:
                self._add_view(spark, topic, names, views)
            try:
                return spark.sql(self._sql)
            except AnalysisException as error:
                missing = self._missing(error)
                if missing is None or missing in views or len(views) >= TABLES_MAX:
                    raise
                wanted = [missing]

    def close(self) -> None:
        self._cluster.close()

    def _missing(self, error: AnalysisException) -> str | None:
        """The topic that Spark took for a table and did not find."""
        if error.getCondition() != _NOT_FOUND:
            return None
        relation = (error.getMessageParameters() or {}).get("relationName", "")
        return ".".join(part.name for part in sqlglot.to_table(relation, dialect="spark").parts)

    def _partitions(self, topic: str) -> list[int]:
        found = self._cluster.partitions([topic]).get(topic)
        if not found:
            known = self._cluster.topics()
            hint = closest(topic, known) if len(known) <= TABLES_MAX else "; `millstream topic list` shows the topics"
            raise BadQuestion(f"there is no topic {topic} at {self._broker}{hint}")
        return found

    def _add_view(self, spark: SparkSession, topic: str, names: frozenset[str] | None, views: list[str]) -> None:
        if topic.lower() in [view.lower() for view in views]:
            raise BadQuestion(f"{topic} and another topic differ only in case, which SQL ignores; query one of them")
        if topic not in self._schemas:
            self._schemas[topic] = self._settle(topic)
        self._view(spark, topic, names).createOrReplaceTempView(f"`{topic}`")
        views.append(topic)

    def _settle(self, topic: str) -> tuple[str, str | None]:
        """The decoding of the values, and their columns."""
        partitions = self._partitions(topic)
        if self._schema is not None or self._kind in ("text", "bytes"):
            return ("json", self._schema) if self._schema is not None else (self._kind, None)
        schema = guess.columns(guess.sample(self._cluster, topic, partitions))
        if schema is None and self._kind == "json":
            raise BadQuestion(f"the values of {topic} do not look like JSON objects; name their columns with --schema")
        return ("json", schema) if schema is not None else ("text", None)

    def _view(self, spark: SparkSession, topic: str, names: frozenset[str] | None) -> DataFrame:
        kind, schema = self._schemas[topic]
        columns = {name: _text("key") if name == "_key" else F.col(source) for name, source in META.items()}
        if kind == "json":
            assert schema is not None
            parsed = F.from_json(F.col("value").cast("string"), schema)
            fields = [name for name, _ in read_ddl(schema) if name.lower() not in META]
            columns = {name: parsed[name] for name in fields} | columns
        else:
            columns = {"value": F.col("value") if kind == "bytes" else _text("value")} | columns
        chosen = [name for name in columns if names is None or name.lower() in names] or ["_partition"]
        needed = sorted({META.get(name, "value") for name in chosen})
        options = {"bootstrap.servers": self._broker, "subscribe": topic, "client.id": "millstream-query"}
        options["pushFilters"] = str(topic.lower() in self._wording.once).lower()
        reader = spark.read.format("millstream").options(**options)
        records = reader.schema(", ".join(f"{name} {TYPES[name].simpleString()}" for name in needed)).load()
        return records.select(*(columns[name].alias(name) for name in chosen))


def _text(column: str) -> Column:
    return F.make_valid_utf8(F.col(column).cast("string"))


@contextmanager
def as_sentence() -> Iterator[None]:
    """Spark's errors as one sentence."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise BadQuestion(re.sub(r"\.?\s*SQLSTATE: \w{5}", "", first_line(error)).rstrip("; ")) from error


def as_json(answer: DataFrame) -> Iterator[str]:
    """One JSON object per row; of columns with the same name the second is `name_2`."""
    names: list[str] = []
    for name in answer.columns:
        same = sum(each == name or each.startswith(f"{name}_") for each in names)
        names.append(f"{name}_{same + 1}" if name in names else name)
    struct = F.struct(*(F.col(f"`{name.replace('`', '``')}`") for name in names))
    for row in rows(answer.toDF(*names).select(F.to_json(struct, {"ignoreNullFields": "false"}))):
        yield str(row[0])


def rows(answer: DataFrame) -> Iterator[tuple[Any, ...]]:
    """Computed and fetched a partition at a time, so that a result may be larger than memory."""
    with as_sentence():
        yield from answer.toLocalIterator(prefetchPartitions=True)
