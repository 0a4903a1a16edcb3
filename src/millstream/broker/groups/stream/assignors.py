"""Who should read what: pure functions from members and topics to a target.

Every partition of a topic that somebody wants goes to exactly one of those who want it.

    uniform   as even as possible (loads differ by one at most when all want the same), moving as little as possible
    range     per topic, consecutive partitions in order of member: partition n of two topics meets at one member
    exclusive per topic, one member has all of it and the others stand by; who has it keeps it

`ASSIGNORS` is open: a discipline that needs another rule adds its function under a name.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple
from uuid import UUID

Partition = tuple[UUID, int]
Target = dict[str, set[Partition]]


class Wants(NamedTuple):
    """What one member asks for."""

    topics: frozenset[UUID]
    held: Set[Partition]
    """What it was to have until now: where stickiness starts from."""
    order: str
    """Its place in the line: the instance id where it has one, so that a restart changes nothing."""


Assignor = Callable[[Mapping[str, Wants], Mapping[UUID, int]], Target]
"""Given members by id and partition counts by topic id."""


def range_(members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> Target:
    target: Target = {member: set() for member in members}
    in_order = sorted(members, key=lambda member: (members[member].order, member))
    for topic, count in topics.items():
        readers = [member for member in in_order if topic in members[member].topics]
        if not readers:
            continue
        share, extra = divmod(count, len(readers))
        start = 0
        for place, member in enumerate(readers):
            end = start + share + (place < extra)
            target[member].update((topic, partition) for partition in range(start, end))
            start = end
    return target


def uniform(members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> Target:
    if not members:
        return {}
    target = _kept(members, topics)
    if len({wants.topics for wants in members.values()}) == 1:
        _level(target, members, topics)
    else:
        _balance(target, members, topics)
    return target


def exclusive(members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> Target:
    """A new active member is the first in line, so that all topics of a group that moves meet again at one."""
    target: Target = {member: set() for member in members}
    in_line = sorted(members, key=lambda member: (members[member].order, member))
    for topic, count in topics.items():
        readers = [member for member in in_line if topic in members[member].topics]
        if not readers:
            continue
        holding = {member: sum(held[0] == topic for held in members[member].held) for member in readers}
        active = max(readers, key=lambda member: holding[member])  # of those who hold nothing, the first
        target[active].update((topic, partition) for partition in range(count))
    return target


def _kept(members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> Target:
    """What each member has and may keep; of two that claim a partition, the first."""
    taken: set[Partition] = set()
    target: Target = {}
    for member, wants in members.items():
        keep = {held for held in wants.held if held[0] in wants.topics and held[1] < topics.get(held[0], 0)}
        target[member] = keep - taken
        taken |= keep
    return target


def _level(target: Target, members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> None:
    """All want the same: each gets the same number, and the larger shares go to those who have most already."""
    wanted = next(iter(members.values())).topics
    everything = sorted((topic, number) for topic in wanted for number in range(topics.get(topic, 0)))
    share, extra = divmod(len(everything), len(members))
    by_load = sorted(members, key=lambda member: (-len(target[member]), members[member].order, member))
    room: deque[tuple[str, int]] = deque()
    taken: set[Partition] = set()
    for place, member in enumerate(by_load):
        limit = share + (place < extra)
        if len(target[member]) > limit:
            target[member] = set(sorted(target[member])[:limit])
        taken |= target[member]
        if len(target[member]) < limit:
            room.append((member, limit - len(target[member])))
    for partition in everything:
        if partition not in taken:  # in turn, so that a topic spreads over members
            member, left = room.popleft()
            target[member].add(partition)
            if left > 1:
                room.append((member, left - 1))


def _balance(target: Target, members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> None:
    """Members want different topics: fill from the least loaded, then move while that evens two loads out.

    Every move lowers the sum of squared loads, so this ends.
    """
    readers = {topic: [member for member in members if topic in members[member].topics] for topic in topics}
    taken = set().union(*target.values())
    for topic in sorted(topics, key=lambda topic: (len(readers[topic]), topic)):  # those with least choice first
        queue = [(len(target[member]), members[member].order, member) for member in readers[topic]]
        heapq.heapify(queue)
        for number in range(topics[topic] if queue else 0):
            if (topic, number) not in taken:
                load, order, member = queue[0]
                target[member].add((topic, number))
                heapq.heapreplace(queue, (load + 1, order, member))
    movable: dict[UUID, dict[str, list[Partition]]] = {topic: {} for topic in topics}
    for member, mine in target.items():
        for partition in sorted(mine):
            movable[partition[0]].setdefault(member, []).append(partition)
    moved = True
    while moved:
        moved = sum(_even_out(target, movable[topic], readers[topic]) for topic in topics) > 0


def _even_out(target: Target, movable: dict[str, list[Partition]], readers: list[str]) -> bool:
    """Moves partitions of one topic from its most to its least loaded readers; says whether any moved."""
    moved = False
    while True:
        givers = [member for member, mine in movable.items() if mine]
        if not givers:
            return moved
        giver = max(givers, key=lambda member: len(target[member]))
        taker = min(readers, key=lambda member: len(target[member]))
        if len(target[giver]) - len(target[taker]) < 2:
            return moved
        partition = movable[giver].pop()
        movable.setdefault(taker, []).append(partition)
        target[giver].remove(partition)
        target[taker].add(partition)
        moved = True


EXCLUSIVE = "exclusive"
ASSIGNORS: dict[str, Assignor] = {"uniform": uniform, "range": range_, EXCLUSIVE: exclusive}
DEFAULT_ASSIGNOR = "uniform"
