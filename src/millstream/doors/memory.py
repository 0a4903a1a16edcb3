"""What the door may hold in memory: a budget for frames, and a pool so that large ones are not allocated each time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class _Waiter:
    __slots__ = ("ready", "size")

    def __init__(self, size: int, ready: Callable[[], None]) -> None:
        self.size = size
        self.ready: Callable[[], None] | None = ready


class Budget:
    """Bytes in flight over all connections. Whoever does not fit waits in line, and its connection is not read."""

    __slots__ = ("_is_serving", "_waiting", "free", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.free = limit
        self._waiting: deque[_Waiter] = deque()
        self._is_serving = False

    @property
    def is_contested(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def take(self, size: int) -> bool:
        if size > self.free or self._waiting:
            return False
        self.free -= size
        return True

    def wait(self, size: int, ready: Callable[[], None]) -> Callable[[], None]:
        """Calls back once `size` bytes are taken for the caller; what is answered leaves the line."""
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
        """First come, first served. Whoever is called back may give or leave in turn, which must not start this
        again.
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
    """Buffers of two sizes that are used again: for the beginning of any frame, and for a full batch of most
    clients.
    """

    FREE = 4 << 10
    """Whoever has sent no more of a frame than half of this gets so much, and nobody counts it: many who send a byte
    and stop must not use up the budget.
    """
    SMALL = 64 << 10
    LARGE = (1 << 20) + (64 << 10)
    KEPT_MAX = 8

    def __init__(self) -> None:
        self._kept: dict[int, list[bytearray]] = {self.SMALL: [], self.LARGE: []}

    def size_for(self, size: int) -> int:
        """How large a buffer for so many bytes will be."""
        return self.SMALL if size <= self.SMALL else max(size, self.LARGE)

    def take(self, size: int) -> bytearray:
        kept = self._kept.get(size)
        return kept.pop() if kept else bytearray(size)

    def give(self, buffer: bytearray) -> None:
        kept = self._kept.get(len(buffer))
        if kept is not None and len(kept) < self.KEPT_MAX:
            kept.append(buffer)
