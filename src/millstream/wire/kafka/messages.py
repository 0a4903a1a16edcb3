"""Kafka's messages, decoded and encoded with `kio`'s schemas for every API that is not on the hot path.

`kio` has one class per message and version. This module gives handlers one shape per API:

- A request becomes a `Message`: attributes are the protocol's field names (snake case); durations are integers of
  milliseconds under `kio`'s name (`session_timeout`), and a field that the client's version lacks is None. A name
  that no version has raises AttributeError, so a typo cannot read as "absent".
- A response is given as `Fields`, plain nested dictionaries. Fields that the client's version lacks are left out,
  fields with a default may be omitted.

Requests are decoded with `kio`'s schemas, but not with its compiled parser, which trusts its input. An array that
claims 2^31 items makes that parser allocate memory for all of them, which kills the process. It also refuses unknown
tagged fields (KIP-482), which newer clients may send.

`kio` is imported on first use: a broker that only produces and fetches never imports it. The import takes some 100 ms,
and the schemas of an API up to 50 ms more, so the door runs it in a thread (`load`).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import sys
import types
import typing
from collections.abc import Callable
from typing import Any
from uuid import UUID

from millstream.core.errors import ProtocolError
from millstream.wire.kafka.primitives import Reader, error_text

Fields = dict[str, Any]
REQUEST_BYTES_MAX = 5 << 20
"""A member's subscription may have 4 MiB; no other request of these APIs is nearly as large."""
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

    def get(self, name: str) -> Any:
        """The field, or None if this version of the message does not have it."""
        return self._values.get(name)

    def arrays(self) -> dict[str, list[Any]]:
        return {name: value for name, value in self._values.items() if isinstance(value, list)}

    def fields(self) -> Fields:
        """The message as `Fields`, for encoding."""
        return {name: _plain(value) for name, value in self._values.items()}

    def __repr__(self) -> str:
        return f"Message({self._values!r})"


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.fields()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def decode_request(key: int, version: int, body: bytes | memoryview) -> Message:
    if len(body) > REQUEST_BYTES_MAX:
        raise ProtocolError(f"a request of {len(body)} bytes to API {key}: at most {REQUEST_BYTES_MAX} are allowed")
    message = _request_reader(key, version)(Reader(memoryview(body)))
    assert isinstance(message, Message)
    return message


def encode_response(key: int, version: int, fields: Fields) -> bytes:
    entity = _load(key, version, "response")
    from kio.serial import entity_writer

    buffer = io.BytesIO()
    entity_writer(entity)(buffer, _build(entity, fields))
    return buffer.getvalue()


def encode_request(key: int, version: int, fields: Fields) -> bytes:
    """For clients: the body of a request."""
    entity = _load(key, version, "request")
    from kio.serial import entity_writer

    buffer = io.BytesIO()
    entity_writer(entity)(buffer, _build(entity, fields))
    return buffer.getvalue()


def decode_response(key: int, version: int, reader: Reader) -> Message:
    """For clients: an answer, read from behind its correlation id."""
    message = _response_reader(key, version)(reader)
    assert isinstance(message, Message)
    return message


_NOTHING = {"string": "", "bytes": b"", "records": None, "bool": False, "uuid": None}


class Planned(typing.NamedTuple):
    """One field of an answer."""

    name: str
    kind: str
    inner: list[Planned] | None
    is_array: bool


def response_plan(key: int, version: int) -> list[Planned]:
    """The fields of an answer, with nested structures, for generic code (`refusal.py`)."""
    return _planned(_load(key, version, "response"))


def _planned(entity: Any) -> list[Planned]:
    """Without tagged fields, which are optional (KIP-482)."""
    return [
        Planned(name, kind, None if inner is None else _planned(inner), is_array)
        for field, (name, kind, inner, is_array) in zip(dataclasses.fields(entity), _plan(entity), strict=True)
        if "tag" not in field.metadata or field.default is dataclasses.MISSING
    ]


def nothing(field: Planned) -> Any:
    if field.is_array:
        return ()
    if field.inner is not None:
        return {each.name: nothing(each) for each in field.inner}
    return b"" if field.kind == "records" else _NOTHING.get(field.kind, 0)


def is_flexible(key: int, version: int) -> bool:
    """Whether this version is flexible (KIP-482), including its header."""
    return bool(_load(key, version, "request").__flexible__)


def require(key: int, version: int) -> None:
    """Raises `ProtocolError` without a schema: such a request can be neither decoded nor answered."""
    _import_kio()
    from kio.index import KioIndexError

    try:
        _load(key, version, "request")
    except (KioIndexError, ImportError, AttributeError) as error:
        raise ProtocolError(f"API {key} has no version {version}") from error


def load(key: int, version: int) -> None:
    """Imports the schemas of this version's requests and answers. Runs in any thread."""
    _request_reader(key, version)
    entity = _load(key, version, "response")
    from kio.serial import entity_writer

    entity_writer(entity)
    _plan(entity)
    _loaded.add((key, version))


def is_loaded(key: int, version: int) -> bool:
    return (key, version) in _loaded


_loaded: set[tuple[int, int]] = set()


@functools.cache
def _load(key: int, version: int, kind: str) -> Any:
    _import_kio()
    from kio.index import load_request_schema, load_response_schema

    return load_request_schema(key, version) if kind == "request" else load_response_schema(key, version)


@functools.cache
def _import_kio() -> None:
    """Imports `kio` without `hypothesis`, which `kio` imports if it is installed: 2 s for a new broker."""
    if "hypothesis" in sys.modules:
        import kio.serial
    else:
        sys.modules["hypothesis"] = None  # type: ignore[assignment]  # documented: makes the import fail
        try:
            import kio.serial  # noqa: F401
        finally:
            del sys.modules["hypothesis"]


@functools.cache
def _known_names(key: int, kind: str) -> frozenset[str]:
    """Every field name of every version of a message, with nested structures."""
    from kio.schema.index import api_key_map, schema_name_map

    names: set[str] = set()
    for version in schema_name_map[api_key_map[key]]:
        pending = [_load(key, version, kind)]
        while pending:
            for field in dataclasses.fields(pending.pop()):
                names.add(field.name)
                inner = _entity_inside(field.type)
                if inner is not None:
                    pending.append(inner)
    return frozenset(names)


Read = Callable[[Reader], Any]


@functools.cache
def _request_reader(key: int, version: int) -> Read:
    return _structure(_load(key, version, "request"), _known_names(key, "request"))


@functools.cache
def _response_reader(key: int, version: int) -> Read:
    entity = _load(key, version, "response")
    structure = _structure(entity, _known_names(key, "response"))

    def read(reader: Reader) -> Message:
        if entity.__flexible__:
            reader.skip_tags()
        message = structure(reader)
        assert isinstance(message, Message)
        return message

    return read


def _structure(entity: Any, known: frozenset[str]) -> Read:
    compact = bool(entity.__flexible__)
    fields: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    defaults: Fields = {}
    for field, (name, kind, inner, is_array) in zip(dataclasses.fields(entity), _plan(entity), strict=True):
        is_nullable = type(None) in typing.get_args(field.type)
        read = _field(kind, inner, is_array, is_nullable, compact, known)
        if "tag" in field.metadata:
            tagged[field.metadata["tag"]] = (name, read)
            defaults[name] = None
        else:
            fields.append((name, read))

    def read_structure(reader: Reader) -> Message:
        values = dict(defaults)
        for name, read in fields:
            values[name] = read(reader)
        if compact:
            for tag, end in reader.tags():
                if tag in tagged:
                    name, read = tagged[tag]
                    values[name] = read(reader)
                reader.skip_to(end)
        return Message(values, known)

    return read_structure


def _field(kind: str, inner: Any, is_array: bool, is_nullable: bool, compact: bool, known: frozenset[str]) -> Read:
    if is_array:
        item = _field(kind, inner, False, False, compact, known)

        def read_array(reader: Reader) -> list[Any] | None:
            count = reader.count(compact, 1)
            if count < 0 and not is_nullable:
                raise ProtocolError("an array is null, which its field does not allow")
            return None if count < 0 else [item(reader) for _ in range(count)]

        return read_array
    if inner is not None:
        structure = _structure(inner, known)
        return (lambda reader: structure(reader) if reader.i8() >= 0 else None) if is_nullable else structure
    if kind == "string":
        return (lambda reader: reader.string(compact)) if is_nullable else (lambda reader: reader.text(compact))
    if kind in ("bytes", "records"):
        return lambda reader: _to_bytes(reader.blob(compact), is_nullable)
    return _NUMBERS[kind]


_NUMBERS: dict[str, Read] = {
    "int8": Reader.i8,
    "int16": Reader.i16,
    "int32": Reader.i32,
    "int64": Reader.i64,
    "uint16": Reader.u16,
    "float64": Reader.f64,
    "bool": Reader.boolean,
    "error_code": Reader.i16,
    "timedelta_i32": Reader.i32,
    "timedelta_i64": Reader.i64,
    "datetime_i64": lambda reader: None if (value := reader.i64()) < 0 else value,
    "uuid": lambda reader: None if (value := reader.uuid()) == NO_ID else value,
}


def _to_bytes(view: memoryview | None, is_nullable: bool) -> bytes | None:
    if view is None and not is_nullable:
        raise ProtocolError("bytes are null, which their field does not allow")
    return None if view is None else bytes(view)


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
        elif name == "error_message":
            value = error_text(value)
        elif kind.startswith("timedelta"):
            value = value * _MILLISECOND
        elif kind.startswith("datetime"):
            value = None if value < 0 else _EPOCH + value * _MILLISECOND
        arguments[name] = value
    return entity(**arguments)


@functools.cache
def _plan(entity: Any) -> list[tuple[str, str, Any, bool]]:
    """For each field: name, Kafka type, nested structure if any, and whether it is an array."""
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
