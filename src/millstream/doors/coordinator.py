"""Whether this broker looks after a group, for protocols that cannot send their clients to another one.

Where brokers share a store a group belongs to one of them. Kafka's clients ask who that is; those of other protocols
come to the broker that they know. A group that nobody looks after is taken up for them, and any other is refused with
the broker that has it, so that somebody can point the client there.
"""

from __future__ import annotations

from millstream.cluster.base import Cluster
from millstream.core.errors import Code, RequestError


async def coordinate(cluster: Cluster, group_id: str) -> None:
    """Raises `RequestError` unless this broker looks after the group, or fanout id, from now on."""
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
            f"another broker looks after {group_id}: connect to broker {node.node_id} on {node.host} "
            f"(its Kafka door is {node.host}:{node.port})",
        )
