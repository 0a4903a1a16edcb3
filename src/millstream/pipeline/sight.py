"""The names that a SELECT can use, and the rows that it returns.

Names are compared as in Spark, without regard to case. If something is unknown, such as the columns of a table in a
catalog, the names of rows are None, and no check reports columns that might be theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sqlglot import exp

from millstream.pipeline.functions import GENERATORS, WINDOWS, WITHOUT_PARENTHESES, called

UNNAMED = ""
"""The name of a column that its SELECT does not name; Spark generates one, such as `count(1)`."""


@dataclass(frozen=True)
class Rows:
    names: list[str] | None
    """None: some are unknown."""
    is_stream: bool = False
    aggregations: int = 0
    """The depth of nested aggregates, including DISTINCT."""
    joins: bool = False
    """Streams are joined with streams."""
    append_only: str | None = None
    """The part that Spark can only append and never update."""
    untimed: bool = False
    """An aggregate that no watermark can ever close, so that its rows are never final."""


def together(sources: Iterable[Rows]) -> Rows:
    """The properties of rows that come from all of these; the caller sets the names."""
    every = list(sources)
    return Rows(
        names=None,
        is_stream=any(rows.is_stream for rows in every),
        aggregations=max((rows.aggregations for rows in every), default=0),
        joins=any(rows.joins for rows in every),
        append_only=next((rows.append_only for rows in every if rows.append_only), None),
        untimed=any(rows.untimed for rows in every),
    )


@dataclass
class Sight:
    """The names that the expressions of a SELECT can use; a subquery sees the outer names too."""

    sources: dict[str, Rows] = field(default_factory=dict)
    """By alias, in lower case; those without one have a blank and a number."""
    outer: Sight | None = None
    outputs: frozenset[str] = frozenset()
    """Names that the SELECT itself defines. Other expressions may use them, except WHERE."""
    windows: frozenset[str] = frozenset()

    def add(self, alias: str, rows: Rows) -> None:
        self.sources[alias.lower() or f" {len(self.sources)}"] = rows

    def chain(self) -> Iterator[Sight]:
        sight: Sight | None = self
        while sight is not None:
            yield sight
            sight = sight.outer

    def columns(self) -> dict[str, str] | None:
        """All usable columns, by their names in lower case; None if there may be others."""
        found: dict[str, str] = {}
        for sight in self.chain():
            for rows in sight.sources.values():
                if rows.names is None:
                    return None
                found.update((name.lower(), name) for name in rows.names if name != UNNAMED)
        return found

    def tables(self) -> list[str]:
        return [name for sight in self.chain() for name in sight.sources if not name.startswith(" ")]


def outputs(select: exp.Select, sight: Sight) -> list[str] | None:
    """The names of a SELECT's result columns."""
    names: list[str] = []
    for each in select.expressions:
        found = _output(each, select, sight)
        if found is None:
            return None
        names.extend(found)
    return names


def _output(node: exp.Expr, select: exp.Select, sight: Sight) -> list[str] | None:
    if isinstance(node, exp.Alias):
        return [node.alias]
    if isinstance(node, exp.Aliases):
        return [name.name for name in node.aliases]
    inner = node.unnest()
    while isinstance(inner, exp.Cast):  # named after its operand, if that has a name
        inner = inner.this.unnest()
        if not isinstance(inner, exp.Column | exp.Dot | exp.Cast):
            return [UNNAMED]
    if inner.is_star and isinstance(inner, exp.Star | exp.Column | exp.Dot):
        return _star(inner, select, sight)
    if isinstance(inner, exp.Column):
        known = sight.columns()
        is_call = not inner.table and inner.name.lower() in WITHOUT_PARENTHESES
        return [UNNAMED] if is_call and known is not None and inner.name.lower() not in known else [inner.name]
    if isinstance(inner, exp.Dot) and isinstance(inner.expression, exp.Identifier):
        return [inner.expression.name]
    if isinstance(inner, exp.Literal):
        return [inner.name]
    function = called(inner)
    if function in GENERATORS or isinstance(inner, exp.QueryTransform):
        return None
    return [function] if function in WINDOWS else [UNNAMED]


def _star(node: exp.Expr, select: exp.Select, sight: Sight) -> list[str] | None:
    star = node.this if isinstance(node, exp.Column) else node
    if isinstance(node, exp.Dot) or any(star.args.get(key) for key in ("replace", "rename", "ilike")):
        return None
    if isinstance(node, exp.Column):
        if node.table.lower() not in sight.sources:
            return None
        sources = [sight.sources[node.table.lower()]]
    elif any(
        join.args.get("using") or join.method or join.kind in ("SEMI", "ANTI")
        for join in select.args.get("joins") or []
    ):
        return None
    else:
        sources = list(sight.sources.values())
    left_out = {each.name.lower() for each in star.args.get("except_") or []}
    names: list[str] = []
    for rows in sources:
        if rows.names is None:
            return None
        names.extend(name for name in rows.names if name.lower() not in left_out)
    return names
