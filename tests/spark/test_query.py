"""SQL questions over topics."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession

from millstream.pipeline.question import BadQuestion, Question, as_json, read_wording, rows
from tests.serving import ServedBroker

pytestmark = pytest.mark.slow

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
HOUR_MS = 3_600_000


def fill(broker: ServedBroker, topic: str, records: list[dict[str, Any]], partitions: int = 2) -> str:
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result()
    producer = Producer({"bootstrap.servers": broker.address, "compression.type": "lz4"})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(30) == 0
    return topic


def clicks(count: int = 300) -> list[dict[str, Any]]:
    """One a minute, the last one now."""
    began = int(time.time() * 1000) - count * 60_000
    return [
        {
            "value": json.dumps({"user": f"u{number % 3}", "ms": number, "at": {"page": f"/{number % 5}"}}).encode(),
            "key": b"u%d" % (number % 3),
            "partition": number % 2,
            "timestamp": began + number * 60_000,
        }
        for number in range(count)
    ]


@contextmanager
def asked(spark: SparkSession, broker: ServedBroker, sql: str, **how: Any) -> Iterator[DataFrame]:
    question = Question(sql, broker.address, **how)
    try:
        question.check_topics()
        yield question.ask(spark.newSession())
    finally:
        question.close()


def answer(spark: SparkSession, broker: ServedBroker, sql: str, **how: Any) -> list[tuple[Any, ...]]:
    with asked(spark, broker, sql, **how) as found:
        return [tuple(row) for row in rows(found)]


def test_json_fields_are_columns(spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]) -> None:
    topic = fill(broker, unique("clicks"), clicks())
    sql = f"SELECT user, count(*) AS n, max(ms) AS most, max(at.page) FROM `{topic}` GROUP BY user ORDER BY user"
    assert answer(spark, broker, sql) == [("u0", 100, 297, "/4"), ("u1", 100, 298, "/4"), ("u2", 100, 299, "/4")]


def test_a_topic_without_json_has_its_value_as_text(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    records = [{"value": b"plain", "key": b"k\xff", "partition": 0}, {"value": b"\xc3\xbc", "partition": 0}]
    topic = fill(broker, unique("lines.of-text"), [*records, {"value": None, "key": b"gone", "partition": 0}])
    sql = f"SELECT value, _key, _topic, _partition, _offset FROM `{topic}` ORDER BY _offset"
    assert answer(spark, broker, sql) == [
        ("plain", "k\ufffd", topic, 0, 0),
        ("ü", None, topic, 0, 1),
        (None, "gone", topic, 0, 2),
    ]
    assert answer(spark, broker, f"SELECT value FROM `{topic}` WHERE _offset = 0", kind="bytes") == [(b"plain",)]


def test_a_schema_given_by_hand_wins(spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]) -> None:
    topic = fill(broker, unique("clicks"), [{"value": b'{"at": "2026-11-15T12:00:00Z", "n": 1}'}, {"value": b"bad"}])
    sql = f"SELECT hour(at), n FROM `{topic}` ORDER BY n"
    assert answer(spark, broker, sql, schema="at TIMESTAMP, n INT") == [(None, None), (12, 1)]


def test_topics_are_joined(spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]) -> None:
    topic = fill(broker, unique("clicks"), clicks(30))
    users = fill(broker, unique("users"), [{"value": b'{"id": "u1", "name": "Ada"}'}])
    sql = (
        f"WITH slow AS (SELECT * FROM `{topic}` WHERE ms > 20) "
        f"SELECT name, count(*) FROM slow JOIN `{users}` ON user = id GROUP BY name"
    )
    assert answer(spark, broker, sql) == [("Ada", 3)]


def test_only_what_the_filter_asks_for_is_read(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = fill(broker, unique("clicks"), clicks())
    # A task per range, and at least one: without pushed filters there would be one for each partition.
    with asked(spark, broker, f"SELECT ms FROM `{topic}` WHERE _partition = 1 AND _offset >= 140") as found:
        assert found.rdd.getNumPartitions() == 1
        assert sorted(row[0] for row in rows(found)) == [2 * offset + 1 for offset in range(140, 150)]
    with asked(spark, broker, f"SELECT ms FROM `{topic}` WHERE _timestamp > now() + INTERVAL 1 DAY") as found:
        assert found.rdd.getNumPartitions() == 1 and list(rows(found)) == []
    with asked(spark, broker, f"SELECT ms FROM `{topic}` WHERE _timestamp > now() - INTERVAL 30 MINUTES") as found:
        assert 25 <= len(list(rows(found))) <= 31


def test_a_topic_that_is_read_in_two_places_has_all_its_rows_in_both(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = fill(broker, unique("query_twice"), clicks())
    first = f"(SELECT count(*) FROM `{topic}` WHERE _partition = 0)"
    assert answer(spark, broker, f"SELECT {first} AS a, (SELECT count(*) FROM `{topic}`) AS b") == [(150, 300)]
    with_ = f"WITH t AS (SELECT _partition AS p FROM `{topic}`)"
    counted = f"{with_} SELECT (SELECT count(*) FROM t WHERE p = 0) AS a, (SELECT count(*) FROM t WHERE p = 1) AS b"
    assert answer(spark, broker, counted) == [(150, 150)]


def test_columns_that_the_sql_does_not_name_are_not_read(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = fill(broker, unique("clicks"), clicks(10))

    def read(sql: str) -> str:
        with asked(spark, broker, sql) as found:
            plan = found._jdf.queryExecution().executedPlan().toString()
            return str(plan[plan.index("millstream[") :].split("]")[0])

    assert "value" not in read(f"SELECT count(*) FROM `{topic}`")
    assert "key" not in read(f"SELECT max(ms) FROM `{topic}`")
    assert "timestamp" in read(f"SELECT * FROM `{topic}`")
    assert answer(spark, broker, f"SELECT count(*) FROM `{topic}`") == [(10,)]


@pytest.mark.parametrize(
    ("sql", "tables", "names"),
    [
        ("SELECT a, count(*) FROM x GROUP BY a", ("x",), {"a", "x"}),
        ("SELECT * FROM x", ("x",), None),
        ("SELECT x.* FROM x", ("x",), None),
        ("WITH c AS (SELECT a FROM x) SELECT a FROM c, `y.z-1`", ("x", "y.z-1"), {"c", "a", "x", "y.z-1"}),
        ("SELECT a FROM x NATURAL JOIN y", ("x", "y"), None),
        ("FROM x", ("x",), None),
        ("SELECT b FROM x PIVOT (sum(c) FOR d IN (1 AS b))", ("x",), None),
        ("SELECT a FROM x WHERE b IN (SELECT c FROM y)", ("x", "y"), {"a", "b", "c", "x", "y"}),
        ("DESCRIBE x", (), None),
        ("SELECT a FROM range(3), other.catalog", (), {"a", "other", "catalog"}),
        ("SELECT from where", (), None),
    ],
)
def test_tables_and_names_are_found_in_the_sql(sql: str, tables: tuple[str, ...], names: set[str] | None) -> None:
    wording = read_wording(sql)
    assert sorted(wording.tables) == sorted(tables)
    assert wording.names == names


def test_a_question_that_has_no_answer_is_one_sentence(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = fill(broker, unique("clicks"), clicks(5))
    dotted = fill(broker, unique("dotted.name").replace("-", "_"), clicks(5))

    def sentence(sql: str, **how: Any) -> str:
        with pytest.raises(BadQuestion) as refused:
            answer(spark, broker, sql, **how)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert sentence(f"SELECT 1 FROM `{topic}x`") == (
        f"there is no topic {topic}x at {broker.address}; did you mean {topic}?"
    )
    assert "`user`" in sentence(f"SELECT usr FROM `{topic}`")
    assert f"write `{dotted}`" in sentence(f"SELECT * FROM {dotted}")
    assert f"write `{topic}`" in sentence(f"SELECT ms FROM {topic} WHERE ms > 1")
    assert "Syntax error" in sentence(f"SELECT ms FORM `{topic}` WHERE")
    assert "DIVIDE_BY_ZERO" in sentence(f"SELECT ms / 0 FROM `{topic}`")
    assert "DROP is not a query" in sentence("DROP TABLE clicks")
    text = fill(broker, unique("text"), [{"value": b"x"}])
    assert "do not look like JSON" in sentence(f"SELECT * FROM `{text}`", kind="json")


def test_answers_as_json_keep_columns_of_one_name_apart(
    spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    with asked(spark, broker, "SELECT 1 AS a, 2 AS a, CAST(NULL AS INT) AS `b.c`, X'FF' AS d") as found:
        assert [json.loads(line) for line in as_json(found)] == [{"a": 1, "a_2": 2, "b.c": None, "d": "/w=="}]


def run(broker: ServedBroker, *arguments: str, code: int = 0, **more: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "millstream", "query", *arguments]
    environ = CLEAN | {"MILLSTREAM_BROKER": broker.address} | more
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.timeout(240)
def test_the_command_answers_as_csv(broker: ServedBroker, unique: Callable[[str], str]) -> None:
    topic = fill(broker, unique("clicks"), clicks(9))
    out, err = run(broker, f"SELECT user, at, ms > 7 AS slow FROM `{topic}` ORDER BY ms", "-o", "csv", "--limit", "8")
    assert err == ""
    lines = list(csv.reader(io.StringIO(out)))
    assert lines[0] == ["user", "at", "slow"] and len(lines) == 9
    assert lines[1] == ["u0", "{page: /0}", "false"]


def test_the_command_names_the_topic_that_was_meant_before_spark_starts(
    broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = fill(broker, unique("purchases"), clicks(1))
    out, err = run(broker, f"SELECT * FROM `{topic}s`", code=1, JAVA_HOME="/nowhere")
    assert out == "" and err == (f"millstream: there is no topic {topic}s at {broker.address}; did you mean {topic}?\n")
