"""DescribeConfigs (key 32), versions 1 to 4.

Describes settings of topics, groups and the broker with source and documentation, and the levels of the broker's
loggers. Broker settings are listed under Kafka's names and under Millstream's own. Topic settings that Kafka does not
have are listed if they are set or if the client names them.
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
