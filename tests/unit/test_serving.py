"""The two ways into `serve` know the same flags."""

from __future__ import annotations

import inspect

import pytest

from millstream.cli import serving
from millstream.cli.serve import serve


def test_the_plain_way_knows_every_flag_that_the_library_knows() -> None:
    assert set(inspect.signature(serve).parameters) == {*serving.WITH_VALUE, *serving.SWITCHES}


def test_flags_may_be_written_with_a_space_or_with_an_equals_sign() -> None:
    expected = {"data": "d", "log_level": "debug", "allow_unauthenticated": True}
    assert serving.plain_flags(["--data", "d", "--log-level=debug", "--allow-unauthenticated"]) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--dta", "d"],
        ["--data"],
        ["--data", "--http"],
        ["d"],
        ["--log_level", "x"],
        ["--allow-unauthenticated=1"],
    ],
)
def test_everything_unusual_is_left_to_the_library(arguments: list[str]) -> None:
    assert serving.plain_flags(arguments) is None
