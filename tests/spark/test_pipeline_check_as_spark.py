"""The check before a start against Spark itself: what it calls a mistake Spark refuses, and what it knows is so.

Spark analyses each query over a stream and says whether it could run in the output mode that the check has chosen. The
other way round not everything can be known without Spark, so a query that Spark refuses may pass the check, unless it
is among those that must be found (`MISTAKES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from millstream.pipeline import check, ddl
from millstream.pipeline.source import ORIGIN
from millstream.pipeline.spec import PipelineSpec, parse

SCHEMA = "user STRING, url STRING, ms LONG, at TIMESTAMP, tags ARRAY<STRING>, place STRUCT<city: STRING, zip: INT>"
LAKE, TOPIC = 'lake = "x"\npartition_by = "none"\nformat = "parquet"', 'topic = "out"'

GOOD = [
    "SELECT * FROM clicks",
    "SELECT * EXCEPT (tags, place), upper(url) AS u FROM clicks WHERE ms > 5",
    "SELECT USER, `url`, c.ms, C.place.zip, tags[0] AS tag, place.city FROM CLICKS c",
    "SELECT ms / 1000 AS s, s * 2 AS d, CAST(ms AS INT), (url) FROM clicks",
    "SELECT c.user, t.tag FROM clicks c LATERAL VIEW explode(tags) t AS tag",
    "SELECT user, tag FROM clicks LATERAL VIEW OUTER posexplode(tags) AS i, tag",
    "SELECT explode(tags) FROM clicks",
    "SELECT posexplode(tags) AS (i, tag), user FROM clicks",
    "SELECT col FROM (SELECT explode(tags) FROM clicks)",
    "SELECT transform(tags, (tag, i) -> tag || i || url) AS t, filter(tags, tag -> tag = user) AS f FROM clicks",
    "SELECT aggregate(tags, 0, (n, tag) -> n + length(tag)) AS n FROM clicks",
    "WITH Big AS (SELECT user AS who, ms FROM clicks), more AS (SELECT * FROM big) SELECT More.who FROM MORE",
    "WITH t(a, b) AS (SELECT user, url FROM clicks) SELECT a, t.b FROM t",
    "SELECT a, b FROM (SELECT user, url FROM clicks) AS t(a, b)",
    "SELECT user FROM clicks UNION ALL SELECT url FROM clicks",
    "SELECT c.user, v.name FROM clicks c JOIN VALUES ('a', 'b') AS v(id, name) ON c.user = v.id",
    "SELECT user, id FROM clicks CROSS JOIN range(3)",
    "SELECT user, (SELECT max(x) FROM VALUES (1) AS t(x)) AS m FROM clicks",
    "SELECT user FROM clicks WHERE url IN (SELECT x FROM VALUES ('a') AS t(x))",
    "SELECT timestampadd(HOUR, 1, at) AS l, date_diff(DAY, at, at) AS d, extract(MINUTE FROM at) AS m FROM clicks",
    "SELECT current_date, current_timestamp, current_user, session_user FROM clicks",
    "SELECT CASE WHEN ms > 5 THEN 'slow' ELSE 'fast' END AS kind, if(ms > 5, 1, 0) AS i, ms IS NULL AS n FROM clicks",
    "SELECT from_json(url, 'a INT, b STRING').a AS a, named_struct('x', ms).x AS x, map('k', ms)['k'] AS k FROM clicks",
    "SELECT url RLIKE '^/a' AS r, url LIKE '/a%' AS l, ms BETWEEN 1 AND 5 AS b, ms IN (1, 2) AS i FROM clicks",
    "SELECT date '2024-01-01' AS d, interval 3 days AS i, 1.5 AS x, 2e3 AS y, 5L AS z, -ms AS n FROM clicks",
    "SELECT window, count(*) AS n FROM clicks GROUP BY window(at, '1 minute')",
    "SELECT window.start, window.end AS e, avg(ms) AS m FROM clicks GROUP BY window(at, '1 hour', '5 minutes')",
    "SELECT w.start AS s, sum(ms) AS m FROM (SELECT window(at, '1 minute') AS w, ms FROM clicks) GROUP BY w",
    "SELECT session_window.start AS s, count(*) AS n FROM clicks GROUP BY session_window(at, '5 minutes'), user",
    "SELECT at, count(*) AS n, max_by(user, ms) AS u, collect_set(url) AS s FROM clicks GROUP BY at HAVING n > 1",
    "SELECT at, count(*) FILTER (WHERE ms > 5) AS slow, approx_count_distinct(user) AS users FROM clicks GROUP BY ALL",
    "SELECT at, listagg(user, ',') WITHIN GROUP (ORDER BY user) AS l FROM clicks GROUP BY 1",
    "SELECT DISTINCT at, user FROM clicks",
    "SELECT a.user FROM clicks a JOIN clicks b ON a.user = b.user AND a.at = b.at",
    "SELECT a.user FROM clicks a LEFT JOIN clicks b ON a.user = b.user AND a.at = b.at",
    "SELECT user FROM clicks a JOIN clicks b USING (user)",
    "SELECT user FROM clicks LIMIT 5",
    "SELECT window(w, '1 hour').start AS h, sum(n) AS n FROM (SELECT window AS w, count(*) AS n FROM clicks"
    " GROUP BY window(at, '1 minute')) GROUP BY window(w, '1 hour')",
    "SELECT s, h, d FROM (SELECT sum(ms * 1.5) AS s, round(avg(ms)) AS h, 1 - sum(ms) AS d FROM clicks GROUP BY at)",
    "FROM clicks SELECT user",
    "FROM clicks |> WHERE ms > 5 |> SELECT user, ms",
    "SELECT parse_json(url):a.b FROM clicks",
    "SELECT ms >>> 1 AS m, X 'FF' AS h FROM clicks",
    "SELECT /*+ BROADCAST(v) */ user -- a comment, with 'quotes\n FROM clicks, VALUES (1) AS v(x);",
]
"""Queries that can run, into a lake with a watermark."""

MISTAKES = [
    "SELECT usr FROM clicks",
    "SELECT c.usr FROM clicks c",
    "SELECT clicks.url FROM clicks c",
    "SELECT ms / 1000 AS s FROM clicks WHERE s > 1",
    "SELECT t.b FROM (SELECT user AS a FROM clicks) AS t",
    "WITH t(a) AS (SELECT user FROM clicks) SELECT url FROM t",
    "SELECT user FROM cliks",
    "SELECT x.* FROM clicks",
    "SELECT url FROM clicks GROUP BY nothing",
    "SELECT url, count(*) AS n FROM clicks GROUP BY url HAVING m > 5",
    "SELECT transform(tags, tag -> tagg) AS t FROM clicks",
    "SELECT window.middle AS m FROM clicks GROUP BY window(at, '1 minute')",
    "SELECT window.start AS m FROM clicks",
    "SELECT a.user FROM clicks a JOIN clicks b ON a.user = b.usr",
    "SELECT user FROM clicks WHERE (ms > 5",
    "SELECT user url ms FROM clicks",
    "SELECT user FROM clicks ORDER BY at",
    "SELECT user FROM clicks SORT BY at",
    "SELECT user FROM clicks CLUSTER BY user",
    "SELECT user FROM clicks OFFSET 3",
    "SELECT rank() OVER (PARTITION BY user ORDER BY at) AS r FROM clicks",
    "SELECT at, count(DISTINCT user) AS n FROM clicks GROUP BY at",
    "SELECT user FROM clicks WHERE ms IN (SELECT ms FROM clicks)",
    "SELECT user FROM clicks INTERSECT SELECT url FROM clicks",
    "SELECT user FROM clicks EXCEPT SELECT url FROM clicks",
    "SELECT user FROM clicks TABLESAMPLE (10 PERCENT)",
    "SELECT * FROM (SELECT user, ms FROM clicks) PIVOT (sum(ms) FOR user IN ('a', 'b'))",
    "SELECT user, count(*) AS n FROM clicks GROUP BY user",
    "SELECT count(*) AS n FROM clicks",
    "SELECT DISTINCT user FROM clicks",
]
"""Queries that cannot, and must be found before Spark starts."""


@pytest.fixture(scope="module")
def streams(spark: SparkSession) -> Iterator[dict[bool, SparkSession]]:
    """Sessions in which `clicks` is a stream, with and without a watermark."""
    columns = [*ddl.columns(SCHEMA), *ORIGIN]
    select = [f"CAST(NULL AS {kind}) AS {name}" for name, kind in columns if name != "at"]
    order = [name for name, _ in columns]
    sessions = {}
    for timed in (False, True):
        sessions[timed] = session = spark.newSession()
        rows = session.readStream.format("rate").load().selectExpr("timestamp AS at", *select).select(*order)
        (rows.withWatermark("at", "10 minutes") if timed else rows).createOrReplaceTempView("clicks")
    yield sessions


def pipeline(sql: str, sink: str, timed: bool) -> PipelineSpec:
    watermark = 'watermark = { column = "at", delay = "10 minutes" }\n' if timed else ""
    text = f'name = "n"\n[source]\ntopic = "clicks"\nschema = "{SCHEMA}"\n{watermark}'
    spec, mistakes = parse(
        Path("/p.toml"), f'{text}[[step]]\nname = "one"\nsql = """{sql}"""\n[[sink]]\nfrom = "one"\n{sink}\n'
    )
    assert mistakes == [] and spec is not None
    return spec


def refusal(session: SparkSession, spec: PipelineSpec) -> str | None:
    """Why Spark would not start the pipeline's query."""
    try:
        start(session.sql(spec.steps[0].sql), check.output_mode(spec, spec.sinks[0]))
    except (AnalysisException, ParseException, Py4JJavaError) as error:
        return str(error).splitlines()[0]
    return None


def start(rows: DataFrame, mode: str) -> None:
    """As far as Spark goes before it reads anything."""
    jvm = rows.sparkSession.sparkContext._jvm
    assert jvm is not None
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    checker.checkForStreaming(
        rows._jdf.queryExecution().analyzed(), modes.Append() if mode == "append" else modes.Update()
    )


@pytest.mark.parametrize("sql", GOOD)
def test_what_spark_can_do_is_no_mistake(streams: dict[bool, SparkSession], sql: str) -> None:
    spec = pipeline(sql, TOPIC, timed=True)
    assert refusal(streams[True], spec) is None
    assert check.check(spec, None) == []


@pytest.mark.parametrize("sql", MISTAKES)
def test_mistakes_are_found_that_spark_would_find(streams: dict[bool, SparkSession], sql: str) -> None:
    spec = pipeline(sql, LAKE, timed=True)
    assert refusal(streams[True], spec) is not None
    assert check.check(spec, None) != []


@pytest.mark.parametrize("sql", GOOD + MISTAKES)
@pytest.mark.parametrize("timed", [False, True], ids=["plain", "watermark"])
@pytest.mark.parametrize("sink", [LAKE, TOPIC], ids=["lake", "topic"])
def test_there_is_no_false_alarm(streams: dict[bool, SparkSession], sql: str, timed: bool, sink: str) -> None:
    spec = pipeline(sql, sink, timed)
    about_sql = [
        each for each in check.check(spec, None) if "has no name" not in each.text and "have no name" not in each.text
    ]
    if about_sql:
        assert refusal(streams[timed], spec) is not None, about_sql


@pytest.mark.parametrize("sql", GOOD)
def test_columns_and_types_are_those_of_spark(streams: dict[bool, SparkSession], sql: str) -> None:
    known = check.step_columns(pipeline(sql, TOPIC, timed=True)).get("one")
    if known is None:
        return
    schema = streams[True].sql(sql).schema
    assert len(schema.fields) == len(known)
    for field, (name, kind) in zip(schema.fields, known, strict=True):
        if name:
            assert field.name == name
        else:
            assert not re.fullmatch(r"\w+", field.name)
        if kind != "?":
            assert ddl.columns(f"x {field.dataType.simpleString()}")[0][1] == kind
