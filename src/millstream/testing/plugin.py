"""Millstream's fixtures for pytest: a real broker inside the test process. See `docs/testing.md`.

pytest loads this wherever the package is installed, so it imports nothing that slows tests without a broker.
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
    """The test's own broker, in memory, on a free port: Kafka clients connect to `.bootstrap`."""
    from millstream.testing.broker_thread import BrokerThread

    with BrokerThread(**millstream_settings) as broker:
        yield broker
