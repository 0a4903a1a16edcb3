"""What a broker's operator can set about groups, and the bounds that keep one client from using all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.broker.groups.group_configs import HEARTBEAT, SESSION


@dataclass(frozen=True, slots=True)
class GroupSettings:
    groups_max: int = 10_000
    groups_per_peer_max: int = 0
    """Of those, how many the clients of one address may make. 0: half of them, from loopback all."""
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
    group_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What was set for single groups; changes while the broker runs."""
    pattern_chars_max: int = 256
    consumer_migration_policy: str = "bidirectional"
    """Which groups change their protocol while they have members (`migration.py`)."""

    metadata_bytes_max: int = 4_096
    """Of the string that a client may store beside an offset."""
    offsets_retention_ms: int = 7 * 24 * 3_600_000
    offsets_check_ms: int = 600_000
    unused_check_ms: int = 60_000
    """Groups that never had a member or an offset go this often: clients make them by asking."""
    pending_ms_max: int = 60_000
    """How long a member id is kept that was given out and not used; a client uses it at once."""

    def consumer_session_ms(self, group_id: str) -> int:
        return int(self.group_configs.get(group_id, {}).get(SESSION, self.consumer_session_timeout_ms))

    def consumer_heartbeat_ms(self, group_id: str) -> int:
        return int(self.group_configs.get(group_id, {}).get(HEARTBEAT, self.consumer_heartbeat_interval_ms))
