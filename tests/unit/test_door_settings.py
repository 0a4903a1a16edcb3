"""Changes of settings that come at the same time, over several connections: all of them are made."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.serial import entity_writer

from millstream.broker.broker import Broker
from millstream.broker.configs import GROUP, TOPIC
from millstream.broker.session import Session
from millstream.config import Config
from millstream.core.errors import Code
from millstream.core.metrics import Metrics
from millstream.doors.kafka import (
    api_20_delete_topics,
    api_33_alter_configs,
    api_37_create_partitions,
    api_44_incremental_alter_configs,
)
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.sessions import FetchSessions
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from millstream.wire.kafka import messages
from tests.unit.groups_kit import HeldMeta, start, turn

SETTINGS = {
    TOPIC: {"retention.ms": "1000", "segment.ms": "2000", "cleanup.policy": "compact"},
    GROUP: {"share.delivery.count.limit": "7", "share.auto.offset.reset": "earliest", "millstream.key.order": "true"},
}


class Admin:
    """One broker, and any number of connections to it."""

    def __init__(self) -> None:
        self.meta, clock = HeldMeta(), VirtualClock()
        self.broker = Broker(Config(), MemoryLogStore(clock), self.meta, clock, Metrics())

    def ask(self, module: Any, version: int, **fields: Any) -> asyncio.Task[Any]:
        request = load_request_schema(module.KEY, version)
        buffer = io.BytesIO()
        entity_writer(request)(buffer, messages._build(request, fields))
        context = Context(
            Session(self.broker, "kafka", "10.0.0.1", client_id="client"), FetchSessions(), "127.0.0.1", 9092, version
        )
        return start(module.handle(messages.decode_request(module.KEY, version, buffer.getvalue()), context))

    def set(self, kind: int, name: str, value: str) -> asyncio.Task[Any]:
        config = {"name": name, "config_operation": api_44_incremental_alter_configs.SET, "value": value}
        resource = {"resource_type": kind, "resource_name": "orders", "configs": [config]}
        return self.ask(api_44_incremental_alter_configs, 1, resources=[resource], validate_only=False)

    def replace(self, name: str, value: str) -> asyncio.Task[Any]:
        resource = {"resource_type": TOPIC, "resource_name": "orders", "configs": [{"name": name, "value": value}]}
        return self.ask(api_33_alter_configs, 2, resources=[resource], validate_only=False)

    def grow(self, count: int) -> asyncio.Task[Any]:
        topic = {"name": "orders", "count": count, "assignments": None}
        return self.ask(api_37_create_partitions, 2, topics=[topic], timeout=1000, validate_only=False)

    def delete(self) -> asyncio.Task[Any]:
        return self.ask(api_20_delete_topics, 5, topic_names=["orders"], timeout=1000)

    def overrides(self, kind: int) -> dict[str, str]:
        if kind == GROUP:
            return dict(self.broker.queues.overrides("orders"))
        topic = self.broker.topics.get("orders")
        assert topic is not None
        return topic.settings.overrides

    async def land_all(self) -> None:
        """The store answers only when every other task waits."""
        await turn()
        while self.meta.held:
            self.meta.land()
            await turn()


@pytest.fixture
async def admin() -> Admin:
    admin = Admin()
    await admin.broker.start()
    await admin.broker.topics.create("orders", 1, {})
    return admin


@pytest.mark.parametrize("kind", [TOPIC, GROUP])
async def test_settings_that_are_set_at_the_same_time_are_all_kept(admin: Admin, kind: int) -> None:
    admin.meta.holding = True
    changes = [admin.set(kind, name, value) for name, value in SETTINGS[kind].items()]
    await admin.land_all()
    assert [change.result()["responses"][0]["error_code"] for change in changes] == [Code.NONE] * 3
    assert admin.overrides(kind) == SETTINGS[kind]


async def test_a_topic_that_grows_is_configured_at_the_same_time(admin: Admin) -> None:
    admin.meta.holding = True
    grown, replaced, changed = admin.grow(3), admin.replace("segment.ms", "5"), admin.set(TOPIC, "retention.ms", "7")
    await admin.land_all()
    assert grown.result()["results"][0]["error_code"] == Code.NONE
    assert replaced.result()["responses"][0]["error_code"] == Code.NONE
    assert changed.result()["responses"][0]["error_code"] == Code.NONE
    topic = admin.broker.topics.get("orders")
    assert topic is not None and topic.partition_count == 3
    assert topic.settings.overrides == {"segment.ms": "5", "retention.ms": "7"}


async def test_a_topic_is_deleted_while_it_changes(admin: Admin) -> None:
    """UNKNOWN_TOPIC_OR_PARTITION would say that it is gone already."""
    admin.meta.holding = True
    changed, deleted = admin.set(TOPIC, "retention.ms", "7"), admin.delete()
    await admin.land_all()
    assert changed.result()["responses"][0]["error_code"] == Code.NONE
    assert deleted.result()["responses"][0]["error_code"] == Code.NONE
    assert admin.broker.topics.get("orders") is None


async def test_a_topic_that_somebody_else_deletes_first_is_gone(admin: Admin) -> None:
    admin.meta.holding = True
    first, second = admin.delete(), admin.delete()
    await admin.land_all()
    codes = [each.result()["responses"][0]["error_code"] for each in (first, second)]
    assert codes == [Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION]
