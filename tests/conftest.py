"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.serving import ServedBroker

pytest_plugins = [
    "millstream.testing.plugin"
]  # as users load it; also if the package was installed before the plugin existed


# Tests that run in the background may ignore SIGINT, and the programs that they start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes is the machine's business, which may be busy with other tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """One real broker for all tests that only talk to it; each uses topics and groups of its own."""
    with ServedBroker(tmp_path_factory.mktemp("broker")) as served:
        yield served


LONG = (
    "test_demo.py",
    "test_docs.py",
    "test_kill_9.py",
    "test_queue_chaos.py",
    "test_databases.py",
    "test_exclusive.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, in whatever order the rest is: none of it runs alone at the end. Longest of all
    are those that share the Spark session, one after the other.
    """
    items.sort(key=lambda item: (item.path.parent.name != "spark", item.path.name not in LONG))


_numbers = itertools.count()


@pytest.fixture
def unique() -> Callable[[str], str]:
    """A name that no other test uses."""
    return lambda stem: f"{stem}-{next(_numbers)}"
