"""Server addresses as users write them: HOST:PORT, separated by commas."""

from __future__ import annotations

import re

from millstream.core.errors import MillstreamError

_ADDRESS = re.compile(r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.%]+\]|[\w.-]+):([0-9]{1,5})", re.ASCII)
"""With or without a protocol prefix, as Kafka's clients accept it."""


def check_addresses(text: str) -> None:
    """Raises at once for an address that no client can reach."""
    for each in str(text).split(","):
        found = _ADDRESS.fullmatch(each.strip())
        if found is None or not 0 < int(found[1]) < 65536:
            raise MillstreamError(
                f"{each.strip()!r} is not the address of a server: write HOST:PORT, as 127.0.0.1:9092"
            )
