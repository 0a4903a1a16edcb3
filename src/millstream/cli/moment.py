"""Times as users write them: a duration (`10m`), or a moment (`2026-01-31T12:00`, `@1769857200000`)."""

from __future__ import annotations

import datetime
import re

import typer

UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DURATION_MS_MAX = 366 * UNITS_MS["d"]
MOMENT_MS_MAX = 9_999_999_999_999
_PART = re.compile(r"([0-9]{1,12})(ms|s|m|h|d)")


def duration_ms(text: str, option: str) -> int:
    """`90s`, `10m`, `1h30m`."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"{option} {text} is not a duration, as in 90s, 10m, 2h or 1d12h")
    duration = sum(int(number) * UNITS_MS[unit] for number, unit in parts)
    if duration > DURATION_MS_MAX:
        raise typer.BadParameter(f"{option} {text} is longer than a year")
    return duration


def moment_ms(text: str, option: str) -> int:
    """Local time unless it has a zone."""
    if re.fullmatch(r"@[0-9]+", text):
        moment = int(text[1:])
    else:
        try:
            moment = int(datetime.datetime.fromisoformat(text).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            raise typer.BadParameter(
                f"{option} {text} is not a time, as in 2026-01-31T12:00, 2026-01-31T12:00Z or @MILLISECONDS"
            ) from None
    if not 0 <= moment <= MOMENT_MS_MAX:
        raise typer.BadParameter(f"{option} {text} is not between the years 1970 and 2286")
    return moment


def past_ms(text: str, option: str, now_ms: int) -> int:
    """A moment, or a duration ago."""
    if _PART.match(text) and re.search("[smhd]$", text):
        return now_ms - duration_ms(text, option)
    try:
        return moment_ms(text, option)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error}; nor so long ago, as in 90s, 10m, 2h or 1d12h") from None
