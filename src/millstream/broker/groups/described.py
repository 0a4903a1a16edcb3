"""Views of groups for `describe` and `list`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from millstream.broker.groups.stream.assignors import Partition


class Listed(NamedTuple):
    group_id: str
    protocol_type: str
    state: str
    type: str
    members: int


@dataclass(frozen=True, slots=True)
class ClassicMemberView:
    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class ClassicView:
    state: str
    protocol_type: str
    protocol_name: str
    members: list[ClassicMemberView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ConsumerMemberView:
    id: str
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    epoch: int
    topics: list[str]
    pattern: str | None
    assigned: frozenset[Partition]
    target: frozenset[Partition]
    classic: bool
    """It uses the classic protocol."""


@dataclass(frozen=True, slots=True)
class ConsumerView:
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: list[ConsumerMemberView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShareMemberView:
    id: str
    rack_id: str | None
    client_id: str
    client_host: str
    epoch: int
    topics: list[str]
    assigned: dict[UUID, int]
    """Topics and their numbers of partitions."""


@dataclass(frozen=True, slots=True)
class ShareView:
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: list[ShareMemberView] = field(default_factory=list)
