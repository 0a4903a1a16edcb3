"""An embedded broker asks its authorizer like every door: each verb is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from millstream import RequestError
from millstream.client.api import Batch
from millstream.client.embedded import Embedded
from millstream.core.errors import Code
from millstream.records.compression import Codec
from millstream.security.principal import EMBEDDED
from millstream.security.rights import CLUSTER_NAME, Kind, Operation
from tests.refusing import Refusing

TOPIC, GROUP = Code.TOPIC_AUTHORIZATION_FAILED, Code.GROUP_AUTHORIZATION_FAILED
ROW = (0, None, b"key", b"value", ())
Verb = Callable[[Embedded], Awaitable[Any]]


@pytest.fixture
def rules() -> Refusing:
    return Refusing()


@pytest.fixture
async def ms(rules: Refusing) -> AsyncIterator[Embedded]:
    async with Embedded("memory:", authorizer=rules) as ms:
        await ms.create_topic("orders", partitions=2)
        await ms.create_topic("open", partitions=1)
        for topic in ("orders", "open"):
            await ms.send(topic, b"first", partition=0)
        yield ms


def state(ms: Embedded) -> tuple[Any, ...]:
    broker = ms.broker
    logs = [(topic.name, each.log.end) for topic in broker.topics for each in topic.partitions]
    return broker._meta.revision, logs, broker.groups.list(), sorted(broker.queues.names())  # type: ignore[attr-defined]


def deny_all(rules: Refusing, *topics: str) -> None:
    for operation in Operation:
        for topic in topics:
            rules.deny(operation, Kind.TOPIC, topic)
        rules.deny(operation, Kind.GROUP, "secret")
    rules.deny(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME)


async def each(ms: Embedded) -> None:
    (answer,) = await ms.append_each(Batch("orders", 0, [ROW]), Codec.NONE)
    assert isinstance(answer, BaseException)
    raise answer


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        (lambda ms: ms.create_topic("new"), TOPIC),
        (lambda ms: ms.delete_topic("orders"), TOPIC),
        (lambda ms: ms.partition_count("orders"), TOPIC),
        (lambda ms: ms.partition_count("new"), TOPIC),
        (lambda ms: ms.send("orders", b"x"), TOPIC),
        (lambda ms: ms.send("orders", b"x", partition=0), TOPIC),
        (lambda ms: ms.send("new", b"x", partition=0), TOPIC),
        (lambda ms: ms.append([Batch("open", 0, [ROW]), Batch("orders", 0, [ROW])], Codec.NONE), TOPIC),
        (each, TOPIC),
        (lambda ms: ms.read("orders").receive(0), TOPIC),
        (lambda ms: ms.read("new").receive(0), TOPIC),
        (lambda ms: ms.stream("orders", group="g").receive(5), TOPIC),
        (lambda ms: ms.stream("open", group="secret").receive(5), GROUP),
        (lambda ms: ms.queue("orders", group="g").receive(0), TOPIC),
        (lambda ms: ms.queue("open", group="secret").receive(0), GROUP),
        (lambda ms: ms.exclusive("orders", group="g").receive(0), TOPIC),
        (lambda ms: ms.exclusive("open", group="secret").receive(0), GROUP),
    ],
)
async def test_each_verb_is_refused(ms: Embedded, rules: Refusing, verb: Verb, code: Code) -> None:
    before = state(ms)
    deny_all(rules, "orders", "new")
    with pytest.raises(RequestError, match=f"{EMBEDDED} may not") as raised:
        await verb(ms)
    assert raised.value.code == code
    rules.denied.clear()
    assert state(ms) == before


async def test_topics_that_may_not_be_described_are_not_listed(ms: Embedded, rules: Refusing) -> None:
    deny_all(rules, "orders")
    assert await ms.topics() == {"open": 1}


async def test_a_reader_stops_when_its_right_is_gone(ms: Embedded, rules: Refusing) -> None:
    async with ms.read("orders", follow=True) as reading, ms.exclusive("orders", group="e") as member:
        for each in (reading, member):
            found = await each.receive(5)
            assert found is not None and found.value == b"first"
        await ms.send("orders", b"second", partition=0)
        rules.deny(Operation.READ, Kind.TOPIC, "orders")
        for each in (reading, member):
            with pytest.raises(RequestError, match="may not read topic orders"):
                await each.receive(5)


async def test_a_worker_stops_when_its_right_is_gone(ms: Embedded, rules: Refusing) -> None:
    async with ms.queue("orders", group="q") as worker:
        job = await worker.receive(5)
        assert job is not None
        rules.deny(Operation.READ, Kind.GROUP, "q")
        with pytest.raises(RequestError, match="may not read group q"):
            await job.accept()
        with pytest.raises(RequestError, match="may not read group q"):
            await worker.receive(0)
        rules.denied.clear()
        await job.accept()
