"""The assignors: pure functions from members and topics to a target assignment.

Every partition of a subscribed topic goes to exactly one of its subscribers.

    uniform   as even as possible (equal subscriptions: loads differ by at most one), with as few moves as possible
    range     per topic, consecutive partitions in member order: one member gets partition n of co-partitioned topics
    exclusive per topic, one member has all partitions and keeps them; the others are standbys

`ASSIGNORS` is open: a discipline that needs another rule adds a named function.
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
    """The input for one member."""

    topics: frozenset[UUID]
    held: Set[Partition]
    """Its previous target: the basis of stickiness."""
    order: str
    """Its sort key: the instance id if it has one, so that a restart changes nothing (KIP-345)."""


Assignor = Callable[[Mapping[str, Wants], Mapping[UUID, int]], Target]
"""Takes members by id and partition counts by topic id."""


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
    """A new active member is the first in order, so that all topics of a group move to the same one."""
    target: Target = {member: set() for member in members}
    in_line = sorted(members, key=lambda member: (members[member].order, member))
    for topic, count in topics.items():
        readers = [member for member in in_line if topic in members[member].topics]
        if not readers:
            continue
        holding = {member: sum(held[0] == topic for held in members[member].held) for member in readers}
        active = max(readers, key=lambda member: holding[member])  # if none holds any, the first
        target[active].update((topic, partition) for partition in range(count))
    return target


def _kept(members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> Target:
    """The partitions that each member may keep; of two claims, the first wins."""
    taken: set[Partition] = set()
    target: Target = {}
    for member, wants in members.items():
        keep = {held for held in wants.held if held[0] in wants.topics and held[1] < topics.get(held[0], 0)}
        target[member] = keep - taken
        taken |= keep
    return target


def _level(target: Target, members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> None:
    """Equal subscriptions: equal shares, and members with the most partitions get the larger ones."""
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
        if partition not in taken:  # round robin, to spread a topic over members
            member, left = room.popleft()
            target[member].add(partition)
            if left > 1:
                room.append((member, left - 1))


def _balance(target: Target, members: Mapping[str, Wants], topics: Mapping[UUID, int]) -> None:
    """Different subscriptions: fill the least loaded first, then move while two loads even out.

    Every move lowers the sum of squared loads, so this terminates.
    """
    readers = {topic: [member for member in members if topic in members[member].topics] for topic in topics}
    taken = set().union(*target.values())
    for topic in sorted(topics, key=lambda topic: (len(readers[topic]), topic)):  # fewest readers first
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
    """Moves partitions of one topic from its most to its least loaded readers; returns if any moved."""
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
