"""Comet's client as its users have it: stubs that grpcio-tools generates from the IDL, and the behaviour of Comet's Go
client on top of them, as far as its server can tell.

    Producer   CreateTopic until it succeeds or the error contains "already exists"; bootstraps with an empty
               GetMetadata; sends each batch to the leader of its partitions
    Consumer   Subscribe, then Poll; subscribes again under a new id after any error; reconnects with an empty
               SubscribeRequest; closes without Unsubscribe
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
import zlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_tools import protoc

from millstream.wire.comet import IDL

SECONDS_MAX = 20
ATTEMPTS_MAX = 10
METHODS = (
    "CreateTopic", "DeleteTopic", "ListTopics", "GetMetadata", "Produce", "Consume", "Subscribe", "Poll", "Unsubscribe",
    "Replicate",
)  # fmt: skip


def compile_idl(*arguments: str) -> None:
    code = protoc.main(["protoc", f"-I{IDL.parent}", *arguments, IDL.name])
    assert code == 0


@functools.cache
def generated() -> tuple[Any, Any]:
    """The modules of the messages and of the stubs."""
    with tempfile.TemporaryDirectory() as directory:
        compile_idl(f"--python_out={directory}", f"--grpc_python_out={directory}")
        sys.path.insert(0, directory)
        try:
            return importlib.import_module("comet_pb2"), importlib.import_module("comet_pb2_grpc")
        finally:
            sys.path.remove(directory)


class Comet:
    """One channel. Each call has a method of its name, which takes the fields of its request."""

    def __init__(self, address: str, **options: int) -> None:
        self.messages, services = generated()
        self.channel = grpc.insecure_channel(
            address, options=[(f"grpc.{name}", value) for name, value in options.items()]
        )
        self.stub = services.BrokerServiceStub(self.channel)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)
        request = getattr(self.messages, f"{name}Request")
        call = getattr(self.stub, name)
        return lambda **fields: call(request(**fields), timeout=SECONDS_MAX, wait_for_ready=True)

    def raw(self, method: str, data: bytes) -> bytes:
        """A call with any bytes as its request."""
        call = self.channel.unary_unary(f"/comet.v1.BrokerService/{method}")
        answer: bytes = call(data, timeout=SECONDS_MAX, wait_for_ready=True)
        return answer

    def produce(self, topic: str, *values: bytes, partition: int = 0, key: bytes = b"") -> list[tuple[int, int]]:
        """Partition and offset of each record; fails on an error."""
        records = [{"partition": partition, "key": key, "value": value} for value in values]
        answer = self.Produce(topic=topic, records=records)
        assert answer.error == "", answer.error
        return [(each.partition, each.offset) for each in answer.results]

    def consume(self, topic: str, partition: int = 0, offset: int = 0, max_records: int = 0) -> list[tuple[int, bytes]]:
        answer = self.Consume(topic=topic, partition=partition, offset=offset, max_records=max_records)
        assert answer.error == "", answer.error
        return [(each.offset, each.value) for each in answer.messages]

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Producer:
    """Comet's `TopicProducer`, one flush at a time."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, replication_factor: int = 1) -> None:
        self.bootstrap, self.topic, self.partitions = bootstrap, topic, partitions
        self.channels: dict[str, Comet] = {}
        self.turn = 0
        client = self.to(bootstrap)
        for _ in range(ATTEMPTS_MAX):
            answer = client.CreateTopic(name=topic, partitions=partitions, replication_factor=replication_factor)
            if answer.success or "already exists" in answer.error:
                break
        else:
            raise AssertionError(answer.error)
        self.refresh()

    def to(self, address: str) -> Comet:
        if address not in self.channels:
            self.channels[address] = Comet(address)
        return self.channels[address]

    def refresh(self) -> None:
        metadata = self.to(self.bootstrap).GetMetadata()
        host = self.bootstrap.rpartition(":")[0]
        addresses = {
            each.id: host + each.address if each.address[0] == ":" else each.address for each in metadata.brokers
        }
        [topic] = [each for each in metadata.topics if each.name == self.topic]
        self.leaders = {each.id: addresses[each.leader_broker_id] for each in topic.partitions}

    def send(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Keys and values; a flush."""
        by_leader: dict[str, list[dict[str, Any]]] = {}
        for key, value in records:
            if key:
                partition = zlib.crc32(key) % self.partitions
            else:
                partition, self.turn = self.turn % self.partitions, self.turn + 1
            by_leader.setdefault(self.leaders[partition], []).append(
                {"partition": partition, "key": key, "value": value}
            )
        for address, batch in by_leader.items():
            answer = self.to(address).Produce(topic=self.topic, records=batch)
            assert answer.error == "", answer.error

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


class Consumer:
    """The poll loop of Comet's `Consumer` for one topic, one turn at a time."""

    def __init__(self, bootstrap: str, topic: str, group: str, max_records: int = 100) -> None:
        self.bootstrap, self.topic, self.group, self.max_records = bootstrap, topic, group, max_records
        self.client = Comet(bootstrap)
        self.member = ""
        self.partitions: list[int] = []
        self.rebalances = 0
        self.seen: list[tuple[int, int, bytes]] = []
        """Partition, offset and value."""

    def subscribe(self) -> None:
        answer = self.client.Subscribe(topic=self.topic, group=self.group)
        assert answer.error == "", answer.error
        self.member, self.partitions = answer.member_id, list(answer.partitions)

    def poll(self) -> list[tuple[int, int, bytes]]:
        """One turn of the loop: the messages of a poll."""
        if not self.member:
            self.subscribe()
        try:
            answer = self.client.Poll(
                topic=self.topic, group=self.group, member_id=self.member, max_records=self.max_records
            )
        except grpc.RpcError:
            self.reconnect()
            return []
        if answer.error:
            self.member = ""
            return []
        if answer.rebalance:
            self.rebalances += 1
        found = [(each.partition, each.offset, each.value) for each in answer.messages]
        self.seen += found
        return found

    def reconnect(self) -> None:
        """The next bootstrap address is the one that answers an empty SubscribeRequest with status OK."""
        self.client.close()
        self.client, self.member = Comet(self.bootstrap), ""
        self.client.Subscribe()

    def close(self) -> None:
        """Without Unsubscribe."""
        self.client.close()
