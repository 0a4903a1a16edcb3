"""Chance that can be had again: the seed is part of what a failure prints."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    seed = random.randrange(1 << 32)
    request.node.add_report_section("call", "dice", f"random.Random({seed})")
    return random.Random(seed)
