"""Where servers are, as users write it: HOST:PORT, several with commas between them."""

from __future__ import annotations

import re

from millstream.core.errors import MillstreamError

_ADDRESS = re.compile(r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.%]+\]|[\w.-]+):([0-9]{1,5})", re.ASCII)
"""With a protocol before it or without, as Kafka's clients take it."""


def check_addresses(text: str) -> None:
    """Raises at once for what no client could ever reach."""
    for each in str(text).split(","):
        found = _ADDRESS.fullmatch(each.strip())
        if found is None or not 0 < int(found[1]) < 65536:
            raise MillstreamError(
                f"{each.strip()!r} is not the address of a server: write HOST:PORT, as 127.0.0.1:9092"
            )
