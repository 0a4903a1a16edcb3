"""Where administration looks for the broker's pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.admin.failure import Failure
from millstream.admin.pages import queues


class Broker:
    """As much of a connection as it takes to ask a broker where its pages are."""

    address = "broker.example:9092"

    def __init__(self, host: str, http: str | None) -> None:
        self._host = host
        self._http = http

    def metadata(self) -> Any:
        return SimpleNamespace(brokers={1: SimpleNamespace(host=self._host)})

    def settings(self, resource: Any) -> list[Any]:
        assert resource.name == "1"
        return [] if self._http is None else [SimpleNamespace(name="http", value=self._http)]


@pytest.mark.parametrize(
    ("host", "http", "sentence"),
    [
        ("127.0.0.1", None, "broker.example:9092 is not a Millstream broker"),
        ("127.0.0.1", "off", "the broker runs without its HTTP pages"),
        ("127.0.0.1", "127.0.0.1:1", "the broker's pages at 127.0.0.1:1 cannot be read"),
        ("127.0.0.1", "0.0.0.0:1", "the broker's pages at 127.0.0.1:1 cannot be read"),
        ("::1", "[::]:1", r"the broker's pages at \[::1\]:1 cannot be read"),
    ],
)
def test_pages_that_cannot_be_had_are_named(host: str, http: str | None, sentence: str) -> None:
    with pytest.raises(Failure, match=sentence):
        queues(cast("Any", Broker(host, http)))
