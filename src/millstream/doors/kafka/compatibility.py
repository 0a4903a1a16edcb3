"""Generates `docs/compatibility.md` from the handlers, so that the page matches the code.

python -m millstream.doors.kafka.compatibility            prints the page
python -m millstream.doors.kafka.compatibility --check F  fails if the file F is not the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from millstream.doors.kafka.apis import APIS, Api
from millstream.doors.kafka.differences import DIFFERENCES

_TEXT = re.compile(r"(?P<name>\w+) \(key \d+\), versions? [\d a-z]+\.\s+(?P<does>.+?)\s+Gaps: (?P<gaps>.+)", re.DOTALL)

_HEAD = """\
# What works with which client

This page lists the clients, tools and APIs that work with Millstream. `make docs` generates it from the handlers in
`src/millstream/doors/kafka/`, and `make check` compares it with them.

## Clients

`tests/compat/` runs each of these clients, unmodified and from its own package, against a real broker: topics,
producing (plain, keyed, with headers, every compression it has, idempotent), consuming from start, end, offset and
time, groups with rebalancing, commits and resuming after a restart of the broker.

| client | represents | groups |
|---|---|---|
| confluent-kafka (librdkafka 2.x) | every client built on librdkafka: C, C++, Python, Go, .NET, PHP, Ruby, Rust \
| classic: range, roundrobin, cooperative-sticky, static members; `group.protocol=consumer`: range, uniform, \
exclusive; share groups: `ShareConsumer` and `DeserializingShareConsumer`, implicit and explicit acknowledgement |
| aiokafka | asyncio Python | classic: range, roundrobin, sticky |
| kafka-python | pure Python | classic: range, roundrobin, sticky, cooperative-sticky |
| kcat 1.7 | the shell, with an older librdkafka | classic: range |

A group may have members of both protocols and of several clients at a time: it changes its protocol while they work
(KIP-848; `tests/compat/test_group_migration.py`).

Clients of FlowMQ, Flume, Luxun and Comet have doors of their own ([FlowMQ](flowmq.md), [the others](doors.md)),
with the same topics and the same groups behind them:

| client | represents | groups |
|---|---|---|
| a client written from the table of FlowMQ's document | every FlowMQ client \
| queues, the same that share consumers work on |
| a client written from the tables of Flume's document | every Flume client \
| range, assigned by the broker; Kafka consumers may be members too |
| a client that Apache Thrift generated from Luxun's IDL; thriftpy2 | every Luxun client | fanout ids: one cursor each |
| a client that protoc generated from Comet's IDL | every Comet client | roundrobin, assigned by the broker |

## Apache Kafka's Java client and tools

The tests have no Java client, because they install nothing from Maven. They compare answers on the wire with those of
Kafka 4.1.1 (`tests/compat/test_kafka_answers.py`, `test_kafka_configs.py`). These tools were run by hand against this
broker, from the jars of Apache Kafka 4.1.1 on Java 17:

| tool | works |
|---|---|
| `kafka-topics` | create, list, describe, delete |
| `kafka-configs` | topics, brokers (one and all), broker loggers and groups: describe and alter; users: describe |
| `kafka-get-offsets`, `kafka-log-dirs` | end offsets; sizes |
| `kafka-console-producer` | keyed records |
| `kafka-console-consumer` | by topic with `group.protocol=consumer`, by pattern with the classic protocol |
| `kafka-console-share-consumer`, `kafka-share-groups` | consume; list and describe |
| `kafka-consumer-groups` | list, describe, reset offsets |
| `kafka-features`, `kafka-metadata-quorum` | describe |
| `kafka-leader-election`, `kafka-reassign-partitions`, `kafka-transactions`, `kafka-acls` | the answers of a Kafka \
without such features: no election needed, no reassignment, no transaction, security disabled |

Small programs with these clients were run by hand too. They produced, and consumed in a group:

| client | version | works |
|---|---|---|
| Apache Kafka's Java client | 4.1.1 | Admin, producer, consumer with `group.protocol=classic` and `consumer` |
| Kafka Streams | 4.1.1 | a count with a state store, at least once; the store restored from its changelog |
| Kafka Connect | 4.1.1 | standalone and distributed workers with file source and sink |
| franz-go, kafka-go, Sarama | 1.22.2, 0.4.51, 1.61.1 | produce, consumer groups |
| kafkajs | 2.2.4 | produce, consumer groups |

## Differences from Kafka

| where | what is different | why |
|---|---|---|
"""

_APIS = """
## APIs

A request for an API or version that is not listed gets UNSUPPORTED_VERSION if its response has an error field;
otherwise the broker closes the connection. ApiVersions lists exactly this table.

| key | API | versions | what it does | gaps |
|---|---|---|---|---|
"""


def page() -> str:
    differences = "".join(f"| {where} | {what} | {why} |\n" for where, what, why in DIFFERENCES)
    return _HEAD + differences + _APIS + "".join(_row(APIS[key]) for key in sorted(APIS))


def _row(api: Api) -> str:
    match = _TEXT.fullmatch(api.text.strip())
    if match is None:
        raise SystemExit(f"{api.name}: its docstring must read 'Name (key N), versions A to B. … Gaps: ….'")
    versions = f"{api.low} to {api.high}" if api.low != api.high else str(api.low)
    does, gaps = (" ".join(match[part].split()).replace("|", "\\|") for part in ("does", "gaps"))
    return f"| {api.key} | {match['name']} | {versions} | {does} | {gaps} |\n"


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.stdout.write(page())
        return 0
    path = Path(arguments[-1])
    if path.read_text() != page():
        print(f"{path} does not match the handlers; generate it with `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
