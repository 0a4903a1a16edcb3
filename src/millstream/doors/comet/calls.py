"""The calls in flight of the Comet door: their memory, and the clients that hold it.

gRPC accepts the connections and frames the messages. It leaves three things unbounded, which this module bounds:

    what                                    bound
    requests that are received or handled   `requests`: a call is read when there is room for the largest request
    answers that are not taken              `answers`: a call with a possibly large answer waits for room to read
    calls of one address                    half of `CALLS_MAX`, except from loopback; more are RESOURCE_EXHAUSTED

A client that neither sends its request nor takes its answer is disconnected after a minute, or after ten seconds while
other calls wait for memory. gRPC has no call for that: `disconnect` shuts its socket down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import grpc

from millstream.config import Config
from millstream.core.clock import Clock, Timer
from millstream.core.errors import ProtocolError
from millstream.core.logs import Damped
from millstream.core.metrics import Metrics
from millstream.core.peer import is_loopback, peer_of
from millstream.doors.memory import Budget
from millstream.doors.message_size import GRPC_BYTES_MAX

refusals = Damped(__name__)

CALLS_MAX = 4096
"""gRPC refuses more with RESOURCE_EXHAUSTED. A call that waits for memory takes some 20 KB."""
REQUEST_BYTES_MAX = GRPC_BYTES_MAX
# A client that hangs up before it has its answer is no error. gRPC logs one, with a traceback.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith("ExecuteBatchError"))
SWEEP_SECONDS = 1.0
STUCK_SECONDS_MAX = 60.0
CONTESTED_SECONDS_MAX = 10.0


class Call:
    __slots__ = ("_answer_room", "_calls", "_request_room", "host", "peer", "since")

    def __init__(self, calls: Calls, peer: str, host: str) -> None:
        self._calls = calls
        self.peer = peer
        self.host = host
        self.since: float | None = None
        """Since when the client sends its request, or takes its answer."""
        self._request_room = 0
        self._answer_room = 0

    async def read(self, context: Any) -> bytes:
        """The request."""
        calls = self._calls
        room = min(REQUEST_BYTES_MAX, calls.requests.limit)
        await _reserve(calls.requests, room)
        self._request_room = room
        self.since = calls.clock.monotonic()
        data = await context.read()
        self.since = None
        if data is grpc.aio.EOF:
            raise ProtocolError("the call ended without a request")
        calls.metrics.bytes_in += len(data)
        self._request_room = min(len(data), room)
        calls.requests.give(room - self._request_room)
        return data  # type: ignore[no-any-return]

    async def await_room(self, size: int) -> None:
        """Reserves memory for the answer."""
        room = min(size, self._calls.answers.limit)
        await _reserve(self._calls.answers, room)
        self._answer_room = room

    def answers(self, size: int) -> None:
        """The answer leaves. An answer without a reserved room is small, and does not wait."""
        calls = self._calls
        calls.metrics.bytes_out += size
        calls.requests.give(self._request_room)
        calls.answers.give(self._answer_room - size)
        self._request_room, self._answer_room = 0, size
        self.since = calls.clock.monotonic()

    def close(self, context: Any = None) -> None:
        self._calls.requests.give(self._request_room)
        self._calls.answers.give(self._answer_room)
        self._request_room = self._answer_room = 0
        self._calls.discard(self)


class Calls:
    def __init__(self, config: Config, clock: Clock, metrics: Metrics) -> None:
        self.clock = clock
        self.metrics = metrics
        self.requests = Budget(config.inflight_bytes_max // 2)
        self.answers = Budget(config.inflight_bytes_max // 2)
        """A separate budget, so that slow readers never block writers."""
        self._open: dict[Call, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._sweeper: Timer | None = None

    def start(self) -> None:
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)

    def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def open(self, context: Any) -> Call:
        peer: str = context.peer()
        host = host_of(peer)
        of_peer = peer_of(host)
        if self._by_peer[of_peer] >= CALLS_MAX // 2 and not is_loopback(host):
            refusals.warning("refusing a call from %s: it has %d in flight", host, CALLS_MAX // 2)
            self.metrics.request_errors += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{host} has {CALLS_MAX // 2} calls in flight")
        call = Call(self, peer, host)
        self._open[call] = None
        self._by_peer[of_peer] += 1
        context.add_done_callback(call.close)
        return call

    def discard(self, call: Call) -> None:
        if call in self._open:
            del self._open[call]
            peer = peer_of(call.host)
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def __len__(self) -> int:
        return len(self._open)

    def _sweep(self) -> None:
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)
        contested = self.requests.is_contested or self.answers.is_contested
        now = self.clock.monotonic()
        latest = now - (CONTESTED_SECONDS_MAX if contested else STUCK_SECONDS_MAX)
        stuck = [call for call in self._open if call.since is not None and call.since < latest]
        for call in stuck:
            refusals.warning("closing the comet connection from %s: it neither sends nor takes data", call.host)
            call.since = now
        if stuck:
            self.metrics.request_errors += len(stuck)
            disconnect({call.peer for call in stuck})


async def _reserve(budget: Budget, size: int) -> None:
    if budget.take(size):
        return
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def taken() -> None:
        if ready.cancelled():
            budget.give(size)
        else:
            ready.set_result(None)

    leave = budget.wait(size, taken)
    try:
        await ready
    except asyncio.CancelledError:
        if ready.cancelled():
            leave()
        else:
            budget.give(size)
        raise


def host_of(peer: str) -> str:
    """The address in gRPC's name of a client: ipv4:127.0.0.1:40312 or ipv6:%5B::1%5D:40312."""
    host = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]").removeprefix("::ffff:")


def disconnect(peers: Iterable[str]) -> None:
    """Shuts down the sockets of these clients, which this process has as descriptors of gRPC's."""
    wanted = {(host_of(peer), peer.rpartition(":")[2]) for peer in peers}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                host, port = found.getpeername()[:2]
                if (host.removeprefix("::ffff:"), str(port)) in wanted:
                    found.shutdown(socket.SHUT_RDWR)
