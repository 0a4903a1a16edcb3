"""A pipeline whose file changes between runs, rows that come too late, and dead letters that name their pipeline."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession

from millstream.pipeline import check
from millstream.pipeline.mistakes import BadPipeline
from millstream.pipeline.notes import FILE
from millstream.pipeline.run import BatchReport, Pipeline, PipelineFailed
from tests.serving import ServedBroker
from tests.spark.topics import Sent, Topics

PIPELINE = """
name = "shop"
dead_letters = "TOPIC.dead"
[source]
topic = "TOPIC"
name = "orders"
schema = "item STRING, price LONG, cost LONG, at TIMESTAMP"
watermark = { column = "at", delay = "10 minutes" }
[[step]]
name = "per_hour"
sql = "SELECT window.start AS hour, item, sum(price) AS total FROM orders GROUP BY window(at, '1 hour'), item"
[[sink]]
from = "per_hour"
table = "sqlite:shop.db"
name = "hours"
key = ["hour", "item"]
"""


class Shop:
    """A pipeline over a topic of its own, in a folder of its own."""

    def __init__(self, spark: SparkSession, broker: ServedBroker, topic: str, home: Path) -> None:
        self._spark = spark
        self._broker = broker
        self.topics = Topics(broker.address)
        self.topic = self.topics.create(topic, 1)
        self.topics.create(f"{topic}.dead", 1)
        self.home = home
        self.file = home / "shop.toml"
        self.write(PIPELINE)

    def write(self, text: str) -> None:
        self.file.write_text(text.replace("TOPIC", self.topic))

    def send(self, *rows: tuple[str, int, str]) -> None:
        values = [{"item": item, "price": price, "cost": 1, "at": f"2026-01-01T{at}:00Z"} for item, price, at in rows]
        self.topics.produce(self.topic, [Sent(json.dumps(value).encode()) for value in values])

    def run(self, **changes: Any) -> list[BatchReport]:
        """Takes what is there."""
        pipeline = Pipeline(replace(check.load(self.file), **changes), self._spark, self._broker.address)
        pipeline.start(once=True)
        try:
            return list(pipeline.watch())
        finally:
            pipeline.stop()

    def totals(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.home / "shop.db")) as database:
            rows = database.execute("SELECT substr(hour, 12, 2) || ' ' || item, total FROM hours").fetchall()
        return dict(rows)

    def cli(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "millstream", "pipeline", *arguments, "--broker", self._broker.address]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture
def shop(spark: SparkSession, broker: ServedBroker, unique: Callable[[str], str], tmp_path: Path) -> Shop:
    return Shop(spark, broker, unique("shop"), tmp_path)


@pytest.mark.timeout(240)
def test_rows_behind_the_watermark_are_counted_by_step(shop: Shop) -> None:
    shop.send(("tea", 1, "10:00"), ("tea", 2, "15:00"))
    assert next(report.late for report in shop.run() if report.sink == "table-hours") == {"per_hour": 0}
    shop.send(("tea", 4, "10:30"), ("pot", 8, "11:00"), ("tea", 16, "15:30"))
    late = [report.late["per_hour"] for report in shop.run() if report.sink == "table-hours"]
    assert sum(late) == 2
    assert shop.totals() == {"10 tea": 1, "15 tea": 18}
    [table, _] = json.loads(shop.cli("show", "shop.toml", "-o", "json"))["sinks"]
    assert table["late"] == 2 and table["rows_dropped_by_watermark"] == {"per_hour": 2}


@pytest.mark.timeout(240)
def test_a_changed_aggregate_is_told_with_a_remedy_and_the_remedy_works(shop: Shop) -> None:
    shop.send(("tea", 1, "10:00"), ("tea", 2, "10:30"))
    shop.run()
    assert shop.totals() == {"10 tea": 3}
    shop.write(PIPELINE.replace("sum(price)", "avg(price)"))
    with pytest.raises(BadPipeline, match=r"shop\.toml:11: step per_hour: aggregates changed from SUM\(price\) to AV"):
        shop.run()
    told = shop.cli("check", "shop.toml", code=1)
    assert "`millstream pipeline reset" in told and told.rstrip().endswith("table-hours`")
    (shop.home / ".millstream" / "shop" / "table-hours" / FILE).unlink()  # as an earlier version left it
    shop.send(("tea", 3, "10:45"))
    with pytest.raises(
        PipelineFailed, match=r"^table-hours: Spark cannot continue from the state .*STATE_STORE.* reset "
    ):
        shop.run()
    assert "choose --delete-output or --keep-output" in shop.cli("reset", "shop.toml", "table-hours", code=1)
    assert "did you mean table-hours?" in shop.cli("reset", "shop.toml", "table-hour", "--keep-output", code=1)
    done = shop.cli("reset", "shop.toml", "table-hours", "--delete-output")
    assert done.splitlines() == [
        "Deleted 1 row of the table hours",
        "Reset table-hours; its next run starts at the beginning",
    ]
    shop.write(PIPELINE.replace("sum(price) AS total", "avg(price) AS mean, sum(price) AS total"))
    shop.run()
    assert shop.totals() == {"10 tea": 6}
    with closing(sqlite3.connect(shop.home / "shop.db")) as database:
        assert database.execute("SELECT mean FROM hours").fetchall() == [(2.0,)], "a column that the table had not"


@pytest.mark.timeout(240)
def test_a_dead_letter_names_its_pipeline_and_its_column(shop: Shop) -> None:
    good, bad = b'{"item": "tea", "price": 1, "at": "2026-01-01T10:00:00Z"}', b'{"item": "tea", "price": "dear"}'
    shop.topics.produce(shop.topic, [Sent(value) for value in (good, bad, b"not JSON")])
    shop.run()
    shop.run(name="audit", checkpoint=shop.home / ".millstream" / "audit", sinks=())
    consumer = Consumer({"bootstrap.servers": shop.topics.address, "group.id": "none"})
    consumer.assign([TopicPartition(f"{shop.topic}.dead", 0, 0)])
    letters = [consumer.poll(30) for _ in range(4)]
    consumer.close()
    headers = [dict(letter.headers() or []) for letter in letters if letter is not None]
    assert [each["millstream-pipeline"] for each in headers] == [b"shop", b"shop", b"audit", b"audit"]
    assert [each.get("millstream-column") for each in headers] == [b"price", None, b"price", None]
    assert headers[0]["millstream-offset"] == b"1" and b"is not JSON that fits" in (
        headers[0]["millstream-cause"] or b""
    )
