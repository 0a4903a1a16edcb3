"""The page about queues says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.broker.settings import GROUP_SETTINGS
from millstream.core.metrics import QUEUE_COUNTERS, QUEUE_GAUGES

PAGE = (Path(__file__).parents[2] / "docs" / "queues.md").read_text()


def test_the_page_lists_every_setting_of_a_queue_with_its_default() -> None:
    table = dict(re.findall(r"^\| `([\w.]+)` \| (\S+) \|", PAGE, re.MULTILINE))
    assert table == {name: setting.default for name, setting in GROUP_SETTINGS.items()}


def test_the_page_names_every_metric_of_queues() -> None:
    names = [*QUEUE_GAUGES, *(f"{name}_total" for name in QUEUE_COUNTERS)]
    assert [name for name in names if f"_{name}`" not in PAGE] == []
