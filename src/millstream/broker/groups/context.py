"""What all groups of a broker share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.broker.groups.journal import Journal
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.assignors import Assignor
from millstream.broker.groups.stream.topic_matches import TopicMatches
from millstream.broker.groups.view import QueuesView, TopicsView
from millstream.core.clock import Clock


@dataclass(frozen=True, slots=True)
class GroupContext:
    journal: Journal
    clock: Clock
    topics: TopicsView
    matches: TopicMatches
    settings: GroupSettings
    assignors: Mapping[str, Assignor]
    queues: QueuesView
