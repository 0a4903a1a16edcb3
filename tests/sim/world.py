"""A cluster in one process: the real membership, controller, replication and logs over a virtual clock, network, disk
and metadata store. Everything that happens follows from one seed.

    Timeline    the world's clock; a node that is paused or dead gets nothing from it
    Etcd        one store of keys, with a view per node: delays, lost requests, lost answers, late watches
    Wires       fetches between nodes: delayed, dropped, duplicated, cut
    Node        one broker: killed with the loss of unsynced pages, paused, restarted, its disk replaced
"""

from __future__ import annotations

import asyncio
import heapq
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

from millstream.broker.replication.calls import Copied, CopyRequest, Served
from millstream.broker.replication.leader import Leader
from millstream.broker.replication.replicas import Replicas
from millstream.cluster import partition_state
from millstream.cluster.base import Node as Address
from millstream.cluster.base import PartitionKey
from millstream.cluster.controller import Controller
from millstream.cluster.membership import Membership
from millstream.cluster.partition_state import PartitionState
from millstream.cluster.partitions import PREFIX, Partitions
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.config import FlushPolicy, LogConfig
from millstream.log.flusher import Syncable
from millstream.log.replica import ReplicaLog
from millstream.stores.base import Operation, Versioned
from millstream.stores.keys import MemoryMeta
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualTimer
from millstream.testing.disk import ForgetfulDisk

LEASE_MS = 3_000
LAG_MS = 2_000
TOPIC = UUID(int=7)
ANSWER_SECONDS_MAX = 1.0


class Violation(AssertionError):
    """An invariant does not hold."""


class Timeline:
    """Time for all nodes. Unlike `VirtualClock` it lets the event loop run between two timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = 0

    def call_later(self, seconds: float, callback: Callable[[], object]) -> VirtualTimer:
        timer = VirtualTimer(self.now + max(seconds, 0.0), callback)
        self._order += 1
        heapq.heappush(self._timers, (timer.due, self._order, timer))
        return timer

    async def advance(self, seconds: float) -> None:
        target = self.now + seconds
        await run_ready()
        while self._timers and self._timers[0][0] <= target:
            due, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
                await run_ready()
        self.now = target


async def run_ready() -> None:
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # the loop is asyncio's own
    while ready:
        await _turn()


async def _turn() -> None:
    await asyncio.sleep(0)


class NodeClock:
    """A node's clock: nothing happens while the node is paused, and nothing any more when it is dead."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.is_paused = False
        self.is_dead = False
        self._held: deque[Callable[[], object]] = deque()

    def now_ms(self) -> int:
        return 1_700_000_000_000 + round(self._timeline.now * 1000)

    def monotonic(self) -> float:
        return self._timeline.now

    def call_later(self, seconds: float, callback: Callable[[], object]) -> VirtualTimer:
        timer = VirtualTimer(0.0, callback)

        def fire() -> None:
            if timer.callback is None or self.is_dead:
                return
            if self.is_paused:
                self._held.append(fire)
            else:
                timer.callback()

        self._timeline.call_later(seconds, fire)
        return timer

    def resume(self) -> None:
        self.is_paused = False
        held, self._held = self._held, deque()
        for callback in held:
            callback()


class Etcd:
    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.keys = MemoryMeta()
        self.timeline = timeline
        self.random = random
        self.is_away = False
        self.views: list[View] = []
        self.keys.watch("", self._changed)

    def _changed(self, key: str, stored: Versioned | None) -> None:
        for view in self.views:
            view.hear(self.keys.revision, key, stored)


class View:
    """One node's connection to the metadata store. Implements `MetaStore`."""

    failure = None

    def __init__(self, etcd: Etcd, clock: NodeClock) -> None:
        self._etcd = etcd
        self._clock = clock
        self.is_cut = False
        self._news: deque[tuple[int, str, Versioned | None]] = deque()
        self._watchers: dict[int, tuple[str, Callable[[str, Versioned | None], None]]] = {}
        self._next = 0
        etcd.views.append(self)

    @property
    def is_away(self) -> bool:
        return self.is_cut or self._etcd.is_away

    def _delay(self) -> float:
        random = self._etcd.random
        return random.uniform(0.0005, 0.01) if random.random() < 0.97 else random.uniform(0.1, 0.8)

    def _ask(self, work: Callable[[], Promise[Any]]) -> Promise[Any]:
        """Carries a request there and its answer back. Either may be lost."""
        answer: Promise[Any] = Promise()
        random, timeline = self._etcd.random, self._etcd.timeline

        def too_late() -> None:
            if not answer.done:
                answer.fail(RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the metadata store does not answer"))

        self._clock.call_later(ANSWER_SECONDS_MAX, too_late)
        # A request that was sent is carried out even if its node dies or is paused.
        if self.is_away and random.random() < 0.7:
            return answer

        def there() -> None:
            if self._etcd.is_away:
                return
            done = work()
            revision = self._etcd.keys.revision
            if not self.is_away and random.random() < 0.99:
                self._clock.call_later(self._delay(), lambda: back(done, revision))

        def back(done: Promise[Any], revision: int) -> None:
            self._flush(revision)
            if not answer.done:
                answer.follow(done)

        timeline.call_later(self._delay(), there)
        return answer

    def get(self, key: str) -> Promise[Versioned | None]:
        return self._ask(lambda: self._etcd.keys.get(key))

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        return self._ask(lambda: self._etcd.keys.list(prefix))

    def transact(self, *operations: Operation) -> Promise[int]:
        return self._ask(lambda: self._etcd.keys.transact(*operations))

    def watch(self, prefix: str, callback: Callable[[str, Versioned | None], None]) -> Callable[[], None]:
        self._next += 1
        number = self._next
        self._watchers[number] = prefix, callback
        return lambda: self._watchers.pop(number, None) and None

    def hear(self, revision: int, key: str, stored: Versioned | None) -> None:
        self._news.append((revision, key, stored))
        self._clock.call_later(self._delay(), lambda: self._arrive(revision))

    def _arrive(self, revision: int) -> None:
        if self.is_away:
            self._clock.call_later(0.1, lambda: self._arrive(revision))
        else:
            self._flush(revision)

    def _flush(self, revision: int) -> None:
        while self._news and self._news[0][0] <= revision:
            _, key, stored = self._news.popleft()
            for prefix, callback in list(self._watchers.values()):
                if key.startswith(prefix):
                    callback(key, stored)


class Wires:
    """Carries fetches from one node. Implements `PeerCalls`."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    def _delay(self) -> float:
        random = self._world.random
        return random.uniform(0.0002, 0.004) if random.random() < 0.98 else random.uniform(0.05, 1.5)

    def fetch(self, leader: Address, request: CopyRequest, lane: int) -> Promise[Sequence[Copied]]:
        world, clock, node_id = self._world, self._node.clock, self._node.id
        answer: Promise[Sequence[Copied]] = Promise()

        def fail(why: str) -> None:
            if not answer.done:
                answer.fail(ConnectionError(why))

        def there() -> None:
            target = world.nodes[leader.node_id]
            if target.replicas is None or world.is_cut(node_id, leader.node_id):
                clock.call_later(0.01, lambda: fail("refused"))
                return
            target.clock.call_later(0, lambda: serve(target))

        def serve(target: Node) -> None:
            assert target.replicas is not None
            target.replicas.serve(request).answer.then(served)

        def served(done: Promise[list[Served]]) -> None:
            copied = [
                Copied(one.key, one.code, one.high_watermark, one.log_start, one.divergence, one.slice.to_bytes())
                for one in done.value()
            ]
            if not world.is_cut(node_id, leader.node_id) and world.random.random() < 0.995:
                clock.call_later(self._delay(), lambda: None if answer.done else answer.settle(copied))

        clock.call_later(2.0, lambda: fail("no answer"))
        if world.random.random() < 0.995:
            world.timeline.call_later(self._delay(), there)
        if world.random.random() < 0.01:
            world.timeline.call_later(self._delay() * 3, there)
        return answer

    def disconnect(self, node_id: int) -> None:
        return None


class LateFlusher:
    """Replaces `Flusher`: a sync takes a few milliseconds of virtual time."""

    def __init__(self, clock: NodeClock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self._waiting: dict[Syncable, None] = {}
        self._running: set[Syncable] = set()
        self.is_instant = False

    def request(self, log: Syncable) -> None:
        self._waiting[log] = None
        if log not in self._running:
            self._running.add(log)
            self._later(lambda: self._begin(log))

    def _later(self, callback: Callable[[], None]) -> None:
        if self.is_instant:
            callback()
        else:
            self._clock.call_later(self._random.uniform(0.0005, 0.006), callback)

    def _begin(self, log: Syncable) -> None:
        self._waiting.pop(log, None)
        work = log.begin_sync()
        if work is None:
            self._running.discard(log)
            return
        self._later(lambda: self._end(log, work))

    def _end(self, log: Syncable, work: Callable[[], None]) -> None:
        failure: OSError | None = None
        try:
            work()
        except OSError as error:
            failure = error
        self._running.discard(log)
        log.end_sync(failure, lambda: None)
        if log in self._waiting:
            self.request(log)

    def close(self) -> None:
        return None


class Node:
    def __init__(self, world: World, node_id: int, directory: Path) -> None:
        self.id = node_id
        self.world = world
        self.directory = directory
        self.disk = ForgetfulDisk(str(directory))
        self.clock = NodeClock(world.timeline)
        self.view: View | None = None
        self.replicas: Replicas | None = None
        self.controller: Controller | None = None
        self.members: Membership | None = None
        self.partitions: Partitions | None = None
        self.store: LocalLogStore | None = None
        self._joining: asyncio.Future[None] | None = None
        self.is_untrusted = False
        """Its disk was replaced, or may have lost acknowledged records."""
        self.has_new_disk = False

    @property
    def is_up(self) -> bool:
        return self.replicas is not None

    async def start(self) -> None:
        world = self.world
        self.clock = clock = NodeClock(world.timeline)
        self.view = View(world.etcd, clock)
        view: Any = self.view  # what the rules of replication use of a `MetaStore`
        flusher = LateFlusher(clock, world.random)
        self.store = store = LocalLogStore(str(self.directory), clock, flusher, self.disk)  # type: ignore[arg-type]
        store.lock()
        self.members = members = Membership(view, clock, self.id, LEASE_MS)
        self.partitions = partitions = Partitions(view)
        self.controller = controller = Controller(view, members, partitions, clock)
        self.replicas = replicas = Replicas(members, partitions, clock, Wires(world, self), LAG_MS)
        members.on_join = members.on_leave = members.on_beat = controller.look
        members.on_lost = members.on_register = replicas.registered
        config = LogConfig(segment_bytes=world.segment_bytes, flush=FlushPolicy.parse(world.flush))
        for index in range(world.partition_count):
            log = store.open("t", TOPIC.hex, index, config)
            assert isinstance(log, ReplicaLog)
            replicas.host(PartitionKey(TOPIC, index), log)
        self._joining = asyncio.ensure_future(self._join(members, partitions, controller, replicas))

    async def _join(
        self, members: Membership, partitions: Partitions, controller: Controller, replicas: Replicas
    ) -> None:
        """As a broker does: it goes on trying until the metadata store answers."""
        steps = [members.start, partitions.start, controller.start]
        if self.is_untrusted:
            steps.append(lambda: partitions.forget(self.id, is_empty=self.has_new_disk))
        steps.append(lambda: members.join("sim", self.id))
        for step in steps:
            while not self.clock.is_dead:
                try:
                    await step()
                    break
                except Exception:
                    over: Promise[None] = Promise()
                    self.clock.call_later(0.3, lambda over=over: over.settle(None))  # type: ignore[misc]
                    await over
        self.is_untrusted = self.has_new_disk = False
        replicas.start()

    def kill(self, *, loses_power: bool, replaces_disk: bool = False) -> None:
        self.vanish()
        if replaces_disk:
            shutil.rmtree(self.directory)
            self.directory.mkdir()
            self.disk = ForgetfulDisk(str(self.directory))
            self.is_untrusted = self.has_new_disk = True
        elif loses_power:
            self.disk = self.disk.crash(self.world.random)

    def vanish(self) -> None:
        """Everything of the process is gone; its descriptors are closed."""
        self.clock.is_dead = True
        if self.view is not None:
            self.world.etcd.views.remove(self.view)
        if self.store is not None:
            self.store.unlock()
        if self.replicas is not None:
            for log in self.replicas.hosted.values():
                assert isinstance(log, ReplicaLog)
                for segment in log.segments:
                    segment.let_go()
        self.replicas = self.controller = self.members = self.partitions = self.store = self.view = None

    def leader(self, index: int) -> Leader | None:
        return self.replicas.leaders.get(PartitionKey(TOPIC, index)) if self.replicas is not None else None


class World:
    def __init__(
        self,
        seed: int,
        directory: Path,
        *,
        nodes: int = 3,
        partitions: int = 2,
        min_isr: int = 2,
        flush: str = "always",
    ) -> None:
        self.random = Random(seed)
        self.timeline = Timeline()
        self.etcd = Etcd(self.timeline, self.random)
        self.partition_count = partitions
        self.min_isr = min_isr
        self.flush = flush
        self.segment_bytes = self.random.choice([700, 5_000, 1 << 20])
        self.cuts: set[frozenset[int]] = set()
        self.nodes: dict[int, Node] = {}
        for node_id in range(1, nodes + 1):
            home = directory / str(node_id)
            home.mkdir()
            self.nodes[node_id] = Node(self, node_id, home)

    def is_cut(self, one: int, two: int) -> bool:
        return frozenset((one, two)) in self.cuts

    def create_topic(self) -> None:
        ids = list(self.nodes)
        for index in range(self.partition_count):
            turned = tuple(ids[index % len(ids) :] + ids[: index % len(ids)])
            state = partition_state.create(turned, self.min_isr, {})
            self.etcd.keys.transact(*Partitions.creations(TOPIC, index, [state])).value()

    def states(self) -> list[PartitionState]:
        stored = self.etcd.keys.list(PREFIX).value()
        return [PartitionState.decode(versioned.value) for _, versioned in stored]
