"""Spark's DDL without Spark. What Spark makes of the same texts was seen with Spark 4.3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.pipeline import ddl


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("user STRING, ms LONG, at TIMESTAMP", "user STRING; ms BIGINT; at TIMESTAMP"),
        ("a: int, `b c` double NOT NULL, `d``e` real", "a INT; b c DOUBLE; d`e FLOAT"),
        ("a decimal, b dec(5), c numeric(5, 2) COMMENT 'x, y'", "a DECIMAL(10,0); b DECIMAL(5,0); c DECIMAL(5,2)"),
        ("a array<map<string,int>>", "a ARRAY<MAP<STRING, INT>>"),
        ("a struct<x: int, `y z` array <string> not null>, b int", "a STRUCT<x: INT, `y z`: ARRAY<STRING>>; b INT"),
        ("a varchar(20), b char(3), c string collate UTF8_LCASE", "a STRING; b STRING; c STRING"),
        ("select int, timestamp timestamp -- odd\n, /* x */ 1a byte", "select INT; timestamp TIMESTAMP; 1a TINYINT"),
        ("a time(3), b interval day to second, c void", "a TIME(3); b INTERVAL DAY TO SECOND; c VOID"),
    ],
)
def test_reads_what_spark_reads(text: str, wanted: str) -> None:
    assert "; ".join(f"{name} {kind}" for name, kind in ddl.columns(text)) == wanted


@pytest.mark.parametrize(
    ("text", "part", "offset"),
    [
        ("user STRNG", "STRNG; did you mean STRING?", 5),
        ("user", "the column user has no type", 4),
        ("user STRING url STRING", "a comma is missing before 'url'", 12),
        ("user STRING,", "a column's name is missing before the end", 12),
        ("user STRING, USER INT", "USER occurs twice", 13),
        ("a ARRAY", "as in ARRAY<STRING>", 7),
        ("a MAP<STRING>", ", is missing before '>'", 12),
        ("a ARRAY<INT", "> is missing before the end", 11),
        ("a VARCHAR", "needs a length", 2),
        ("a DECIMAL(50,2)", "at most 38 digits", 2),
        ("a DECIMAL(x)", "takes whole numbers, not 'x'", 10),
        ("a INT NOT", "NULL is missing", 9),
        ("a INT COMMENT", "the text of the comment is missing", 13),
        ("größe INT", "a column's name is missing before 'größe'", 0),
        ("1 INT", "a column's name is missing before '1'", 0),
        ("a " + "ARRAY<" * 60 + "INT" + ">" * 60, "nested more than 50 deep", 302),
    ],
)
def test_says_what_is_wrong_and_where(text: str, part: str, offset: int) -> None:
    with pytest.raises(ddl.BadDDL) as caught:
        ddl.columns(text)
    assert part in str(caught.value)
    assert caught.value.offset == offset


@given(st.text(alphabet="ab`<>(),: '\"INTARYMPSUC0-/*\n", max_size=40))
def test_any_text_is_columns_or_a_mistake(text: str) -> None:
    try:
        assert ddl.columns(text)
    except ddl.BadDDL as error:
        assert 0 <= error.offset <= len(text)
