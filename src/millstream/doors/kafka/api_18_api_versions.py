"""ApiVersions (key 18), versions 0 to 4.

Lists exactly the served APIs. A newer request version gets UNSUPPORTED_VERSION in version 0, so that the client can
retry (KIP-511). The features (KIP-584) are those of Kafka 4.1 that this broker has:
`group.version` 1 (consumer groups), `share.version` 1 (share groups), `metadata.version` 27 (4.1-IV1).
Gaps: no `transaction.version`, because there are no transactions; no `kraft.version` and no
`eligible.leader.replicas.version`, because there are no replicas. Levels are fixed.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka import peer_connection
from millstream.doors.kafka.context import Context
from millstream.doors.outbox import Chunk
from millstream.wire.kafka import api_versions
from millstream.wire.kafka.api_versions import Feature
from millstream.wire.kafka.primitives import Reader

KEY = 18
VERSIONS = (0, 4)
FLEXIBLE_FROM = api_versions.FLEXIBLE_FROM

FEATURES = (Feature("group.version", 0, 1), Feature("metadata.version", 7, 27), Feature("share.version", 0, 1))


def answer(reader: Reader, context: Context) -> list[Chunk]:
    from millstream.doors.kafka.apis import APIS

    if context.version >= FLEXIBLE_FROM and (nonce := peer_connection.recognise(reader, context)):
        return [nonce]
    supported = VERSIONS[0] <= context.version <= VERSIONS[1]
    ranges = [(api.key, api.low, api.high) for api in sorted(APIS.values(), key=lambda api: api.key)]
    code = Code.NONE if supported else Code.UNSUPPORTED_VERSION
    return [api_versions.encode(context.version if supported else 0, code, ranges, FEATURES)]
