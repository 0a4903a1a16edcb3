"""The verbs without async, in threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import millstream.sync
from millstream.core.errors import Closed, LeaseLost, Undecodable, UnknownTopic
from millstream.testing.broker_thread import BrokerThread

SECONDS = 20.0
"""Far more than anything here takes: what waits longer hangs."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def either(kind: str, request: pytest.FixtureRequest) -> millstream.sync.Millstream:
    if kind == "embedded":
        return millstream.sync.open("memory:")
    return millstream.sync.connect(request.getfixturevalue("millstream").bootstrap)


def test_a_script_sends_and_reads() -> None:
    with millstream.sync.open("memory:") as ms:
        sent = ms.send("orders", b"widget", key=b"user-1")
        assert (sent.partition, sent.offset) == (0, 0)
        ms.send_many([("orders", b"%d" % number) for number in range(1500)])
        values = [record.value for record in ms.read("orders", follow=False)]
        assert values == [b"widget", *(b"%d" % number for number in range(1500))]
        assert ms.topics() == {"orders": 1}
        ms.create_topic("audit", partitions=2)
        ms.delete_topic("audit")
        with pytest.raises(UnknownTopic):
            list(ms.read("audit", follow=False))


def test_a_server_is_reached_in_the_same_way(millstream: BrokerThread) -> None:
    from millstream import sync

    with sync.connect(millstream.bootstrap) as ms:
        ms.send("orders", {"n": 1}, encode=lambda order: json.dumps(order).encode())
        with ms.stream("orders", group="g", decode=json.loads) as stream:
            record = stream.receive(20)
            assert record is not None and record.value == {"n": 1} and stream.assignment == [("orders", 0)]
            stream.commit()


def test_jobs_and_events_are_answered_from_the_script() -> None:
    with millstream.sync.open("memory:") as ms:
        ms.send_many([("jobs", b"1"), ("jobs", b"2")])
        with ms.queue("jobs", group="workers") as jobs:
            first = jobs.receive(5)
            assert first is not None and first.attempt == 1
            first.renew()
            first.accept()
            with pytest.raises(LeaseLost):
                first.accept()
            for job in jobs:
                job.reject("no")
                break
            assert jobs.receive(0.01) is None
        with ms.exclusive("jobs", group="projector") as ledger:
            assert ledger.changed(0) and ledger.is_active
            event = ledger.receive(5)
            assert event is not None
            event.commit()
        with ms.exclusive("jobs", group="projector") as ledger:
            event = ledger.receive(5)
            assert event is not None and event.offset == 1


def test_threads_share_a_group() -> None:
    with millstream.sync.open("memory:", default_partitions=4) as ms:
        ms.create_topic("clicks")
        seen: list[bytes] = []
        by_thread: Counter[str] = Counter()
        lock = threading.Lock()
        with ms.streams({"clicks": 4}, group="counters") as streams:

            def count(stream: millstream.sync.Stream[bytes]) -> None:
                for record in stream:
                    with lock:
                        seen.append(record.value)
                        by_thread[threading.current_thread().name] += 1
                        is_last = len(seen) >= 400
                    if is_last:
                        streams.stop()

            with ThreadPoolExecutor(4) as threads:
                counting = [threads.submit(count, stream) for stream in streams["clicks"]]
                until(lambda: all(len(stream.assignment) == 1 for stream in streams))
                with ms.sender("clicks", partitioner="round_robin", records_max=10) as out:
                    for number in range(400):
                        out.send(b"%d" % number)
                for each in counting:
                    each.result(SECONDS)
        assert sorted(seen) == sorted(b"%d" % number for number in range(400))
        assert sorted(by_thread.values()) == [100, 100, 100, 100]


@pytest.mark.parametrize("kind", ["embedded", "remote"])
@pytest.mark.parametrize("error", [None, KeyError("the user's own")])
def test_threads_that_wait_end_when_their_streams_are_closed(
    kind: str, error: Exception | None, request: pytest.FixtureRequest
) -> None:
    with either(kind, request) as ms:
        ms.create_topic("clicks", partitions=2)
        counts: list[int] = []

        def count(stream: millstream.sync.Stream[bytes]) -> None:
            counts.append(sum(1 for _ in stream))

        threads: list[threading.Thread] = []
        expected = pytest.raises(KeyError) if error is not None else contextlib.nullcontext()
        with expected, ms.streams({"clicks": 2}, group="counters") as streams:
            threads += [threading.Thread(target=count, args=(each,), daemon=True) for each in streams["clicks"]]
            for thread in threads:
                thread.start()
            until(lambda: all(len(stream.assignment) == 1 for stream in streams))
            if error is not None:
                raise error
        for thread in threads:
            thread.join(SECONDS)
        assert counts == [0, 0]


@pytest.mark.parametrize("kind", ["embedded", "remote"])
def test_threads_that_wait_end_when_everything_is_closed(kind: str, request: pytest.FixtureRequest) -> None:
    ends: list[str] = []
    with either(kind, request) as ms:
        ms.create_topic("orders")
        ms.send("orders", b"first")
        reading = ms.read("orders")
        has_begun = threading.Event()

        def read() -> None:
            for _ in reading:
                has_begun.set()
            ends.append("reading")

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert has_begun.wait(SECONDS)
    thread.join(SECONDS)
    assert ends == ["reading"]
    ms.close()  # which is no error


def test_a_thread_inside_a_call_is_told_when_everything_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.client.sync.FINISH_SECONDS", 0.05)
    errors: list[BaseException] = []
    ms = millstream.sync.open("memory:")
    is_inside = threading.Event()

    async def for_ever() -> None:
        is_inside.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            ms._loop.call(for_ever())
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert is_inside.wait(SECONDS)
    ms.close()
    thread.join(SECONDS)
    assert [str(error) for error in errors] == ["the instance was closed during the call"]


def test_a_callback_that_would_wait_for_its_own_loop_is_told() -> None:
    with millstream.sync.open("memory:") as ms:
        errors: list[str] = []

        def again(message: object, sent: object) -> None:
            try:
                ms.send("orders", b"again")
            except millstream.MillstreamError as error:
                errors.append(str(error))

        with ms.sender("orders", on_sent=again) as out:
            out.send(b"x")
        assert errors == ["a callback runs on the event loop and cannot wait for a call of this module"]


def test_a_loop_that_is_left_loses_nothing_that_was_read_ahead() -> None:
    with millstream.sync.open("memory:") as ms:
        ms.send_many([("orders", b"%d" % number) for number in range(10)])
        with ms.read("orders", follow=False) as reading:
            for record in reading:
                if record.offset == 2:
                    break
            after = reading.receive(SECONDS)
            assert after is not None and after.offset == 3
            assert [record.offset for record in reading] == [4, 5, 6, 7, 8, 9]


def test_a_value_that_cannot_be_decoded_costs_none_of_those_read_with_it() -> None:
    with millstream.sync.open("memory:") as ms:
        ms.send_many([("orders", value) for value in (b"1", b"2", b"{", b"4")])
        given: list[object] = []
        with ms.read("orders", follow=False, decode=json.loads) as reading:
            with pytest.raises(millstream.Undecodable):
                given.extend(record.value for record in reading)
            given += [record.value for record in reading]
        assert given == [1, 2, 4]


def test_it_ends_with_its_loop_and_says_so_afterwards() -> None:
    before = set(threading.enumerate())
    with millstream.sync.open("memory:") as ms:
        ms.send("orders", b"x")
    assert set(threading.enumerate()) <= before
    with pytest.raises(Closed):
        ms.send("orders", b"y")


def test_a_store_that_cannot_be_opened_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(millstream.MillstreamError):
        millstream.sync.open("nosuch:store")
    assert set(threading.enumerate()) <= before


def test_a_job_whose_value_the_decoder_refuses_can_be_answered(millstream: BrokerThread) -> None:
    from millstream import sync

    for ms in (sync.open("memory:"), sync.connect(millstream.bootstrap)):
        with ms:
            ms.send_many([("jobs", b"nonsense"), ("jobs", b"1")])
            with ms.queue("jobs", group="g", decode=json.loads) as jobs:
                with pytest.raises(Undecodable) as refused:
                    jobs.receive(SECONDS)
                job = refused.value.record
                assert isinstance(job, sync.Job) and job.value == b"nonsense"
                job.reject(reason="no JSON")
                with pytest.raises(LeaseLost):
                    job.accept()
                following = jobs.receive(SECONDS)
                assert following is not None and following.value == 1


def test_a_process_that_was_forked_is_told_to_open_its_own() -> None:
    """The thread that would answer does not exist: a caller would wait forever."""
    program = """
import os, signal, millstream.sync
with millstream.sync.open("memory:") as ms:
    ms.send("orders", b"x")
    reading = ms.read("orders")
    child = os.fork()
    if not child:
        signal.alarm(20)
        for ask in (lambda: ms.send("orders", b"y"), ms.topics, reading.receive, lambda: next(iter(reading))):
            try:
                ask()
            except millstream.Closed as error:
                assert "forked" in str(error)
            else:
                os._exit(1)
        ms.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert reading.receive(20).value == b"x"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("verb", ["read", "stream", "queue", "exclusive"])
def test_a_program_that_closes_nothing_ends(millstream: BrokerThread, verb: str) -> None:
    options = "" if verb == "read" else ", group='g'"
    program = f"""
import millstream.sync
ms = millstream.sync.connect({millstream.bootstrap!r})
ms.send("jobs", b"x")
items = ms.{verb}("jobs"{options})
assert items.receive(20).value == b"x"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
