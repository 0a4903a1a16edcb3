"""Durations and moments as people write them."""

from __future__ import annotations

import pytest
import typer

from millstream.cli.moment import duration_ms, moment_ms, past_ms


@pytest.mark.parametrize(
    ("text", "length"),
    [("250ms", 250), ("30s", 30_000), ("10m", 600_000), ("2h", 7_200_000), ("1d12h", 129_600_000), ("0s", 0)],
)
def test_durations_are_numbers_with_units(text: str, length: int) -> None:
    assert duration_ms(text, "--delay") == length


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "10 m", "10min", "1.5h", "10m!", "999999d"])
def test_what_is_no_duration_is_named_with_its_option(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--delay"):
        duration_ms(text, "--delay")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("@1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T23:13:20.5+01:00", 1_700_000_000_500),
    ],
)
def test_moments_are_iso_or_milliseconds(text: str, moment: int) -> None:
    assert moment_ms(text, "--at") == moment


@pytest.mark.parametrize("text", ["", "soon", "10m", "@", "@99999999999999", "1900-01-01T00:00Z", "2026-13-01"])
def test_what_is_no_moment_is_named_with_its_option(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--at"):
        moment_ms(text, "--at")


def test_the_past_may_be_a_moment_or_so_long_ago() -> None:
    assert past_ms("2h", "--since", 10_000_000) == 2_800_000
    assert past_ms("@5", "--since", 10_000_000) == 5
    with pytest.raises(typer.BadParameter, match=r"--since tomorrow is not a time, .* nor so long ago, as in 90s"):
        past_ms("tomorrow", "--since", 0)
    assert past_ms("2023-11-14T22:13:20Z", "--since", 0) == 1_700_000_000_000
