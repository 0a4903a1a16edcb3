"""Random but valid Kafka messages of any API and version, written and read by `kio`."""

from __future__ import annotations

import dataclasses
import datetime
import io
import random
import typing
import uuid
from collections.abc import Mapping
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

_MILLISECOND = datetime.timedelta(milliseconds=1)
_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_SIGNED = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


class Maker:
    """Makes messages; `hints` gives values to pick from by field name, so that requests hit what exists."""

    def __init__(
        self,
        generator: random.Random,
        hints: Mapping[str, typing.Sequence[Any]] | None = None,
        hinted_share: float = 1.0,
    ) -> None:
        self._random = generator
        self._hints = hints or {}
        self._hinted_share = hinted_share

    def request(self, key: int, version: int) -> bytes:
        """The body of a request, without its header."""
        return write(self.entity(load_request_schema(key, version)))

    def entity(self, kind: Any) -> Any:
        return kind(**{field.name: self._field(field) for field in dataclasses.fields(kind)})

    def _field(self, field: dataclasses.Field[Any]) -> Any:
        is_nullable = type(None) in typing.get_args(field.type)
        if is_nullable and field.metadata.get("kafka_type") not in ("uuid", "datetime_i64") and self._chance(0.2):
            return None
        if "tag" in field.metadata and self._chance(0.5):
            return field.default
        is_array, inner = _shape(field.type)
        if not is_array:
            return self._value(field.name, field.metadata.get("kafka_type"), inner)
        count = self._random.choice((0, 1, 1, 2, 3))
        return tuple(self._value(field.name, field.metadata.get("kafka_type"), inner) for _ in range(count))

    def _value(self, name: str, kind: str | None, inner: Any) -> Any:
        pick = self._random
        if dataclasses.is_dataclass(inner):
            return self.entity(inner)
        if name in self._hints and self._chance(self._hinted_share):
            return pick.choice(self._hints[name])
        if kind in _SIGNED:
            return self._integer(_SIGNED[kind])
        if kind == "uint16":
            return pick.randrange(1 << 16)
        if kind == "float64":
            return pick.choice((0.0, -1.5, pick.random()))
        if kind == "string":
            return "".join(pick.choice("abcä.-_/€") for _ in range(pick.choice((0, 1, 5, 40, 200))))
        if kind in ("bytes", "records"):
            return pick.randbytes(pick.choice((0, 1, 20, 300)))
        if kind == "bool":
            return self._chance(0.5)
        if kind == "uuid":
            return uuid.UUID(int=pick.getrandbits(128)) if self._chance(0.8) else None
        if kind == "error_code":
            return pick.choice(list(ErrorCode))
        if kind in ("timedelta_i32", "timedelta_i64"):
            return pick.choice((0, 1, 100, pick.randrange(1 << 31))) * _MILLISECOND
        if kind == "datetime_i64":
            return None if self._chance(0.3) else _EPOCH + pick.randrange(1 << 41) * _MILLISECOND
        raise AssertionError(f"{name} is of a kind that is not known here: {kind}")

    def _integer(self, bits: int) -> int:
        limit = 1 << (bits - 1)
        pick = self._random
        return pick.choice((-1, 0, 1, pick.randrange(100), pick.randrange(-limit, limit), limit - 1, -limit))

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def _shape(annotation: Any) -> tuple[bool, Any]:
    """Whether it is an array, and the type of one item; None is looked through."""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is tuple:
            return True, typing.get_args(part)[0]
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    return False, parts[0] if parts else annotation


def write(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def read_response(key: int, version: int, body: bytes) -> Any:
    """The decoded answer; nothing may be left over."""
    kind = load_response_schema(key, version)
    entity, size = entity_reader(kind)(body, 0)
    assert size == len(body), f"{len(body) - size} bytes are left over after {kind.__name__} version {version}"
    return entity
