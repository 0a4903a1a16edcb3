"""Millstream's fixtures for pytest: a real broker inside the test process. See `docs/testing.md`.

Loaded by pytest wherever the package is installed, so nothing is imported here that a test without a broker would pay
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from millstream.testing.broker_thread import BrokerThread


@pytest.fixture
def millstream_settings() -> dict[str, Any]:
    """Override this to configure the broker: fields of `millstream.config.Config`, `store` included."""
    return {}


@pytest.fixture
def millstream(millstream_settings: dict[str, Any]) -> Iterator[BrokerThread]:
    """A broker of the test's own, on a free port, in memory: `.bootstrap` is where Kafka clients connect."""
    from millstream.testing.broker_thread import BrokerThread

    with BrokerThread(**millstream_settings) as broker:
        yield broker
