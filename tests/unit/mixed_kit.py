"""A classic consumer as real ones behave, one step at a time: what the tests of groups with both protocols share."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import Any

from millstream.broker.groups.stream.classic_member import Joined
from millstream.broker.groups.stream.plan import decode_assignment, encode_assignment
from millstream.broker.groups.stream.subscription import decode_subscription
from millstream.core.errors import Code, RequestError
from tests.unit.groups_kit import Bench, Client, subscription, turn

Named = tuple[str, int]


def owning(topics: Iterable[str], owned: Iterable[Named], version: int = 3) -> bytes:
    """A subscription of a later version, with owned partitions, generation and rack."""
    head = struct.pack(">h", version) + subscription(*topics)[2:-4] + struct.pack(">i", -1)
    partitions = encode_assignment(owned)[2:-4]
    return head + partitions + struct.pack(">ih", -1, -1)


class ClassicClient:
    """Eager: revokes everything before it rejoins. Cooperative: lists what it owns, revokes what it is not given."""

    def __init__(self, bench: Bench, *, cooperative: bool = False, instance_id: str | None = None) -> None:
        self.bench = bench
        self.cooperative = cooperative
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.owned: set[Named] = set()
        self.protocol = "cooperative-sticky" if cooperative else "range"
        self.errors: list[Code] = []
        self._must_join = True
        self._joining: asyncio.Task[Joined] | None = None
        self._syncing: asyncio.Task[Any] | None = None

    async def step(self) -> None:
        """Sends what is due, and takes what is there."""
        await turn()
        try:
            await self._step()
        except RequestError as error:
            self._refused(error.code)
        await turn()

    async def _step(self) -> None:
        if self._joining is not None:
            if self._joining.done():
                task, self._joining = self._joining, None
                self._joined(task.result())
        elif self._syncing is not None:
            if self._syncing.done():
                syncing, self._syncing = self._syncing, None
                self._synced(syncing.result().assignment)
        elif self._must_join:
            self._join()
        else:
            self.bench.groups.heartbeat("g", self.member_id, self.instance_id, self.generation)

    def _join(self) -> None:
        self._must_join = False
        if not self.cooperative:
            self.owned = set()
        metadata = owning(["orders"], self.owned) if self.cooperative else subscription("orders")
        changes = {"protocols": ((self.protocol, metadata),), "instance_id": self.instance_id}
        self._joining = self.bench.join(self.member_id, id_required=True, **changes)

    def _joined(self, joined: Joined) -> None:
        self.member_id = joined.member_id
        if joined.error == Code.MEMBER_ID_REQUIRED:
            self._must_join = True
            return
        self.generation = joined.generation
        assert joined.protocol_name == self.protocol
        if joined.leader == joined.member_id:
            self._syncing = self.bench.plan(joined.member_id, joined.generation, self._plan(joined))
        else:
            self._syncing = self.bench.sync(self.member_id, self.generation, self.instance_id)

    def _plan(self, joined: Joined) -> dict[str, bytes]:
        """Round robin; a partition that another member still owns waits for the next generation (KIP-429)."""
        topic = self.bench.topics.get("orders")
        assert topic is not None
        members = sorted(member for member, _, _ in joined.members)
        said = {member: decode_subscription(metadata) for member, _, metadata in joined.members}
        owner = {part: member for member, each in said.items() if each is not None for part in each.owned}
        plan: dict[str, list[Named]] = {member: [] for member in members}
        for number in range(topic.partition_count):
            member = members[number % len(members)]
            if owner.get(("orders", number), member) == member:
                plan[member].append(("orders", number))
        return {member: encode_assignment(parts) for member, parts in plan.items()}

    def _synced(self, assignment: bytes) -> None:
        decoded = decode_assignment(assignment)
        assert decoded is not None
        revoked = self.owned - decoded[0]
        self.owned = decoded[0]
        if self.cooperative and revoked:
            self._must_join = True

    def _refused(self, code: Code) -> None:
        self.errors.append(code)
        self._must_join = True
        if code == Code.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if code in (Code.UNKNOWN_MEMBER_ID, Code.ILLEGAL_GENERATION):
            self.generation, self.owned = -1, set()

    async def commit(self, offset: int) -> Code:
        try:
            codes = await self.bench.commit(offset, self.member_id, self.generation, instance_id=self.instance_id)
        except RequestError as error:
            return error.code
        return codes[0][0]

    async def leave(self) -> None:
        self.owned = set()
        assert self.bench.groups.leave("g", [(self.member_id, self.instance_id)]) == [Code.NONE]
        await turn()

    def vanish(self) -> None:
        """Leaves, and takes no answers any more."""
        self.bench.groups.leave("g", [(self.member_id, self.instance_id)])
        for task in (self._joining, self._syncing):
            if task is not None:
                task.add_done_callback(lambda done: done.exception())

    @property
    def numbers(self) -> list[int]:
        return sorted(number for _, number in self.owned)


def numbers_of(members: Iterable[ClassicClient | Client]) -> list[int]:
    """Partitions that all members together own; a partition with two owners is listed twice."""
    return sorted(number for member in members for number in member.numbers)


async def run(*members: ClassicClient | Client, steps: int = 16) -> None:
    """Each in turn, as often as a rebalance may need; no partition ever has two owners."""
    for _ in range(steps):
        for member in members:
            await (member.step() if isinstance(member, ClassicClient) else member.beat())
            owned = numbers_of(members)
            assert len(owned) == len(set(owned)), [each.numbers for each in members]


async def classic_group(bench: Bench, count: int = 2, **how: Any) -> list[ClassicClient]:
    members = [ClassicClient(bench, **how) for _ in range(count)]
    await run(*members)
    assert numbers_of(members) == [0, 1, 2, 3]
    return members
