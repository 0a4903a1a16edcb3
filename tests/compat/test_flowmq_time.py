"""What FlowMQ's door does as time passes: over real sockets, on a clock that the test moves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.slice import Slice
from millstream.server import Server
from tests.compat.client_flowmq import ACK, NACK, FlowmqClient, FlowmqError
from tests.compat.clients import wait_for
from tests.in_thread import BrokerInThread

Connect = Callable[[], FlowmqClient]
WINDOW = 10


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path, flowmq="127.0.0.1:0", flowmq_unacknowledged_max=WINDOW) as started:
        yield started


@pytest.fixture
def connect(broker: BrokerInThread) -> Iterator[Connect]:
    opened: list[FlowmqClient] = []

    def connect() -> FlowmqClient:
        opened.append(FlowmqClient(broker.address("flowmq")))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.mark.parametrize("group", ["workers", None])
def test_an_unanswered_message_comes_again_after_30_seconds_and_not_before(
    broker: BrokerInThread, connect: Connect, group: str | None
) -> None:
    client, worker = connect(), connect()
    worker.subscribe("jobs", group)
    name = client.publish("jobs", b"job")
    first = worker.next()
    broker.advance(29.9)
    assert worker.has_nothing()
    broker.advance(0.2)
    assert worker.next() == first == (name, b"job")
    worker.ack(first)
    broker.advance(120)
    assert worker.has_nothing()


def test_a_record_with_a_time_is_delivered_at_that_time_and_holds_up_nothing(
    broker: BrokerInThread, connect: Connect
) -> None:
    worker = connect()
    worker.subscribe("jobs", "workers")
    producer = Producer({"bootstrap.servers": broker.address("kafka"), "log_level": 0})
    at = str(broker.clock.now_ms() + 600_000).encode()
    producer.produce("jobs", b"later", headers=[("millstream-deliver-at", at)], timestamp=broker.clock.now_ms())
    producer.produce("jobs", b"now", timestamp=broker.clock.now_ms())
    assert producer.flush(20) == 0
    first = worker.next()
    assert first.payload == b"now"
    worker.ack(first)
    broker.advance(599)
    assert worker.has_nothing()
    broker.advance(1.1)
    assert worker.next().payload == b"later"


def test_an_answer_that_comes_too_late_is_refused(broker: BrokerInThread, connect: Connect) -> None:
    client, slow, quick = connect(), connect(), connect()
    slow.subscribe("jobs", "workers")
    client.publish("jobs", b"job")
    message = slow.next()
    quick.subscribe("jobs", "workers")
    broker.advance(30.1)
    assert quick.next() == message
    with pytest.raises(FlowmqError, match="its lease expired"):
        slow.ack(message)
    quick.ack(message)


@pytest.mark.parametrize("verb", [ACK, NACK])
def test_a_late_answer_is_not_taken_for_that_of_who_has_the_message_now(
    broker: BrokerInThread, connect: Connect, verb: int
) -> None:
    client, slow, quick, other = connect(), connect(), connect(), connect()
    for each in (slow, quick, other):
        each.subscribe("jobs", "workers")
    client.publish("jobs", b"job")
    message = slow.next()
    broker.advance(30.1)
    assert quick.next() == message
    with pytest.raises(FlowmqError, match="its lease expired"):
        slow.ask(verb, message.id.encode())
    quick.ack(message)
    assert slow.has_nothing() and other.has_nothing()


@pytest.mark.parametrize("group", ["workers", None])
def test_a_message_that_nobody_answers_is_a_dead_letter_after_90_seconds(
    broker: BrokerInThread, connect: Connect, group: str | None
) -> None:
    client, worker, listener = connect(), connect(), connect()
    worker.subscribe("jobs", group)
    listener.subscribe("__dlq__")
    client.publish("jobs", b"job")
    for _ in range(3):
        assert worker.next().payload == b"job"
        assert listener.has_nothing()
        broker.advance(30.1)
    assert listener.next().payload == b"job"
    assert worker.has_nothing()
    broker.advance(120)
    assert worker.has_nothing()


def test_a_full_window_of_expired_messages_comes_again(broker: BrokerInThread, connect: Connect) -> None:
    client, worker = connect(), connect()
    worker.subscribe("jobs", "workers")
    for number in range(WINDOW + 3):
        client.publish("jobs", b"%d" % number)
    first = worker.take(WINDOW)
    assert worker.has_nothing()
    broker.advance(30.1)
    assert worker.take(WINDOW) == first
    assert worker.has_nothing()


def test_a_subscriber_that_hangs_gets_nothing_while_others_answer(broker: BrokerInThread, connect: Connect) -> None:
    """Or a few turns later everything would have failed because of it."""
    client, hung, alive = connect(), connect(), connect()
    hung.subscribe("jobs", "workers")
    alive.subscribe("jobs", "workers")
    for number in range(4):
        client.publish("jobs", b"%d" % number)
    held = hung.take(2)
    for message in alive.take(2):
        alive.ack(message)
    broker.advance(30.1)
    again = alive.take(2)
    assert again == held
    for message in again:
        alive.ack(message)
    for number in range(6):
        client.publish("jobs", b"more %d" % number)
    messages = alive.take(6)
    assert hung.has_nothing()
    for message in messages:
        alive.ack(message)
    # It answers, if too late: it is back, and has its turns again.
    with pytest.raises(FlowmqError, match="its lease expired"):
        hung.ack(held[0])
    assert hung.has_nothing()
    alive.close()
    client.publish("jobs", b"last")
    last = hung.next()
    hung.ack(last)
    other = connect()
    other.subscribe("jobs", "workers")
    for number in range(2):
        client.publish("jobs", b"%d" % number)
    assert {hung.next().payload, other.next().payload} == {b"0", b"1"}


def test_one_that_was_late_and_lives_gets_one_message_at_a_time_until_it_answers_in_time(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, slow, quick = connect(), connect(), connect()
    slow.subscribe("jobs", "workers")
    quick.subscribe("jobs", "workers")
    client.publish("jobs", b"long")
    long = slow.next()
    broker.advance(31)
    quick.ack(quick.next())
    with pytest.raises(FlowmqError, match="its lease expired"):
        slow.ack(long)
    for number in range(6):
        client.publish("jobs", b"%d" % number)
    assert not slow.has_nothing() and len(slow.messages) == 1
    for message in quick.take(5):
        quick.ack(message)
    slow.ack(slow.next())
    for number in range(6):
        client.publish("jobs", b"more %d" % number)
    assert len(slow.take(3)) == len(quick.take(3)) == 3
    assert slow.has_nothing() and quick.has_nothing()


def test_one_that_was_late_and_lives_is_not_held_back_by_a_message_that_has_become_a_dead_letter(
    broker: BrokerInThread, connect: Connect
) -> None:
    """It will never be delivered again, and its subscriber may never answer it."""
    client, slow, quick, listener = connect(), connect(), connect(), connect()
    slow.subscribe("jobs", "workers")
    listener.subscribe("__dlq__")
    client.publish("jobs", b"poison")
    for _ in range(2):
        slow.next()
        broker.advance(30.1)
    assert slow.next().payload == b"poison"
    client.publish("jobs", b"long")
    long = slow.next()
    quick.subscribe("jobs", "workers")
    client.publish("jobs", b"short")
    quick.ack(quick.next())
    broker.advance(30.1)
    assert listener.next().payload == b"poison"
    quick.ack(quick.next())
    with pytest.raises(FlowmqError, match="its lease expired"):
        slow.ack(long)
    for number in range(4):
        client.publish("jobs", b"%d" % number)
    slow.ack(slow.next())


def test_an_answer_to_a_message_that_has_become_a_dead_letter_is_not_in_time(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, slow, quick, listener = connect(), connect(), connect(), connect()
    slow.subscribe("jobs", "workers")
    listener.subscribe("__dlq__")
    client.publish("jobs", b"poison")
    for _ in range(2):
        slow.next()
        broker.advance(30.1)
    poison = slow.next()
    quick.subscribe("jobs", "workers")
    client.publish("jobs", b"short")
    quick.ack(quick.next())
    broker.advance(30.1)
    assert listener.next().payload == b"poison"
    with pytest.raises(FlowmqError, match="its lease expired"):
        slow.ack(poison)
    for number in range(6):
        client.publish("jobs", b"%d" % number)
    assert not slow.has_nothing() and len(slow.messages) == 1


def test_who_does_not_read_for_as_long_as_a_lease_keeps_nothing_from_one_that_was_late(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, late, stuck = connect(), connect(), connect()
    stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    late.subscribe("jobs", "workers")
    stuck.subscribe("jobs", "workers")
    stuck.subscribe("news")
    client.publish("jobs", b"job")
    message = late.next()
    broker.advance(20)
    for _ in range(WINDOW - 1):
        client.publish("news", bytes(1_000_000))
    for _ in range(2):
        broker.advance(10)
        assert late.has_nothing()
    for _ in range(2):
        broker.advance(10)
    assert late.next() == message
    late.ack(message)


def test_a_clean_stop_is_not_the_last_failure_of_a_message(tmp_path: Path) -> None:
    broker = BrokerInThread(tmp_path, flowmq="127.0.0.1:0")
    with broker:
        worker = FlowmqClient(broker.address("flowmq"))
        worker.subscribe("jobs", "workers")
        worker.publish("jobs", b"job")
        for _ in range(2):
            worker.nack(worker.next())
        third = worker.next()
    worker.close()
    with broker, FlowmqClient(broker.address("flowmq")) as worker:
        assert worker.list_topics() == ["jobs"]
        worker.subscribe("jobs", "workers")
        assert worker.next() == third
        worker.ack(third)


def test_attempts_are_counted_across_a_restart(tmp_path: Path) -> None:
    broker = BrokerInThread(tmp_path, flowmq="127.0.0.1:0")
    with broker, FlowmqClient(broker.address("flowmq")) as worker:
        worker.subscribe("jobs", "workers")
        worker.publish("jobs", b"job")
        worker.nack(worker.next())
        second = worker.next()
    with broker, FlowmqClient(broker.address("flowmq")) as worker:
        worker.subscribe("__dlq__")
        worker.subscribe("jobs", "workers")
        third = worker.next()
        assert third == second
        worker.nack(third)
        dead = worker.next()
        assert dead.payload == b"job" and dead.id != third.id


def test_messages_go_60_seconds_after_the_last_group_is_done_with_them(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, quick, slow = connect(), connect(), connect()
    quick.subscribe("jobs", "quick")
    slow.subscribe("jobs", "slow")
    for number in range(3):
        client.publish("jobs", b"%d" % number)
    for message in quick.take(3):
        quick.ack(message)
    broker.advance(20)
    first, second, _ = slow.take(3)
    slow.ack(first)
    slow.ack(second)
    for _ in range(11):
        broker.advance(5)
        assert _start(broker, "jobs") == 0
    broker.advance(11)
    assert _start(broker, "jobs") == 2
    late = connect()
    late.subscribe("jobs", "late")
    assert late.next().payload == b"2"
    assert late.has_nothing()


def test_a_spectator_says_nothing_about_what_was_published_before_it(broker: BrokerInThread, connect: Connect) -> None:
    client, spectator, worker = connect(), connect(), connect()
    for number in range(2):
        client.publish("jobs", b"%d" % number)
    spectator.subscribe("jobs")
    client.publish("jobs", b"2")
    spectator.ack(spectator.next())
    for _ in range(14):
        broker.advance(5)
    assert _start(broker, "jobs") == 0
    worker.subscribe("jobs", "workers")
    messages = worker.take(3)
    assert [message.payload for message in messages] == [b"0", b"1", b"2"]
    for message in messages:
        worker.ack(message)
    for _ in range(14):
        broker.advance(5)
    assert _start(broker, "jobs") == 3


def test_what_all_spectators_have_answered_goes_where_there_is_no_group(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, first, second = connect(), connect(), connect()
    first.subscribe("news")
    client.publish("news", b"0")
    second.subscribe("news")
    client.publish("news", b"1")
    for spectator, count in ((first, 2), (second, 1)):
        for message in spectator.take(count):
            spectator.ack(message)
    for _ in range(14):
        broker.advance(5)
    assert _start(broker, "news") == 2


def _pass(broker: BrokerInThread, seconds: int) -> None:
    for _ in range(seconds // 5):
        broker.advance(5)


def _disconnect(broker: BrokerInThread, client: FlowmqClient) -> None:
    """Returns when the broker has noticed."""
    before = broker.ask(lambda server: server.metrics.connections_active)
    client.close()
    wait_for(lambda: broker.ask(lambda server: server.metrics.connections_active) < before, "a connection less")


@pytest.mark.parametrize("seconds", [0, 20], ids=["at once", "after 20 seconds"])
def test_what_a_subscriber_without_a_group_acknowledged_goes_60_seconds_later_although_it_disconnected(
    broker: BrokerInThread, connect: Connect, seconds: int
) -> None:
    client, reader = connect(), connect()
    reader.subscribe("news")
    for number in range(3):
        client.publish("news", b"%d" % number)
    for message in reader.take(3):
        reader.ack(message)
    _pass(broker, seconds)
    _disconnect(broker, reader)
    _pass(broker, 55 - seconds)
    assert _start(broker, "news") == 0
    _pass(broker, 15)
    assert _start(broker, "news") == 3


def done_keys(server: Server) -> list[str]:
    meta: Any = server.broker._meta
    return [key for key in meta.values if key.startswith("done/")]


@pytest.mark.parametrize("is_connected", [False, True], ids=["disconnected", "connected"])
def test_a_restart_within_the_60_seconds_does_not_keep_what_was_acknowledged(
    broker: BrokerInThread, connect: Connect, is_connected: bool
) -> None:
    client, reader = connect(), connect()
    reader.subscribe("news")
    for number in range(3):
        client.publish("news", b"%d" % number)
    for message in reader.take(3):
        reader.ack(message)
    if not is_connected:
        _disconnect(broker, reader)
    _pass(broker, 20)
    _restart(broker)
    connect().publish("news", b"new")
    _pass(broker, 50)
    assert _start(broker, "news") == 0
    _pass(broker, 25)
    assert _start(broker, "news") == 3, "and the message that no subscriber had stays"
    _restart(broker)
    _pass(broker, 300)
    assert _start(broker, "news") == 3
    keys = broker.ask(lambda server: done_keys(server))
    assert not keys, "nothing is left to know"


def test_progress_is_stored_when_a_subscriber_leaves(broker: BrokerInThread, connect: Connect) -> None:
    """A broker that is killed stores nothing more."""
    client, reader = connect(), connect()
    reader.subscribe("news")
    client.publish("news", b"x")
    reader.ack(reader.next())
    _disconnect(broker, reader)
    wait_for(
        lambda: broker.ask(lambda server: bool(done_keys(server))),
        "a stored offset",
    )


def test_a_group_that_came_before_a_restart_still_gets_what_others_were_done_with(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, reader, worker = connect(), connect(), connect()
    reader.subscribe("news")
    for number in range(2):
        client.publish("news", b"%d" % number)
    for message in reader.take(2):
        reader.ack(message)
    _disconnect(broker, reader)
    worker.subscribe("news", "workers")
    _restart(broker)
    _pass(broker, 300)
    assert _start(broker, "news") == 0
    again = connect()
    again.subscribe("news", "workers")
    assert [message.payload for message in again.take(2)] == [b"0", b"1"]


def _restart(broker: BrokerInThread) -> None:
    broker.stop()
    broker.start()


def test_what_a_group_has_not_read_stays_when_a_subscriber_without_one_acknowledged_it_and_left(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, reader, worker = connect(), connect(), connect()
    worker.subscribe("news", "workers")
    reader.subscribe("news")
    for number in range(3):
        client.publish("news", b"%d" % number)
    for message in reader.take(3):
        reader.ack(message)
    worker.ack(worker.next())
    _disconnect(broker, reader)
    _disconnect(broker, worker)
    _pass(broker, 300)
    assert _start(broker, "news") == 1
    again = connect()
    again.subscribe("news", "workers")
    assert [message.payload for message in again.take(2)] == [b"1", b"2"]


def test_a_group_that_comes_within_the_60_seconds_still_gets_everything(
    broker: BrokerInThread, connect: Connect
) -> None:
    client, reader, worker = connect(), connect(), connect()
    reader.subscribe("news")
    for number in range(2):
        client.publish("news", b"%d" % number)
    for message in reader.take(2):
        reader.ack(message)
    _disconnect(broker, reader)
    _pass(broker, 40)
    worker.subscribe("news", "workers")
    assert [message.payload for message in worker.take(2)] == [b"0", b"1"]
    _disconnect(broker, worker)
    _pass(broker, 300)
    assert _start(broker, "news") == 0


def test_what_a_subscriber_left_unanswered_or_was_not_sent_stays(broker: BrokerInThread, connect: Connect) -> None:
    client, reader = connect(), connect()
    reader.subscribe("news")
    for number in range(3):
        client.publish("news", b"%d" % number)
    first, second, _ = reader.take(3)
    reader.ack(first)
    reader.ack(second)
    _disconnect(broker, reader)
    client.publish("news", b"3")
    late = connect()
    late.subscribe("news")
    client.publish("news", b"4")
    late.ack(late.next())
    _disconnect(broker, late)
    _pass(broker, 300)
    assert _start(broker, "news") == 2


def test_subscribers_one_after_the_other_leave_nothing_behind(broker: BrokerInThread, connect: Connect) -> None:
    client = connect()
    for number in range(4):
        reader = connect()
        reader.subscribe("news")
        client.publish("news", b"%d" % number)
        reader.ack(reader.next())
        _disconnect(broker, reader)
        broker.advance(2)
    _pass(broker, 70)
    assert _start(broker, "news") == 4


def test_a_topic_that_is_made_again_keeps_what_nobody_has_read(broker: BrokerInThread, connect: Connect) -> None:
    client, reader = connect(), connect()
    reader.subscribe("news")
    client.publish("news", b"old")
    reader.ack(reader.next())
    _disconnect(broker, reader)
    _pass(broker, 10)
    client.delete_topic("news")
    client.publish("news", b"new")
    _pass(broker, 300)
    assert _start(broker, "news") == 0


def _start(broker: BrokerInThread, topic: str) -> int:
    def look(server: Server) -> int:
        found = server.broker.topics.get(topic)
        assert found is not None
        return found.partitions[0].log.start

    return broker.ask(look)


def test_a_silent_subscriber_stays_and_a_silent_stranger_goes(broker: BrokerInThread, connect: Connect) -> None:
    client, subscriber, stranger, stuck = (connect() for _ in range(4))
    subscriber.subscribe("jobs")
    stranger.ping()
    stuck.socket.sendall(b"\x04\0\0")
    stuck.socket.settimeout(20)
    broker.advance(5)
    for _ in range(8):
        broker.advance(10)
    assert stuck.socket.recv(1) == b""
    for _ in range(62):
        broker.advance(10)
        client.ping()
    assert stranger.socket.recv(1) == b""
    client.publish("jobs", b"job")
    assert subscriber.next().payload == b"job"


def farewell(client: FlowmqClient) -> str:
    """The reason of the ERROR with which the connection ends."""
    with pytest.raises(FlowmqError) as refused:
        client.answer()
    with pytest.raises(ConnectionError):
        client.receive()
    return str(refused.value)


def test_subscribers_are_told_when_another_broker_has_their_queue(broker: BrokerInThread, connect: Connect) -> None:
    client, worker, idle, other = connect(), connect(), connect(), connect()
    for each in (worker, idle):
        each.subscribe("jobs", "workers")
    other.subscribe("jobs")
    for number in range(4):
        client.publish("jobs", b"%d" % number)
    held = worker.next()
    broker.ask(lambda server: server.broker.queues.release())
    worker.messages.clear()
    worker.send(0x06, held.id.encode())  # an acknowledgement that is never stored
    for each in (worker, idle):
        assert "another broker coordinates the queue" in farewell(each)
    assert len(other.take(4)) == 4 and other.ping(b"still here") == b"still here", "a private queue is not concerned"


def test_who_subscribes_after_a_queue_was_lost_joins_a_live_one(broker: BrokerInThread, connect: Connect) -> None:
    client, worker = connect(), connect()
    worker.subscribe("jobs", "workers")

    def lose_and_find(server: Server) -> None:
        server.broker.queues.release()
        server.broker.in_background(server.broker.queues.adopt(lambda group_id: True))

    broker.ask(lose_and_find)
    farewell(worker)
    again = connect()
    again.subscribe("jobs", "workers")
    client.publish("jobs", b"job")
    again.ack(again.next())


def test_a_partition_that_cannot_be_read_is_tried_again_a_moment_later(
    broker: BrokerInThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, worker = connect(), connect()
    client.create_topic("jobs")
    client.publish("jobs", b"job")
    topic = broker.ask(lambda server: server.broker.topics.get("jobs"))
    assert topic is not None
    kind = type(topic.partitions[0].log)
    failed = Promise[Slice].failed(RequestError(Code.KAFKA_STORAGE_ERROR, "the disk does not answer"))
    with monkeypatch.context() as away:
        away.setattr(kind, "read", lambda *_: failed)
        worker.subscribe("jobs", "workers")
        assert worker.has_nothing()
        broker.advance(1.1)
        assert worker.has_nothing()
    broker.advance(1.1)
    assert worker.next().payload == b"job"
