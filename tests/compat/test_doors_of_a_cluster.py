"""The other doors of two brokers over one database: a broker that does not coordinate a group refuses and names the one
that does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.compat import client_flume
from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun
from tests.compat.raw import create_topic
from tests.serving import ServedBroker

FLAGS = [part for door in ("flowmq", "flume", "luxun") for part in (f"--{door}", "127.0.0.1:0")]


def has_topic(client: Flume, topic: str) -> bool:
    return client.fetch(topic, 0, 0).error == client_flume.NONE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedBroker, ServedBroker]]:
    """The first broker coordinates all groups, because it started alone."""
    directory = tmp_path_factory.mktemp("pair")
    url = f"sqlite:{directory / 'store.db'}"
    with (
        ServedBroker(directory / "1", *FLAGS, "--node-id", "1", store=url) as one,
        ServedBroker(directory / "2", *FLAGS, "--node-id", "2", store=url) as two,
    ):
        for door in ("flowmq", "flume", "luxun"):
            create_topic(one.address, door)
        with Flume(two.doors["flume"]) as client:
            for door in ("flowmq", "flume", "luxun"):
                wait_for(partial(has_topic, client, door))
        yield one, two


def wait_for(holds: Callable[[], bool]) -> None:
    """What goes in through one broker is news to the other a moment later."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_luxun_sizes_and_items_of_a_fanout_id_come_from_the_broker_that_knows(
    pair: tuple[ServedBroker, ServedBroker], generated: tuple[Any, Any]
) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(Luxun(broker.doors["luxun"], generated)) for broker in pair)
        for number in range(5):
            assert one.produce("luxun", b"%d" % number).index == number
        assert [one.consume("luxun", "f").itemList for _ in range(3)] == [[b"0"], [b"1"], [b"2"]]
        assert one.size("luxun", "f").size == 2
        wait_for(lambda: two.size("luxun").size == 5)
        errors = one.types.ErrorCode
        for answer in (two.size("luxun", "f"), two.consume("luxun", "f")):
            assert answer.result.resultCode == one.types.ResultCode.FAILURE
            assert answer.result.errorCode == errors.INTERNAL_ERROR
            assert f"broker 1 on 127.0.0.1 (its Kafka door is {pair[0].address})" in answer.result.errorMessage
        assert two.consume("luxun", index=4).itemList == [b"4"], "any broker can say"


def test_flume_groups_are_refused_where_another_broker_has_them(pair: tuple[ServedBroker, ServedBroker]) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(Flume(broker.doors["flume"])) for broker in pair)
        assert one.produce("flume", b"x", partition=0).error == client_flume.NONE
        assert one.commit("readers", "flume", 0, 1) == client_flume.NONE
        assert one.committed("readers", "flume", 0) == (client_flume.NONE, 1)
        assert two.committed("readers", "flume", 0)[0] == client_flume.UNKNOWN
        assert two.commit("readers", "flume", 0, 1) == client_flume.UNKNOWN
        assert two.join("readers", ["flume"]).error == client_flume.UNKNOWN
        wait_for(lambda: two.fetch("flume", 0, 0).records == [(0, b"x")])


def test_flowmq_groups_are_refused_with_a_sentence(pair: tuple[ServedBroker, ServedBroker]) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(FlowmqClient(broker.doors["flowmq"])) for broker in pair)
        one.publish("flowmq", b"x")
        one.subscribe("flowmq", "workers")
        with pytest.raises(FlowmqError, match="broker 1 on 127"):
            two.subscribe("flowmq", "workers")
        assert one.next().payload == b"x"


def test_flowmq_clients_of_one_broker_use_a_topic_that_another_has_just_made(
    pair: tuple[ServedBroker, ServedBroker],
) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(FlowmqClient(broker.doors["flowmq"])) for broker in pair)
        for number in range(10):
            one.publish(f"published-{number}", b"x")
            two.publish(f"published-{number}", b"y")
            one.publish(f"subscribed-{number}", b"x")
            two.subscribe(f"subscribed-{number}")
