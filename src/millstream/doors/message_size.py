"""The size of records on doors of systems that take 1 MiB: FlowMQ, Flume, Luxun.

Kafka measures a batch, those systems a payload. So topics that such a door creates have a `max.message.bytes` that a
payload of 1 MiB fits into, with its batch's header, its key and its lengths around it.
"""

from __future__ import annotations

from millstream.config import Config

BATCH_BYTES_MAX = (1 << 20) + 1024


def one_mebibyte(config: Config) -> dict[str, str]:
    """The settings of a new topic."""
    return {} if config.message_bytes_max >= BATCH_BYTES_MAX else {"max.message.bytes": str(BATCH_BYTES_MAX)}
