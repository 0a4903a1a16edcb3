"""An operator's settings for groups, and the bounds on what one client can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.broker.groups.group_configs import HEARTBEAT, SESSION


@dataclass(frozen=True, slots=True)
class GroupSettings:
    groups_max: int = 10_000
    groups_per_peer_max: int = 0
    """Groups that one address may create. 0: half of `groups_max`, or all from loopback."""
    group_id_bytes_max: int = 512
    """Escaped it has at most three times as many, which fits the keys of every store."""
    members_max: int = 10_000
    """Per group (KIP-389), with pending member ids (KIP-394)."""
    writes_waiting_max: int = 100_000

    session_timeout_min_ms: int = 1_000
    session_timeout_max_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 0
    """How long an empty group waits for more members (KIP-134). 0: tests and small groups start at once."""
    protocols_bytes_max: int = 4 << 20
    """Of a classic member's metadata, or another member's topic names: about 100,000 topics."""
    all_protocols_bytes_max: int = 256 << 20
    """Of all members of all groups together."""
    small_protocols_bytes: int = 64 << 10
    """Members with less metadata are exempt from the total: there are not enough of them to matter."""

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_waiting_interval_ms: int = 500
    """For a member that waits for others to release its partitions: it polls more often than the interval."""
    group_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Overrides of single groups; change while the broker runs."""
    pattern_chars_max: int = 256
    consumer_migration_policy: str = "bidirectional"
    """Allowed protocol changes of groups with members (`migration.py`)."""

    metadata_bytes_max: int = 4_096
    """Of the string that a client may store with an offset."""
    offsets_retention_ms: int = 7 * 24 * 3_600_000
    offsets_check_ms: int = 600_000
    unused_check_ms: int = 60_000
    """How often never-used groups are dropped: clients create them by mere requests."""
    pending_ms_max: int = 60_000
    """Lifetime of an unused pending member id (KIP-394); clients use it at once."""

    def consumer_session_ms(self, group_id: str) -> int:
        return int(self.group_configs.get(group_id, {}).get(SESSION, self.consumer_session_timeout_ms))

    def consumer_heartbeat_ms(self, group_id: str) -> int:
        return int(self.group_configs.get(group_id, {}).get(HEARTBEAT, self.consumer_heartbeat_interval_ms))
