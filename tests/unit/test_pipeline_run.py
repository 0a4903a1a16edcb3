"""A pipeline that is watched: how it is told to stop, and when a query is begun again. Without Spark."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from millstream.cli.running import Stop
from millstream.pipeline import run
from millstream.pipeline.run import BEGINNINGS_MAX, WORKER_LATE, Pipeline, PipelineFailed, _Running

LINES = 80
"""More than one round of `watch` has, with all that it calls."""


class Query:
    """As far as `watch` looks at one."""

    id = "1"

    def __init__(self, error: Exception | None = None) -> None:
        self.isActive = error is None
        self.recentProgress: list[Any] = []
        self._error = error

    def exception(self) -> Exception | None:
        return self._error

    def stop(self) -> None:
        pass


class Taken:
    """A sink that takes everything."""

    def deliver(self, rows: Any, batch: int) -> int:
        return 1

    def close(self) -> None:
        pass


def watched(query: Query) -> tuple[Pipeline, _Running]:
    nothing: Any = None
    begun: Any = query
    pipeline = Pipeline(nothing, nothing, "127.0.0.1:9092")
    running = _Running("sink", lambda *_: Taken(), begin=lambda: begun)
    running.start()
    pipeline._running.append(running)
    return pipeline, running


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "POLL_SECONDS", 0.0)


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


@pytest.mark.timeout(20)
def test_a_stop_may_be_asked_for_at_any_moment(handlers: None) -> None:
    """A signal's handler runs in the thread that watches, between any two of its lines, also where that has a lock."""
    for line in range(1, LINES):
        assert stopped_at(line)


def stopped_at(line: int) -> bool:
    """Whether the pipeline's watching ended after a signal before that line, of those that it goes through."""
    pipeline, _ = watched(Query())
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGTERM)
        return trace

    tracing = sys.gettrace()
    with Stop() as stop:
        sys.settrace(trace)
        try:
            return list(pipeline.watch(lambda: stop.is_asked)) == []
        finally:
            sys.settrace(tracing)


def test_a_query_that_delivers_has_all_its_beginnings_again() -> None:
    pipeline, running = watched(Query(RuntimeError(WORKER_LATE)))
    batches = iter(range(3 * BEGINNINGS_MAX))

    def deliver_or_stop() -> bool:
        batch = next(batches, None)
        if batch is not None:
            running.on_batch(None, batch)  # type: ignore[arg-type]
        return batch is None

    assert list(pipeline.watch(deliver_or_stop)) == []
    with pytest.raises(PipelineFailed, match=f"{WORKER_LATE}.* too busy .* again"):
        list(pipeline.watch())
