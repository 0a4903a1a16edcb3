"""Answers with an error in place of the real ones: what `fail_next` puts into the Kafka door.

An answer is made from the API's schema alone. Its error codes are all the same; names, ids and numbers of topics and
partitions are those of the request, everything else is empty. The request is not carried out.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from millstream.doors.kafka.apis import APIS
from millstream.errors import Code, code_of
from millstream.wire.kafka import header, messages
from millstream.wire.kafka.messages import Fields, Message

PRODUCE, METADATA, API_VERSIONS = 0, 3, 18
_SAME = {"index": "partition_index", "partition_index": "index", "partition": "partition_index", "group_id": "group_id"}
"""Fields of answers that have another name in some request."""


class Faults:
    def __init__(self) -> None:
        self._waiting: dict[int, deque[Code]] = {}

    def add(self, api: str | int, code: Code | int | str, times: int = 1) -> None:
        key = _key(api)
        if key in (METADATA, API_VERSIONS):
            raise ValueError("Metadata and ApiVersions cannot be made to fail: clients would know no broker")
        chosen = Code.__members__.get(code.upper()) if isinstance(code, str) else code_of(code)
        if chosen is None or chosen == Code.NONE:
            raise ValueError(f"{code} is not the code of an error")
        self._waiting.setdefault(key, deque()).extend([chosen] * times)

    @property
    def left(self) -> int:
        """How many requests are still to fail."""
        return sum(map(len, self._waiting.values()))

    def __call__(self, key: int, version: int, frame: memoryview) -> tuple[bytes, bytes] | None:
        waiting = self._waiting.get(key)
        if not waiting:
            return None
        is_flexible = messages.is_flexible(key, version)
        _, reader = header.skip_client(frame, is_flexible)
        request = messages.decode_request(key, version, reader.buffer[reader.position :])
        if key == PRODUCE and request.acks == 0:  # nobody waits for an answer that could fail
            return None
        code = waiting.popleft()
        fields = _structure(messages.response_plan(key, version), request, code)
        return (b"\0" if is_flexible else b""), messages.encode_response(key, version, fields)


def _key(api: str | int) -> int:
    if isinstance(api, int) and api in APIS:
        return api
    wanted = str(api).replace("_", "").lower()
    for key, served in APIS.items():
        if served.name.split("_", 2)[2].replace("_", "") == wanted:
            return key
    known = ", ".join(sorted(served.name.split("_", 2)[2] for served in APIS.values()))
    raise ValueError(f"there is no API {api!r}; there are {known}")


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
    # A request that lists bare names or numbers: the answer has a structure for each.
    if isinstance(request, str):
        return request if name in ("group_id", "key", "name") else None
    return request if name in ("index", "partition", "partition_index") else None


def _parts(field: messages.Planned, request: Any) -> list[Any]:
    """The request's array that one of the answer speaks about: of that name; else its first, if errors go there."""
    if not isinstance(request, Message):
        return []
    arrays = request.arrays()
    if field.name not in arrays and field.inner is not None and _has_error(field.inner):
        return next(iter(arrays.values()), [])
    return arrays.get(field.name, [])


def _has_error(plan: list[messages.Planned]) -> bool:
    return any(each.kind == "error_code" or (each.inner is not None and _has_error(each.inner)) for each in plan)
