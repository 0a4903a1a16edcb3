"""Kafka's topic settings that the broker accepts, validates and describes, but that have no effect.

Tools copy a topic's settings from one cluster to another, so a broker that refuses a setting refuses the topic. These
settings concern replicas, tiered storage or files that this broker does not have, or work that it never does: a batch
keeps its producer's compression.
"""

from __future__ import annotations

import re

from millstream.broker.setting import (
    BOOLEAN,
    INT,
    INT_MAX,
    LIST,
    LONG,
    LONG_MAX,
    STRING,
    Setting,
    boolean,
    choice,
    integer,
)

_REPLICA = re.compile(r"\s*\d+\s*:\s*\d+\s*")


def _gzip_level(text: str) -> int:
    level: int = integer(-1, 9)(text)
    if level == 0:
        raise ValueError("must be between 1 and 9, or -1")
    return level


def _replicas(text: str) -> str:
    if text and text.strip() != "*" and not all(_REPLICA.fullmatch(part) for part in text.split(",")):
        raise ValueError("must be * or PARTITION:BROKER, several with commas")
    return text


def _no_tiered_storage(text: str) -> bool:
    if boolean(text):
        raise ValueError("this broker has no tiered storage")
    return False


_CODECS = choice("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_NEVER_COMPRESSED = "no effect: the broker does not compress"
_ONE_COPY = "no effect: each partition has one copy"
_NOT_TIERED = "no effect: there is no tiered storage"

INERT: dict[str, Setting] = {
    "compression.gzip.level": Setting("-1", INT, _gzip_level, _NEVER_COMPRESSED),
    "compression.lz4.level": Setting("9", INT, integer(1, 17), _NEVER_COMPRESSED),
    "compression.type": Setting(
        "producer", STRING, _CODECS, "no effect: batches keep the compression that their producer chose"
    ),
    "compression.zstd.level": Setting("3", INT, integer(-131072, 22), _NEVER_COMPRESSED),
    "file.delete.delay.ms": Setting(
        "60000", LONG, integer(0, LONG_MAX), "no effect: a file is deleted when its last reader is done"
    ),
    "follower.replication.throttled.replicas": Setting("", LIST, _replicas, _ONE_COPY),
    "leader.replication.throttled.replicas": Setting("", LIST, _replicas, _ONE_COPY),
    "local.retention.bytes": Setting("-2", LONG, integer(-2, LONG_MAX), _NOT_TIERED),
    "local.retention.ms": Setting("-2", LONG, integer(-2, LONG_MAX), _NOT_TIERED),
    "min.insync.replicas": Setting("1", INT, integer(1, INT_MAX), _ONE_COPY),
    "preallocate": Setting("false", BOOLEAN, boolean, "no effect: segments grow as they are written"),
    "remote.log.copy.disable": Setting("false", BOOLEAN, boolean, _NOT_TIERED),
    "remote.log.delete.on.disable": Setting("false", BOOLEAN, boolean, _NOT_TIERED),
    "remote.storage.enable": Setting("false", BOOLEAN, _no_tiered_storage, "must be false: there is no tiered storage"),
    "segment.index.bytes": Setting("10485760", INT, integer(4, INT_MAX), "no effect: an index grows with its segment"),
    "segment.jitter.ms": Setting("0", LONG, integer(0, LONG_MAX), "no effect: segments end at segment.ms"),
    "unclean.leader.election.enable": Setting("false", BOOLEAN, boolean, _ONE_COPY),
}
