"""The record size of doors whose systems accept 1 MiB: FlowMQ, Flume, Luxun.

Kafka limits a batch, those systems limit a payload. So topics that such a door creates have a `max.message.bytes` with
room for a payload of 1 MiB and its batch header, key and lengths.
"""

from __future__ import annotations

from millstream.config import Config

BATCH_BYTES_MAX = (1 << 20) + 1024


def one_mebibyte(config: Config) -> dict[str, str]:
    """Settings for a new topic."""
    return {} if config.message_bytes_max >= BATCH_BYTES_MAX else {"max.message.bytes": str(BATCH_BYTES_MAX)}
