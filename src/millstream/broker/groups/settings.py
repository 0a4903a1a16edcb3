"""What a broker's operator can set about groups, and the bounds that keep one client from using all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSettings:
    groups_max: int = 10_000
    group_id_bytes_max: int = 512
    """Escaped it is three times that at most, which still fits the keys of every store."""
    members_max: int = 10_000
    """Per group; members that were only given an id count too."""
    writes_waiting_max: int = 100_000

    session_timeout_min_ms: int = 1_000
    session_timeout_max_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 0
    """How long the first member of an empty group waits for company. 0: tests and small groups start at once."""
    protocols_bytes_max: int = 4 << 20
    """Of one classic member's metadata, or of the names that another subscribes to: about 100,000 topics."""
    all_protocols_bytes_max: int = 256 << 20
    """Of all members of all groups together."""
    small_protocols_bytes: int = 64 << 10
    """A member that says no more than this is not held to what all say: there are not that many members."""

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_waiting_interval_ms: int = 500
    """For a member whose partitions others have yet to release: it need not sit out a whole interval when they have."""
    pattern_chars_max: int = 256

    metadata_bytes_max: int = 4_096
    """Of the string that a client may store beside an offset."""
    offsets_retention_ms: int = 7 * 24 * 3_600_000
    offsets_check_ms: int = 600_000
