"""The identity of a client, as Kafka names it: `User:alice`."""

from __future__ import annotations

from typing import NamedTuple


class Principal(NamedTuple):
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS = Principal("User", "ANONYMOUS")
"""Kafka's name for a client that did not authenticate."""
EMBEDDED = Principal("User", "EMBEDDED")
"""The process that runs the broker inside itself: it can read the store anyway."""
