"""`kill -9` under load: every record that a real client was told of is there, once, at its offset, in order."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tests.crash.load import Load, consume_all, count, create_topic
from tests.serving import ServedBroker


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(240)
def test_rounds_of_kill_9_lose_nothing_and_repeat_nothing(
    rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(rounds)
    with ServedBroker(tmp_path / "data") as broker:
        create_topic(broker.address, segment_bytes="1048576")
        load = Load(broker.address)
        load.start()
        try:
            for _ in range(rounds):
                load.wait_for_more(50)
                time.sleep(random.uniform(0, 0.2))  # the random moment: there is no event for it
                broker.kill()
                broker.start()
        finally:
            load.stop()
        found = consume_all(broker.address)
    with capsys.disabled():
        print(count(load, found, f"kill -9: {rounds} rounds"))
