"""One member of an exclusive group in a process of its own: `python exclusive_worker.py STORE JOURNAL SEED`.

What it does goes into its journal line by line, each written at once, so that a kill loses none:

    A REVISION           became active
    P OFFSET             processed a record
    C OFFSET REVISION    committed, and was told so
    N OFFSET             was told that it is not active

Commits come after one to ten records; a clean end on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import millstream
from millstream.client.embedded_exclusive import EmbeddedExclusive

HEARTBEAT, TAKEOVER = 0.2, 0.6
WORK = 0.001
"""Seconds for every third record."""


async def main(store: str, journal: str, seed: str) -> None:
    rng = random.Random(seed)
    file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)

    def note(*words: object) -> None:
        os.write(file, (" ".join(map(str, words)) + "\n").encode())

    async with millstream.open(store) as ms:
        ledger = ms.exclusive("ledger", group="projector", heartbeat=HEARTBEAT, takeover=TAKEOVER)
        assert isinstance(ledger, EmbeddedExclusive)
        async with ledger:
            term = 0
            until_commit = rng.randint(1, 10)
            while not stopping.is_set():
                event = await ledger.receive(0.1)
                member = ledger._member
                assert member is not None
                if ledger.is_active and ledger._terms != term:
                    term = ledger._terms
                    note("A", member.active_since)
                if event is None:
                    continue
                if event.offset % 3 == 0:
                    await asyncio.sleep(WORK)
                note("P", event.offset)
                until_commit -= 1
                if until_commit > 0:
                    continue
                until_commit = rng.randint(1, 10)
                try:
                    await event.commit()
                    note("C", event.offset, member.written)
                except millstream.NotActive:
                    note("N", event.offset)
                except millstream.RequestError as error:  # the database was away, or locked by one that stands still
                    note("E", event.offset, error.code.name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
