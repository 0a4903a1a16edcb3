"""Log lines: one line per event, whatever it contains, at a bounded rate."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from millstream.core import logs


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("restored_logging")
def test_logs_are_one_json_object_a_line_when_nobody_watches() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    log = logging.getLogger("millstream.log")
    log.debug("not shown")
    log.error("%s is 100%% read-only: %s", "orders-3", OSError(5, "Input/output\nerror"))
    logging.getLogger("library").warning("plain %s", "words")
    try:
        raise ValueError("odd")
    except ValueError:
        log.exception("failed")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"]) == ("error", "millstream.log")
    assert first["event"] == "orders-3 is 100% read-only: [Errno 5] Input/output\nerror"
    assert second["event"] == "plain words"
    assert "ValueError: odd" in third["traceback"]


@pytest.mark.usefixtures("restored_logging")
def test_a_name_from_outside_cannot_break_a_text_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    logging.getLogger("millstream").info("client %s connected from %s", "evil\x1b[2J\nERROR fake", "10.0.0.1:5")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"INFO    client evil\u001b[2J\nERROR fake connected from 10.0.0.1:5")


def test_what_comes_over_and_over_is_said_a_few_times_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    damped = logs.Damped("millstream.test")
    for number in range(1000):
        damped.warning("refused %d", number)
    damped.warning("another kind")
    said = [record.getMessage() for record in caplog.records]
    assert said[:-2] == [f"refused {number}" for number in range(9)]
    assert said[-2:] == ["refused 9 (further messages like this are suppressed for now)", "another kind"]
    caplog.clear()
    now += logs.DAMPED_SECONDS
    damped.warning("refused %d", 1000)
    damped.warning("another kind")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["suppressed 990 more like the next one in 10 s", "refused 1000", "another kind"]
