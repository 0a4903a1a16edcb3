"""A step's SQL as sqlglot parses it, before Spark starts.

sqlglot only approximates Spark's language, and Spark decides. `_BEYOND` lists the syntax that only Spark reads, and
`_SURE` the expressions to which both give the same type: in doubt no mistake is reported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlglot import Token, TokenType, exp
from sqlglot.dialects import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.optimizer.qualify import qualify

from millstream.core.errors import MillstreamError
from millstream.pipeline import ddl
from millstream.pipeline.functions import WINDOWS

logging.getLogger("sqlglot").addHandler(logging.NullHandler())  # its messages are reported as mistakes

Columns = list[tuple[str, str]]
"""Names and types; an unknown type is UNKNOWN."""
UNKNOWN = "?"
TIME_WINDOW = "STRUCT<start: TIMESTAMP, end: TIMESTAMP>"

_SPARK = Spark()
_BEYOND = re.compile(r">>>|\bX\s+'|\|>", re.IGNORECASE)
"""Spark reads these and sqlglot does not, or differently: unsigned shifts, X 'FF' with a space, pipes."""
_CLOSED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/", re.DOTALL)
_QUERY_WORDS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "MAP", "REDUCE", "(")
_SURE = (
    *(exp.Cast, exp.Count, exp.CountIf, exp.ApproxDistinct, exp.Predicate, exp.Connector, exp.Not),
    *(exp.Upper, exp.Lower, exp.Trim, exp.Length, exp.Concat, exp.CurrentTimestamp, exp.CurrentDate),
)
_SURE_OF_NUMBERS = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Sum, exp.Avg, exp.Abs, exp.Neg)
_AS_ITS_ARGUMENT = (exp.Min, exp.Max, exp.First, exp.Last, exp.AnyValue)
_NUMBERS = ("TINYINT", "SMALLINT", "INT", "BIGINT", "DOUBLE")
"""Spark computes with DECIMAL and FLOAT by its own rules."""


class Finding(NamedTuple):
    """A mistake at a character of the SQL."""

    offset: int
    text: str


class BadSQL(MillstreamError):
    """SQL that cannot be a step; `offset` is the position in it."""

    def __init__(self, text: str, offset: int = 0) -> None:
        super().__init__(text)
        self.offset = offset


def read(sql: str) -> exp.Query | None:
    """The query; None if sqlglot cannot judge it. Raises BadSQL."""
    if _BEYOND.search(sql):
        return None
    try:
        tokens = _SPARK.tokenize(sql)
        if any(token.token_type is TokenType.COLON for token in tokens):
            return None  # a path into a variant
        _free_window(tokens)
        trees = [tree for tree in _SPARK.parser().parse(tokens, sql) if tree is not None]
    except TokenError:
        opened = re.search(r"['\"`]|/\*", _CLOSED.sub(lambda closed: " " * len(closed[0]), sql))
        text = "the SQL has a quote, backtick or comment that is not closed"
        raise BadSQL(text, opened.start() if opened else 0) from None
    except ParseError as error:
        raise _not_parsed(error, sql) from None
    except RecursionError:
        raise BadSQL("the SQL is nested too deeply; split it into steps") from None
    except Exception:  # a bug of sqlglot's parser is no mistake of the file
        return None
    if not trees:
        raise BadSQL("the SQL is empty; write SELECT ... FROM ...")
    if len(trees) > 1:
        second = next((token.end + 1 for token in tokens if token.token_type is TokenType.SEMICOLON), 0)
        raise BadSQL("a step takes one statement; make a [[step]] of each", second)
    if isinstance(trees[0], exp.Query):
        return trees[0]
    if tokens[0].text.upper() in _QUERY_WORDS:
        return None
    raise BadSQL(f"a step's SQL must be a query, SELECT ... FROM ..., and not {tokens[0].text.upper()}")


def offset_of(node: exp.Expr) -> int:
    """The start of a node in the SQL: sqlglot keeps positions of names only, so this is its first name's."""
    for name in node.find_all(exp.Identifier, bfs=False):
        if (start := name.meta.get("start")) is not None:
            return int(start)
    return 0


def types(query: exp.Query, views: Mapping[str, Columns | None]) -> dict[str, str]:
    """The types of a query's columns by their names in lower case, if they are certain."""
    schema: dict[str, object] = {
        view: {name: "UNKNOWN" if kind == UNKNOWN else kind for name, kind in columns}
        for view, columns in views.items()
        if columns
    }
    try:
        bare = query.copy()
        if any(call.name.lower() in WINDOWS for call in bare.find_all(exp.Anonymous)):
            bare.transform(_type_windows, copy=False)
        qualified = qualify(bare, dialect=_SPARK, schema=schema, validate_qualify_columns=False)
        typed = annotate_types(qualified, dialect=_SPARK, schema=schema)
        doubtful = _doubtful(typed)
        return {each.alias_or_name.lower(): _type_of(each, doubtful) for each in typed.selects}
    except Exception:  # sqlglot's optimizer raises any exception, and types are optional
        return {}


def _free_window(tokens: Sequence[Token]) -> None:
    """`window` is an ordinary name unless it opens WINDOW name AS (...); sqlglot takes it for the keyword."""
    for at, token in enumerate(tokens):
        if token.token_type is TokenType.WINDOW:
            after = [each.token_type for each in tokens[at + 1 : at + 3]]
            if len(after) < 2 or after[1] is not TokenType.ALIAS or after[0] in (TokenType.L_PAREN, TokenType.DOT):
                token.token_type = TokenType.VAR


def _not_parsed(error: ParseError, sql: str) -> BadSQL:
    first = error.errors[0] if error.errors else {}
    near = " ".join(str(first.get("highlight") or "").split())
    wanted = str(first.get("description") or "")
    cause = f", {wanted[0].lower()}{wanted[1:]}" if wanted.startswith("Expecting") else ""
    lines = sql.split("\n")[: max(int(first.get("line") or 1) - 1, 0)]
    offset = sum(len(line) + 1 for line in lines) + max(int(first.get("col") or 1) - 1, 0)
    place = f' near "{near[:40]}"' if near else ""
    return BadSQL(f"the SQL cannot be read{place}{cause}; if Spark accepts it, put check = false into the step", offset)


def _type_windows(node: exp.Expr) -> exp.Expr:
    """Spark makes a struct of window(...) and names it `window`; sqlglot does not know that."""
    if isinstance(node, exp.Column) and node.table.lower() in WINDOWS and node.name.lower() in ("start", "end"):
        made = exp.cast(exp.null(), "TIMESTAMP", dialect=_SPARK)
    elif isinstance(node, exp.Anonymous | exp.Column) and node.name.lower() in WINDOWS:
        made = exp.cast(exp.null(), TIME_WINDOW, dialect=_SPARK)
    else:
        return node
    return exp.alias_(made, node.name) if isinstance(node.parent, exp.Select) else made


def _type_of(selected: exp.Expr, doubtful: set[str]) -> str:
    inner = selected.unalias().unnest()
    if inner.type is None or not _is_sure(inner, doubtful):
        return UNKNOWN
    try:
        return ddl.columns(f"x {inner.type.sql(_SPARK)}")[0][1]
    except MillstreamError:
        return UNKNOWN


def _doubtful(query: exp.Query) -> set[str]:
    """Names of columns inside a query with uncertain types: types that depend on them are uncertain too."""
    names = {
        each.name.lower()
        for lateral in query.find_all(exp.Lateral)
        if isinstance(alias := lateral.args.get("alias"), exp.TableAlias)
        for each in alias.columns
    }
    inner = [each for select in query.find_all(exp.Select) if select is not query for each in select.expressions]
    before = -1
    while len(names) > before:
        before = len(names)
        names |= {each.alias_or_name.lower() for each in inner if not _is_sure(each.unalias().unnest(), names)}
    return names


def _is_sure(node: exp.Expr, doubtful: set[str]) -> bool:
    if isinstance(node, _AS_ITS_ARGUMENT):
        return _is_sure(node.this.unnest(), doubtful)
    if isinstance(node, _SURE_OF_NUMBERS):
        parts = [part.unnest() for part in node.iter_expressions()]
        are_numbers = all(part.type is not None and part.type.sql(_SPARK) in _NUMBERS for part in parts)
        return are_numbers and all(_is_sure(part, doubtful) for part in parts)
    if isinstance(node, exp.Column | exp.Dot):
        return not any(column.name.lower() in doubtful for column in node.find_all(exp.Column))
    return isinstance(node, _SURE) or (isinstance(node, exp.Literal) and (node.is_string or node.is_int))
