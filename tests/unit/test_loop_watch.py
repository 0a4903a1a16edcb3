"""What tells that the event loop was held."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from millstream.core.loop_watch import BEAT_SECONDS, LoopWatch
from millstream.core.metrics import Metrics, Scrape


async def test_work_that_holds_the_loop_shows_in_both_figures_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    watch = LoopWatch(metrics)
    before = time.thread_time()
    watch.start()
    await asyncio.sleep(2 * BEAT_SECONDS)
    until = time.thread_time() + 0.15
    while time.thread_time() < until:
        pass
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(2 * BEAT_SECONDS)
    watch.stop()
    assert 0.15 - BEAT_SECONDS <= metrics.loop_busy_seconds_max < time.thread_time() - before
    assert metrics.stall_seconds.sum > 0.1 and metrics.stall_seconds.count > 1
    assert "event loop blocked for" in caplog.text
    text = Scrape(metrics, tuple, tuple, tuple).text().decode()
    assert "millstream_event_loop_stall_seconds_bucket" in text
    assert f"millstream_event_loop_busy_seconds_max {metrics.loop_busy_seconds_max}" in text


async def test_a_loop_that_waits_for_others_is_not_busy() -> None:
    metrics = Metrics()
    watch = LoopWatch(metrics)
    before = time.thread_time()
    watch.start()
    time.sleep(0.15)  # noqa: ASYNC251  (as a process that gets no CPU)
    await asyncio.sleep(2 * BEAT_SECONDS)
    watch.stop()
    assert metrics.loop_busy_seconds_max < time.thread_time() - before  # the figure counts CPU time only
    assert metrics.stall_seconds.sum > 0.1
