"""Message ids: text that holds a record's topic, partition and offset, so that the broker keeps no table of ids.

    22 characters     the topic's id, base64url (RFC 4648) without padding
    :PARTITION:OFFSET in decimal

Ids are unique for ever: a recreated topic has a new id. For the first 100,000,000,000 messages of a topic an id is no
longer than the UUIDs of FlowMQ's own broker, for which its example clients have room.
"""

from __future__ import annotations

import base64
import uuid

TOPIC_BYTES = 22
NUMBER_BYTES_MAX = 19


def topic_part(topic_id: uuid.UUID) -> bytes:
    return base64.urlsafe_b64encode(topic_id.bytes)[:TOPIC_BYTES]


def prefix(topic_id: uuid.UUID, partition: int) -> bytes:
    """An id without the offset."""
    return b"%s:%d:" % (topic_part(topic_id), partition)


def parse(message_id: bytes) -> tuple[uuid.UUID, int, int] | None:
    """Topic, partition and offset; None if it is not a message id."""
    parts = message_id.split(b":")
    if len(parts) != 3 or len(parts[0]) != TOPIC_BYTES:
        return None
    if not all(part.isdigit() and len(part) <= NUMBER_BYTES_MAX for part in parts[1:]):
        return None
    try:
        topic_id = uuid.UUID(bytes=base64.b64decode(parts[0] + b"==", altchars=b"-_", validate=True))
    except ValueError:
        return None
    return topic_id, int(parts[1]), int(parts[2])
