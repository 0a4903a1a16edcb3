"""Mistakes that a pipeline's file has although it can be read: in schemas, SQL, sinks and topics.

tests/spark/test_pipeline_check_as_spark.py asks Spark about the same things.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.client.cluster import KafkaCluster
from millstream.pipeline import check
from millstream.pipeline.mistakes import BadPipeline
from millstream.pipeline.spec import LakeSink, PipelineSpec, parse
from tests.serving import ServedBroker

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = EXAMPLES / "clicks.toml"
SCHEMA = "user STRING, url STRING, ms LONG, at TIMESTAMP, tags ARRAY<STRING>, place STRUCT<city: STRING, zip: INT>"
WATERMARK = 'watermark = { column = "at", delay = "10 minutes" }'
LAKE = 'lake = "lake"\npartition_by = "none"'
TABLE = 'table = "sqlite:hits.db"\nname = "hits"\nkey = "user"'
KEYED = TABLE.replace('"user"', '["user", "{}"]')
TOPIC = 'topic = "alerts"'


def pipeline(*steps: str, sink: str = TOPIC, schema: str = SCHEMA, source: str = WATERMARK) -> PipelineSpec:
    """Steps one, two, ... over the view clicks, the last of which goes into the sink. Its SQL is on line 8."""
    names = ["clicks", "one", "two", "three"]
    text = f'name = "n"\n[source]\ntopic = "clicks"\nschema = "{schema}"\n{source}\n'
    for name, sql in zip(names[1:], steps, strict=False):
        text += f"[[step]]\nname = '{name}'\nsql = '''{sql}'''\n"
    spec, mistakes = parse(FILE, f"{text}[[sink]]\nfrom = '{names[len(steps)]}'\n{sink}\n")
    assert mistakes == [] and spec is not None
    return spec


def mistakes_in(spec: PipelineSpec) -> list[str]:
    return [each.text for each in check.check(spec, None)]


def columns(spec: PipelineSpec, view: str = "one") -> str:
    return ", ".join(f"{name} {kind}" for name, kind in check.step_columns(spec)[view])


# -- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_have_no_mistakes(path: Path) -> None:
    assert check.load(path).name == path.stem


def test_the_columns_of_the_example_are_known() -> None:
    spec = check.load(EXAMPLES / "clicks.toml")
    origin = "_key BINARY, _topic STRING, _partition INT, _offset BIGINT, _timestamp TIMESTAMP"
    assert columns(spec, "clicks") == f"user STRING, url STRING, ms BIGINT, at TIMESTAMP, {origin}"
    assert columns(spec, "per_minute") == "minute TIMESTAMP, url STRING, hits BIGINT, ms DOUBLE"
    assert columns(spec, "slow") == "user STRING, url STRING, ms BIGINT"


def test_what_a_run_asks_about_the_example() -> None:
    spec = check.load(EXAMPLES / "clicks.toml")
    lake, table, topic = spec.sinks
    assert [check.is_untransformed(spec, sink) for sink in spec.sinks] == [True, False, False]
    assert [check.stateful_steps(spec, sink.source) for sink in spec.sinks] == [[], ["per_minute"], []]
    assert [check.output_mode(spec, sink) for sink in (lake, table, topic)] == ["append", "update", "append"]
    assert isinstance(lake, LakeSink)
    assert check.time_column(spec, lake) == "_timestamp"


def test_mistakes_of_both_kinds_are_told_together(tmp_path: Path) -> None:
    text = (EXAMPLES / "clicks.toml").read_text().replace("avg(ms)", "avg(millis)").replace('"sqlite:hits.db"', '"x"')
    (tmp_path / "clicks.toml").write_text(text.replace('name = "clicks"', 'name = "clicks"\ncolour = "red"'))
    with pytest.raises(BadPipeline) as caught:
        check.load(tmp_path / "clicks.toml")
    assert str(caught.value).replace(str(tmp_path), "") == (
        "/clicks.toml:7: colour is not known; there are name, broker, dead_letters, on_error, trigger, rows_per_batch, "
        "checkpoint, source, step, sink\n"
        "/clicks.toml:18: step per_minute: there is no column millis; there are user, url, ms, at, _key, _topic, "
        "_partition, _offset, _timestamp\n"
        "/clicks.toml:33: this is not a supported database; write sqlite:FILE or "
        "postgresql://USER@HOST/DATABASE"
    )


# -- the source ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('schema = "user STRNG"', "source.schema: the column user has a type that Spark does not know"),
        ('schema = "user STRING, User INT"', "source.schema: the column User occurs twice"),
        ('schema = "_offset LONG"', "source.schema: _offset is a name that the pipeline reserves"),
        ('schema = "tags ARRAY<INT>"\nformat = "csv"', "source.schema: tags is ARRAY<INT>, which CSV cannot hold"),
        ('schema = "a INT"\noptions = { modus = "x" }', "source.options: modus is not known"),
        ('schema = "a INT"\noptions = { timestampformat = "x" }', None),
        ('schema = "a INT"\noptions = { Mode = "FAILFAST" }', "source.options: Mode is decided by on_error"),
        ('format = "text"\noptions = { sep = ";" }', "source.options: format text has no options"),
        ('format = "text"\noptions = { failOnDataLoss = false }', None),
        ('schema = "a INT"\noptions = { failOnDataLoss = "no" }', "source.options: failOnDataLoss must be true"),
        ('schema = "a INT"\nwatermark = { column = "at", delay = "1 day" }', "the watermark's column at is not in"),
        ('schema = "at DATE"\nwatermark = { column = "at", delay = "1 day" }', "the watermark's column at is DATE"),
        ('schema = "At TIMESTAMP"\nwatermark = { column = "at", delay = "1 day" }', None),
        ('format = "text"\nwatermark = { column = "_timestamp", delay = "1 day" }', None),
        ('format = "avro"\nschema = "{"', "source.schema: is not an Avro schema, which is JSON or a .avsc file"),
        ("format = 'avro'\nschema = '\"string\"'", "source.schema: the Avro schema must be a record"),
        ("format = 'avro'\nschema = '{\"type\": \"record\"}'", "source.schema: is not an Avro schema: "),
        ("format = 'avro'\nschema = '[1, 2]'", "source.schema: is not an Avro schema: "),
    ],
)  # fmt: skip
def test_tells_what_is_wrong_with_a_source(source: str, wanted: str | None) -> None:
    text = f'name = "n"\n[source]\ntopic = "clicks"\n{source}\n[[sink]]\nfrom = "clicks"\n{LAKE}\n'
    spec, mistakes = parse(FILE, text)
    assert mistakes == [] and spec is not None
    found = mistakes_in(spec)
    assert len(found) == (wanted is not None)
    assert wanted is None or found[0].startswith(wanted)


def test_a_mistake_in_a_long_schema_is_on_its_line() -> None:
    text = 'name = "n"\n[source]\ntopic = "t"\nschema = """\nuser STRING,\nms LONGER\n"""\n'
    spec, _ = parse(FILE, text + '[[sink]]\nfrom = "t"\nlake = "x"')
    assert spec is not None
    (mistake,) = check.check(spec, None)
    assert mistake.line == 6


# -- SQL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT * FROM clicks WHERE ms > 5", None),
        ("SELECT USER, `url`, Clicks.ms, c.at FROM CLICKS c", "neither a table nor a column Clicks; there is c"),
        ("SELECT place.city, c.place.zip, tags[0] AS t FROM clicks AS c", None),
        ("SELECT t.tag FROM clicks LATERAL VIEW explode(tags) t AS tag", None),
        ("SELECT explode(tags) AS tag, user FROM clicks", None),
        ("SELECT transform(tags, tag -> upper(tag) || url) AS t FROM clicks", None),
        ("SELECT transform(tags, tag -> upper(tagg)) AS t FROM clicks", "there is no column tagg"),
        ("SELECT ms / 1000 AS s, s * 2 AS d FROM clicks", None),
        ("SELECT url, count(*) AS n FROM clicks GROUP BY url HAVING n > 5", None),
        ("SELECT ms / 1000 AS s FROM clicks WHERE s > 1", "WHERE comes before SELECT and cannot see s"),
        ("WITH big AS (SELECT user AS who FROM clicks) SELECT Big.who FROM BIG", None),
        ("WITH big AS (SELECT user AS who FROM clicks) SELECT url FROM big", "there is no column url; there is who"),
        ("SELECT a FROM (SELECT user, url FROM clicks) AS t(a, b)", None),
        ("SELECT t.b FROM (SELECT user AS a FROM clicks) AS t", "t has no column b; there is a"),
        ("SELECT user, name FROM clicks JOIN VALUES ('u', 'n') AS names(id, name) ON user = id", None),
        ("SELECT c.user, p.x FROM clicks c JOIN catalog.people p ON p.id = c.user", None),
        ("SELECT unheard_of(user, ms) AS u FROM clicks", None),
        ("SELECT timestampadd(HOUR, 1, at) AS later, date_diff(DAY, at, at) AS d, current_date AS t FROM clicks", None),
        ("SELECT window.start, window.middle FROM clicks GROUP BY window(at, '1 minute')", "window has a start"),
        ("SELECT w.start AS s FROM (SELECT window(at, '1 minute') AS w FROM clicks)", None),
        ("SELECT usr FROM clicks", "there is no column usr; did you mean user?"),
        ("SELECT user FROM cliks", "there is no table cliks; did you mean clicks?"),
        ("SELECT user FROM one", "one is not defined yet"),
        ("SELECT user FROM two", "two is not defined yet"),
        ("SELECT x.* FROM clicks", "there is no table x in this FROM; there is clicks"),
        ("SELECT user FROM clicks; SELECT 1", "a step takes one statement"),
        ("SELECT user FROM clicks;", None),
        ("DELETE FROM clicks", "a step's SQL must be a query, SELECT ... FROM ..., and not DELETE"),
        ("SELECT user, FROM WHERE", "the SQL cannot be read"),
        ("SELECT 'a FROM clicks", "the SQL has a quote, backtick or comment that is not closed"),
        ("-- nothing", "the SQL is empty"),
        ("FROM clicks |> WHERE ms > 5 |> SELECT usr", None),
        ("SELECT parse_json(url):a.b AS x FROM clicks", None),
        ("SELECT ms >>> 1 AS x FROM clicks", None),
    ],
)  # fmt: skip
def test_tells_what_is_wrong_with_sql_and_nothing_else(sql: str, wanted: str | None) -> None:
    found = mistakes_in(pipeline(sql, "SELECT 1 AS x FROM clicks"))
    assert len(found) == (wanted is not None), found
    assert wanted is None or wanted in found[0]


def test_mistakes_in_long_sql_are_on_their_lines() -> None:
    spec = pipeline("\nSELECT usr,\n       url\nFROM clicks\nWHERE mss > 5\n  AND at > nw")
    assert [each.line for each in check.check(spec, None)] == [9, 12, 13]
    spec = pipeline("SELECT user\nFROM clicks\nWHERE (ms > 5\n")
    assert [each.line for each in check.check(spec, None)] == [10]
    spec = pipeline("SELECT user\nFROM clicks\nWHERE url = 'x\n")
    assert [each.line for each in check.check(spec, None)] == [10]


def test_steps_see_the_columns_of_steps_above_them() -> None:
    spec = pipeline("SELECT user AS who, ms * 2 AS twice FROM clicks", "SELECT Who, twice + 1 AS more FROM One")
    assert mistakes_in(spec) == []
    assert columns(spec, "two") == "Who STRING, more BIGINT"
    (found,) = mistakes_in(pipeline("SELECT user AS who, ms * 2 AS twice FROM clicks", "SELECT url FROM one"))
    assert found == "step two: there is no column url; there are who, twice"


def test_a_step_can_be_left_to_spark() -> None:
    text = (
        'name = "n"\n[source]\ntopic = "t"\nformat = "text"\n[[step]]\nname = "one"\nsql = "SELECT (("\ncheck = false\n'
    )
    spec, mistakes = parse(FILE, text + '[[sink]]\nfrom = "one"\nlake = "x"')
    assert mistakes == [] and spec is not None
    assert check.check(spec, None) == []
    assert "one" not in check.step_columns(spec)


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT * EXCEPT (tags, place, _key) FROM clicks", "user STRING, url STRING, ms BIGINT, at TIMESTAMP, "
         "_topic STRING, _partition INT, _offset BIGINT, _timestamp TIMESTAMP"),
        ("SELECT url, count(*) AS n, sum(ms) AS s, avg(ms) AS m, max(at) AS t FROM clicks GROUP BY url",
         "url STRING, n BIGINT, s BIGINT, m DOUBLE, t TIMESTAMP"),
        ("SELECT window, window.end FROM clicks GROUP BY window(at, '1 day')",
         "window STRUCT<start: TIMESTAMP, end: TIMESTAMP>, end TIMESTAMP"),
        ("SELECT place.zip, place.city AS c, CAST(ms AS INT), cast(at AS DATE) AS d FROM clicks",
         "zip INT, c STRING, ms INT, d DATE"),
        ("SELECT ms > 5 AS slow, upper(user) AS u, ms + 1 AS p, ms / 2 AS h, ms * 1.5 AS odd FROM clicks",
         "slow BOOLEAN, u STRING, p BIGINT, h DOUBLE, odd ?"),
        ("SELECT posexplode(tags) AS (i, tag) FROM clicks", "i ?, tag ?"),
        ("SELECT user FROM clicks UNION ALL SELECT url FROM clicks", "user STRING"),
    ],
)  # fmt: skip
def test_columns_and_types_are_told_where_they_are_sure(sql: str, wanted: str) -> None:
    assert columns(pipeline(sql)) == wanted


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT user FROM clicks ORDER BY at", "cannot be sorted: leave ORDER BY out"),
        ("SELECT user FROM (SELECT user, at FROM clicks SORT BY at)", "cannot be sorted: leave SORT BY out"),
        ("SELECT user FROM clicks OFFSET 3", "cannot skip rows: leave OFFSET out"),
        (
            "SELECT rank() OVER (PARTITION BY user ORDER BY at) AS r FROM clicks",
            "Spark cannot do OVER (...) on a stream",
        ),
        ("SELECT count(DISTINCT user) AS n FROM clicks", "use approx_count_distinct(...)"),
        (
            "SELECT user FROM clicks WHERE ms IN (SELECT max(ms) FROM clicks)",
            "cannot read a stream inside an expression",
        ),
        ("SELECT user FROM clicks INTERSECT SELECT url FROM clicks", "Spark has no INTERSECT of streams"),
        ("SELECT user FROM clicks TABLESAMPLE (10 PERCENT)", "Spark cannot sample a stream"),
        (
            "SELECT * FROM (SELECT user, ms FROM clicks) PIVOT (sum(ms) FOR user IN ('a', 'b'))",
            "Spark cannot PIVOT a stream",
        ),
        (
            "SELECT count(*) AS n FROM clicks GROUP BY session_window(at, '1 day')",
            "needs more than session_window in GROUP BY",
        ),
        ("SELECT sum(x) AS s FROM VALUES (1) AS t(x) ORDER BY s", None),
        ("SELECT user, (SELECT max(x) FROM VALUES (1) AS t(x)) AS m FROM clicks", None),
        ("SELECT listagg(user) WITHIN GROUP (ORDER BY user) AS l FROM clicks GROUP BY window(at, '1 day')", None),
    ],
)
def test_tells_what_spark_cannot_do_with_a_stream(sql: str, wanted: str | None) -> None:
    found = mistakes_in(pipeline(sql))
    assert len(found) == (wanted is not None), found
    assert wanted is None or wanted in found[0]


WINDOWED = "SELECT user, window.start AS s, count(*) AS n FROM clicks GROUP BY user, window(at, '1 minute')"
SESSIONS = "SELECT session_window.end AS e FROM clicks GROUP BY session_window(at, '5 minutes'), user"
GROUPED = "SELECT user, count(*) AS n FROM clicks GROUP BY user"


@pytest.mark.parametrize(
    ("steps", "sink", "mode", "without_watermark", "with_watermark"),
    [
        (["SELECT user FROM clicks"], LAKE, "append", True, True),
        ([WINDOWED], LAKE, "append", False, True),
        ([WINDOWED], TABLE, "update", True, True),
        ([WINDOWED], TOPIC, "update", True, True),
        ([GROUPED], LAKE, "append", False, False),
        ([GROUPED], TABLE, "update", True, True),
        (["SELECT DISTINCT user FROM clicks"], LAKE, "append", False, False),
        (["SELECT DISTINCT user, at FROM clicks"], LAKE, "append", False, True),
        (["SELECT DISTINCT user FROM clicks"], TOPIC, "update", True, True),
        (["SELECT try_sum(ms) AS s FROM clicks"], LAKE, "append", False, False),
        (["SELECT user FROM clicks UNION SELECT url FROM clicks"], TOPIC, "update", True, True),
        ([WINDOWED, "SELECT user, n FROM one WHERE n > 5"], TABLE, "update", True, True),
        ([WINDOWED, "SELECT window(s, '1 hour') AS w, sum(n) AS n FROM one GROUP BY 1"], TOPIC, "append", False, True),
        ([GROUPED, "SELECT sum(n) AS n FROM one"], TOPIC, "append", False, False),
        ([GROUPED, "SELECT user FROM one LIMIT 5"], TOPIC, "append", False, False),
        ([SESSIONS], TOPIC, "append", False, True),
        (["SELECT a.user FROM clicks a JOIN clicks b ON a.user = b.url"], LAKE, "append", True, True),
        (["SELECT a.user FROM clicks a LEFT JOIN clicks b ON a.user = b.url"], LAKE, "append", False, True),
    ],
)  # fmt: skip
def test_an_aggregate_is_updated_or_else_needs_a_watermark(
    steps: list[str], sink: str, mode: str, without_watermark: bool, with_watermark: bool
) -> None:
    timed, untimed = pipeline(*steps, sink=sink), pipeline(*steps, sink=sink, source="")
    assert check.output_mode(timed, timed.sinks[0]) == check.output_mode(untimed, untimed.sinks[0]) == mode
    assert (mistakes_in(untimed) == [], mistakes_in(timed) == []) == (without_watermark, with_watermark)


def test_state_is_kept_for_aggregates_and_joins_in_any_step_below() -> None:
    spec = pipeline(GROUPED, "SELECT user FROM one", "SELECT user FROM clicks")
    assert [check.stateful_steps(spec, view) for view in ("clicks", "one", "Two", "three")] == [
        [],
        ["one"],
        ["one"],
        [],
    ]
    assert check.stateful_steps(pipeline("SELECT a.user FROM clicks a, clicks b WHERE a.user = b.url"), "one")
    assert not check.stateful_steps(pipeline("SELECT user FROM clicks JOIN VALUES (1) AS t(x) ON ms = x"), "one")
    assert check.stateful_steps(pipeline("FROM clicks |> AGGREGATE count(*) AS n GROUP BY user"), "one")


# -- sinks -----------------------------------------------------------------------------------------------------------


def at(url: str) -> str:
    """A table sink at a URL."""
    return TABLE.replace("sqlite:hits.db", url)


@pytest.mark.parametrize(
    ("sql", "sink", "wanted"),
    [
        ("SELECT user, count(*) FROM clicks GROUP BY user", TABLE, "column 2 of one has no name; add AS NAME"),
        ("SELECT user, upper(url), ms + 1 FROM clicks", LAKE, "columns 2 and 3 of one have no name; add AS NAME"),
        ("SELECT user, upper(url) FROM clicks", TOPIC, None),
        ("SELECT user, ms AS User FROM clicks", LAKE, "one has more than one column"),
        ("SELECT user AS `a b` FROM clicks", LAKE, "a Delta lake cannot have a column named 'a b'"),
        ("SELECT user AS `a b` FROM clicks", LAKE + '\nformat = "parquet"', None),
        ("SELECT user, at AS day FROM clicks", 'lake = "x"', "one has a column day, as the lake's partitions"),
        ("SELECT user, url FROM clicks", 'lake = "x"', "one has no TIMESTAMP, so the day of a row is unknown"),
        ("SELECT at AS a, _timestamp AS b FROM clicks", 'lake = "x"', "one has several times (a, b)"),
        ("SELECT at AS a, user FROM clicks", 'lake = "x"', None),
        ("SELECT date_trunc('HOUR', at) AS a, user FROM clicks", 'lake = "x"', None),
        ("SELECT user FROM clicks", 'lake = "s3://bucket/x"\npartition_by = "none"', "a lake is a folder"),
        ("SELECT user FROM clicks", KEYED.format("minute"), "key: one has no column minute; there is user"),
        ("SELECT user FROM clicks", KEYED.format("USER"), "key names a column twice"),
        ("SELECT place AS user FROM clicks", TABLE, "key: user is a STRUCT, which cannot be a key"),
        ("SELECT user FROM clicks", at("sqlite:"), "names no file; write sqlite:FILE"),
        ("SELECT user FROM clicks", at("sqlite::memory:"), "names no file; write sqlite:FILE"),
        ("SELECT user FROM clicks", at("sqlite://hits.db"), "names no file; write sqlite:FILE"),
        ("SELECT user FROM clicks", at("sqlite:nowhere/hits.db"), "nowhere for the SQLite file; make it first"),
        ("SELECT user FROM clicks", at("mysql://h/d"), "mysql: is not a supported database"),
        ("SELECT user FROM clicks", at("postgresql:h"), "is not complete"),
        ("SELECT user FROM clicks", at("postgresql:///d?host=/run"), None),
        ("SELECT user FROM clicks", at("postgres://u:p@[::1]:5433,h2:5432/d"), None),
        ("SELECT user FROM clicks", at("postgresql://h:port/d"), "has a host or port that is not valid"),
        ("SELECT user FROM clicks", TOPIC + '\nkey = "usr"', "key: one has no column usr; did you mean user?"),
        ("SELECT user FROM clicks", TOPIC + '\nformat = "text"', 'format = "text" sends the column value'),
        ("SELECT user AS value FROM clicks", TOPIC + '\nformat = "text"', None),
        ("SELECT user AS value FROM clicks", TOPIC + '\nformat = "bytes"', "must be BINARY; one has it as STRING"),
    ],
)  # fmt: skip
def test_tells_what_does_not_fit_a_sink(sql: str, sink: str, wanted: str | None) -> None:
    found = mistakes_in(pipeline(sql, sink=sink))
    assert len(found) == (wanted is not None), found
    assert wanted is None or wanted in found[0]


@pytest.mark.parametrize(
    "url", ["postgresql://u:hunter2@h:99999/d", "postgres:u:hunter2@h", "my:sql://u:hunter2@h", "hunter2"]
)
def test_passwords_are_in_no_mistake(url: str) -> None:
    found = mistakes_in(pipeline("SELECT user FROM clicks", sink=at(url)))
    assert len(found) == 1
    assert "hunter2" not in found[0]


def test_a_lake_is_partitioned_by_the_time_that_fits_best() -> None:
    def column(sql: str, schema: str = SCHEMA, source: str = WATERMARK) -> str | None:
        spec = pipeline(sql, sink='lake = "x"', schema=schema, source=source)
        assert isinstance(spec.sinks[0], LakeSink)
        return check.time_column(spec, spec.sinks[0])

    assert column("SELECT * FROM clicks") == "_timestamp"
    assert column("SELECT at, at AS other FROM clicks") == "at"
    assert column("SELECT a AS At, b FROM clicks", "a TIMESTAMP, b TIMESTAMP", "") == "At"
    assert column("SELECT a, b FROM clicks", "a TIMESTAMP, b TIMESTAMP", "") is None
    assert column("SELECT a FROM clicks", "a TIMESTAMP, b TIMESTAMP", "") == "a"


def test_spark_may_know_the_time_better() -> None:
    spec = pipeline("SELECT date_trunc('HOUR', at) AS hour_of FROM clicks", sink='lake = "x"')
    assert isinstance(spec.sinks[0], LakeSink)
    assert check.time_column(spec, spec.sinks[0]) is None
    assert check.time_column(spec, spec.sinks[0], [("hour_of", "timestamp")]) == "hour_of"


# -- topics ----------------------------------------------------------------------------------------------------------


def test_topics_that_are_not_there_are_told(broker: ServedBroker, unique: Callable[[str], str]) -> None:
    there, out = unique("clicks"), unique("alerts")
    text = f'name = "n"\n[source]\ntopic = "{there}"\nname = "clicks"\nformat = "text"\n'
    spec, _ = parse(FILE, f'{text}[[sink]]\nfrom = "clicks"\ntopic = "{out}"\n')
    assert spec is not None
    cluster = KafkaCluster(broker.address)
    try:
        found = check.check(spec, cluster)
        assert [(each.line, each.text) for each in found] == [
            (3, f"there is no topic {there}; create it with `millstream topic create {there}`"),
            (8, f"there is no topic {out}; create it with `millstream topic create {out}`"),
        ]
        create(broker, there, out)
        assert check.check(spec, cluster) == []
    finally:
        cluster.close()


def test_a_broker_that_does_not_answer_is_one_mistake() -> None:
    spec, _ = parse(EXAMPLES / "clicks.toml")
    assert spec is not None
    (mistake,) = check.check(spec, KafkaCluster("127.0.0.1:1", timeout_seconds=0.1))
    assert mistake.text.startswith("the broker cannot be reached, so topics could not be looked up: cannot find alerts")


def create(broker: ServedBroker, *topics: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker.address})
    for future in admin.create_topics([NewTopic(topic, 1) for topic in topics]).values():
        future.result(30)


# -- whatever the file says ------------------------------------------------------------------------------------------

WORDS = (
    *(
        "SELECT",
        "FROM clicks",
        "WHERE",
        "GROUP BY",
        "window(at, '1 minute')",
        "count(*)",
        "JOIN clicks ON",
        "user",
        "ms",
    ),
    *(
        ",",
        "(",
        ")",
        "*",
        "'",
        "`",
        ".",
        "AS",
        "WITH x AS (SELECT 1)",
        "UNION",
        "ORDER BY 1",
        "OVER (",
        "VALUES (1)",
        ";",
    ),
    *("LATERAL VIEW explode(tags)", "CASE WHEN", "END", "IN (", "EXISTS (", "->", "::INT", "LIMIT 1", "\n", "é"),
    *("PIVOT (sum(ms) FOR user IN ('a'))", "DISTINCT", "tags[0]", "x -> x", "1.5", "INTERVAL 1 DAY"),
)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
def test_no_sql_is_so_broken_that_the_check_fails(sql: str) -> None:
    text = f"name = 'n'\n[source]\ntopic = 'clicks'\nschema = '{SCHEMA}'\n"
    text += f'[[step]]\nname = "one"\nsql = """SELECT {sql}"""\n'
    spec, mistakes = parse(FILE, text + f"[[sink]]\nfrom = 'one'\n{LAKE}\n")
    assert mistakes == [] and spec is not None
    for mistake in check.check(spec, None):
        assert 1 <= mistake.line <= text.count("\n") + 5
        assert "\n" not in mistake.text
    check.output_mode(spec, spec.sinks[0])


# -- Avro with ids ---------------------------------------------------------------------------------------------------

AVSC = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "string"}%s]}'
ORDER, WIDER = AVSC % "", AVSC % ', {"name": "customer", "type": "string"}'


def framed(**more: str) -> list[str]:
    """What is wrong with a source of Avro that has these keys too."""
    keys = "".join(f"{key} = {value}\n" for key, value in more.items())
    text = f'name = "n"\n[source]\ntopic = "t"\nformat = "avro"\nschema = \'{WIDER}\'\n{keys}'
    spec, mistakes = parse(FILE, f'{text}[[sink]]\nfrom = "t"\ntopic = "out"\n')
    assert spec is not None
    return [f"{each.line}: {each.text}" for each in (*mistakes, *check.check(spec, None))]


def test_ids_of_schemas_say_by_which_schema_a_value_was_written() -> None:
    assert framed() == framed(schema_ids=f"{{ 17 = '{WIDER}' }}") == []
    [told] = framed(schema_ids=f"{{ 17 = '{WIDER}', 18 = '{ORDER}' }}")
    assert told.startswith("6: source.schema_ids.18: its values cannot be read by source.schema")
    assert "source.schema_ids.18: is not an Avro schema" in framed(schema_ids="{ 18 = 'x' }")[0]
    assert 'source.schema_ids: "v1" is not the id of a schema' in framed(schema_ids=f"{{ v1 = '{WIDER}' }}")[0]
    assert 'source.schema_ids.1 "none.avsc" cannot be read' in framed(schema_ids='{ 1 = "none.avsc" }')[0]
    assert "source.schema_ids is empty" in framed(schema_ids="{}")[0]


def test_confluents_framing_without_ids_is_refused() -> None:
    [told] = framed(options='{ confluent = "true" }')
    assert told == (
        "6: source.options: confluent alone cannot tell schemas apart; say which schema each id is, "
        'as in schema_ids = { 17 = "orders.avsc" }'
    )
