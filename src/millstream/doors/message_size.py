"""The record size of topics that a door creates: 1 MiB for FlowMQ, Flume and Luxun, a gRPC message for Comet.

Kafka limits a batch, those systems limit a payload. So topics that such a door creates have a `max.message.bytes` with
room for a payload of 1 MiB and its batch header, key and lengths. Comet limits neither; its clients limit a gRPC
message to 4 MiB. A record that fits into such a topic fits into such an answer.
"""

from __future__ import annotations

from millstream.config import Config

BATCH_BYTES_MAX = (1 << 20) + 1024
GRPC_BYTES_MAX = 4 << 20
"""The largest message that gRPC clients accept by default."""


def one_mebibyte(config: Config) -> dict[str, str]:
    """Settings for a new topic."""
    return {} if config.message_bytes_max >= BATCH_BYTES_MAX else {"max.message.bytes": str(BATCH_BYTES_MAX)}


def one_grpc_message(config: Config) -> dict[str, str]:
    """Settings for a new topic of the Comet door."""
    limit = GRPC_BYTES_MAX - 1024
    return {} if config.message_bytes_max >= limit else {"max.message.bytes": str(limit)}
