"""The arguments of `millstream queue redrive`."""

from __future__ import annotations

import pytest
import typer

from millstream.cli.queue_redrive import parse_rate


def test_rates_are_records_a_second() -> None:
    assert [parse_rate(text) for text in ("50", "50/s", "0.5/s")] == [50, 50, 0.5]
    for text in ("", "0", "-1", "fast", "50/m", "1e9"):
        with pytest.raises(typer.BadParameter, match="--rate"):
            parse_rate(text)
