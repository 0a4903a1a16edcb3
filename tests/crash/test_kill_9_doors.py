"""`kill -9` under load through the other doors: nothing acknowledged is lost, and no cursor goes back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.testing.held_port import HeldPort
from tests.compat import client_flowmq as flowmq
from tests.compat import client_flume as flume
from tests.compat.client_flowmq import FlowmqClient
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
        target = self._count + count
        self._wait_until(lambda: self._count >= target)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._done:
            met = self._done.wait_for(lambda: condition() or bool(self.errors), timeout=30)
            assert met and not self.errors, (self.errors, "the load stands still")

    def kill_rounds(
        self, broker: ServedBroker, rounds: int, seed: int, is_enough: Callable[[], bool] = lambda: True
    ) -> None:
        generator = random.Random(seed)
        for thread in self._threads:
            thread.start()
        try:
            for _ in range(rounds):
                self.wait_for_more(30)
                time.sleep(generator.uniform(0, 0.15))  # the random moment: there is no event for it
                broker.kill()
                broker.start()
            self.wait_for_more(60)
            self._wait_until(is_enough)
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(30)
        assert not self.errors, self.errors


@pytest.fixture
def address() -> Iterator[str]:
    """Where the door is, through all kills."""
    with HeldPort() as held:
        yield held.address


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.timeout(180)
def test_flume_records_and_commits_survive(
    rounds: int, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
                    if client.fetch("load", partition, 0).error == flume.TOPIC_NOT_FOUND:
                        time.sleep(0.01)  # the first record creates the topic, and commits made before do not count
                        continue
                    _, offset = client.committed("readers", "load", partition)
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
    rounds: int,
    address: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generated = generate(tmp_path_factory.mktemp("generated"))
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
        load.kill_rounds(broker, rounds, seed=2, is_enough=lambda: all(len(got) > 100 for got in answered.values()))
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
        assert all(stored[index] == item for index, item in got.items())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_flowmq_messages_survive_and_none_is_done_twice(
    rounds: int, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load()
    lock = threading.Lock()
    acknowledged: set[bytes] = set()
    done: set[bytes] = set()
    """Whose ACK was answered."""
    doubtful: set[bytes] = set()
    """Whose ACK was under way when the broker died: it was stored, or it was not."""

    def publish(name: str) -> Callable[[], None]:
        numbers = iter(range(1 << 40))

        def work() -> None:
            with FlowmqClient(address, timeout=10) as client:
                while not load.is_stopping:
                    if len(acknowledged) > len(done) + 500:
                        time.sleep(0.002)
                        continue
                    sent = [f"{name}:{next(numbers)}".encode() for _ in range(PIPELINED)]
                    for message in sent:
                        client.send(flowmq.PUBLISH, b"load\0" + message)
                    for message in sent:
                        client.answer()
                        with lock:
                            acknowledged.add(message)
                        load.note()

        return work

    def answer_next(client: FlowmqClient, seconds: float = 2.0) -> None:
        """Takes what there is, and answers all of it."""
        messages = [client.next(seconds), *client.messages]
        client.messages.clear()
        doubtful.update(message.payload for message in messages)
        for message in messages:
            client.send(flowmq.ACK, message.id.encode())
        for message in messages:
            client.answer()
            with lock:
                assert message.payload not in done, "what was done was given out again, and done again"
                done.add(message.payload)

    def subscribe() -> None:
        with FlowmqClient(address, timeout=10) as client:
            client.subscribe("load", "workers")
            while not load.is_stopping:
                answer_next(client)

    with ServedBroker(tmp_path / "data", "--flowmq", address, "--flume", "127.0.0.1:0") as broker:
        for name in "abc":
            load.add(publish(name))
        for _ in range(2):
            load.add(subscribe)
        load.kill_rounds(broker, rounds, seed=3)
        with Flume(broker.doors["flume"]) as reader:

            def everything(topic: str) -> list[bytes]:
                found: list[tuple[int, bytes]] = []
                while records := reader.fetch(topic, 0, found[-1][0] + 1 if found else 0, 1 << 20).records:
                    found += records
                return [payload for _, payload in found]

            with FlowmqClient(address) as client:
                client.subscribe("load", "workers")
                while left := acknowledged - done - doubtful - set(everything("__dlq__")):
                    try:
                        answer_next(client, 20.0)
                    except TimeoutError:
                        raise AssertionError(
                            f"{len(left)} messages are not delivered again: {sorted(left)[:5]}"
                        ) from None
            stored = everything("load")
            dead = everything("__dlq__")
    lost = acknowledged - set(stored)
    with capsys.disabled():
        print(
            f"\nFlowMQ, kill -9: {rounds} rounds, acknowledged {len(acknowledged):,}, stored {len(stored):,}, "
            f"lost {len(lost)}; done {len(done):,}, set aside {len(dead)}"
        )
    assert not lost and len(set(stored)) == len(stored)
    assert len(done) > 100
