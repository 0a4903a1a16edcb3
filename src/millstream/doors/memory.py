"""The memory of a door: a budget for bytes in flight, and a pool that reuses large buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class _Waiter:
    __slots__ = ("ready", "size")

    def __init__(self, size: int, ready: Callable[[], None]) -> None:
        self.size = size
        self.ready: Callable[[], None] | None = ready


class Budget:
    """Bytes in flight over all connections. A request without room waits in line; its connection is not read."""

    __slots__ = ("_is_serving", "_waiting", "free", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.free = limit
        self._waiting: deque[_Waiter] = deque()
        self._is_serving = False

    @property
    def is_contested(self) -> bool:
        """Whether a connection waits."""
        return bool(self._waiting)

    def take(self, size: int) -> bool:
        if size > self.free or self._waiting:
            return False
        self.free -= size
        return True

    def wait(self, size: int, ready: Callable[[], None]) -> Callable[[], None]:
        """Calls back once `size` bytes are taken for the caller. The returned function leaves the line."""
        waiter = _Waiter(size, ready)
        self._waiting.append(waiter)

        def leave() -> None:
            waiter.ready = None
            self._serve()

        return leave

    def give(self, size: int) -> None:
        self.free += size
        self._serve()

    def _serve(self) -> None:
        """Serves waiters in order of arrival. A callback may call `give` or leave the line, which must not start this
        loop again.
        """
        if self._is_serving:
            return
        self._is_serving = True
        try:
            while self._waiting:
                first = self._waiting[0]
                if first.ready is not None and first.size > self.free:
                    return
                self._waiting.popleft()
                if first.ready is not None:
                    self.free -= first.size
                    first.ready()
        finally:
            self._is_serving = False


class BufferPool:
    """Reuses buffers of two sizes: for the beginning of any frame, and for a full batch of most clients."""

    FREE = 4 << 10
    """Size of the first buffer after at most half as many bytes of a frame. It is not counted: many clients that send
    one byte and stop must not use up the budget.
    """
    SMALL = 64 << 10
    LARGE = (1 << 20) + (64 << 10)
    KEPT_MAX = 8

    def __init__(self) -> None:
        self._kept: dict[int, list[bytearray]] = {self.SMALL: [], self.LARGE: []}

    def size_for(self, size: int) -> int:
        """The size of the buffer for this many bytes."""
        return self.SMALL if size <= self.SMALL else max(size, self.LARGE)

    def take(self, size: int) -> bytearray:
        kept = self._kept.get(size)
        return kept.pop() if kept else bytearray(size)

    def give(self, buffer: bytearray) -> None:
        kept = self._kept.get(len(buffer))
        if kept is not None and len(kept) < self.KEPT_MAX:
            kept.append(buffer)
