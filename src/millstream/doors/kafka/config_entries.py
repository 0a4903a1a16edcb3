"""One setting as DescribeConfigs and CreateTopics return it: value, source and synonyms (KIP-226)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millstream.wire.kafka.messages import Fields

FROM_TOPIC, FROM_DEFAULT, FROM_LOGGER, FROM_GROUP = 1, 5, 6, 8
"""Kafka's config sources; those of brokers are in `broker_settings`."""


class Synonym(NamedTuple):
    """A value that applies if no synonym before it is set."""

    name: str
    value: str | None
    source: int


def entry(
    name: str,
    synonyms: Sequence[Synonym],
    config_type: int,
    text: str | None,
    *,
    read_only: bool = False,
    is_sensitive: bool = False,
) -> Fields:
    """The first synonym gives the value."""
    return {
        "name": name,
        "value": synonyms[0].value,
        "read_only": read_only,
        "config_source": synonyms[0].source,
        "is_sensitive": is_sensitive,
        "synonyms": [synonym._asdict() for synonym in synonyms],
        "config_type": config_type,
        "documentation": text,
    }
