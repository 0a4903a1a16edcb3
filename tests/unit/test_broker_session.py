"""Sessions: rights are checked for every verb; members, sessions and known shapes belong to a principal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.groups.groups import Beat, Join, PartitionCommit, ShareBeat, TopicCommit
from millstream.broker.session import Session
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.sessions import FetchSessions
from millstream.doors.kafka.share_sessions import ShareSessions
from millstream.security.principal import Principal
from millstream.security.rights import Kind, Operation
from millstream.server import Server
from millstream.wire.kafka.fetch import FetchRequest, PartitionFetch
from tests.compat import raw
from tests.refusing import Refusing

ALICE = Principal("User", "alice")
MALLORY = Principal("User", "mallory")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off"))
    await server.start()
    server.broker.authorizer = Refusing()
    await server.broker.topics.create("orders", 2, {})
    yield server
    await server.stop()


@pytest.fixture
def rules(server: Server) -> Refusing:
    assert isinstance(server.broker.authorizer, Refusing)
    return server.broker.authorizer


@pytest.fixture
def alice(server: Server) -> Session:
    return Session(server.broker, "kafka", "10.0.0.1", principal=ALICE)


@pytest.fixture
def mallory(server: Server) -> Session:
    return Session(server.broker, "kafka", "10.0.0.1", principal=MALLORY)


def joining(member_id: str = "", instance_id: str | None = None) -> Join:
    return Join("g", member_id, instance_id, "", "", 10_000, 10_000, "consumer", (("range", b""),))


async def code_of(work: Any) -> Code:
    try:
        if asyncio.iscoroutine(work):
            await work
    except RequestError as error:
        return error.code
    return Code.NONE


def refused(call: Any, *arguments: Any) -> Code:
    with pytest.raises(RequestError) as raised:
        call(*arguments)
    return raised.value.code


Ask = Callable[[bytes], Awaitable[bytes]]


@pytest.fixture
async def ask(server: Server) -> AsyncIterator[Ask]:
    """Sends a request on one connection and waits for its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses["kafka"].port)

    async def exchange(frame: bytes) -> bytes:
        writer.write(frame)
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))

    yield exchange
    writer.close()


async def test_every_verb_about_a_group_asks_for_a_right(alice: Session, rules: Refusing) -> None:
    for operation in (Operation.READ, Operation.DESCRIBE, Operation.DELETE):
        rules.deny(operation, Kind.GROUP, "g")
    commits = [TopicCommit("orders", [PartitionCommit(0, 1)])]
    asked = [
        alice.join(joining()),
        alice.sync("g", "m", None, 1, (None, None), {}),
        alice.consumer_heartbeat(Beat("g", "m", 0, rebalance_ms=1, topics=frozenset({"orders"}))),
        alice.share_heartbeat(ShareBeat("g", "m", 0, topics=frozenset({"orders"}))),
        alice.commit("g", "", None, -1, commits),
        alice.delete_offsets("g", [("orders", [0])]),
        alice.delete_group("g"),
    ]
    assert [await code_of(each) for each in asked] == [Code.GROUP_AUTHORIZATION_FAILED] * len(asked)
    calls: list[tuple[Any, ...]] = [
        (alice.heartbeat, "g", "m", None, 1),
        (alice.leave, "g", []),
        (alice.committed, "g", None),
        (alice.describe_classic, "g"),
        (alice.describe_consumer, "g"),
        (alice.describe_share, "g"),
        (alice.share_group, "g", "m"),
    ]
    assert [refused(*each) for each in calls] == [Code.GROUP_AUTHORIZATION_FAILED] * len(calls)
    assert alice._broker.groups.list() == []


async def test_groups_that_may_not_be_described_are_not_listed(alice: Session, rules: Refusing) -> None:
    for name in ("g", "secret"):
        await alice.commit(name, "", None, -1, [TopicCommit("orders", [PartitionCommit(0, 1)])])
    rules.deny(Operation.DESCRIBE, Kind.GROUP, "secret")
    assert [each.group_id for each in alice.list_groups()] == ["g"]


async def test_a_refusal_does_not_tell_whether_a_topic_exists(alice: Session, rules: Refusing) -> None:
    for name in ("orders", "missing"):
        rules.deny(Operation.WRITE, Kind.TOPIC, name)
    assert refused(alice.partition, "orders", 0, Operation.WRITE) == Code.TOPIC_AUTHORIZATION_FAILED
    assert refused(alice.partition, "missing", 0, Operation.WRITE) == Code.TOPIC_AUTHORIZATION_FAILED
    topic = alice.topic("orders", Operation.READ)
    assert refused(alice.topic, topic.id, Operation.WRITE) == Code.TOPIC_AUTHORIZATION_FAILED
    assert refused(alice.partition, "orders", 2, Operation.READ) == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_known_produce_request_is_refused_once_its_right_is_gone(
    server: Server, rules: Refusing, ask: Ask
) -> None:
    frame = raw.produce("orders", raw.batch(b"first"), version=9)
    stored = await ask(frame)
    assert await ask(frame) != stored  # of a known shape: only the offset differs
    rules.deny(Operation.WRITE, Kind.TOPIC, "orders")
    for _ in range(2):  # the refused request is not learned either
        assert b"may not write topic orders" in await ask(frame)
    assert server.broker.topics.find("orders").partitions[0].log.end == 2  # type: ignore[union-attr]


async def test_a_fetch_of_a_denied_topic_costs_that_topic_only(server: Server, rules: Refusing, ask: Ask) -> None:
    await server.broker.topics.create("open", 1, {})
    await ask(raw.produce("orders", raw.batch(b"secret"), version=9))
    await ask(raw.produce("open", raw.batch(b"public"), version=9))
    rules.deny(Operation.READ, Kind.TOPIC, "orders")
    assert b"secret" not in await ask(raw.fetch("orders", 0))
    assert b"public" in await ask(raw.fetch("open", 0))


async def test_shapes_are_shared_only_by_clients_with_the_same_rights(server: Server) -> None:
    door = server._kafka
    assert door is not None
    known = door.known_for(Session(server.broker, "kafka", "10.0.0.1", principal=ALICE))
    assert door.known_for(Session(server.broker, "kafka", "10.0.0.2", principal=ALICE)) is known
    assert door.known_for(Session(server.broker, "kafka", "10.0.0.1", principal=MALLORY)) is not known


async def test_another_principal_cannot_act_for_a_classic_member(alice: Session, mallory: Session) -> None:
    joined = await alice.join(joining(instance_id="i"))
    member, generation = joined.member_id, joined.generation
    await alice.sync("g", member, "i", generation, (None, None), {})
    alice.heartbeat("g", member, "i", generation)
    commits = [TopicCommit("orders", [PartitionCommit(0, 5)])]
    assert refused(mallory.heartbeat, "g", member, "i", generation) == Code.UNKNOWN_MEMBER_ID
    for attempt in (
        mallory.join(joining(member)),
        mallory.join(joining(instance_id="i")),
        mallory.sync("g", member, "i", generation, (None, None), {}),
        mallory.commit("g", member, "i", generation, commits),
    ):
        assert await code_of(attempt) == Code.UNKNOWN_MEMBER_ID
    alice.heartbeat("g", member, "i", generation)
    assert await alice.commit("g", member, "i", generation, commits) == [[Code.NONE]]


async def test_another_principal_cannot_act_for_a_member_of_the_consumer_protocol(
    alice: Session, mallory: Session
) -> None:
    beat = Beat("g", "m", 0, instance_id="i", rebalance_ms=1_000, topics=frozenset({"orders"}))
    epoch = (await alice.consumer_heartbeat(beat)).epoch
    for attempt in (beat, Beat("g", "m", epoch), Beat("g", "m", -1), Beat("g", "other", 0, instance_id="i",
                    rebalance_ms=1_000, topics=frozenset({"orders"}))):  # fmt: skip
        assert await code_of(mallory.consumer_heartbeat(attempt)) == Code.UNKNOWN_MEMBER_ID
    assert (await alice.consumer_heartbeat(Beat("g", "m", epoch, instance_id="i"))).epoch == epoch


async def test_another_principal_cannot_use_a_share_session(alice: Session, mallory: Session) -> None:
    shares = ShareSessions()
    await alice.share_heartbeat(ShareBeat("g", "m", 0, topics=frozenset({"orders"})))
    ours, theirs = (Context(each, FetchSessions(), "127.0.0.1", 9092) for each in (alice, mallory))
    session = shares.open("g", "m", ours)
    assert await code_of(mallory.share_heartbeat(ShareBeat("g", "m", 1))) == Code.UNKNOWN_MEMBER_ID
    assert refused(shares.open, "g", "m", theirs) == Code.UNKNOWN_MEMBER_ID
    assert refused(shares.find, "g", "m", 1, theirs) == Code.SHARE_SESSION_NOT_FOUND
    assert shares.find("g", "m", 1, ours) is session


def test_another_principal_cannot_use_or_end_a_fetch_session() -> None:
    table = FetchSessions()
    first = FetchRequest(0, 1, 1, 0, 0, 0, [("orders", [PartitionFetch(0, -1, 0, 1024)])], [])
    session = table.open(first, ALICE)
    assert session is not None
    following = first._replace(session_id=session.id, session_epoch=1, topics=[])
    assert refused(table.open, following, MALLORY) == Code.FETCH_SESSION_ID_NOT_FOUND
    table.open(following._replace(session_epoch=-1), MALLORY)
    table.open(following._replace(session_epoch=0), MALLORY)
    assert table.open(following, ALICE) is session
