"""What cannot be meant is refused at once, in the same words embedded and remote."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import millstream as package
import millstream.sync
from millstream import Millstream, MillstreamError, StartupError
from millstream.client.embedded import Embedded
from millstream.testing.broker_thread import BrokerThread

_names = iter(range(10**6))


@pytest.mark.parametrize("group", ["", "g" * 513, "ü" * 257, "\0", "a\0b", "\ud800", b"g", None, 7])
async def test_a_group_without_a_proper_name(ms: Millstream, group: Any) -> None:
    for make in (
        lambda: ms.stream("orders", group=group),
        lambda: ms.streams({"orders": 1}, group=group),
        lambda: ms.queue("orders", group=group),
        lambda: ms.exclusive("orders", group=group),
    ):
        with pytest.raises(MillstreamError, match="a group's name"):
            make()


@pytest.mark.parametrize("offset", ["bogus", "", 1.5, None, True, b"start"])
async def test_an_offset_that_is_none(ms: Millstream, offset: Any) -> None:
    with pytest.raises(MillstreamError, match="an offset is an int, 'start' or 'end'"):
        ms.read("orders", offset=offset)


@pytest.mark.parametrize("time", ["now", -1, 1 << 63, 1.5, True])
async def test_a_time_that_is_none(ms: Millstream, time: Any) -> None:
    with pytest.raises(MillstreamError, match="a time is a datetime, or milliseconds since 1970"):
        ms.read("orders", time=time)


@pytest.mark.parametrize("offset", [0, 7, "end"])
async def test_an_offset_and_a_time(ms: Millstream, offset: Any) -> None:
    with pytest.raises(MillstreamError, match="an offset or a time, not both"):
        ms.read("orders", offset=offset, time=1)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("key", "text", "a key is bytes or None, not str"),
        ("headers", (("trace", "text"),), "a header's value is bytes or None, not str"),
        ("headers", (("trace", 7),), "a header's value is bytes or None, not int"),
        ("headers", ((b"trace", b""),), "a header's name is a str, not bytes"),
        ("headers", "no", "headers are pairs"),
        ("timestamp", 1 << 63, "a timestamp is milliseconds since 1970"),
        ("timestamp", -1, "a timestamp is milliseconds since 1970"),
        ("partition", "0", "a partition is an int"),
    ],
)
async def test_a_record_that_cannot_be_stored(ms: Millstream, field: str, value: Any, rule: str) -> None:
    with pytest.raises(MillstreamError, match=rule):
        await ms.send("orders", b"x", **{field: value})
    with pytest.raises(MillstreamError, match=rule):
        await ms.send_many([package.Message("orders", b"x", **{field: value})])


@pytest.mark.parametrize(
    "address", ["not an address", "", "host", "host:", ":9092", "host:0", "host:99999", "a:1,,b:2"]
)
async def test_an_address_that_is_none_is_named_at_once(address: str) -> None:
    for connect in (package.connect, millstream.sync.connect):
        with pytest.raises(MillstreamError, match="is not the address of a server: write HOST:PORT"):
            connect(address)


@pytest.mark.parametrize("address", ["a:1", "a.example:9092, b-2:9092", "[::1]:9092", "SASL_SSL://a:9093"])
def test_addresses_as_kafkas_clients_take_them(address: str) -> None:
    package.connect(address)


def test_a_fault_that_does_not_exist_is_named(server: BrokerThread) -> None:
    with pytest.raises(ValueError, match="NOPE is not the code of an error"):
        server.fail_next("Produce", "NOPE")


async def test_settings_are_stored_as_text_whatever_they_were_given_as(ms: Millstream) -> None:
    """A number that was stored as one could not be told to any Kafka client: DescribeConfigs has texts only."""
    given: dict[str, Any] = {
        "retention.ms": 60_000,
        "min.cleanable.dirty.ratio": 0.25,
        "group.millstream.key.order": True,
    }
    await ms.create_topic("with-numbers", settings=given)
    limit: dict[str, Any] = {"share.delivery.count.limit": 5}
    async with ms.queue("with-numbers", group="numbered", settings=limit) as jobs:
        assert await jobs.receive(timeout=0) is None
    if isinstance(ms, Embedded):
        topic = ms.broker.topics.get("with-numbers")
        assert topic is not None and topic.settings.overrides == {
            "retention.ms": "60000",
            "min.cleanable.dirty.ratio": "0.25",
            "group.millstream.key.order": "true",
        }
    wrong: dict[str, Any] = {"cleanup.policy": ["compact"]}
    with pytest.raises(MillstreamError, match="a setting is a name and its value as text"):
        await ms.create_topic("with-a-list", settings=wrong)


def test_a_setting_of_the_broker_that_does_not_exist_is_named() -> None:
    for make in (lambda: package.open("memory:", default_partition=4), lambda: BrokerThread(default_partition=4)):
        with pytest.raises(package.StartupError, match=r"not a setting; did you mean default_partitions\?"):
            make()


@pytest.mark.parametrize("reason", [b"bytes", ValueError("an error, and not its text"), None, 7])
async def test_a_reason_that_is_no_text_costs_no_other_job(ms: Millstream, reason: Any) -> None:
    topic = f"jobs-{next(_names)}"
    await ms.send_many([(topic, b"0"), (topic, b"1")])
    async with ms.queue(topic, group=topic, prefetch=2) as jobs:
        one, two = await jobs.receive(20), await jobs.receive(20)
        assert one is not None and two is not None
        for answer in (one.reject, one.release):
            with pytest.raises(MillstreamError, match="a reason is text, not"):
                await answer(reason=reason)
        await two.accept()
        await one.accept()


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e300, "30", None])
async def test_a_delay_that_is_none_costs_no_other_job(ms: Millstream, delay: Any) -> None:
    topic = f"delayed-{next(_names)}"
    await ms.send_many([(topic, b"0"), (topic, b"1")])
    async with ms.queue(topic, group=topic, prefetch=2) as jobs:
        one, two = await jobs.receive(20), await jobs.receive(20)
        assert one is not None and two is not None
        with pytest.raises(MillstreamError, match="a delay is a number of seconds"):
            await one.release(delay=delay)
        await two.accept()
        await one.accept()


async def test_a_reason_that_utf_8_cannot_say_is_said_with_escapes(ms: Millstream) -> None:
    await ms.send("files", b"0")
    async with ms.queue("files", group="files", settings={"errors.deadletterqueue.topic.name": "dead"}) as jobs:
        job = await jobs.receive(20)
        assert job is not None
        await job.reject(reason="cannot read \udcff.jpg")  # as the names of files are
    async with asyncio.timeout(20):
        while "dead" not in await ms.topics():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.01)
        letter = await ms.read("dead").receive()
    assert letter is not None and letter.header("millstream-dead-reason") == b"cannot read \\udcff.jpg"


@pytest.mark.parametrize("topic", [b"orders", None, 7])
async def test_a_topic_without_a_proper_name(ms: Millstream, topic: Any) -> None:
    rule = "a topic's name is a str, not"
    for make in (lambda: ms.read(topic), lambda: ms.stream([topic], group="g"), lambda: ms.exclusive(topic, group="g")):
        with pytest.raises(MillstreamError, match=rule):
            make()
    async with ms.sender() as sender:
        for send in (
            ms.send(topic, b"x"),
            ms.send_many([(topic, b"x")]),
            ms.create_topic(topic),
            ms.delete_topic(topic),
            sender.send(b"x", topic=topic or 7),  # type: ignore[arg-type]
        ):
            with pytest.raises(MillstreamError, match=rule):
                await send


async def test_topics_that_are_no_names(ms: Millstream) -> None:
    with pytest.raises(MillstreamError, match="topics are named by a str or several, not 7"):
        ms.queue(7, group="g")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "messages", [("orders", b"a"), ["orders"], [("orders",)], [("a", b"b", b"c", (), 0, 1, 2)], [7]]
)
async def test_messages_that_are_none(ms: Millstream, messages: Any) -> None:
    with pytest.raises(MillstreamError, match="a message is a topic, a value and perhaps a key"):
        await ms.send_many(messages)


async def test_messages_that_are_not_several(ms: Millstream) -> None:
    with pytest.raises(MillstreamError, match=r"messages are a list, as .*, not NoneType"):
        await ms.send_many(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", [Path("app.db"), None, 7])
def test_a_store_that_is_no_url(store: Any) -> None:
    with pytest.raises(StartupError, match="a store is a URL, as 'sqlite:"):
        package.open(store)


def test_a_clock_that_would_go_back(server: BrokerThread) -> None:
    with pytest.raises(ValueError, match="time only goes forward"):
        server.clock.advance(-5)
