"""A click stream through a pipeline on Spark: a lake, a table, alerts, and dead letters for undecodable rows.

The demo counts the clicks that it generates. It counts the output in the lake, in SQLite and in the topics. The counts
must be equal.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from millstream.demo.broker import Broker
from millstream.demo.report import Report, console

CLICKS = 200_000
BAD_EVERY = 400
SLOW_MS = 2000
PAGES = ("/", "/search", "/cart", "/checkout", "/help", "/login", "/about")
WEIGHTS = (40, 25, 12, 8, 7, 5, 3)
RUN_SECONDS_MAX = 150.0

PIPELINE = """\
name = "clicks"

[source]
topic = "clicks"
format = "json"
schema = "user STRING, url STRING, ms LONG, at TIMESTAMP"
watermark = { column = "at", delay = "10 minutes" }

[[step]]
name = "per_minute"
sql = '''
SELECT window.start AS minute, url, count(*) AS hits, avg(ms) AS ms
FROM clicks GROUP BY window(at, '1 minute'), url
'''

[[step]]
name = "slow"
sql = "SELECT user, url, ms FROM clicks WHERE ms > 2000"

[[sink]]                   # offline: a lake
from = "clicks"
lake = "lake/clicks"

[[sink]]                   # near real time: a table, upserted by key
from = "per_minute"
table = "sqlite:hits.db"
name = "hits"
key = ["minute", "url"]

[[sink]]                   # real time: an alert topic
from = "slow"
topic = "alerts"
"""


@dataclass
class Story:
    good: int = 0
    bad: int = 0
    slow: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    alerts: list[str] = field(default_factory=list)
    letters: list[str] = field(default_factory=list)

    def next_value(self, number: int, now: float) -> bytes:
        if number % BAD_EVERY == 7:
            self.bad += 1
            return random.choice([b"not json", b'{"user": "u1", "ms": "soon"}', b'{"user": "\xff"}', b"[1, 2"])
        url = random.choices(PAGES, WEIGHTS)[0]
        ms = int(random.lognormvariate(5, 1))
        self.good += 1
        self.slow += ms > SLOW_MS
        self.pages[url] += 1
        at = datetime.fromtimestamp(now - 600 + number * 600 / CLICKS, UTC)
        click = {"user": f"user-{random.randrange(5000)}", "url": url, "ms": ms, "at": at.isoformat()}
        return json.dumps(click).encode()

    def show(self, home: Path) -> None:
        table = Table(title="\nThe top pages, from SQLite", title_justify="left", title_style="bold")
        table.add_column("page")
        for heading in ("hits", "mean ms"):
            table.add_column(heading, justify="right")
        with sqlite3.connect(home / "hits.db") as database:
            rows = database.execute(
                "SELECT url, sum(hits), sum(hits * ms) / sum(hits) FROM hits GROUP BY url ORDER BY 2 DESC LIMIT 5"
            )
            for url, hits, ms in rows:
                table.add_row(url, f"{hits:,}", f"{ms:.0f}")
        console.print(table)
        console.print("\n[bold]An alert[/], from the topic alerts:", *self.alerts[:1], markup=True)
        console.print("[bold]A dead letter[/], from clicks.dead:", *self.letters[:1], markup=True)
        console.print(f"[bold]The files:[/] {home / 'clicks.toml'}, {home / 'lake/clicks'} (Delta), {home / 'hits.db'}")


def run(broker: Broker, report: Report, home: Path) -> Story:
    story = Story()
    with report.step("clicks, some of them bad") as say:
        broker.command("topic", "create", "clicks", "-p", "4")
        broker.command("topic", "create", "alerts")
        send(broker, story)
        say(f"{story.good + story.bad:,} records, {story.bad:,} of them undecodable")
    with report.step("a pipeline on Spark") as say:
        file = home / "clicks.toml"
        file.write_text(PIPELINE)
        broker.command("pipeline", "run", str(file), "--once", seconds_max=RUN_SECONDS_MAX)
        say("into a lake, a table and a topic")
    with report.step("count the output"):
        count(broker, report, home, story)
    return story


def send(broker: Broker, story: Story) -> None:
    from confluent_kafka import Producer

    client = Producer({"bootstrap.servers": broker.kafka, "linger.ms": 20, "compression.type": "zstd"})
    now = time.time()
    for number in range(CLICKS):
        value = story.next_value(number, now)
        while True:
            try:
                client.produce("clicks", value)
                break
            except BufferError:
                client.poll(0.1)
    client.flush(30)


def count(broker: Broker, report: Report, home: Path, story: Story) -> None:
    from deltalake import DeltaTable

    stored = DeltaTable(home / "lake" / "clicks").count()
    report.expect("good clicks, and rows in the lake", story.good, stored)
    with sqlite3.connect(home / "hits.db") as database:
        hits = Counter(dict(database.execute("SELECT url, sum(hits) FROM hits GROUP BY url")))
    report.expect("good clicks, and hits in the table", story.good, hits.total())
    report.expect("pages whose hits differ", 0, sum(hits[url] != story.pages[url] for url in PAGES))
    story.alerts = read(broker, "alerts")
    report.expect("slow clicks, and alerts", story.slow, len(story.alerts))
    story.letters = read(broker, "clicks.dead", "%v  because %h")
    report.expect("bad clicks, and dead letters", story.bad, len(story.letters))


def read(broker: Broker, topic: str, template: str = "%v") -> list[str]:
    return broker.command("consume", topic, "--until-end", "-f", template + "\\n").splitlines()
