"""Kafka's messages, decoded and encoded by `kio` for every API that is not on the hot path.

`kio` has one class per message and version. Handlers should not care, so this module gives them one shape per API:

- A request becomes a `Message`: attributes are the protocol's field names (snake case); durations are integers of
  milliseconds under `kio`'s name (`session_timeout`), and a field that the client's version lacks is None. A name
  that no version has raises AttributeError, so a typo cannot read as "absent".
- A response is given as `Fields`, plain nested dictionaries. Fields that the client's version lacks are left out,
  fields with a default may be omitted.

`kio` is imported on first use: a broker that only produces and fetches never pays for it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import sys
import types
import typing
from typing import Any
from uuid import UUID

from millstream.errors import ProtocolError

Fields = dict[str, Any]
NO_ID = UUID(int=0)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)


class Message:
    """One decoded request, or a structure inside it."""

    __slots__ = ("_known", "_values")

    def __init__(self, values: Fields, known: frozenset[str]) -> None:
        self._values = values
        self._known = known

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            if name in self._known:
                return None
            raise AttributeError(f"no version of this message has a field {name!r}") from None

    def __repr__(self) -> str:
        return f"Message({self._values!r})"


def decode_request(key: int, version: int, body: bytes | memoryview) -> Message:
    entity = _load(key, version, "request")
    from kio.serial import entity_reader

    try:
        decoded, _ = entity_reader(entity)(bytes(body), 0)
    except Exception as error:  # kio raises several unrelated types for bytes that do not fit
        raise ProtocolError(f"the {entity.__name__} (version {version}) cannot be decoded: {error}") from error
    message = _to_message(decoded, _known_names(key))
    assert isinstance(message, Message)
    return message


def encode_response(key: int, version: int, fields: Fields) -> bytes:
    entity = _load(key, version, "response")
    from kio.serial import entity_writer

    buffer = io.BytesIO()
    entity_writer(entity)(buffer, _build(entity, fields))
    return buffer.getvalue()


def encode_refusal(key: int, version: int, code: int) -> tuple[bytes, bytes]:
    """Header tags and body of the answer to a request that is not served, if the protocol has a place for an error."""
    _import_kio()
    from kio.index import KioIndexError

    try:
        entity = _load(key, version, "response")
    except (KioIndexError, ImportError, AttributeError) as error:
        raise ProtocolError(f"API {key} in version {version} is not known") from error
    if "error_code" not in {field.name for field in dataclasses.fields(entity)}:
        raise ProtocolError(f"API {key} in version {version} is not served")
    nothing = {name: _nothing(kind, inner, is_array) for name, kind, inner, is_array in _plan(entity)}
    body = encode_response(key, version, {**nothing, "error_code": code})
    return (b"\0" if entity.__flexible__ else b""), body


def _nothing(kind: str, inner: Any, is_array: bool) -> Any:
    if is_array:
        return ()
    if inner is not None:
        return {name: _nothing(*rest) for name, *rest in _plan(inner)}
    return {"string": "", "bytes": b"", "records": None, "bool": False, "uuid": None}.get(kind, 0)


def is_flexible(key: int, version: int) -> bool:
    """Whether this version has tagged fields, in its header too."""
    return bool(_load(key, version, "request").__flexible__)


@functools.cache
def _load(key: int, version: int, kind: str) -> Any:
    _import_kio()
    from kio.index import load_request_schema, load_response_schema

    return load_request_schema(key, version) if kind == "request" else load_response_schema(key, version)


@functools.cache
def _import_kio() -> None:
    """Loads `kio` without `hypothesis`, which it would import wherever that is installed, for 2 s of a fresh broker."""
    if "hypothesis" in sys.modules:
        import kio.serial
    else:
        sys.modules["hypothesis"] = None  # type: ignore[assignment]  # documented: makes the import fail
        try:
            import kio.serial  # noqa: F401
        finally:
            del sys.modules["hypothesis"]


@functools.cache
def _known_names(key: int) -> frozenset[str]:
    """Every field name of any version of a request, structures inside it included."""
    from kio.schema.index import api_key_map, schema_name_map

    names: set[str] = set()
    for version in schema_name_map[api_key_map[key]]:
        pending = [_load(key, version, "request")]
        while pending:
            for field in dataclasses.fields(pending.pop()):
                names.add(field.name)
                inner = _entity_inside(field.type)
                if inner is not None:
                    pending.append(inner)
    return frozenset(names)


def _to_message(value: Any, known: frozenset[str]) -> Any:
    if dataclasses.is_dataclass(value):
        return Message(
            {field.name: _to_message(getattr(value, field.name), known) for field in dataclasses.fields(value)}, known
        )
    if isinstance(value, tuple):
        return [_to_message(item, known) for item in value]
    if isinstance(value, datetime.timedelta):
        return value // _MILLISECOND
    if isinstance(value, datetime.datetime):
        return (value - _EPOCH) // _MILLISECOND
    return value


def _build(entity: Any, fields: Fields) -> Any:
    arguments = {}
    for name, kind, inner, is_array in _plan(entity):
        if name not in fields:
            continue
        value = fields[name]
        if value is None:
            pass
        elif inner is not None:
            value = tuple(_build(inner, item) for item in value) if is_array else _build(inner, value)
        elif is_array:
            value = tuple(value)
        elif kind == "error_code":
            value = _error_code(int(value))
        elif kind.startswith("timedelta"):
            value = value * _MILLISECOND
        elif kind.startswith("datetime"):
            value = None if value < 0 else _EPOCH + value * _MILLISECOND
        arguments[name] = value
    return entity(**arguments)


@functools.cache
def _plan(entity: Any) -> list[tuple[str, str, Any, bool]]:
    """For each field: its name, Kafka type, the structure inside it if any, and whether it is an array."""
    return [
        (
            field.name,
            field.metadata.get("kafka_type", ""),
            _entity_inside(field.type),
            _is_array(field.type),
        )
        for field in dataclasses.fields(entity)
    ]


def _is_array(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple or any(_is_array(part) for part in _union_parts(annotation))


def _entity_inside(annotation: Any) -> Any:
    if dataclasses.is_dataclass(annotation):
        return annotation
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else _union_parts(annotation)
    for part in parts:
        inner = _entity_inside(part)
        if inner is not None:
            return inner
    return None


def _union_parts(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else ()


@functools.cache
def _error_code(number: int) -> Any:
    from kio.schema.errors import ErrorCode

    return ErrorCode(number)
