from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.groups.stream.pattern import Pattern, pattern_of
from millstream.core.errors import Code, RequestError

atoms = st.sampled_from(
    ["a", "b", "-", "_", r"\.", ".", "[ab]", "[^a]", "[a-c]", r"\d", r"\w", r"[\w-]", "^", "$", "[]a]"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@given(patterns, st.text("abc-_.1", min_size=1, max_size=6))
def test_matches_what_the_standard_library_matches(text: str, name: str) -> None:
    assert Pattern(text, 256).matches(name) == (re.fullmatch(text, name) is not None)


SLOW = ["(a*)*b", "(a|a)*b", "(a|aa)+$b", ".*.*.*.*.*.*.*.*.*.*b", "(.*a){20}b", "((a?){40}){40}b"]
SYNTAX = ["(", ")", "[", "[a", "*", "a**", "a{", "a{2,1}", "a{9999}", "\\", r"\q", "[z-a]"]
NOT_RE2 = [r"(a)\1", "(?=a)", "(?i)a", "[[:alpha:]]"]
TOO_MUCH = ["((((){1000}){1000}){1000}){1000}", "((a{1000}){1000}){1000}", "a" * 257, "(" * 200]


@pytest.mark.parametrize("text", SLOW)
def test_patterns_that_make_backtracking_explode_are_quick(text: str) -> None:
    started = time.thread_time()
    try:
        assert not Pattern(text, 256).matches("a" * 249)
    except RequestError as error:
        assert error.code == Code.INVALID_REGULAR_EXPRESSION
    assert time.thread_time() - started < 1


@pytest.mark.parametrize("text", SYNTAX + NOT_RE2 + TOO_MUCH)
def test_what_is_no_pattern_or_not_of_re2s_kind_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as raised:
        Pattern(text, 256)
    assert raised.value.code == Code.INVALID_REGULAR_EXPRESSION


@given(st.text(max_size=60))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    try:
        Pattern(text, 256).matches("orders")
    except RequestError as error:
        assert error.code == Code.INVALID_REGULAR_EXPRESSION


def test_a_pattern_must_match_the_whole_name() -> None:
    assert Pattern("^ord.*", 256).matches("orders")
    assert Pattern("^orders$", 256).matches("orders")
    assert not Pattern("ord", 256).matches("orders")
    assert Pattern("(?:orders|bills)-[0-9]{1,3}", 256).matches("bills-42")


COSTLY = "(.*a.{20}|.*b.{30}|.*c.{40}|.*d.{50}){2}z"
"""Meets another set of states with nearly every character."""


def test_a_pattern_with_too_many_states_is_refused_with_the_reason() -> None:
    with pytest.raises(RequestError, match="more than 500 states") as raised:
        Pattern("(.*a.{300}){2}", 256)
    assert raised.value.code == Code.INVALID_REGULAR_EXPRESSION


def test_a_costly_pattern_costs_a_millisecond_a_name_and_counts_its_steps() -> None:
    names = ["".join(random.Random(at).choices("abcdefgh-.", k=249)) for at in range(100)]
    pattern = Pattern(COSTLY, 256)
    started = time.thread_time()
    assert not any(map(pattern.matches, names))
    assert time.thread_time() - started < 1.0
    assert pattern.spent > 100 * 200


def test_members_with_the_same_text_share_a_pattern() -> None:
    first = pattern_of("orders-.*", 256)
    assert pattern_of("orders-.*", 256) is first
    with pytest.raises(RequestError):
        pattern_of("orders-.*", 5)
