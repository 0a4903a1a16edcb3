"""Topic patterns with bounded matching time.

A member may subscribe by regular expression (KIP-848), and the broker matches it with every topic on its event loop.
Python's `re` backtracks: a short pattern can keep it busy for hours. So patterns use the RE2 subset, as Kafka's do: no
back-references and no look-around. The matcher follows all alternatives at once, in time O(pattern length × name
length).

    pattern      branch ('|' branch)*
    branch       (atom ('*' | '+' | '?' | '{m}' | '{m,}' | '{m,n}') '?'?)*
    atom         character | '.' | '[' set ']' | '\\' escape | '(' pattern ')' | '(?:' pattern ')' | '^' | '$'

A pattern must match the whole name. Names consist of 65 characters, so every atom is a subset of those.

How it is bounded
-----------------
1. A pattern has at most `_STATES_MAX` states with repetitions expanded; a larger one is refused.
2. A set of states is an int with a bit for each state that reads a character. Steps from one set to the next are
   cached; a new step costs one lookup per eight states. A name of 249 characters costs about a millisecond at worst,
   usually a few microseconds.
3. `topic_matches.py` matches each name once, some steps at a time. One pattern object serves all members with the same
   text.
"""

from __future__ import annotations

import string
from typing import Final
from weakref import WeakValueDictionary

from millstream.core.errors import Code, RequestError

_ALPHABET: Final = frozenset(string.ascii_letters + string.digits + "._-")
_ESCAPES: Final = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset[str](),
}
_STATES_MAX = 500
_REPEAT_MAX = 1_000
_BUILD_MAX = 5_000
"""Steps of compilation: nested repetitions of nothing multiply, but add no states."""
_REMEMBERED_MAX = 10_000
_CHEAP_STEPS = 32
"""Cached steps that take as long as one that must be computed."""
_START, _END, _EMPTY = "start", "end", "empty"

# A node of the parsed pattern: a set of characters, one of the words above, or ("cat" | "or" | "repeat", …).
Node = frozenset[str] | str | tuple[object, ...]


class Pattern:
    """`matches(name)`; equal when the text is."""

    __slots__ = (
        "__weakref__", "_accept", "_after", "_can", "_ends", "_first", "_jumps", "_matches_empty",
        "_remembered", "_sets", "_steps", "_unions", "spent", "text",
    )  # fmt: skip

    def __init__(self, text: str, chars_max: int) -> None:
        if len(text) > chars_max:
            raise _invalid(f"the topic pattern has {len(text)} characters; at most {chars_max} are allowed")
        self.text = text
        self._sets: list[tuple[frozenset[str], int]] = []
        self._jumps: list[list[tuple[str, int]]] = []
        self._steps = 0
        self._accept = self._state()
        first = self._build(_Parser(text).parse(), self._accept)
        self._after: list[int] = []
        """For each state, the set of states after it has read its character."""
        self._can = dict.fromkeys(_ALPHABET, 0)
        """For each character, the states that read it."""
        self._ends = 0
        """The states after which the name may end."""
        self._flatten()
        start = self._reach({first}, at_start=True)
        self._first = self._bits(start)
        self._matches_empty = self._accept in self._reach({first}, at_start=True, at_end=True)
        self._unions: dict[tuple[int, int], int] = {}
        self._remembered: dict[tuple[int, str], int] = {}
        self.spent = 0
        """Steps that matching took; the caller may reset it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def matches(self, name: str) -> bool:
        if not name:
            return self._matches_empty
        states, costly = self._first, 0
        for character in name[:-1]:
            following = self._remembered.get((states, character))
            if following is None:
                costly += 1
                following = self._union(states & self._can.get(character, 0))
                if len(self._remembered) < _REMEMBERED_MAX:
                    self._remembered[states, character] = following
            states = following
            if not states:
                break
        self.spent += costly + 1 + len(name) // _CHEAP_STEPS
        return bool(states & self._can.get(name[-1], 0) & self._ends)

    def _union(self, states: int) -> int:
        """The successors of states, eight at a time."""
        following, unions = 0, self._unions
        for at, byte in enumerate(states.to_bytes((states.bit_length() + 7) // 8, "little")):
            if byte:
                union = unions.get((at, byte))
                if union is None:
                    union = 0
                    for bit in range(8):
                        if byte >> bit & 1:
                            union |= self._after[8 * at + bit]
                    unions[at, byte] = union
                following |= union
        return following

    def _flatten(self) -> None:
        """Turns empty transitions into sets of states."""
        for state, (characters, target) in enumerate(self._sets):
            bit = 1 << state
            self._after.append(self._bits(self._reach({target})) if characters else 0)
            if characters and self._accept in self._reach({target}, at_end=True):
                self._ends |= bit
            for character in characters & _ALPHABET:
                self._can[character] |= bit

    def _bits(self, states: frozenset[int]) -> int:
        return sum(1 << state for state in states if self._sets[state][0])

    def _reach(self, states: set[int], *, at_start: bool = False, at_end: bool = False) -> frozenset[int]:
        """All states reachable from these without reading a character."""
        reached, pending = set(states), list(states)
        while pending:
            for condition, target in self._jumps[pending.pop()]:
                allowed = condition == _EMPTY or (at_start if condition == _START else at_end)
                if allowed and target not in reached:
                    reached.add(target)
                    pending.append(target)
        return frozenset(reached)

    def _state(self) -> int:
        if len(self._sets) >= _STATES_MAX:
            raise _repeats_too_much()
        self._sets.append((frozenset(), 0))
        self._jumps.append([])
        return len(self._sets) - 1

    def _build(self, node: Node, target: int) -> int:
        """Adds the states that match `node` and continue at `target`; returns the first of them."""
        self._steps += 1
        if self._steps > _BUILD_MAX:
            raise _repeats_too_much()
        if isinstance(node, frozenset):
            state = self._state()
            self._sets[state] = (node, target)
            return state
        if isinstance(node, str):
            state = self._state()
            self._jumps[state].append((node, target))
            return state
        kind, *parts = node
        if kind == "cat":
            for part in reversed(parts):
                target = self._build(part, target)  # type: ignore[arg-type]
            return target
        if kind == "or":
            state = self._state()
            self._jumps[state] = [(_EMPTY, self._build(part, target)) for part in parts]  # type: ignore[arg-type]
            return state
        inner, least, most = parts
        return self._build_repeat(inner, least, most, target)  # type: ignore[arg-type]

    def _build_repeat(self, inner: Node, least: int, most: int | None, target: int) -> int:
        if most is None:
            loop = self._state()
            self._jumps[loop] = [(_EMPTY, target)]
            self._jumps[loop].append((_EMPTY, self._build(inner, loop)))
            first = loop
        else:
            first = target
            for _ in range(most - least):
                state = self._state()
                self._jumps[state] = [(_EMPTY, target), (_EMPTY, self._build(inner, first))]
                first = state
        for _ in range(least):
            first = self._build(inner, first)
        return first


_PATTERNS: WeakValueDictionary[str, Pattern] = WeakValueDictionary()


def pattern_of(text: str, chars_max: int) -> Pattern:
    """The pattern of a text; raises INVALID_REGULAR_EXPRESSION. Members with the same text share one."""
    found = _PATTERNS.get(text)
    if found is None or len(text) > chars_max:
        found = _PATTERNS[text] = Pattern(text, chars_max)
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Node:
        node = self._pattern()
        if self._at < len(self._text):
            raise _invalid("the topic pattern has a ')' without its '('")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise _invalid("the topic pattern ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _pattern(self) -> Node:
        branches = [self._branch()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._branch())
        return branches[0] if len(branches) == 1 else ("or", *branches)

    def _branch(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return ("cat", *parts)

    def _atom(self) -> Node:
        character = self._take()
        if character in "*+?":
            raise _invalid(f"the topic pattern has a {character!r} with nothing to repeat")
        if character == "(":
            return self._group()
        if character == "[":
            return self._set()
        if character == "\\":
            return self._escape()
        if character in "^$":
            return _START if character == "^" else _END
        return _ALPHABET if character == "." else frozenset(character)

    def _group(self) -> Node:
        if self._peek() == "?":
            self._at += 1
            if self._take() != ":":
                raise _invalid("the topic pattern may use (…) and (?:…) only")
        node = self._pattern()
        if self._peek() != ")":
            raise _invalid("the topic pattern has a '(' without its ')'")
        self._at += 1
        return node

    def _escape(self) -> frozenset[str]:
        character = self._take()
        if character.lower() in _ESCAPES:
            known = _ESCAPES[character.lower()]
            return known if character.islower() else _ALPHABET - known
        if character.isalnum():
            raise _invalid(f"the topic pattern has an unknown escape: \\{character}")
        return frozenset(character)

    def _set(self) -> frozenset[str]:
        negated = self._peek() == "^"
        self._at += negated
        chosen: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            if self._text.startswith("[:", self._at):
                raise _invalid("the topic pattern uses a [:class:], which is not supported")
            low = self._set_member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._set_member()
                if len(low) != 1 or len(high) != 1 or min(low) > min(high):
                    raise _invalid("the topic pattern has a range that ends before it starts")
                low = frozenset(each for each in _ALPHABET if min(low) <= each <= min(high))
            chosen |= low
        self._at += 1
        return _ALPHABET - chosen if negated else frozenset(chosen)

    def _set_member(self) -> frozenset[str]:
        character = self._take()
        return self._escape() if character == "\\" else frozenset(character)

    def _repeated(self, node: Node) -> Node:
        character = self._peek()
        if character and character in "*+?":
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        elif character == "{":
            least, most = self._counts()
        else:
            return node
        if self._peek() == "?":  # no difference for a whole match
            self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise _invalid("the topic pattern repeats a repetition; enclose the inner one in (…)")
        return ("repeat", node, least, most)

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if end < 0 or not _is_count(least) or (most and not _is_count(most)):
            raise _invalid("the topic pattern has a '{' that is not {m}, {m,} or {m,n}")
        self._at = end + 1
        low = int(least)
        high = int(most) if most else None if comma else low
        if high is not None and high < low:
            raise _invalid("the topic pattern has a {m,n} that ends before it starts")
        return low, high


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 4 and int(digits) <= _REPEAT_MAX


def _repeats_too_much() -> RequestError:
    return _invalid(f"the topic pattern has more than {_STATES_MAX} states with its repetitions written out")


def _invalid(detail: str) -> RequestError:
    return RequestError(Code.INVALID_REGULAR_EXPRESSION, detail)
