"""The topics that members' patterns match, updated as topics are created and deleted.

Rules
-----
1. A pattern is matched with every topic once, before its first member joins (`prepare`). After that it is matched only
   with new names (`catch_up`).
2. Deleted names are removed at once. A new name counts once it has been matched: `names` is only a lookup, so no target
   waits for a pattern.
3. Matching yields to the event loop (`turns.py`), with one budget for all groups.
4. Members of all groups with the same text share a pattern and its names, which are freed with the last member.
"""

from __future__ import annotations

from collections.abc import Set
from weakref import WeakKeyDictionary

from millstream.broker.groups.stream.pattern import Pattern
from millstream.broker.groups.turns import Turns
from millstream.broker.groups.view import TopicsView


class _Matched:
    __slots__ = ("names", "unmatched")

    def __init__(self, unmatched: list[str]) -> None:
        self.names: set[str] = set()
        self.unmatched = unmatched


class TopicMatches:
    def __init__(self, topics: TopicsView, turns: Turns) -> None:
        self._topics = topics
        self._turns = turns
        self._known: set[str] = set()
        self._patterns: WeakKeyDictionary[Pattern, _Matched] = WeakKeyDictionary()

    def names(self, pattern: Pattern) -> Set[str]:
        matched = self._patterns.get(pattern)
        return matched.names if matched is not None else frozenset()

    async def prepare(self, pattern: Pattern) -> None:
        """On return, every existing topic has been matched with the pattern."""
        matched = self._patterns.get(pattern)
        if matched is None:
            self.topics_changed()
            matched = self._patterns[pattern] = _Matched(list(self._known))
        await self._match(pattern, matched)

    def topics_changed(self) -> None:
        """Queues new names for matching and removes deleted ones."""
        names = set(self._topics.names())
        gone, new = self._known - names, names - self._known
        self._known = names
        for matched in self._patterns.values():
            matched.unmatched.extend(new)
            matched.names -= gone

    async def catch_up(self) -> None:
        """Matches all patterns with the new names."""
        for pattern, matched in list(self._patterns.items()):
            await self._match(pattern, matched)

    async def _match(self, pattern: Pattern, matched: _Matched) -> None:
        if matched.unmatched and self._turns.is_taken:
            await self._turns.next()
        while matched.unmatched:
            name = matched.unmatched.pop()
            if self._topics.get(name) is not None and pattern.matches(name):
                matched.names.add(name)
            steps, pattern.spent = pattern.spent, 0
            if self._turns.spend(steps):
                await self._turns.next()
