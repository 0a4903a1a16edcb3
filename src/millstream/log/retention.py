"""Retention removes whole segments, oldest first, by age and by size."""

from __future__ import annotations

import logging

from millstream.log.config import LogConfig
from millstream.log.log import NO_ROOM, Log
from millstream.log.segment import Segment

logger = logging.getLogger(__name__)


def expire(log: Log) -> None:
    """Rolls an old active segment, then removes segments beyond `retention.ms` and `retention.bytes`."""
    if not log.segments:
        return
    config, now = log.config, log.clock.now_ms()
    active = log.segments[-1]
    crowded = None
    if active.size and 0 <= active.begun_ms(now) <= now - config.segment_ms:
        try:
            active = log.roll()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            crowded = error  # the removal below may make room
    if not _drop(log, config, active, now) and crowded is not None:
        raise crowded


def _drop(log: Log, config: LogConfig, active: Segment, now: int) -> bool:
    if not config.delete or (config.retention_ms < 0 and config.retention_bytes < 0):
        return False
    oldest = now - config.retention_ms if config.retention_ms >= 0 else None
    total = log.size_bytes()
    keep_from = log.segments[0].base_offset
    for segment in log.segments:
        if segment is active and segment.size == 0:
            break
        too_old = oldest is not None and segment.newest_ms(now) < oldest
        too_much = 0 <= config.retention_bytes <= total - segment.size
        if not (too_old or too_much):
            break
        total -= segment.size
        following = [other.base_offset for other in log.segments if other.base_offset > segment.base_offset]
        keep_from = following[0] if following else log.end
    keep_from = min(keep_from, log.high_watermark)
    if keep_from <= log.segments[0].base_offset:
        return False
    if keep_from > log.segments[-1].base_offset:
        log.roll_to_drop()
    dropped = log.drop_from_front(keep_from)
    logger.info("%s: retention removed %d bytes; the log starts at %d now", log.name, dropped, log.start)
    return True
