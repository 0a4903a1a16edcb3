"""Share groups: states, offsets and members.

librdkafka's admin client does not list or describe them yet, so plain requests go to every broker of the cluster:
the broker that lists a group is its coordinator.
"""

from __future__ import annotations

from typing import Any

from millstream.admin.connection import CONNECT_SECONDS, Connection
from millstream.admin.failure import CODES, Failure
from millstream.admin.position import TopicPartition
from millstream.client.link import Link, LinkBroken
from millstream.core.errors import Code
from millstream.wire.kafka.messages import Message

LIST_GROUPS, DESCRIBE, DESCRIBE_OFFSETS, ALTER_OFFSETS = 16, 77, 90, 91


class ShareGroups:
    def __init__(self, connection: Connection) -> None:
        self._brokers = connection.metadata().brokers.values()
        self._client_id = connection.client_id

    def states(self) -> dict[str, str]:
        """Each share group with its state."""
        return {name: state for name, (state, _) in self._find().items()}

    def group(self, name: str) -> ShareGroup | None:
        found = self._find().get(name)
        return None if found is None else ShareGroup(name, found[1])

    def _find(self) -> dict[str, tuple[str, Link]]:
        found: dict[str, tuple[str, Link]] = {}
        for broker in self._brokers:
            try:
                link = Link(str(broker.host), broker.port, self._client_id, CONNECT_SECONDS)
                answer = link.ask(LIST_GROUPS, 5, 5, {"states_filter": [], "types_filter": ["share"]})
            except LinkBroken:  # older than share groups, or just gone: librdkafka reports it where it matters
                continue
            found.update((each.group_id, (each.group_state.lower(), link)) for each in answer.groups)
        return found


class ShareGroup:
    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self._link = link

    def _description(self) -> Message:
        answer = self._link.ask(DESCRIBE, 1, 1, {"group_ids": [self.name], "include_authorized_operations": False})
        [group] = answer.groups
        _check(group.error_code, group.error_message)
        described: Message = group
        return described

    def offsets(self) -> dict[TopicPartition, tuple[int, int | None]]:
        """For each partition read: the first offset that is not done, and the number of records that are not."""
        answer = self._link.ask(DESCRIBE_OFFSETS, 0, 1, {"groups": [{"group_id": self.name, "topics": None}]})
        [group] = answer.groups
        _check(group.error_code, group.error_message)
        return {
            (topic.topic_name, each.partition_index): (each.start_offset, each.lag)
            for topic in group.topics
            for each in topic.partitions
            if each.start_offset >= 0
        }

    def seek(self, targets: dict[TopicPartition, int]) -> None:
        topics: dict[str, list[dict[str, int]]] = {}
        for (topic, index), offset in targets.items():
            topics.setdefault(topic, []).append({"partition_index": index, "start_offset": offset})
        listed = [{"topic_name": name, "partitions": partitions} for name, partitions in topics.items()]
        answer = self._link.ask(ALTER_OFFSETS, 0, 0, {"group_id": self.name, "topics": listed})
        _check(answer.error_code, answer.error_message)
        for topic in answer.responses:
            for each in topic.partitions:
                _check(each.error_code, each.error_message)

    def describe(self) -> dict[str, Any]:
        """The group, its partitions and its members."""
        group = self._description()
        offsets = self.offsets()
        partitions = [
            {"topic": topic, "partition": index, "start": start, "lag": lag}
            for (topic, index), (start, lag) in sorted(offsets.items())
        ]
        members = [
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.client_host.removeprefix("/"),
                "topics": ",".join(member.subscribed_topic_names),
            }
            for member in group.members
        ]
        return {
            "group": self.name,
            "state": group.group_state.lower(),
            "protocol": "share",
            "lag": sum(lag or 0 for _, lag in offsets.values()),
            "partitions": partitions,
            "members": members,
        }


def _check(code: int, text: str | None) -> None:
    if code != Code.NONE:
        known = CODES.get(code)
        raise Failure(text or (known.text if known is not None else f"the broker answered with error {code}"))
