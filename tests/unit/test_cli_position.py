"""Where to begin, as people write it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from millstream.admin.position import Kind, Position
from millstream.cli.position import parse_position
from millstream.cli.produce import produce
from millstream.cli.topic import app as topic


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("start", Position(Kind.START)),
        ("17", Position(Kind.OFFSET, 17)),
        ("-5", Position(Kind.RELATIVE, -5)),
        ("@1700000000000", Position(Kind.TIME, 1_700_000_000_000)),
        ("2023-11-14T22:13:20Z", Position(Kind.TIME, 1_700_000_000_000)),
        (f"@{(1 << 63) - 1}", Position(Kind.TIME, (1 << 63) - 1)),
    ],
)
def test_positions_are_words_offsets_and_times(text: str, position: Position) -> None:
    assert parse_position(text) == position


@pytest.mark.parametrize(
    "text", ["", "soon", "@", f"@{1 << 63}", "0001-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "1969-12-31T00:00:00Z"]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_position(text)


def test_numbers_of_partitions_that_no_topic_can_have_are_refused_before_anything_is_sent() -> None:
    for arguments in (["create", "orders", "-p", "99999999999"], ["alter", "orders", "-p", "99999999999"]):
        refused = CliRunner().invoke(topic, arguments)
        assert refused.exit_code == 2 and "99999999999 is not in the range" in refused.output
    app = typer.Typer()
    app.command()(produce)
    refused = CliRunner().invoke(app, ["orders", "x", "-p", "99999999999"])
    assert refused.exit_code == 2 and "99999999999 is not in the range" in refused.output
