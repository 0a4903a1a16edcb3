"""The part of a topic's configuration that a log uses."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.core.errors import StartupError

_NEVER = (1 << 63) - 1
"""Kafka's default of both `flush.messages` and `flush.ms`."""
_TIMER_MS_MAX = (1 << 31) - 1
"""The longest timer."""


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """When the log syncs appends, and so when a producer gets its acknowledgement.

    `always`: after a sync, which many waiting requests share. `os`: at once; the operating system writes the page cache
    when it likes (Kafka's default). `every=100`, `every=500ms`, `every=100,500ms`: at once; a sync follows after that
    many batches or that time.
    """

    batches: int | None = 1
    ms: int | None = None
    records: int | None = None
    """A topic's `flush.messages`."""

    @property
    def always(self) -> bool:
        return self.batches == 1

    @classmethod
    def parse(cls, text: str) -> FlushPolicy:
        if text == "always":
            return cls()
        if text == "os":
            return cls(batches=None)
        if text.startswith("every="):
            batches = ms = None
            for part in text[len("every=") :].split(","):
                if part.endswith("ms") and part[:-2].isdigit() and int(part[:-2]) > 0:
                    ms = int(part[:-2])
                elif part.isdigit() and int(part) > 1:
                    batches = int(part)
                else:
                    break
            else:
                return cls(batches, ms)
        raise StartupError(f"flush={text} is not known: use always, os, every=N (N > 1), every=Tms or every=N,Tms")

    def tightened(self, records: int, ms: int) -> FlushPolicy:
        """Adds Kafka's `flush.messages` and `flush.ms`: the limit that is reached first causes the sync."""
        if self.always or records == 1 or ms == 0:
            return FlushPolicy()
        limits = [min(limit, _TIMER_MS_MAX) for limit in (self.ms, ms) if limit is not None and limit < _NEVER]
        return FlushPolicy(self.batches, min(limits, default=None), records if records < _NEVER else None)

    def __str__(self) -> str:
        if self.always:
            return "always"
        parts = [str(self.batches)] * (self.batches is not None) + [f"{self.ms}ms"] * (self.ms is not None)
        return "every=" + ",".join(parts) if parts else "os"


@dataclass(frozen=True, slots=True)
class LogConfig:
    segment_bytes: int = 1 << 30
    segment_ms: int = 24 * 3600 * 1000
    retention_ms: int = 7 * 24 * 3600 * 1000
    """-1: keep forever."""
    retention_bytes: int = -1
    """-1: no limit."""
    index_interval_bytes: int = 4096
    delete: bool = True
    compact: bool = False
    delete_retention_ms: int = 24 * 3600 * 1000
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = (1 << 63) - 1
    flush: FlushPolicy = FlushPolicy()
