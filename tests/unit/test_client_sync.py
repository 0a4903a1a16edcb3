"""The verbs without async, in threads."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import millstream.sync
from millstream.errors import Closed, LeaseLost, UnknownTopic
from millstream.testing.broker_thread import BrokerThread


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
        with ms.sender("clicks", partitioner="round_robin", records_max=10) as out:
            for number in range(400):
                out.send(b"%d" % number)
        seen: list[bytes] = []
        lock = threading.Lock()
        with ms.streams({"clicks": 4}, group="counters") as streams:

            def count(stream: millstream.sync.Stream[bytes]) -> None:
                for record in stream:
                    with lock:
                        seen.append(record.value)
                        if len(set(seen)) == 400:
                            streams.stop()

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(count, streams["clicks"]))
        assert len(set(seen)) == 400


def test_it_ends_with_its_loop_and_says_so_afterwards() -> None:
    before = threading.active_count()
    with millstream.sync.open("memory:") as ms:
        ms.send("orders", b"x")
    assert threading.active_count() == before
    with pytest.raises(Closed):
        ms.send("orders", b"y")


def test_a_store_that_cannot_be_opened_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(millstream.MillstreamError):
        millstream.sync.open("nosuch:store")
    assert threading.active_count() == before
