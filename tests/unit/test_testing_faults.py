"""Answers with errors, made from the schemas alone: for every API and version, whatever the request."""

from __future__ import annotations

import dataclasses
import random
import struct
from typing import Any

import pytest

from millstream.core.errors import Code
from millstream.doors.kafka.apis import APIS
from millstream.testing.faults import API_VERSIONS, METADATA, Faults
from millstream.wire.kafka import messages
from tests.compat.random_messages import Maker, read_response

CASES = [
    (key, version)
    for key, api in APIS.items()
    for version in range(api.low, api.high + 1)
    if key not in (METADATA, API_VERSIONS)
]


def frame(key: int, version: int, body: bytes) -> memoryview:
    head = struct.pack(">hhih", key, version, 7, -1)
    return memoryview(head + (b"\0" if messages.is_flexible(key, version) else b"") + body)


def error_codes(entity: Any) -> list[int]:
    found: list[int] = []
    for field in dataclasses.fields(entity):
        value = getattr(entity, field.name)
        if field.metadata.get("kafka_type") == "error_code" and "tag" not in field.metadata:
            found.append(value.value)
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                found += error_codes(each)
    return found


@pytest.mark.parametrize(("key", "version"), CASES, ids=[f"{APIS[key].name}-{version}" for key, version in CASES])
def test_every_api_can_be_made_to_fail(key: int, version: int) -> None:
    maker = Maker(random.Random(f"{key} {version}"))
    failed = 0
    for _ in range(20):
        faults = Faults()
        faults.add(key, Code.NOT_COORDINATOR)
        answer = faults(key, version, frame(key, version, maker.request(key, version)))
        if answer is None:  # a produce request with acks=0
            assert key == 0 and faults.left == 1
            continue
        codes = error_codes(read_response(key, version, answer[1]))
        assert set(codes) <= {Code.NOT_COORDINATOR}
        failed += bool(codes)
        assert faults.left == 0 and faults(key, version, frame(key, version, b"")) is None
    assert failed, "no answer had an error in it"
