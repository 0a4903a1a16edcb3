"""A promise is settled once, and tells everybody in order."""

from __future__ import annotations

import asyncio

import pytest

from millstream.core.promise import Promise, begin


def test_is_settled_with_a_value() -> None:
    promise: Promise[int] = Promise()
    assert not promise.done
    promise.settle(7)
    assert promise.done and promise.value() == 7


def test_is_settled_with_an_error() -> None:
    promise: Promise[int] = Promise()
    promise.fail(ValueError("no"))
    assert promise.done
    with pytest.raises(ValueError, match="no"):
        promise.value()


def test_can_be_there_from_the_start() -> None:
    assert Promise.of(None).value() is None
    with pytest.raises(ValueError, match="no"):
        Promise.failed(ValueError("no")).value()


def test_has_no_value_before_it_is_settled() -> None:
    with pytest.raises(RuntimeError, match="not settled yet"):
        Promise().value()


@pytest.mark.parametrize("first", ["settle", "fail"])
@pytest.mark.parametrize("second", ["settle", "fail"])
def test_is_settled_once_only(first: str, second: str) -> None:
    promise: Promise[Exception] = Promise()
    getattr(promise, first)(ValueError())
    with pytest.raises(RuntimeError, match="settled already"):
        getattr(promise, second)(ValueError())


def test_calls_back_in_order_within_the_call_that_settles() -> None:
    promise: Promise[int] = Promise()
    seen: list[tuple[str, int]] = []
    promise.then(lambda done: seen.append(("first", done.value())))
    promise.then(lambda done: seen.append(("second", done.value())))
    assert seen == []
    promise.settle(1)
    assert seen == [("first", 1), ("second", 1)]


def test_a_callback_that_fails_keeps_neither_the_next_nor_whoever_settles(caplog: pytest.LogCaptureFixture) -> None:
    promise: Promise[int] = Promise()
    seen: list[int] = []
    promise.then(lambda done: seen.append(1 // 0))
    promise.then(lambda done: seen.append(done.value()))
    promise.settle(1)
    assert seen == [1]
    assert "ZeroDivisionError" in caplog.text


def test_calls_back_at_once_when_it_is_settled() -> None:
    seen: list[int] = []
    Promise.of(3).then(lambda done: seen.append(done.value()))
    assert seen == [3]


def test_a_callback_may_add_another() -> None:
    promise: Promise[int] = Promise()
    seen: list[str] = []

    def first(done: Promise[int]) -> None:
        seen.append("first")
        done.then(lambda _: seen.append("inner"))

    promise.then(first)
    promise.then(lambda _: seen.append("second"))
    promise.settle(1)
    assert seen == ["first", "inner", "second"]


async def test_can_be_awaited_before_and_after() -> None:
    promise: Promise[int] = Promise()
    asyncio.get_running_loop().call_soon(promise.settle, 5)
    assert await promise == 5
    assert await promise == 5


async def test_awaiting_raises_the_error() -> None:
    promise: Promise[int] = Promise()
    asyncio.get_running_loop().call_soon(promise.fail, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await promise


async def test_whoever_gives_up_waiting_does_not_disturb_it() -> None:
    promise: Promise[int] = Promise()

    async def wait() -> int:
        return await promise

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    promise.settle(2)
    assert promise.value() == 2


async def test_a_coroutine_that_need_not_wait_is_done_at_once() -> None:
    async def work() -> int:
        return await Promise.of(3) + 4

    begun = begin(work())
    assert begun.done and begun.value() == 7


async def test_a_coroutine_that_fails_at_once_fails_the_promise() -> None:
    async def work() -> None:
        raise ValueError("no")

    assert isinstance(begin(work()).error, ValueError)


async def test_a_coroutine_that_has_to_wait_goes_on_by_itself() -> None:
    first: Promise[int] = Promise()
    second: Promise[int] = Promise()

    async def work() -> int:
        found = await first
        await asyncio.sleep(0)
        try:
            return found + await second
        except ValueError:
            await asyncio.sleep(0)
            return found

    begun, also = begin(work()), begin(work())
    assert not begun.done
    first.settle(1)
    second.fail(ValueError("no"))
    assert await begun == 1 and await also == 1


async def test_an_error_after_waiting_fails_the_promise() -> None:
    gate: Promise[None] = Promise()

    async def work() -> None:
        await gate
        raise ValueError("no")

    begun = begin(work())
    gate.settle(None)
    with pytest.raises(ValueError, match="no"):
        await begun
