"""What a commit to etcd costs through aetcd's client and through the store's own calls.

    python -m bench.etcd_clients

The same etcd, on uvloop, as the broker runs: puts of 100 bytes, one after the other and 64 at a time. The store
reports each change to a watcher before it answers; aetcd's client does not watch here. The figures behind
`docs/decisions/0018-own-calls-to-etcd.md` come from here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from statistics import median

import aetcd
import uvloop

from millstream.core.clock import SystemClock
from millstream.stores.base import Put
from millstream.stores.etcd import EtcdMeta
from tests.etcd import PrivateEtcd

SECONDS = 2.0
ROUNDS = 5
AT_ONCE = (1, 64)
VALUE = os.urandom(100)

PutOne = Callable[[int], Awaitable[object]]


async def _measure(put: PutOne, at_once: int) -> tuple[float, float]:
    """Puts per second, and microseconds of this process's CPU per put."""
    count, start, cpu = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - start) < SECONDS:
        await asyncio.gather(*(put(number) for number in range(at_once)))
        count += at_once
    return count / spent, (time.process_time() - cpu) / count * 1e6


async def _run(server: PrivateEtcd) -> None:
    host, _, port = server.address.partition(":")
    store = EtcdMeta(server.new_prefix(), SystemClock())
    watched = EtcdMeta(server.new_prefix(), SystemClock())
    async with aetcd.Client(host, int(port)) as client:
        await store.start()
        await watched.start()
        watched.watch("", lambda key, value: None)
        ways: dict[str, PutOne] = {
            "aetcd's client": lambda number: client.put(b"/aetcd/%d" % number, VALUE),
            "the store": lambda number: store.transact(Put(str(number), VALUE)),
            "the store, watched": lambda number: watched.transact(Put(str(number), VALUE)),
        }
        for at_once in AT_ONCE:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, put in ways.items():
                    found[name].append(await _measure(put, at_once))
            for name, rounds in found.items():
                rate, cpu = (median(column) for column in zip(*rounds, strict=True))
                print(f"{at_once:>3} at a time  {name:<20} {rate:>8.0f} puts/s  {cpu:>6.0f} us of CPU per put")
        await store.close()
        await watched.close()


def main() -> None:
    with PrivateEtcd() as server:
        uvloop.run(_run(server))


if __name__ == "__main__":
    main()
