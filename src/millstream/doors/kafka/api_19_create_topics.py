"""CreateTopics (key 19), versions 2 to 7.

Creates topics with partitions and settings; -1 partitions means the broker's default. Durable when answered.
Gaps: a replication factor other than 1 (or -1) is refused, as each partition has one copy; the answer has the
settings of the first 500 topics of a request only; more than 1,000 settings of one topic are refused with
INVALID_REQUEST.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.config_resources import check_count, topic_entries
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.session import Topic

KEY = 19
VERSIONS = (2, 7)
DESCRIBED_MAX = 500
"""Topics whose settings are in the answer. At sixty entries each, a small request could ask for gigabytes."""


async def handle(request: Message, context: Context) -> Fields:
    named = Counter[str]()
    async for wanted in in_turns(request.topics):
        named[wanted.name] += 1
    results: list[Fields] = []
    async for wanted in in_turns(request.topics):
        try:
            if named[wanted.name] > 1:
                raise RequestError(Code.INVALID_REQUEST, f"the request names {wanted.name} more than once")
            is_described = len(results) < DESCRIBED_MAX
            results.append(await _create(wanted, bool(request.validate_only), is_described, context))
        except RequestError as error:
            results.append(_result(wanted.name, error.code, error.detail))
    return {"throttle_time": 0, "topics": results}


async def _create(wanted: Message, validate_only: bool, is_described: bool, context: Context) -> Fields:
    session = context.session
    session.admin.check_create(wanted.name)
    if wanted.replication_factor not in (-1, 1):
        raise RequestError(
            Code.INVALID_REPLICATION_FACTOR,
            f"a replication factor of {wanted.replication_factor} needs as many brokers; there is 1",
        )
    count = wanted.num_partitions
    if wanted.assignments:
        assigned = {one.partition_index: list(one.broker_ids) async for one in in_turns(wanted.assignments)}
        indexes, here = range(len(wanted.assignments)), [session.node_id]
        if sorted(assigned) != list(indexes) or any(brokers != here for brokers in assigned.values()):
            raise RequestError(
                Code.INVALID_REPLICA_ASSIGNMENT, f"every partition must be assigned to broker {session.node_id}"
            )
        count = len(indexes)
    elif count == -1:
        count = session.config.default_partitions
    check_count(wanted.configs)
    overrides = {config.name: config.value for config in wanted.configs}
    if missing := [name for name, value in overrides.items() if value is None]:
        raise RequestError(Code.INVALID_CONFIG, f"null value not supported for topic configs: {','.join(missing)}")
    topic = await session.admin.create_topic(wanted.name, count, overrides, validate_only)
    result = _result(wanted.name, Code.NONE, None, topic, count)
    if not session.allows(Operation.DESCRIBE_CONFIGS, Kind.TOPIC, topic.name):
        hidden = {"num_partitions": -1, "replication_factor": -1, "topic_config_error_code": Kind.TOPIC.refusal}
        return {**result, **hidden}
    return {**result, "configs": topic_entries(topic.settings, context) if is_described else []}


def _result(name: str, code: Code, detail: str | None, topic: Topic | None = None, count: int = -1) -> Fields:
    return {
        "name": name,
        "topic_id": topic.id if topic is not None else None,
        "error_code": code,
        "error_message": detail,
        "topic_config_error_code": 0,
        "num_partitions": count,
        "replication_factor": 1 if topic is not None else -1,
        "configs": [],
    }
