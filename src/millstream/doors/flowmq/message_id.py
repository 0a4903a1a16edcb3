"""Message ids: text that says where a record lies, so that nothing has to be remembered to find it again.

    22 characters     the topic's id, base64 for URLs
    :PARTITION:OFFSET in decimal

Unique for ever, since a topic that is made anew has a new id. For the first 100,000,000,000 messages of a topic an id
is no longer than the UUIDs that FlowMQ's own broker gives out, which its example clients have room for.
"""

from __future__ import annotations

import base64
import uuid

TOPIC_BYTES = 22
NUMBER_BYTES_MAX = 19


def topic_part(topic_id: uuid.UUID) -> bytes:
    return base64.urlsafe_b64encode(topic_id.bytes)[:TOPIC_BYTES]


def prefix(topic_id: uuid.UUID, partition: int) -> bytes:
    """All of an id but the offset."""
    return b"%s:%d:" % (topic_part(topic_id), partition)


def parse(message_id: bytes) -> tuple[uuid.UUID, int, int] | None:
    """Topic, partition and offset; None if this is no message id."""
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
