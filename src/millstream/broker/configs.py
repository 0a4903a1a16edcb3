"""The verbs of a session for settings: those of topics, groups and brokers.

A group has the settings of its queue and of the consumer protocol. To set a queue setting before the group exists
creates the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.broker.broker_settings import TOPIC_DEFAULTS, BrokerSettings, Layer
from millstream.broker.groups.group_configs import CONSUMER_SETTINGS
from millstream.broker.groups.queue.settings import clean
from millstream.broker.setting import Setting
from millstream.broker.settings import GROUP_SETTINGS, SETTINGS, check_name
from millstream.core.errors import Code, RequestError
from millstream.security.rights import CLUSTER_NAME, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.session import Session

TOPIC, BROKER, LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
"""The types of resources that have settings, with Kafka's numbers."""
OF_BROKERS = {name: SETTINGS[topic] for name, topic in TOPIC_DEFAULTS.items()}
_OF_GROUPS = {**CONSUMER_SETTINGS, **GROUP_SETTINGS}


@dataclass(frozen=True, slots=True)
class Configured:
    """Settable names and set values."""

    table: Mapping[str, Setting]
    overrides: Mapping[str, str]
    default: Callable[[str], str]


class Configs:
    __slots__ = ("_broker", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broker = session._broker

    def check(self, operation: Operation, resource: int, name: str) -> None:
        """Brokers, their loggers and client metrics belong to the cluster."""
        if resource == TOPIC:
            self._session.check(operation, Kind.TOPIC, name)
        elif resource == GROUP:
            self._session.check(operation, Kind.GROUP, name)
        else:
            self._session.check(operation, Kind.CLUSTER, CLUSTER_NAME)

    def describe(self, resource: int, name: str) -> Configured:
        self.check(Operation.DESCRIBE_CONFIGS, resource, name)
        return self._find(resource, name)

    def broker(self, name: str) -> tuple[int | None, BrokerSettings]:
        """This broker's settings, and its node id; None for it: the name means every broker over the store."""
        self.check(Operation.DESCRIBE_CONFIGS, BROKER, name)
        return self._node_of(name), self._broker.settings

    def check_logger(self, operation: Operation, name: str) -> None:
        self.check(operation, LOGGER, name)
        if name != str(self._broker.node_id):
            raise RequestError(
                Code.INVALID_REQUEST, f"this is broker {self._broker.node_id}, not {name or 'all brokers'}"
            )

    def layers(self, name: str) -> list[Layer]:
        """Of a broker's setting that is the default of a topic's: part of what describes the topic."""
        return self._broker.settings.layers(name)

    @property
    def location(self) -> str:
        """Where the logs are."""
        return self._broker.storage()[0]

    def names(self, resource: int) -> list[str]:
        """All topics, or the groups with settings of their own."""
        self.check(Operation.DESCRIBE_CONFIGS, BROKER, "")
        broker = self._broker
        if resource == TOPIC:
            return sorted(broker.topics.names())
        if resource == GROUP:
            return sorted({*filter(broker.queues.overrides, broker.queues.names()), *broker.group_configs.by_group})
        return []

    async def change(
        self, resource: int, name: str, change: Callable[[Configured], Mapping[str, str]], validate_only: bool
    ) -> None:
        """Replaces all settings of a resource by those that `change` makes of them. Changes do not overlap."""
        self.check(Operation.ALTER_CONFIGS, resource, name)
        broker = self._broker
        async with broker.changing:
            overrides = change(self._find(resource, name))
            if resource == TOPIC:
                await broker.topics.configure(name, overrides, validate_only)
            elif resource == BROKER:
                broker.settings.check(overrides)
                if not validate_only:
                    await broker.settings.configure(self._node_of(name), overrides)
            else:
                await self._configure_group(name, overrides, validate_only)

    def _find(self, resource: int, name: str) -> Configured:
        broker = self._broker
        if resource == GROUP:
            if not name:
                raise RequestError(Code.INVALID_REQUEST, "a group's name is missing")
            overrides = {**broker.group_configs.by_group.get(name, {}), **broker.queues.overrides(name)}
            queue = broker.queues.get(name)
            door = queue.door_defaults if queue is not None else {}
            return Configured(_OF_GROUPS, overrides, lambda name: door.get(name, _OF_GROUPS[name].default))
        if resource == BROKER:
            altered = broker.settings.altered(self._node_of(name))
            return Configured(OF_BROKERS, altered, lambda name: broker.settings.layers(name)[0].value)
        if resource == TOPIC:
            topic = broker.topics.get(name)
            if topic is None:
                check_name(name)
                raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
            return Configured(SETTINGS, topic.settings.overrides, topic.settings.default)
        raise RequestError(Code.INVALID_REQUEST, f"resources of type {resource} have no settings here")

    def _node_of(self, name: str) -> int | None:
        """None: every broker."""
        node_id = self._broker.node_id
        if name in ("", str(node_id)):
            return node_id if name else None
        if not name.removeprefix("-").isdigit():
            raise RequestError(Code.INVALID_REQUEST, f"a broker's name is its number, not {name}")
        raise RequestError(Code.INVALID_REQUEST, f"this is broker {node_id}, not {name}")

    async def _configure_group(self, name: str, overrides: Mapping[str, str], validate_only: bool) -> None:
        configs, queues = self._broker.group_configs, self._broker.queues
        of_consumers = {key: text for key, text in overrides.items() if key.startswith("consumer.")}
        of_queue = clean({key: text for key, text in overrides.items() if key not in of_consumers})
        configs.check(name, of_consumers)
        if validate_only:
            return
        if of_consumers != configs.by_group.get(name, {}):
            await configs.configure(name, of_consumers)
        if of_queue != queues.overrides(name):
            await queues.configure(name, of_queue)
