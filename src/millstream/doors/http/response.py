"""A response of an HTTP page."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def text(cls, status: int, text: str) -> Response:
        return cls(status, text.encode() + b"\n")

    @classmethod
    def json(cls, status: int, value: object) -> Response:
        return cls(status, json.dumps(value).encode() + b"\n", "application/json")
