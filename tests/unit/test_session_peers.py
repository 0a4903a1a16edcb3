"""Peers: a broker proves that it is one, and speaks for its client; a claim without the proof is worth nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from typing import Any

import pytest

from millstream.broker.session import Session
from millstream.cluster.base import Node, Solo
from millstream.cluster.shared import SharedCluster
from millstream.config import Config
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.peer_connection import for_client
from millstream.security import peers
from millstream.security.peers import NONCE_BYTES, Peer
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import AllowAll, Kind, Operation
from millstream.server import Server
from millstream.stores.keys import MemoryMeta
from millstream.testing.clock import VirtualClock
from millstream.wire.kafka import api_versions
from millstream.wire.kafka.conversation import Conversation
from tests.compat import raw

ALICE = Principal("User", "alice")
SECRET = b"s" * 32
DESCRIBE = raw.request(15, 6, {"groups": ["g"], "include_authorized_operations": False})


class Noting(AllowAll):
    """Notes for whom it is asked."""

    is_open = False

    def __init__(self) -> None:
        self.asked: set[tuple[Principal, str]] = set()

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        self.asked.add((principal, host))
        return True

    def scope(self, principal: Principal, host: str) -> Hashable:
        return principal


def know(server: Server, secret: bytes) -> None:
    """The secret of its cluster."""
    cluster = server.broker.cluster
    assert isinstance(cluster, Solo)
    cluster.secret = secret


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """The coordinator."""
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off", node_id=2))
    await server.start()
    server.broker.authorizer = Noting()
    know(server, SECRET)
    yield server
    await server.stop()


@pytest.fixture
async def leader(server: Server) -> AsyncIterator[Server]:
    leader = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off", node_id=7))
    await leader.start()
    know(leader, SECRET)
    yield leader
    await leader.stop()


def asked(server: Server) -> set[tuple[Principal, str]]:
    assert isinstance(server.broker.authorizer, Noting)
    return server.broker.authorizer.asked


def node(server: Server, node_id: int = 2) -> Node:
    return Node(node_id, "127.0.0.1", server.addresses["kafka"].port)


def protocols(server: Server) -> list[Any]:
    assert server._kafka is not None
    return [each.protocol for each in server._kafka._connections]


def contexts(server: Server) -> list[Context]:
    return [each._context for each in protocols(server)]


class Client:
    """One connection that says that it is a relay."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, server: Server) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", server.addresses["kafka"].port))

    def claim(self, version: str) -> None:
        self._writer.write(Conversation("").request(api_versions.introduce(api_versions.RELAY, version)))

    def send(self, frame: bytes) -> None:
        self._writer.write(frame)

    async def answer(self) -> bytes:
        """Behind its correlation id."""
        return (await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4))))[4:]

    async def nonce(self) -> bytes:
        self.claim("")
        nonce = await self.answer()
        assert len(nonce) == NONCE_BYTES
        return nonce

    async def rest(self) -> bytes:
        """What the broker sends until it closes the connection."""
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    client = await Client.to(server)
    yield client
    client.close()


def proof(nonce: bytes, secret: bytes = SECRET, target: int = 2) -> str:
    return peers.prove(secret, nonce, target, Peer(7, ALICE, "10.9.9.9"))


@pytest.mark.parametrize("claim", ["7", proof(bytes(NONCE_BYTES))])
async def test_a_claim_without_a_proof_is_an_ordinary_clients(server: Server, client: Client, claim: str) -> None:
    client.claim(claim)
    assert len(await client.answer()) > 100, "the list of APIs"
    client.send(DESCRIBE)
    await client.answer()
    (context,) = contexts(server)
    assert (context.via, context.session.principal) == ("", ANONYMOUS)
    assert asked(server) == {(ANONYMOUS, "127.0.0.1")}


@pytest.mark.parametrize("wrong", ["x", proof(bytes(NONCE_BYTES)), "secret", "target", "é" * 80])
async def test_a_wrong_proof_costs_the_connection_before_its_request_is_handled(
    server: Server, client: Client, wrong: str
) -> None:
    nonce = await client.nonce()
    client.claim({"secret": proof(nonce, b"t" * 32), "target": proof(nonce, target=3)}.get(wrong, wrong))
    client.send(DESCRIBE)
    assert await client.rest() == b""
    assert asked(server) == set()


async def test_a_proof_cannot_be_used_again(server: Server, client: Client) -> None:
    said = proof(await client.nonce())
    client.claim(said)
    await client.answer()
    assert contexts(server)[0].via == "7"
    again = await Client.to(server)
    await again.nonce()
    again.claim(said)
    assert await again.rest() == b""
    again.close()


async def test_a_proven_relay_shares_known_produce_requests_with_its_client_only(
    server: Server, client: Client
) -> None:
    door = server._kafka
    assert door is not None
    nonce = await client.nonce()
    (protocol,) = protocols(server)
    assert protocol._known is door.known_for(Session(server.broker, "kafka", "127.0.0.1"))
    client.claim(proof(nonce))
    await client.answer()
    assert protocol._known is door.known_for(Session(server.broker, "kafka", "10.0.0.1", principal=ALICE))


async def test_a_broker_without_peers_believes_nobody(server: Server, client: Client) -> None:
    know(server, b"")
    client.claim("")
    assert len(await client.answer()) > 100, "the list of APIs"
    client.claim(proof(b"", b""))
    await client.answer()
    assert contexts(server)[0].via == ""


async def test_a_relayed_request_has_the_rights_of_the_client(server: Server, leader: Server) -> None:
    relay = for_client(node(server), Session(leader.broker, "kafka", "10.0.0.1", principal=ALICE))
    for _ in range(2):
        assert b"g" in bytes(await relay.ask(DESCRIBE[4:], 0))
    (context,) = contexts(server)
    assert context.via == "7"
    assert asked(server) == {(ALICE, "10.0.0.1")}
    relay.close()


async def test_a_relay_does_not_ask_a_broker_of_another_cluster(server: Server, leader: Server) -> None:
    client = Session(leader.broker, "kafka", "10.0.0.1", principal=ALICE)
    know(leader, b"t" * 32)
    with pytest.raises(ConnectionError):
        await for_client(node(server), client).ask(DESCRIBE[4:], 0)
    know(server, b"")
    with pytest.raises(ConnectionError):
        await for_client(node(server), client).ask(DESCRIBE[4:], 0)
    assert asked(server) == set()


async def test_the_brokers_of_a_store_share_one_secret() -> None:
    meta, clock = MemoryMeta(), VirtualClock()
    made = [SharedCluster(meta, clock, number, 6_000) for number in (1, 2)]
    for cluster in made:
        await cluster.start()
    first, second = (cluster.secret for cluster in made)
    assert first == second and len(first) == 32
