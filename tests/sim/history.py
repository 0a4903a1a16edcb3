"""One random history of a cluster, and what must hold whatever happens.

1. A record acknowledged with acks=all is there in the end, at its offset, on every replica.
2. An offset below the high watermark has one value, whichever broker is read and whenever.
3. At most one broker leads a partition under one epoch.
4. No end that a client was told goes back.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from millstream.broker.replication.leader import Leader
from millstream.cluster.base import PartitionKey
from millstream.cluster.partition_state import prefer
from millstream.core.errors import RequestError
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records import codec
from millstream.stores.base import ReplicatedLog
from tests.batches import append, batch
from tests.sim.world import TOPIC, Node, Violation, World

COLUMNS = (
    "acknowledged", "elections", "elr elections", "cuts", "isr shrinks", "isr expansions", "restarts", "pauses",
    "network cuts", "etcd outages", "lost disks", "refused", "restarted leaders", "trims", "moves",
)  # fmt: skip


class History:
    def __init__(self, seed: int, directory: Path) -> None:
        self.seed = seed
        self.world = World(seed, directory, min_isr=1 + (seed % 3 > 0), flush="os" if seed % 4 == 3 else "always")
        self.random = self.world.random
        self.counts: Counter[str] = Counter()
        self._next = 0
        self._acknowledged: dict[bytes, tuple[int, int]] = {}
        """Partition and offset, by value."""
        self._seen: dict[tuple[int, int], bytes] = {}
        self._told: dict[int, int] = {}
        self._leaders: dict[tuple[int, int], int] = {}
        self._trimmed: dict[int, int] = {}

    async def run(self, seconds: float = 25.0) -> Counter[str]:
        world = self.world
        world.create_topic()
        for node in world.nodes.values():
            await node.start()
        await world.timeline.advance(2.0)
        end = world.timeline.now + seconds
        while world.timeline.now < end:
            await self._event()
            await world.timeline.advance(self.random.choice([0.001, 0.01, 0.03, 0.1, 0.4]))
            self._look()
        await self._heal()
        self._judge()
        return self.counts

    def end(self) -> None:
        for node in self.world.nodes.values():
            node.vanish()

    # Events

    async def _event(self) -> None:
        world, random = self.world, self.random
        roll = random.random()
        node = random.choice(list(world.nodes.values()))
        if roll < 0.70:
            for _ in range(random.randint(1, 4)):
                self._produce()
        elif roll < 0.84:
            self._read(node)
        elif roll < 0.85:
            self._trim(node)
        elif roll < 0.86:
            self._prefer(node)
        elif roll < 0.90 and node.is_up:
            kind = random.random()
            is_copied = self._is_copied_without(node)
            is_replaced = kind < 0.1 and is_copied and world.min_isr > 1  # else the only copy that counts may be lost
            if world.flush == "os" and not is_copied:
                return
            self.counts["restarts"] += 1
            self.counts["lost disks"] += is_replaced
            self._note(node)
            node.kill(loses_power=kind < 0.7, replaces_disk=is_replaced)
            node.is_untrusted = node.is_untrusted or world.flush == "os"
        elif roll < 0.94:
            for each in world.nodes.values():
                if not each.is_up and random.random() < 0.7:
                    await each.start()
        elif roll < 0.955 and node.is_up:
            node.clock.is_paused = True
            self.counts["pauses"] += 1
            world.timeline.call_later(random.uniform(0.2, 8.0), node.clock.resume)
        elif roll < 0.97:
            others = random.sample(list(world.nodes), 2)
            cut = frozenset(others)
            world.cuts.add(cut)
            self.counts["network cuts"] += 1
            world.timeline.call_later(random.uniform(0.3, 6.0), lambda: world.cuts.discard(cut))
        elif roll < 0.985 and node.view is not None:
            view = node.view
            view.is_cut = True
            self.counts["network cuts"] += 1

            def join() -> None:
                view.is_cut = False

            world.timeline.call_later(random.uniform(0.5, 8.0), join)
        elif roll < 0.99:
            world.etcd.is_away = True
            self.counts["etcd outages"] += 1

            def back() -> None:
                world.etcd.is_away = False

            world.timeline.call_later(random.uniform(0.5, 6.0), back)

    def _is_copied_without(self, node: Node) -> bool:
        """Whether every other copy is in sync: two lost disks may lose records by right."""
        others = {each for each in self.world.nodes if each != node.id}
        if any(not self.world.nodes[each].is_up or self.world.nodes[each].is_untrusted for each in others):
            return False
        return all(others <= set(state.isr) for state in self.world.states())

    def _trim(self, node: Node) -> None:
        index = self.random.randrange(self.world.partition_count)
        leader = node.leader(index)
        if leader is not None and leader.log.high_watermark > leader.log.start:
            self.counts["trims"] += 1
            leader.log.trim(self.random.randint(leader.log.start, leader.log.high_watermark)).value()
            self._trimmed[index] = max(self._trimmed.get(index, 0), leader.log.start)

    def _prefer(self, node: Node) -> None:
        if node.controller is not None and node.members is not None and not node.clock.is_paused:
            alive = node.members.alive
            key = PartitionKey(TOPIC, self.random.randrange(self.world.partition_count))
            self.counts["moves"] += 1
            node.controller.move(key, lambda state: prefer(state, alive))

    def _produce(self) -> None:
        index = self.random.randrange(self.world.partition_count)
        leaders = [node.leader(index) for node in self.world.nodes.values()]
        led = [leader for leader in leaders if leader is not None]
        if not led:
            return
        leader = self.random.choice(led)  # a deposed one may still believe that it leads
        try:
            leader.check_committable()
        except RequestError:
            self.counts["refused"] += 1
            return
        self._next += 1
        values = [b"%d.%d" % (self._next, number) for number in range(self.random.randint(1, 3))]
        data = batch(*(value + b" " * self.random.choice([0, 50, 300]) for value in values))
        stored = [record.value for record in codec.iterate(bytes(data))]
        appended = append(leader.log, data)
        end = leader.log.end

        def done(promise: Promise[Appended]) -> None:
            if promise.error is None:
                first = promise.value().base_offset
                self.counts["acknowledged"] += len(values)
                for number, value in enumerate(stored):
                    assert value is not None
                    self._acknowledged[value] = (index, first + number)

        leader.when_committed(appended, end).then(done)

    def _read(self, node: Node) -> None:
        for index in range(self.world.partition_count):
            leader = node.leader(index)
            if leader is None or node.clock.is_paused:
                continue
            self._look()
            self._check_values(index, leader)
            if leader.knows_watermark:
                end = leader.log.high_watermark
                # A deposed leader may still tell an older end. Clients know the epoch and refuse it (KIP-320).
                if leader.state.leader_epoch == max(epoch for place, epoch in self._leaders if place == index):
                    if end < self._told.get(index, 0):
                        raise Violation(f"partition {index} ended at {self._told[index]}, and ends at {end} now")
                    self._told[index] = end

    def _led(self, index: int) -> list[Leader]:
        return [leader for node in self.world.nodes.values() if (leader := node.leader(index)) is not None]

    def _check_values(self, index: int, leader: Leader) -> None:
        log = leader.log
        at = self.random.randint(log.start, max(log.high_watermark - 1, log.start))
        while at < log.high_watermark:
            piece = log.read(at, 4096).value()
            for record in codec.iterate(piece.to_bytes()):
                known = self._seen.setdefault((index, record.offset), record.value or b"")
                if known != record.value:
                    raise Violation(f"offset {record.offset} of partition {index}: {known!r}, then {record.value!r}")
            if piece.next_offset <= at:
                break
            at = piece.next_offset

    def _look(self) -> None:
        for node_id, node in self.world.nodes.items():
            for index in range(self.world.partition_count):
                leader = node.leader(index)
                if leader is not None:
                    known = self._leaders.setdefault((index, leader.state.leader_epoch), node_id)
                    if known != node_id:
                        raise Violation(f"brokers {known} and {node_id} led epoch {leader.state.leader_epoch}")

    def _note(self, node: Node) -> None:
        """Takes the counts of a node that ends."""
        if node.replicas is not None and node.controller is not None:
            counts = node.replicas.counts
            self.counts["isr shrinks"] += counts.isr_shrinks
            self.counts["isr expansions"] += counts.isr_expansions
            self.counts["cuts"] += counts.cuts
            self.counts["committed cuts"] += counts.committed_cuts
            self.counts["elections"] += node.controller.elections
            self.counts["elr elections"] += node.controller.elr_elections
            self.counts["restarted leaders"] += node.controller.restarted_leaders
            self.counts["unclean elections"] += node.controller.unclean_elections

    # The end

    async def _heal(self) -> None:
        world = self.world
        world.cuts.clear()
        world.etcd.is_away = False
        for view in world.etcd.views:
            view.is_cut = False
        for node in world.nodes.values():
            if not node.is_up:
                await node.start()
            elif node.clock.is_paused:
                node.clock.resume()
        for _ in range(80):
            await world.timeline.advance(0.5)
            self._look()
            if self._is_settled():
                break
        for node in world.nodes.values():
            self._note(node)

    def _is_settled(self) -> bool:
        for index in range(self.world.partition_count):
            logs = [self._log(node, index) for node in self.world.nodes.values()]
            if len(self._led(index)) != 1 or len({(log.high_watermark, log.end) for log in logs}) != 1:
                return False
            if logs[0].high_watermark != logs[0].end:
                return False
        return True

    def _log(self, node: Node, index: int) -> ReplicatedLog:
        assert node.replicas is not None
        return node.replicas.hosted[PartitionKey(TOPIC, index)]

    def _judge(self) -> None:
        world = self.world
        if self.counts["committed cuts"] or self.counts["unclean elections"]:
            raise Violation("committed records were cut without need")
        if not self._is_settled():
            raise Violation("the cluster did not settle: " + "; ".join(self._situation()))
        for index in range(world.partition_count):
            start = max(self._trimmed.get(index, 0), *(self._log(node, index).start for node in world.nodes.values()))
            contents = [self._content(node, index, start) for node in world.nodes.values()]
            if any(each != contents[0] for each in contents):
                raise Violation(f"the replicas of partition {index} differ")
            seen = ((offset, value) for (place, offset), value in self._seen.items() if place == index)
            acknowledged = ((offset, value) for value, (place, offset) in self._acknowledged.items() if place == index)
            for what, facts in (("was read", seen), ("was acknowledged", acknowledged)):
                for offset, value in facts:
                    if offset >= start and contents[0].get(offset) != value:
                        raise Violation(
                            f"{value!r} {what} at offset {offset} of partition {index}: {contents[0].get(offset)!r}"
                        )

    def _content(self, node: Node, index: int, start: int) -> dict[int, bytes | None]:
        log = self._log(node, index)
        records: dict[int, bytes | None] = {}
        at = start
        while at < log.end:
            piece = log.read(at, 1 << 20).value()
            for record in codec.iterate(piece.to_bytes()):
                if record.offset >= start:
                    records[record.offset] = record.value
            at = piece.next_offset
        return records

    def _situation(self) -> list[str]:
        lines = []
        for key, stored in self.world.etcd.keys.values.items():
            lines.append(f"{key}={stored.value!r}")
        for node in self.world.nodes.values():
            for index in range(self.world.partition_count):
                log = self._log(node, index)
                leads = node.leader(index) is not None
                lines.append(f"{node.id}/{index}: {log.high_watermark} {log.counted} {log.end} leads={leads}")
        return lines
