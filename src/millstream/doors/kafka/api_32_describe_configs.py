"""DescribeConfigs (key 32), versions 1 to 4.

Settings of topics, groups and the broker, with where each value comes from and what it means, and the levels of the
broker's loggers. The broker's settings have Kafka's names, and those of its own configuration beside them. Settings
that Kafka does not have are among a topic's where they are set.
Gaps: no client metrics.
"""

from __future__ import annotations

from millstream.core.errors import RequestError
from millstream.doors.kafka import config_relay, config_resources
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 32
VERSIONS = (1, 4)


async def handle(request: Message, context: Context) -> Fields:
    resources = {(each.resource_type, each.resource_name): each async for each in in_turns(request.resources)}
    results = [await _describe(each, request, context) async for each in in_turns(resources.values())]
    return {"throttle_time": 0, "results": results}


async def _describe(resource: Message, request: Message, context: Context) -> Fields:
    about = {"configuration_keys": resource.configuration_keys}
    more = {name: bool(request.get(name)) for name in ("include_synonyms", "include_documentation")}
    try:
        elsewhere = await config_relay.ask(KEY, VERSIONS[1], resource, about, more, context)
        if elsewhere is not None:
            return elsewhere
        entries = config_resources.describe(resource, context)
    except RequestError as error:
        return {**config_resources.result(resource, error), "configs": []}
    for entry in entries:
        if not request.include_synonyms:
            entry["synonyms"] = []
        if not request.include_documentation:
            entry["documentation"] = None
    return {**config_resources.result(resource), "error_message": "", "configs": entries}
