"""Checks of the verbs' arguments, at the call: a bad record found later would fail other records with it.

Each function returns a usable value, or raises a `MillstreamError` that says what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from millstream.core.errors import MillstreamError
from millstream.records.compression import Codec
from millstream.records.record import Headers

Start = Literal["earliest", "latest"]
GROUP_BYTES_MAX = 512
"""The broker's limit (`group_id_bytes_max`)."""
TIMESTAMP_MAX = 1 << 62
DELAY_SECONDS_MAX = 100 * 366 * 24 * 3600


def checked(
    timestamp: Any, key: Any, value: Any, headers: Any
) -> tuple[int | None, bytes | None, bytes | None, Headers]:
    """A record's parts in storable form; raises `MillstreamError` for an invalid part."""
    if key is not None and type(key) is not bytes:
        key = _bytes(key, "a key is bytes or None")
    if value is not None and type(value) is not bytes:
        value = _bytes(value, "a value is bytes or None", ": give an encoder for it (encode=...)")
    if timestamp is not None and (not isinstance(timestamp, int) or not 0 <= timestamp < TIMESTAMP_MAX):
        raise MillstreamError(f"a timestamp is milliseconds since 1970, as an int, not {timestamp!r}")
    return timestamp, key, value, _headers(headers) if headers else ()


def check_topic(topic: Any) -> None:
    if not isinstance(topic, str):
        raise MillstreamError(f"a topic's name is a str, not {type(topic).__name__}")


def check_partition(partition: Any) -> None:
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise MillstreamError(f"a partition is an int, not {partition!r}")


def checked_time(time: Any, offset: Any) -> int | None:
    """The start time in milliseconds; None if the start is an offset."""
    if isinstance(time, datetime):
        time = round(time.timestamp() * 1000)
    if time is not None and (type(time) is not int or not 0 <= time < TIMESTAMP_MAX):
        raise MillstreamError(f"a time is a datetime, or milliseconds since 1970 as an int, not {time!r}")
    if offset not in ("start", "end") and type(offset) is not int:
        raise MillstreamError(f"an offset is an int, 'start' or 'end', not {offset!r}")
    if time is not None and offset != "start":
        raise MillstreamError(f"give an offset or a time, not both: offset={offset!r}, time={time}")
    return time


def checked_delay(delay: Any) -> float:
    if not isinstance(delay, int | float) or not 0 <= delay <= DELAY_SECONDS_MAX:
        raise MillstreamError(f"a delay is a number of seconds, from 0 to a hundred years, not {delay!r}")
    return delay


def checked_reason(reason: Any) -> str:
    """In storable form: characters that UTF-8 cannot encode, as in file names, are escaped."""
    if not isinstance(reason, str):
        raise MillstreamError(f"a reason is text, not {type(reason).__name__}: give str(...) of it")
    return reason if reason.isascii() else reason.encode(errors="backslashreplace").decode()


def _headers(headers: Any) -> Headers:
    try:
        pairs = [(name, value) for name, value in headers]
    except (TypeError, ValueError):
        raise MillstreamError("headers are pairs of a name and a value, as (('trace', b'1'),)") from None
    for at, (name, value) in enumerate(pairs):
        if not isinstance(name, str):
            raise MillstreamError(f"a header's name is a str, not {type(name).__name__}")
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise MillstreamError(f"a header's name must be encodable as UTF-8, not {name!r}") from None
        if value is not None and type(value) is not bytes:
            pairs[at] = name, _bytes(value, "a header's value is bytes or None")
    return tuple(pairs)


def _bytes(data: Any, rule: str, advice: str = "") -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise MillstreamError(f"{rule}, not {type(data).__name__}{advice}")


def checked_topics(topics: str | Sequence[str]) -> tuple[str, ...]:
    try:
        names = (topics,) if isinstance(topics, str) else tuple(dict.fromkeys(topics))
    except TypeError:
        raise MillstreamError(f"topics are named by a str or several, not {topics!r}") from None
    for name in names:
        check_topic(name)
    if not names:
        raise MillstreamError("name at least one topic")
    return names


def checked_group(group: str) -> str:
    """librdkafka ends the process for an empty group name."""
    if not isinstance(group, str):
        raise MillstreamError(f"a group's name is a str, not {type(group).__name__}")
    try:
        size = len(group.encode())
    except UnicodeEncodeError:
        raise MillstreamError(f"a group's name must be encodable as UTF-8, not {group!r}") from None
    if not 0 < size <= GROUP_BYTES_MAX or "\0" in group:
        raise MillstreamError(f"a group's name has 1 to {GROUP_BYTES_MAX} bytes without NUL")
    return group


def setting_texts(settings: Mapping[str, str] | None) -> dict[str, str]:
    """Settings as text, the form that is stored and sent; numbers and booleans are accepted too."""
    texts = {}
    for name, value in (settings or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise MillstreamError(
                f"a setting is a name and its value as text, as 'retention.ms': '60000', not {value!r}"
            )
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def checked_start(start: str) -> Start:
    if start not in ("earliest", "latest"):
        raise MillstreamError(f"start is earliest or latest, not {start!r}")
    return start  # type: ignore[return-value]  # it is one of the two


def checked_codec(name: str) -> Codec:
    try:
        return Codec.parse(name)
    except Exception as error:
        raise MillstreamError(str(error)) from None
