"""The verbs without async where the caller's thread has a running event loop, as in every notebook."""

from __future__ import annotations

import threading

import millstream.sync
from millstream.testing.broker_thread import BrokerThread


async def test_an_embedded_broker_is_opened_and_closed_inside_a_running_loop() -> None:
    with millstream.sync.open("memory:") as ms:
        ms.send("orders", b"x")
        for record in ms.read("orders"):
            assert record.value == b"x"
            break  # which leaves a generator behind
    assert "millstream-sync" not in {thread.name for thread in threading.enumerate()}


async def test_a_server_is_used_inside_a_running_loop(millstream: BrokerThread) -> None:
    from millstream import sync

    with sync.connect(millstream.bootstrap) as ms:
        ms.send("orders", b"x")
        assert [record.value for record in ms.read("orders", follow=False)] == [b"x"]
