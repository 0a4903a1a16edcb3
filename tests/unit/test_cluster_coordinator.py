"""The coordinator of a group, for doors whose protocols cannot redirect a client."""

from __future__ import annotations

import pytest

from millstream.cluster.base import Solo
from millstream.cluster.coordinator import coordinate
from millstream.cluster.shared import SharedCluster
from millstream.core.errors import Code, RequestError
from millstream.stores.keys import MemoryMeta
from millstream.testing.clock import VirtualClock


async def members(*hosts: str) -> list[SharedCluster]:
    """Brokers over one store, that came one after the other."""
    meta, clock = MemoryMeta(), VirtualClock()
    made = [SharedCluster(meta, clock, number, 6_000) for number in range(1, len(hosts) + 1)]
    for number, (cluster, host) in enumerate(zip(made, hosts, strict=True), 1):
        await cluster.start()
        await cluster.join(host, 9090 + number if host else 0)
    return made


async def test_a_broker_alone_looks_after_everything() -> None:
    await coordinate(Solo(1), "readers")


async def test_a_group_of_another_broker_is_refused_with_its_address() -> None:
    first, second = await members("10.0.0.1", "10.0.0.2")
    await coordinate(first, "readers")
    with pytest.raises(
        RequestError, match=r"broker 1 on 10\.0\.0\.1 \(its Kafka door is 10\.0\.0\.1:9091\)"
    ) as refused:
        await coordinate(second, "readers")
    assert refused.value.code == Code.NOT_COORDINATOR


async def test_a_group_that_nobody_looks_after_is_taken_up() -> None:
    _embedded, served = await members("", "10.0.0.2")
    with pytest.raises(RequestError):
        served.check("readers")
    await coordinate(served, "readers")
    served.check("readers")
