"""DescribeConfigs (key 32), versions 1 to 4.

Settings of topics and share groups, with where each value comes from and what it means, and the broker's own
configuration.
Gaps: no broker loggers.
"""

from __future__ import annotations

from millstream.doors.kafka import config_relay, config_resources
from millstream.doors.kafka.context import Context
from millstream.errors import RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 32
VERSIONS = (1, 4)


async def handle(request: Message, context: Context) -> Fields:
    resources = {(each.resource_type, each.resource_name): each for each in request.resources}
    return {"throttle_time": 0, "results": [await _describe(each, request, context) for each in resources.values()]}


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
    keys = resource.configuration_keys
    if keys is not None:
        entries = [entry for entry in entries if entry["name"] in keys]
    for entry in entries:
        if not request.include_synonyms:
            entry["synonyms"] = []
        if not request.include_documentation:
            entry["documentation"] = None
    return {**config_resources.result(resource), "configs": entries}
