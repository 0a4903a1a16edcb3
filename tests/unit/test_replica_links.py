"""Two brokers over real sockets: one copies what the other one leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import UUID

import pytest

from millstream.broker.replication.calls import CopyRequest, CopyWanted
from millstream.broker.replication.replicas import Replicas
from millstream.cluster import partition_state
from millstream.cluster.base import Node, PartitionKey
from millstream.cluster.membership import Membership
from millstream.cluster.partitions import Partitions
from millstream.config import Config
from millstream.core.clock import SystemClock
from millstream.core.errors import Code
from millstream.doors.kafka.replica_links import ReplicaLinks
from millstream.log.replica import ReplicaLog
from millstream.security import peers
from millstream.security.peers import Peer
from millstream.security.principal import ANONYMOUS
from millstream.server import Server
from millstream.stores.keys import MemoryMeta
from tests.batches import append, batch, read_all

SECRET = b"s" * 32
TOPIC = UUID(int=9)
KEY = PartitionKey(TOPIC, 0)
SECONDS = 20


class Replica:
    """A server, with one replicated partition beside its topics."""

    def __init__(self, node_id: int, meta: MemoryMeta, home: Path) -> None:
        self.node_id = node_id
        self.server = Server(Config(store=f"file:{home}", kafka="127.0.0.1:0", http="off", node_id=node_id))
        self.clock = SystemClock()
        self.members = Membership(meta, self.clock, node_id, 6_000)
        self.partitions = Partitions(meta)
        self.links = ReplicaLinks(self.prove)
        self.replicas = Replicas(self.members, self.partitions, self.clock, self.links)

    def prove(self, nonce: bytes, node_id: int) -> str:
        return peers.prove(SECRET, nonce, node_id, Peer(self.node_id, ANONYMOUS, ""))

    async def start(self) -> None:
        await self.server.start()
        self.server.broker.cluster.secret = SECRET  # type: ignore[misc]  # a broker alone has none
        self.server.broker.replicas = self.replicas
        topic = await self.server.broker.topics.create("t", 1, {})
        log = topic.partitions[0].log
        assert isinstance(log, ReplicaLog)
        self.log = log
        await self.members.start()
        await self.partitions.start()
        self.members.on_register = self.replicas.registered
        await self.members.join("127.0.0.1", self.server.addresses["kafka"].port)
        self.replicas.host(KEY, log)
        self.replicas.start()

    async def stop(self) -> None:
        self.replicas.close()
        self.links.close()
        await self.members.leave()
        await self.server.stop()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Replica, Replica]]:
    """The first one leads."""
    meta = MemoryMeta()
    one, two = Replica(1, meta, tmp_path / "1"), Replica(2, meta, tmp_path / "2")
    await one.start()
    await two.start()
    state = partition_state.create((1, 2), 2, one.members.alive)
    await meta.transact(*Partitions.creations(TOPIC, 0, [state]))
    yield one, two
    await two.stop()
    await one.stop()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while True:  # two loops of timers, and no event
            if is_so():
                return
            await asyncio.sleep(0.01)


async def test_a_batch_is_committed_when_the_other_broker_has_synced_it(pair: tuple[Replica, Replica]) -> None:
    one, two = pair
    leader = one.replicas.leader(KEY)
    await until(lambda: leader.state.isr == (1, 2))
    for number in range(3):
        appended = append(one.log, batch(b"%d" % number * 20_000))
        async with asyncio.timeout(SECONDS):
            await leader.when_committed(appended, one.log.end)
        assert two.log.counted == one.log.end
    await until(lambda: two.log.high_watermark == 3)
    assert [record.value for record in read_all(two.log)] == [record.value for record in read_all(one.log)]


async def test_a_connection_without_proof_gets_no_uncommitted_records(pair: tuple[Replica, Replica]) -> None:
    one, _ = pair
    liar = ReplicaLinks(lambda nonce, node_id: peers.prove(b"x" * 32, nonce, node_id, Peer(2, ANONYMOUS, "")))
    request = CopyRequest(2, 1, [CopyWanted(KEY, 0, 0, -1, 1000)], 0, 1000)
    with pytest.raises(ConnectionError):
        await liar.fetch(Node(1, "127.0.0.1", one.server.addresses["kafka"].port), request, 0)
    liar.close()


async def test_a_follower_of_another_epoch_or_partition_is_told_so(pair: tuple[Replica, Replica]) -> None:
    one, two = pair
    leader = Node(1, "127.0.0.1", one.server.addresses["kafka"].port)
    wanted = [
        CopyWanted(KEY, 5, 0, -1, 1000),
        CopyWanted(PartitionKey(TOPIC, 7), 0, 0, -1, 1000),
    ]
    answers = await two.links.fetch(leader, CopyRequest(2, two.members.epoch, wanted, 0, 1000), 1)
    assert [each.code for each in answers] == [Code.UNKNOWN_LEADER_EPOCH, Code.NOT_LEADER_OR_FOLLOWER]
