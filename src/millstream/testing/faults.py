"""Injected error responses: `fail_next` puts them into the Kafka door.

The request is not executed.
"""

from __future__ import annotations

from collections import deque

from millstream.core.errors import Code, code_of
from millstream.doors.kafka.apis import APIS
from millstream.wire.kafka import header, messages, refusal

PRODUCE, METADATA, API_VERSIONS = 0, 3, 18


class Faults:
    def __init__(self) -> None:
        self._waiting: dict[int, deque[Code]] = {}

    def add(self, api: str | int, code: Code | int | str, times: int = 1) -> None:
        key = _key(api)
        if key in (METADATA, API_VERSIONS):
            raise ValueError("Metadata and ApiVersions cannot be made to fail: clients would find no broker")
        chosen = Code.__members__.get(code.upper()) if isinstance(code, str) else code_of(code)
        if chosen is None or chosen == Code.NONE:
            raise ValueError(f"{code} is not the code of an error")
        self._waiting.setdefault(key, deque()).extend([chosen] * times)

    @property
    def left(self) -> int:
        """How many requests will still fail."""
        return sum(map(len, self._waiting.values()))

    def __call__(self, key: int, version: int, frame: memoryview) -> tuple[bytes, bytes] | None:
        waiting = self._waiting.get(key)
        if not waiting:
            return None
        is_flexible = messages.is_flexible(key, version)
        _, reader = header.skip_client(frame, is_flexible)
        request = messages.decode_request(key, version, reader.buffer[reader.position :])
        if key == PRODUCE and request.acks == 0:  # has no response that could carry an error
            return None
        return (b"\0" if is_flexible else b""), refusal.encode(key, version, request, waiting.popleft())


def _key(api: str | int) -> int:
    if isinstance(api, int) and api in APIS:
        return api
    wanted = str(api).replace("_", "").lower()
    for key, served in APIS.items():
        if served.name.split("_", 2)[2].replace("_", "") == wanted:
            return key
    known = ", ".join(sorted(served.name.split("_", 2)[2] for served in APIS.values()))
    raise ValueError(f"there is no API {api!r}; there are {known}")
