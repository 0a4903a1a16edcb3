"""Fixtures that several unit test files share. A file that needs another one of the same name defines its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType

import pytest

import millstream
from millstream import Millstream
from millstream.records import _kernel, codec, pure
from tests.compat.python_api import server as server
from tests.crash.store_directory import place as place
from tests.unit.queue_kit import kit as kit
from tests.unit.share_kit import shares as shares


@pytest.fixture(params=["embedded", "remote"])
async def ms(request: pytest.FixtureRequest) -> AsyncIterator[Millstream]:
    """Both kinds of the Python API. Each test has topics of its own; the remote ones share a server."""
    if request.param == "embedded":
        made: Millstream = millstream.open("memory:")
    else:
        made = millstream.connect(request.getfixturevalue("server").bootstrap, timeout=10)
    async with made:
        yield made


@pytest.fixture(params=[_kernel, pure], ids=["compiled", "pure"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The compiled kernel of records, and its twin."""
    monkeypatch.setattr(codec, "kernel", request.param)
    kernel: ModuleType = request.param
    return kernel
