"""Requests with as many items as the protocol allows, encoded in milliseconds.

`kio` encodes one item in some 20 microseconds. So it encodes a request with a single item here, and the item's bytes
are repeated: `NAME` and `NUMBER` inside an item stand for a name and a number that differ from item to item.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any

from kio.index import load_request_schema

from millstream.wire.kafka import messages
from millstream.wire.kafka.primitives import array_length
from tests.compat import raw
from tests.compat.random_messages import write

NAME = "n00000"
NUMBER = 0x6E6E6E6E
_NAME, _NUMBER = NAME.encode(), pack(">i", NUMBER)


def request(key: int, version: int, fields: Callable[[list[Any]], dict[str, Any]], item: Any, count: int) -> bytes:
    """The request that `fields` makes of a list of `count` items."""
    schema = load_request_schema(key, version)
    one, two = (write(messages._build(schema, fields([item] * number))) for number in (1, 2))
    behind_count = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b) + 1
    is_compact = messages.is_flexible(key, version)
    head = one[: behind_count - len(array_length(1, is_compact))]
    item_end = behind_count + len(two) - len(one)
    template, tail = one[behind_count:item_end], one[item_end:]
    items = (template.replace(_NAME, b"n%05d" % each).replace(_NUMBER, pack(">i", each)) for each in range(count))
    return raw.frame(key, version, b"".join((head, array_length(count, is_compact), *items, tail)))
