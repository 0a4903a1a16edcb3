"""Checks that this broker coordinates a group, for protocols that cannot redirect their clients.

In a cluster every group has one coordinator. Kafka's clients ask for it (FindCoordinator); clients of other protocols
use the broker that they know. This broker becomes the coordinator of a group that has none. For any other group it
refuses the request and names the coordinator, so that an operator can point the client there.
"""

from __future__ import annotations

from millstream.cluster.base import Cluster
from millstream.core.errors import Code, RequestError


async def coordinate(cluster: Cluster, group_id: str) -> None:
    """Raises `RequestError` unless this broker coordinates the group, or fanout id, from now on."""
    try:
        cluster.check(group_id)
    except RequestError as error:
        if error.code != Code.NOT_COORDINATOR:
            raise
    else:
        return
    node = await cluster.find_coordinator(group_id)
    if node is not None:
        raise RequestError(
            Code.NOT_COORDINATOR,
            f"another broker coordinates {group_id}: connect to broker {node.node_id} on {node.host} "
            f"(its Kafka door is {node.host}:{node.port})",
        )
