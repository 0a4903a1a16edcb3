"""Messages of confluent-kafka whose fields are there: the library's types allow None for every one of them."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Message


def value(message: Message | None) -> bytes:
    assert message is not None and message.error() is None
    found = message.value()
    assert isinstance(found, bytes)
    return found


def offset(message: Message) -> int:
    found = message.offset()
    assert found is not None
    return found


def partition(message: Message) -> int:
    found = message.partition()
    assert found is not None
    return found


def place(message: Message) -> tuple[int, int]:
    return partition(message), offset(message)


def headers(message: Message) -> list[tuple[str, Any]]:
    found = message.headers() or []
    assert isinstance(found, list)
    return found


def error_code(message: Message | None) -> int:
    assert message is not None
    error = message.error()
    assert error is not None
    return error.code()
