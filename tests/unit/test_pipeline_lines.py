"""Places in a TOML file: the walk must agree with tomllib about what is where."""

from __future__ import annotations

import string
import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipeline.lines import KeyPath, Lines

TEXT = '''\
# a comment with [brackets] and = signs
name = "a # no comment"
[source]
options.sep = ";"          # dotted
watermark = { column = "at", delay = """10
minutes""" }
"quoted key" = 'x = 1'

[[step]]
name = "one"
sql = """
SELECT a, \\
       b
FROM t \\u0041
WHERE "x" = 1"""
[step.more]
deep = [
  1, # one
  { x = [2,
     3] },
]
[[step]]
sql = \'\'\'
SELECT ''
[[step]]
\'\'\'
'''


def test_every_key_and_table_is_on_its_line() -> None:
    lines = Lines(TEXT)
    assert lines.line("name") == 2
    assert lines.line("source") == 3
    assert lines.line("source", "options", "sep") == 4
    assert lines.line("source", "watermark", "delay") == 5
    assert lines.line("source", "quoted key") == 7
    assert lines.line("step", 0) == 9
    assert lines.line("step", 0, "sql") == 11
    assert lines.line("step", 0, "more", "deep") == 17
    assert lines.line("step", 0, "more", "deep", 1, "x", 1) == 20
    assert lines.line("step", 1) == 22
    assert lines.line("step", 1, "sql") == 23


def test_what_is_missing_is_on_the_line_of_its_table() -> None:
    lines = Lines(TEXT)
    assert lines.line("step", 1, "name") == 22
    assert lines.line("source", "watermark", "colour") == 5
    assert lines.line("broker") == 1
    assert lines.line() == 1


def test_characters_of_strings_are_on_their_lines_whatever_the_quotes() -> None:
    lines = Lines(TEXT)
    table = tomllib.loads(TEXT)
    first, second = table["step"][0]["sql"], table["step"][1]["sql"]
    assert lines.line_within(("step", 0, "sql"), first.index("SELECT")) == 12
    assert lines.line_within(("step", 0, "sql"), first.index("b")) == 13
    assert lines.line_within(("step", 0, "sql"), first.index("A\n")) == 14
    assert lines.line_within(("step", 0, "sql"), first.index("WHERE")) == 15
    assert lines.line_within(("step", 0, "sql"), 10_000) == 15
    assert lines.line_within(("step", 1, "sql"), second.index("[[step]]")) == 25
    assert lines.line_within(("name",), 5) == 2
    assert lines.line_within(("nothing",), 5) == 1


def test_windows_line_ends_count_once() -> None:
    lines = Lines(TEXT.replace("\n", "\r\n"))
    assert lines.line("step", 1, "sql") == 23
    assert lines.line_within(("step", 0, "sql"), 10) == 13


# -- against tomllib -------------------------------------------------------------------------------------------------

KEYS = st.text(string.ascii_letters + "._-# =[]'\n\"\\é", min_size=1, max_size=6)
WORDS = st.text(string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "") + "é\"'", max_size=20)


def quoted(text: str) -> str:
    """As a basic string on one line."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(sign, sign) for sign in text) + '"'


def long(text: str) -> str:
    """As a multi-line string."""
    return '"""\n' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'


def literal(text: str) -> str:
    return "'" + text.translate({ord("'"): "", ord("\n"): ""}) + "'"


SCALARS = st.one_of(
    st.builds(quoted, WORDS), st.builds(long, WORDS), st.builds(literal, WORDS), st.integers().map(str), st.just("true")
)
ARRAYS = st.lists(SCALARS, max_size=3).map(lambda items: "[ # ]\n" + ",\n".join(items) + "\n]")
INLINE = st.dictionaries(KEYS, SCALARS, max_size=3).map(
    lambda table: "{ " + ", ".join(f"{quoted(key)} = {value}" for key, value in table.items()) + " }"
)
TABLES = st.dictionaries(KEYS, SCALARS | ARRAYS | INLINE, max_size=4).map(
    lambda table: "".join(f"{quoted(key)} = {value} # {{\n" for key, value in table.items())
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    text = draw(TABLES)
    for name in draw(st.lists(KEYS, unique=True, max_size=3)):
        for _ in range(draw(st.integers(1, 3))):
            text += f"[[ {quoted('t' + name)} ]]\n" + draw(TABLES)
        text += f"[ {quoted('s' + name)} . x ]\n" + draw(TABLES)
    return text


@given(documents())
def test_every_value_that_tomllib_finds_has_a_place(text: str) -> None:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a key and a table of one name
        return
    lines = Lines(text)
    assert {place for place, _ in values(table, ())} <= lines._found.keys()
    for place, value in values(table, ()):
        assert 1 <= lines.line(*place) <= text.count("\n") + 1
        if isinstance(value, str):
            last = lines.line_within(place, len(value))
            assert lines.line(*place) <= last <= text.count("\n") + 1
            for at, sign in enumerate(value):
                if sign.isascii() and sign.isalnum():
                    assert sign in text.split("\n")[lines.line_within(place, at) - 1]


def values(node: Any, place: KeyPath) -> list[tuple[KeyPath, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return ([(place, node)] if place else []) + [each for key, value in items for each in values(value, (*place, key))]
