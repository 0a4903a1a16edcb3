"""An error answer for any API, built from its schema alone.

All its error codes are the same. Names, ids and numbers of topics and partitions come from the request; every other
field is empty.
"""

from __future__ import annotations

from typing import Any

from millstream.core.errors import Code, ProtocolError
from millstream.wire.kafka import messages
from millstream.wire.kafka.messages import Fields, Message

_SAME = {"index": "partition_index", "partition_index": "index", "partition": "partition_index", "group_id": "group_id"}
"""Answer fields that have another name in some request."""


def answer(key: int, version: int, body: memoryview, code: Code) -> bytes:
    """The request may be malformed if the answer has a top-level error code."""
    try:
        request = messages.decode_request(key, version, body)
    except ProtocolError:
        if not any(each.kind == "error_code" for each in messages.response_plan(key, version)):
            raise
        request = Message({}, frozenset())
    return encode(key, version, request, code)


def encode(key: int, version: int, request: Message, code: Code) -> bytes:
    return messages.encode_response(key, version, _structure(messages.response_plan(key, version), request, code))


def _structure(plan: list[messages.Planned], request: Any, code: Code) -> Fields:
    return {each.name: _value(each, request, code) for each in plan}


def _value(field: messages.Planned, request: Any, code: Code) -> Any:
    if field.kind == "error_code":
        return int(code)
    if field.name == "error_message":
        return code.text
    if field.is_array:
        if field.inner is None:
            return ()
        return [_structure(field.inner, each, code) for each in _parts(field, request)]
    found = _find(request, field.name)
    if found is None and field.name in _SAME:
        found = _find(request, _SAME[field.name])
    if found is not None and field.inner is None:
        return found
    return messages.nothing(field)


def _find(request: Any, name: str) -> Any:
    if isinstance(request, Message):
        return request.get(name)
    # The request lists bare names or numbers; the answer has a structure for each.
    if isinstance(request, str):
        return request if name in ("group_id", "key", "name") else None
    return request if name in ("index", "partition", "partition_index") else None


def _parts(field: messages.Planned, request: Any) -> list[Any]:
    """The request's array for an array of the answer: by name, else the first one, if the answer's has errors."""
    if not isinstance(request, Message):
        return []
    arrays = request.arrays()
    if field.name not in arrays and field.inner is not None and _has_error(field.inner):
        return next(iter(arrays.values()), [])
    return arrays.get(field.name, [])


def _has_error(plan: list[messages.Planned]) -> bool:
    return any(each.kind == "error_code" or (each.inner is not None and _has_error(each.inner)) for each in plan)
