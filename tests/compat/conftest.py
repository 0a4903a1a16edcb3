"""The table of clients, groups and administration on every store: on `file:` always, on the others as slow tests.

What a run without slow tests shows of the others is `test_stores.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import stores
from tests.compat.client_luxun import generated as generated
from tests.compat.client_luxun import luxun_broker as luxun_broker
from tests.compat.client_luxun import open_client as open_client
from tests.compat.python_api import behind as behind
from tests.compat.python_api import ms as ms
from tests.compat.python_api import server as server
from tests.compat.raw import Raw
from tests.postgres import postgres as postgres
from tests.serving import ServedBroker

ON_EVERY_STORE = ("test_clients", "test_groups", "test_group_migration", "test_admin", "test_share_groups")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module not in ON_EVERY_STORE:
        return
    for fixture, kinds in (("broker", stores.OTHERS), ("own_broker", stores.LASTING[1:])):
        if fixture in metafunc.fixturenames:
            slow = [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]
            metafunc.parametrize(
                fixture, [stores.DEFAULT, *slow], indirect=True, scope="session" if fixture == "broker" else None
            )
            break


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """One real broker for all tests that only talk to it; each uses topics and groups of its own."""
    directory = tmp_path_factory.mktemp("broker")
    url = stores.store_url(getattr(request, "param", stores.DEFAULT), directory, request)
    with ServedBroker(directory, store=url) as served:
        yield served


@pytest.fixture
def own_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """A broker for one test, which may stop it or kill it."""
    directory = tmp_path_factory.mktemp("own")
    url = stores.store_url(getattr(request, "param", stores.DEFAULT), directory, request)
    with ServedBroker(directory, store=url) as served:
        yield served


@pytest.fixture
def link(broker: ServedBroker) -> Iterator[Raw]:
    """A bare connection to the shared broker."""
    with Raw(broker.address) as opened:
        yield opened
