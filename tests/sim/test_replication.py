"""Random histories of three replicas: nothing acknowledged is lost, whatever crashes, pauses and cuts there are.

A failure names its seed. `run(seed, directory)` repeats that history, event by event.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.ablations import QUICK, SLOW, Switch, switched_off
from tests.sim.history import COLUMNS, History
from tests.sim.world import Violation

HISTORIES = 50
"""Of one test."""
MANY = [pytest.param(part, marks=pytest.mark.slow) for part in range(6, 400)]
SEEDS_MAX = 400


@pytest.mark.parametrize("part", [*range(6), *MANY])
def test_no_acknowledged_record_is_lost_in_random_histories(part: int, tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(part * HISTORIES, (part + 1) * HISTORIES):
        total += run(seed, tmp_path)
    print(", ".join(f"{total[column]} {column}" for column in COLUMNS))
    assert all(total[column] for column in COLUMNS), dict(total)


@pytest.mark.parametrize("switch", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_without_a_safeguard_the_simulation_finds_a_violation(switch: Switch, tmp_path: Path) -> None:
    with switched_off(switch), pytest.raises(Violation):
        for seed in range(SEEDS_MAX):
            run(seed, tmp_path)


def run(seed: int, directory: Path) -> Counter[str]:
    home = directory / str(seed)
    home.mkdir()
    loop = asyncio.SelectorEventLoop()
    history = History(seed, home)
    try:
        return loop.run_until_complete(history.run())
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        history.end()
        for task in asyncio.all_tasks(loop):  # of killed nodes
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
