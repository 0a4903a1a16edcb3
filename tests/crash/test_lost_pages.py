"""Power losses, simulated: whatever was not synced may be gone, torn or there, and every promise still holds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.crash.history import History, Report
from tests.crash.machine import InlineExecutor

HISTORIES = [(70, 233), pytest.param(300, 1000, marks=pytest.mark.slow)]
"""How many, and how many power losses they have at least."""
LIVES = 4


@pytest.mark.parametrize(("histories", "losses"), HISTORIES)
def test_keeps_every_promise_over_hundreds_of_simulated_power_losses(
    histories: int, losses: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report()
    loop = asyncio.new_event_loop()
    loop.set_default_executor(InlineExecutor(1))
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(histories):
            directory = tmp_path / str(seed)
            directory.mkdir()
            try:
                History(str(directory), seed, loop, report).run(LIVES)
            except Exception as error:
                error.add_note(f"history {seed}")
                raise
    finally:
        logging.disable(logging.NOTSET)
        loop.close()
        with capsys.disabled():
            print(f"\nlost pages: {report}")
    assert report.crashes >= losses
    assert report.lost == report.duplicated == 0
