"""A member of a share group without a client: heartbeats, fetches and acknowledgements as raw frames."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.records import codec
from tests.compat import raw
from tests.compat.raw import Raw

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
Acks = Sequence[tuple[int, int, Sequence[int]]]
Places = Mapping[tuple[uuid.UUID, int], Acks]


class Bare:
    """One connection of one member, which joins when it is made."""

    def __init__(self, address: str, group: str, *topics: str, member: str | None = None, join: bool = True) -> None:
        self.raw = Raw(address)
        self.group = group
        self.member = member or str(uuid.uuid4())
        self.ids: dict[str, uuid.UUID] = {}
        if join:
            answer = self.beat(0, topics)
            assert answer.error_code == 0, answer
            self.epoch = answer.member_epoch

    def beat(self, epoch: int, topics: Sequence[str] | None = None) -> Any:
        fields = {
            "group_id": self.group,
            "member_id": self.member,
            "member_epoch": epoch,
            "rack_id": None,
            "subscribed_topic_names": topics,
        }
        return self.raw.ask(raw.request(76, 1, fields))

    def fetch_frame(
        self,
        epoch: int,
        places: Places | None = None,
        *,
        forgotten: Sequence[tuple[uuid.UUID, int]] = (),
        wait_ms: int = 0,
        records_max: int = 500,
        bytes_max: int = 1 << 20,
        version: int = 2,
        record_limit: bool = False,
        renew: bool = False,
    ) -> bytes:
        fields = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": epoch,
            "max_wait": wait_ms,
            "min_bytes": 1,
            "max_bytes": bytes_max,
            "max_records": records_max,
            "batch_size": 500,
            "share_acquire_mode": int(record_limit),
            "is_renew_ack": renew,
            "topics": _topics(places or {}),
            "forgotten_topics_data": [{"topic_id": topic, "partitions": [index]} for topic, index in forgotten],
        }
        if version < 2:
            del fields["share_acquire_mode"], fields["is_renew_ack"]
        return raw.request(78, version, fields)

    def fetch(self, epoch: int, places: Places | None = None, **more: Any) -> Any:
        return self.raw.ask(self.fetch_frame(epoch, places, **more))

    def acknowledge(self, epoch: int, places: Places, *, version: int = 2, renew: bool = False) -> Any:
        fields = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": epoch,
            "is_renew_ack": renew,
            "topics": _topics(places),
        }
        if version < 2:
            del fields["is_renew_ack"]
        return self.raw.ask(raw.request(79, version, fields))

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _topics(places: Places) -> list[dict[str, Any]]:
    return [
        {
            "topic_id": topic,
            "partitions": [
                {
                    "partition_index": index,
                    "acknowledgement_batches": [
                        {"first_offset": first, "last_offset": last, "acknowledge_types": types}
                        for first, last, types in acks
                    ],
                }
            ],
        }
        for (topic, index), acks in places.items()
    ]


def topic_id(address: str, name: str) -> uuid.UUID:
    asked = {"topics": [{"topic_id": None, "name": name}], "allow_auto_topic_creation": False}
    with Raw(address) as connection:
        answer = connection.ask(raw.request(3, 12, {**asked, "include_topic_authorized_operations": False}))
    [topic] = answer.topics
    assert topic.topic_id is not None, answer
    found: uuid.UUID = topic.topic_id
    return found


def leases(answer: Any) -> dict[int, list[tuple[int, int, int]]]:
    """By partition: first and last offset and delivery count of what was leased."""
    assert answer.error_code == 0, answer
    return {
        one.partition_index: [
            (each.first_offset, each.last_offset, each.delivery_count) for each in one.acquired_records
        ]
        for topic in answer.responses
        for one in topic.partitions
        if one.acquired_records
    }


def codes(answer: Any) -> dict[int, int]:
    """By partition: the code of a ShareAcknowledge, or of the acknowledgements in a ShareFetch."""
    return {
        one.partition_index: int(getattr(one, "acknowledge_error_code", one.error_code))
        for topic in answer.responses
        for one in topic.partitions
    }


def records(answer: Any) -> list[bytes | None]:
    """The values that came, leased or not."""
    data = b"".join(one.records or b"" for topic in answer.responses for one in topic.partitions)
    return [record.value for record in codec.iterate(data)]
