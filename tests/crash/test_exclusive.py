"""Three members of an exclusive group in three processes, coordinated by the store alone, under kills and stalls.

Every record is processed at least once, commits never go back, and two members never both commit: the revisions of what
one member committed in a term as the active one all lie before the next member's term.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import millstream
from millstream.broker.groups.exclusive import State, state_key
from tests.crash.exclusive_worker import TAKEOVER
from tests.postgres import postgres as postgres
from tests.stores import store_url

RECORDS = [2_000, pytest.param(10_000, marks=pytest.mark.slow)]
MEMBERS = 3
TERMS_MIN = 6
AHEAD_MAX = 500
"""Records that wait to be processed."""
WORKER = Path(__file__).with_name("exclusive_worker.py")


class Term(NamedTuple):
    """What one member did between becoming active and ceasing to be."""

    since: int
    commits: list[tuple[int, int]]
    """Offset and revision."""


class Workers:
    """Processes that are killed, stopped and started again."""

    def __init__(self, store: str, directory: Path, rng: random.Random) -> None:
        self._store = store
        self._directory = directory
        self._rng = rng
        self._numbers = itertools.count()
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        """By journal."""
        self.counts = {"killed": 0, "stalled": 0, "ended": 0}

    def start(self) -> None:
        number = next(self._numbers)
        journal = self._directory / f"{number}.journal"
        command = [sys.executable, str(WORKER), self._store, str(journal), str(number)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._running[journal] = subprocess.Popen(command, env=environment)

    async def trouble(self) -> None:
        """Something happens to one of them, more often than not to the active one."""
        active = max(self._running, key=_active_since)
        journal = active if self._rng.random() < 0.7 else self._rng.choice(list(self._running))
        worker = self._running[journal]
        kind = self._rng.choice(["killed", "stalled", "stalled", "ended"])
        self.counts[kind] += 1
        if kind == "stalled":
            worker.send_signal(signal.SIGSTOP)
            await asyncio.sleep(TAKEOVER * self._rng.uniform(1.1, 2.0))
            worker.send_signal(signal.SIGCONT)
            return
        worker.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGTERM)
        await asyncio.to_thread(worker.wait, 30)
        del self._running[journal]
        self.start()

    def stop(self) -> None:
        for worker in self._running.values():
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
        for worker in self._running.values():
            assert worker.wait(30) in (0, -signal.SIGTERM)  # the signal, where it has only just begun

    def kill(self) -> None:
        for worker in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            worker.wait()

    def terms(self) -> list[Term]:
        terms: list[Term] = []
        for journal in sorted(self._directory.glob("*.journal")):
            mine: list[Term] = []
            for line in journal.read_text().splitlines():
                kind, *numbers = line.split()
                if kind == "A":
                    mine.append(Term(int(numbers[0]), []))
                elif kind == "C":
                    mine[-1].commits.append((int(numbers[0]), int(numbers[1])))
            terms += mine
        return sorted(terms)

    def lines(self, kind: str) -> list[int]:
        """The offsets in all lines of a kind."""
        return [
            int(line.split()[1])
            for journal in self._directory.glob("*.journal")
            for line in journal.read_text().splitlines()
            if line.startswith(kind)
        ]


def _active_since(journal: Path) -> int:
    """The revision at which a worker became active last; 0 if it never did."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith("A")), default=0)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request.param, tmp_path, request)


@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.timeout(240)
async def test_three_processes_process_every_record_under_kills_and_stalls(
    records: int, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    journals = tmp_path / "journals"
    journals.mkdir()
    workers = Workers(store, journals, rng)
    async with millstream.open(store) as ms:
        assert isinstance(ms, millstream.open)
        await ms.create_topic("ledger")
        history: list[State] = []
        key = state_key("projector", "ledger")
        ms.broker._meta.watch(key, lambda _, found: history.append(State.decode(found.value)) if found else None)
        sent = 0

        def committed() -> int:
            return history[-1].positions.get(0, 0) if history else 0

        async def send() -> None:
            """So many, and more until there were enough terms: without work, no member takes over."""
            nonlocal sent
            while sent < records or len(workers.terms()) < TERMS_MIN:
                if sent < committed() + AHEAD_MAX:
                    await ms.send_many([("ledger", b"%d" % number) for number in range(sent, sent + 100)])
                    sent += 100
                await asyncio.sleep(0.02)

        try:
            for _ in range(MEMBERS):
                workers.start()
            sending = asyncio.ensure_future(send())
            while not sending.done():
                before = committed()
                await workers.trouble()
                await asyncio.sleep(rng.uniform(0.1, 1.0))
                while not sending.done() and committed() < before + records // 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # on a busy machine, more trouble would leave them time for nothing else
            await sending
            while len(set(workers.lines("P"))) < sent:  # noqa: ASYNC110  (the last few, in others' journals)
                await asyncio.sleep(0.1)
            workers.stop()
        finally:
            workers.kill()

    processed = workers.lines("P")
    assert set(processed) == set(range(sent))
    assert len(history) > 10
    offsets = [state.positions.get(0, 0) for state in history]
    assert offsets == sorted(offsets)
    terms = workers.terms()
    commits = [commit for term in terms for commit in term.commits]
    for term, following in itertools.pairwise(terms):
        assert all(term.since < revision < following.since for _, revision in term.commits)
    assert commits == sorted(commits, key=lambda commit: commit[1])
    assert commits == sorted(commits)
    with capsys.disabled():
        print(
            f"\nexclusive, {store.partition(':')[0]}: {len(terms)} terms, {len(commits)} commits, "
            f"{len(workers.lines('N'))} refused, {sent:,} records, {len(processed) - sent} again, {workers.counts}"
        )
