"""A broker as a process: store, broker and doors, from start to clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.session import Sessions
from millstream.cluster.base import Cluster, Solo
from millstream.config import DOOR_PORTS, Address, Config, check_listeners
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import RequestError, StartupError
from millstream.core.loop_watch import LoopWatch
from millstream.core.metrics import DamageFigures, GroupFigures, Metrics, PartitionFigures, QueueShare, Scrape
from millstream.doors.http.door import HttpDoor
from millstream.doors.http.pages import Pages
from millstream.doors.kafka.apis import APIS
from millstream.doors.kafka.door import KafkaDoor
from millstream.stores.base import LogStore
from millstream.stores.local import LocalLogStore
from millstream.stores.url import is_shared, open_store

logger = logging.getLogger(__name__)

DATE_SECONDS_MAX = 2.0
"""How long a page waits for the database."""


class Door(Protocol):
    """A door, as the server uses it."""

    def start(self, address: Address) -> Address | Awaitable[Address]:
        """Listens; answers with the actual address, for port 0."""

    async def close(self) -> None: ...


def _flowmq(sessions: Sessions) -> Door:
    from millstream.doors.flowmq.door import FlowmqDoor

    return FlowmqDoor(sessions)


def _flume(sessions: Sessions) -> Door:
    from millstream.doors.flume.door import FlumeDoor

    return FlumeDoor(sessions)


def _luxun(sessions: Sessions) -> Door:
    from millstream.doors.luxun.door import LuxunDoor

    return LuxunDoor(sessions)


def _comet(sessions: Sessions) -> Door:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or every bad client writes to standard error, around our log
    try:
        from millstream.doors.comet.door import CometDoor
    except ModuleNotFoundError as error:
        raise StartupError(
            f"the Comet door needs {error.name}, which is not installed: pip install 'millstream[comet]', or leave out "
            "--comet"
        ) from error

    return CometDoor(sessions)


DOORS: dict[str, Callable[[Sessions], Door]] = {"flowmq": _flowmq, "flume": _flume, "luxun": _luxun, "comet": _comet}
"""The doors of `DOOR_PORTS`. Each is imported when it opens: most brokers have only the Kafka door."""


class Server:
    """Between `start` and `stop`, the doors serve on the running event loop."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = Metrics()
        self._watch = LoopWatch(self.metrics, config.loop_watch_ms / 1000)
        self.addresses: dict[str, Address] = {}
        """Every open door, by name, in the order of the `ready` line."""
        self._broker: Broker | None = None
        self._kafka: KafkaDoor | None = None
        self._doors: list[Door] = []
        self._http: HttpDoor | None = None

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the server is not started"
        return self._broker

    async def start(self) -> None:
        check_listeners(self.config)
        logs, meta = open_store(self.config.store, self.clock, self._observe_sync, self.config.meta)
        cluster: Cluster = Solo(self.config.node_id)
        if is_shared(self.config.store):
            from millstream.cluster.shared import SharedCluster

            cluster = SharedCluster(meta, self.clock, self.config.node_id, self.config.lease_ms)
        self._broker = Broker(self.config, logs, meta, self.clock, self.metrics, cluster)
        try:
            await self._broker.start()
            self._count_recovered(logs)
            sessions = Sessions(self._broker)
            self._kafka = KafkaDoor(sessions)
            self.addresses["kafka"] = address = self._kafka.start(self.config.kafka_address)
            await self._open_others(sessions)
            await cluster.join(*(self.config.advertised_address or address))
            await self._open_http(sessions)
            self._watch.start()
        except RequestError as error:
            await self.stop()
            raise StartupError(f"the broker cannot start: {error.detail}") from error
        except BaseException:
            await self.stop()
            raise

    async def _open_http(self, sessions: Sessions) -> None:
        address = self.config.http_address
        if address is None:
            return
        scrape = Scrape(
            self.metrics,
            topics=self._partition_figures,
            committed=self.broker.groups.committed,
            groups=self._group_figures,
            queues=self._queue_shares,
            api_name=_api_name,
            brokers=lambda: 1 + len(self.broker.cluster.others()),
            damage=self._damage_figures,
            room=lambda: self.broker.storage()[1:],
        )
        pages = Pages(sessions, scrape, lambda: "http" in self.addresses, self._date_queues)
        self._http = HttpDoor(address.host, address.port, pages.routes, pages.actions, names=self._http_names())
        self.addresses["http"] = opened = Address(*await self._http.start())
        # Clients may ask the broker for the address of its pages: the port chosen for port 0 is now known.
        self.broker.config = dataclasses.replace(self.broker.config, http=str(opened))

    def _http_names(self) -> list[str]:
        """The host names under which clients may ask for the pages."""
        advertised = self.config.advertised_address
        given = [name.strip() for name in self.config.http_hosts.split(",")]
        names = [socket.gethostname(), *given, advertised.host if advertised is not None else ""]
        return [name for name in names if name]

    async def _open_others(self, sessions: Sessions) -> None:
        for name in DOOR_PORTS:
            address = self.config.door_address(name)
            if address is not None:
                door = DOORS[name](sessions)
                self._doors.append(door)
                opened = door.start(address)
                self.addresses[name] = opened if isinstance(opened, Address) else await opened

    async def stop(self) -> None:
        self.addresses.pop("http", None)
        self._watch.stop()
        if self._broker is not None:
            self._broker.queues.prepare_to_close()
        for door in self._doors:
            await door.close()
        if self._kafka is not None:
            await self._kafka.close()
        if self._broker is not None:
            await self._broker.close()
        if self._http is not None:
            await self._http.close()

    def ready_line(self) -> str:
        return "ready " + " ".join(f"{door}={address}" for door, address in self.addresses.items())

    def _count_recovered(self, logs: LogStore) -> None:
        if isinstance(logs, LocalLogStore):  # a database recovers by itself
            self.metrics.recovered_logs, self.metrics.recovered_bytes = logs.scanned_logs, logs.scanned_bytes
            self.metrics.torn_logs, self.metrics.torn_bytes = logs.cut_logs, logs.cut_bytes

    def _observe_sync(self, seconds: float) -> None:
        self.metrics.syncs += 1
        self.metrics.sync_seconds.observe(seconds)

    def _partition_figures(self) -> Iterator[PartitionFigures]:
        for topic in self.broker.topics:
            for partition in topic.partitions:
                log = partition.log
                if log.damage.lost is not None:  # its offsets are unknown
                    continue
                yield PartitionFigures(
                    topic.name, partition.index, log.start, log.high_watermark, log.end, log.size_bytes()
                )

    def _damage_figures(self) -> Iterator[DamageFigures]:
        for topic in self.broker.topics:
            for partition in topic.partitions:
                damage = partition.log.damage
                if damage.found:
                    offsets = sum(each.end - each.first for each in damage.ranges)
                    yield DamageFigures(topic.name, partition.index, len(damage.ranges), offsets, damage.found)

    def _group_figures(self) -> Iterator[GroupFigures]:
        for group in self.broker.groups.list():
            yield GroupFigures(group.group_id, group.state, group.members)

    def _queues(self) -> Iterator[Queue]:
        """Named queues. A private queue is one subscriber's and ends with it."""
        for name in self.broker.queues.names():
            queue = self.broker.queues.get(name)
            if queue is not None:
                yield queue

    async def _date_queues(self) -> None:
        """Finds the age of the oldest available records. If the database does not answer, it stays unknown."""
        asked = [asyncio.ensure_future(each.date()) for queue in self._queues() for each in queue.partitions()]
        if asked:
            _, late = await asyncio.wait(asked, timeout=DATE_SECONDS_MAX)
            for each in late:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _queue_shares(self) -> Iterator[QueueShare]:
        for queue in self._queues():
            for each in queue.partitions():
                figures = each.figures()
                yield QueueShare(
                    queue.id,
                    each.topic.name,
                    each.index,
                    figures.available,
                    figures.leased,
                    figures.waiting,
                    figures.done,
                    figures.dead,
                    figures.redelivered,
                    figures.age_ms,
                )


def _api_name(key: int) -> str:
    return APIS[key].name.split("_", 2)[2] if key in APIS else str(key)


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; prints one line on standard output when clients can connect."""
    import uvloop

    _raise_file_limit()
    return uvloop.run(_serve(config))


async def _serve(config: Config) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = Server(config)
    await server.start()
    # Objects that exist now live as long as the process: the collector need not scan them again.
    gc.collect()
    gc.freeze()
    print(server.ready_line(), flush=True)
    await stopping.wait()
    logger.info("stopping")
    await server.stop()
    return 0


def _raise_file_limit() -> None:
    """A partition in use holds a descriptor or two, and so does every client: the soft limit is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
