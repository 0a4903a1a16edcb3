"""`kill -9` under load through the other doors: nothing acknowledged is lost, and no cursor goes back."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat import client_flume as flume
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun, generate
from tests.serving import ServedBroker

ROUNDS = [4, pytest.param(12, marks=pytest.mark.slow)]
PIPELINED = 20


class Load:
    """Threads that go on through every crash, each with a new connection when the old one dies."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._done = threading.Condition()
        self._count = 0
        self.errors: list[BaseException] = []

    def add(self, work: Callable[[], None]) -> None:
        """`work` opens a connection and uses it until it breaks or the load stops."""

        def run() -> None:
            while not self._stopping.is_set():
                try:
                    work()
                except (OSError, EOFError):
                    self._stopping.wait(0.02)
                except BaseException as error:
                    self.errors.append(error)
                    return

        self._threads.append(threading.Thread(target=run))

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def note(self, count: int = 1) -> None:
        with self._done:
            self._count += count
            self._done.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._done:
            target = self._count + count
            moved = self._done.wait_for(lambda: self._count >= target or bool(self.errors), timeout=30)
            assert moved and not self.errors, (self.errors, "the load stands still")

    def kill_rounds(self, broker: ServedBroker, rounds: int, seed: int) -> None:
        generator = random.Random(seed)
        for thread in self._threads:
            thread.start()
        try:
            for _ in range(rounds):
                self.wait_for_more(60)
                time.sleep(generator.uniform(0, 0.15))  # the random moment: there is no event for it
                broker.kill()
                broker.start()
            self.wait_for_more(60)
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(30)
        assert not self.errors, self.errors


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.timeout(180)
def test_flume_records_and_commits_survive(rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    load = Load()
    acknowledged: dict[tuple[int, int], bytes] = {}
    attempted: set[bytes] = set()
    committed: dict[int, int] = {}

    def produce(partition: int) -> Callable[[], None]:
        numbers = iter(range(1 << 40))

        def work() -> None:
            with Flume(address, timeout=10) as client:
                while not load.is_stopping:
                    sent = [b"%d:%d" % (partition, next(numbers)) for _ in range(PIPELINED)]
                    attempted.update(sent)
                    for payload in sent:
                        client.send(flume.PRODUCE, flume.produce_payload("load", payload, partition=partition))
                    for payload in sent:
                        answer = flume.produced(client.receive()[1])
                        assert answer.error == flume.NONE and answer.partition == partition
                        place = partition, answer.offset
                        assert place not in acknowledged, "no offset is given twice"
                        acknowledged[place] = payload
                        load.note()

        return work

    def commit(partition: int) -> Callable[[], None]:
        def work() -> None:
            with Flume(address, timeout=10) as client:
                while not load.is_stopping:
                    code, offset = client.committed("readers", "load", partition)
                    if code == flume.TOPIC_NOT_FOUND:
                        time.sleep(0.01)
                        continue
                    assert offset >= committed.get(partition, -1), "a commit that was acknowledged went back"
                    # One that was under way when the broker died may have been stored, or not.
                    assert offset <= committed.get(partition, -1) + 1
                    committed[partition] = offset
                    assert client.commit("readers", "load", partition, offset + 1) == flume.NONE
                    committed[partition] = offset + 1

        return work

    with ServedBroker(tmp_path / "data", "--flume", address) as broker:
        for partition in range(3):
            load.add(produce(partition))
            load.add(commit(partition))
        load.kill_rounds(broker, rounds, seed=1)
        with Flume(address) as client:
            found: dict[tuple[int, int], bytes] = {}
            for partition in range(3):
                offset = 0
                while records := client.fetch("load", partition, offset, 1 << 20).records:
                    found.update({(partition, offset): payload for offset, payload in records})
                    offset = records[-1][0] + 1
                assert client.committed("readers", "load", partition)[1] == committed[partition]
    lost = [place for place, payload in acknowledged.items() if found.get(place) != payload]
    with capsys.disabled():
        print(f"\nFlume, kill -9: {rounds} rounds, acknowledged {len(acknowledged):,}, lost {len(lost)}")
    assert lost == [] and set(found.values()) <= attempted
    assert len(set(found.values())) == len(found), "nothing is there twice"


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.timeout(180)
def test_luxun_items_survive_and_cursors_never_go_back(
    rounds: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    generated = generate(tmp_path_factory.mktemp("generated"))
    address = f"127.0.0.1:{free_port()}"
    load = Load()
    acknowledged: dict[int, bytes] = {}
    answered: dict[str, dict[int, bytes]] = {"one": {}, "two": {}}
    lock = threading.Lock()

    def connected(use: Callable[[Luxun], None]) -> Callable[[], None]:
        def work() -> None:
            from thrift.transport.TTransport import TTransportException

            try:
                with Luxun(address, generated) as client:
                    while not load.is_stopping:
                        use(client)
            except TTransportException as error:
                raise EOFError from error

        return work

    def produce(name: str) -> Callable[[Luxun], None]:
        numbers = iter(range(1 << 40))

        def use(client: Luxun) -> None:
            item = f"{name}:{next(numbers)}".encode()
            answer = client.produce("load", item)
            assert answer.result.resultCode == client.types.ResultCode.SUCCESS, answer
            with lock:
                assert answer.index not in acknowledged, "no index is given twice"
                acknowledged[answer.index] = item
            load.note()

        return use

    def consume(fanout: str, size: int) -> Callable[[Luxun], None]:
        def use(client: Luxun) -> None:
            answer: Any = client.consume("load", fanout, size=size)
            codes = client.types.ResultCode
            if answer.result.resultCode != codes.SUCCESS:
                known = client.types.ErrorCode
                assert answer.result.errorCode in (
                    known.ALL_MESSAGE_CONSUMED,
                    known.TOPIC_IS_EMPTY,
                    known.TOPIC_NOT_EXIST,
                ), answer
                time.sleep(0.002)
                return
            first = answer.lastConsumedIndex - len(answer.itemList) + 1
            with lock:
                for index, item in enumerate(answer.itemList, first):
                    assert index not in answered[fanout], f"{fanout} was given index {index} twice"
                    answered[fanout][index] = item

        return use

    with ServedBroker(tmp_path / "data", "--luxun", address) as broker:
        for name in "abcd":
            load.add(connected(produce(name)))
        for fanout in answered:
            for size in (0, 0, 50):
                load.add(connected(consume(fanout, size)))
        load.kill_rounds(broker, rounds, seed=2)
        with Luxun(address, generated) as client:
            stored: list[bytes] = []
            while (answer := client.consume("load", index=len(stored), size=1 << 20)).itemList:
                stored += answer.itemList
            for fanout, got in answered.items():
                left = client.size("load", fanout).size
                assert max(got) < len(stored) - left, "the cursor is behind what was answered"
    lost = [index for index, item in acknowledged.items() if stored[index] != item]
    with capsys.disabled():
        print(
            f"\nLuxun, kill -9: {rounds} rounds, acknowledged {len(acknowledged):,}, stored {len(stored):,}, "
            f"lost {len(lost)}; given to the two fanout ids: {[len(got) for got in answered.values()]}"
        )
    assert lost == [] and len(set(stored)) == len(stored)
    for got in answered.values():
        assert len(got) > 100
        assert all(stored[index] == item for index, item in got.items())
