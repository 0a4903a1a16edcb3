"""The views of a pipeline: their columns, and what Spark can do with each as a stream.

A query is walked from the inside out: every SELECT sees the rows of its FROM and returns rows of its own. Spark would
refuse every mistake found here as well, only later and without a line. In doubt no mistake is reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from sqlglot import exp

from millstream.pipeline import sql
from millstream.pipeline.functions import UNITS, WINDOWS, WITHOUT_PARENTHESES, called, is_aggregate
from millstream.pipeline.mistakes import closest
from millstream.pipeline.sight import Rows, Sight, outputs, together
from millstream.pipeline.sql import BadSQL, Columns, Finding

_PLAIN = re.compile(r"\w+")
_AGGREGATING = re.compile(r"\bgroup\s+by\b|\bselect\s+distinct\b|\|>\s*aggregate\b", re.IGNORECASE)
_ENDS = (("order", "ORDER BY"), ("sort", "SORT BY"), ("cluster", "CLUSTER BY"), ("offset", "OFFSET"))


@dataclass(frozen=True)
class View:
    columns: Columns | None
    rows: Rows


def analyse(
    text: str, views: Mapping[str, View], watermark: str | None, later: Collection[str]
) -> tuple[View, list[Finding]]:
    """The view of a step's SQL, and its mistakes.

    `views` are those that it may use, by their names in lower case, the source's first; `later` those that only later
    steps may use.
    """
    try:
        query = sql.read(text)
    except BadSQL as error:
        return unknown_view(text, views), [Finding(error.offset, str(error))]
    if query is None:
        return unknown_view(text, views), []
    walk = _Walk(views, watermark, later)
    try:
        rows = walk.query(query, {}, None)
    except RecursionError:
        return unknown_view(text, views), []
    if rows.names is None:
        return View(None, rows), walk.findings
    kinds = sql.types(query, {name: view.columns for name, view in views.items()})
    columns = [(name, kinds.get(name.lower(), sql.UNKNOWN)) for name in rows.names]
    return View(columns, rows), walk.findings


def unknown_view(text: str, views: Mapping[str, View] | None = None) -> View:
    """For SQL that is left to Spark; its words only suggest whether it aggregates."""
    below = together(views[name].rows for name in references(text, views)) if views else together([])
    aggregations = below.aggregations + bool(_AGGREGATING.search(text))
    return View(None, replace(below, is_stream=True, aggregations=aggregations))


def references(text: str, views: Collection[str]) -> set[str]:
    """The views that a step's SQL reads; if it cannot be parsed, those whose names are among its words."""
    try:
        query = sql.read(text)
    except BadSQL:
        query = None
    if query is None:
        words = {word.lower() for word in _PLAIN.findall(text)}
    else:
        words = {table.name.lower() for table in query.find_all(exp.Table)}
    return words & {*views}


class _Walk:
    def __init__(self, views: Mapping[str, View], watermark: str | None, later: Collection[str]) -> None:
        self.findings: list[Finding] = []
        self._views = views
        self._source = next(iter(views), "")
        self._watermark = watermark
        self._later = later

    def query(self, node: exp.Expr, ctes: Mapping[str, Rows], outer: Sight | None) -> Rows:
        ctes = self._with(node, ctes, outer)
        if isinstance(node, exp.Select):
            rows = self._select(node, ctes, outer)
        elif isinstance(node, exp.SetOperation):
            rows = self._set_operation(node, ctes, outer)
        elif isinstance(node, exp.Subquery) and isinstance(node.this, exp.Query):
            rows = self.query(node.this, ctes, outer)
        else:
            return Rows(None, is_stream=True)
        return self._bounded(node, rows)

    def _with(self, node: exp.Expr, ctes: Mapping[str, Rows], outer: Sight | None) -> Mapping[str, Rows]:
        with_ = node.args.get("with_")
        if with_ is None:
            return ctes
        known = dict(ctes)
        for cte in with_.expressions:
            if with_.recursive:
                known[cte.alias.lower()] = Rows(None)
            known[cte.alias.lower()] = _renamed(self.query(cte.this, known, outer), cte)
        return known

    def _bounded(self, node: exp.Expr, rows: Rows) -> Rows:
        """Refuses clauses that need the end of the rows, which a stream lacks."""
        if not rows.is_stream:
            return rows
        for clause, name in _ENDS:
            if node.args.get(clause) is not None:
                what = "cannot skip rows" if clause == "offset" else "cannot be sorted"
                self._say(node.args[clause], f"a stream has no end and {what}: leave {name} out")
        return replace(rows, append_only="LIMIT") if node.args.get("limit") is not None else rows

    def _set_operation(self, node: exp.SetOperation, ctes: Mapping[str, Rows], outer: Sight | None) -> Rows:
        left, right = self.query(node.this, ctes, outer), self.query(node.expression, ctes, outer)
        both = together([left, right])
        if isinstance(node, exp.Intersect | exp.Except) and right.is_stream:
            self._say(node.expression, f"Spark has no {type(node).__name__.upper()} of streams; use a join")
        distinct = 1 if node.args.get("distinct") else 0
        return replace(both, names=left.names, aggregations=both.aggregations + distinct)

    # -- the rows of FROM --------------------------------------------------------------------------------------------

    def _select(self, node: exp.Select, ctes: Mapping[str, Rows], outer: Sight | None) -> Rows:
        sight = Sight(outer=outer)
        joins = node.args.get("joins") or []
        from_ = node.args.get("from_")
        for source in [*([from_.this] if from_ else []), *joins, *(node.args.get("laterals") or [])]:
            read = source.this if isinstance(source, exp.Join) else source
            rows = self._read(read, ctes, sight)
            if isinstance(source, exp.Join):
                rows = self._joined(source, rows, sight)
            sight.add(read.alias_or_name, rows)
        names = outputs(node, sight)
        sight.outputs = frozenset(name.lower() for name in _given(node))
        inside = list(_inside(node))
        calls = {called(each) for each in inside}
        sight.windows = frozenset(WINDOWS & calls)
        streams = any(rows.is_stream for rows in sight.sources.values())
        for each in inside:
            if isinstance(each, exp.Query):
                rows = self.query(each, ctes, sight)
                if rows.is_stream and streams:
                    self._say(each, "Spark cannot read a stream inside an expression; join it instead")
            elif isinstance(each, exp.Column):
                self._resolve(each, sight)
        rows = replace(together(sight.sources.values()), names=names)
        return self._stateful(node, inside, rows, sight) if streams else rows

    def _read(self, node: exp.Expr, ctes: Mapping[str, Rows], sight: Sight) -> Rows:
        """The rows of one item in FROM."""
        rows = _renamed(self._taken(node, ctes, sight), node)
        if rows.is_stream and node.args.get("sample") is not None:
            self._say(node, "Spark cannot sample a stream: leave TABLESAMPLE out, or filter with rand()")
        for pivot in node.args.get("pivots") or []:
            if rows.is_stream and not pivot.args.get("unpivot"):
                self._say(pivot, "Spark cannot PIVOT a stream; aggregate with FILTER (WHERE ...) instead")
            rows = replace(rows, names=None)
        return rows

    def _taken(self, node: exp.Expr, ctes: Mapping[str, Rows], sight: Sight) -> Rows:
        if node.args.get("joins"):
            return Rows(None, is_stream=True)
        if isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
            return self._table(node, ctes)
        if isinstance(node, exp.Subquery) and isinstance(node.this, exp.Query):
            return self.query(node, ctes, None)
        if isinstance(node, exp.Subquery):
            return self._read(node.this, ctes, sight)
        if isinstance(node, exp.Lateral) and isinstance(node.this, exp.Subquery):
            return self.query(node.this, ctes, sight)
        return Rows(None)  # VALUES, explode(...) and other functions have the columns that their alias names

    def _table(self, node: exp.Table, ctes: Mapping[str, Rows]) -> Rows:
        name = node.name.lower()
        if node.args.get("db") is not None:
            return Rows(None)  # of a catalog that only Spark knows
        if name in ctes:
            return ctes[name]
        if name in self._views:
            return self._views[name].rows
        if name in self._later:
            self._say(node, f"{node.name} is not defined yet: a step reads the source and the steps above it")
        else:
            known = [*ctes, *self._views]
            self._say(node, f"there is no table {node.name}{closest(node.name, known)}")
        return Rows(None, is_stream=True)

    def _joined(self, join: exp.Join, right: Rows, sight: Sight) -> Rows:
        left = together(sight.sources.values())
        if not (left.is_stream and right.is_stream) or isinstance(join.this, exp.Lateral):
            return right
        kind = join.side or (join.kind if join.kind in ("SEMI", "ANTI") else "")
        if not kind:
            return replace(right, joins=True)
        if self._watermark is None:
            self._say(join, f"a {kind} JOIN of streams needs a watermark, or it waits without end; add one to [source]")
        return replace(right, joins=True, append_only=f"{kind} JOIN")

    # -- names -------------------------------------------------------------------------------------------------------

    def _resolve(self, column: exp.Column, sight: Sight) -> None:
        parts = [part.name for part in column.parts]
        first = parts[0].lower()
        known = sight.columns()
        if isinstance(column.this, exp.Star):
            if len(parts) == 2 and first not in sight.tables() and known is not None and first not in known:
                self._say(column, f"there is no table {parts[0]} in this FROM{closest(parts[0], sight.tables())}")
            return
        if not _PLAIN.fullmatch(parts[0]) or first in WITHOUT_PARENTHESES:
            return
        if len(parts) > 1:
            self._resolve_qualified(column, parts, sight, known)
        elif known is not None and first not in known and not self._is_implied(column, first, sight):
            self._say(column, f"there is no column {parts[0]}{closest(parts[0], known.values())}")

    def _resolve_qualified(
        self, column: exp.Column, parts: list[str], sight: Sight, known: Mapping[str, str] | None
    ) -> None:
        first, second = parts[0].lower(), parts[1].lower()
        for each in sight.chain():
            rows = each.sources.get(first)
            if rows is not None:
                names = {name.lower(): name for name in rows.names or []}
                if rows.names is not None and second not in names and known is not None and first not in known:
                    self._say(column, f"{parts[0]} has no column {parts[1]}{closest(parts[1], names.values())}")
                return
        if known is None or first in known or len(parts) > 2:
            return
        if any(first in each.windows for each in sight.chain()):
            if second not in ("start", "end"):
                self._say(column, f"{first} has a start and an end, and no {parts[1]}")
        elif not any(first in each.outputs for each in sight.chain()):
            self._say(column, f"there is neither a table nor a column {parts[0]}{closest(parts[0], sight.tables())}")

    def _is_implied(self, column: exp.Column, name: str, sight: Sight) -> bool:
        if any(name in each.windows for each in sight.chain()):
            return True
        if name in UNITS and isinstance(column.parent, exp.Func):
            return True
        if not any(name in each.outputs for each in sight.chain()):
            return False
        where = column.find_ancestor(exp.Where, exp.Select)
        if isinstance(where, exp.Where) and isinstance(where.parent, exp.Select) and name in sight.outputs:
            self._say(column, f"WHERE comes before SELECT and cannot see {column.name}: write its expression instead")
        return True

    # -- state of a stream -------------------------------------------------------------------------------------------

    def _stateful(self, node: exp.Select, inside: list[exp.Expr], rows: Rows, sight: Sight) -> Rows:
        over = {id(each.this) for each in inside if isinstance(each, exp.Window)}
        for each in inside:
            if isinstance(each, exp.Window):
                self._say(each, "Spark cannot do OVER (...) on a stream; GROUP BY window(TIME, '1 minute') instead")
            elif is_aggregate(each) and isinstance(each.this, exp.Distinct) and id(each) not in over:
                self._say(each, "Spark cannot aggregate DISTINCT on a stream; use approx_count_distinct(...)")
        group = node.args.get("group")
        grouped = group is not None or any(is_aggregate(each) and id(each) not in over for each in inside)
        distinct = node.args.get("distinct") is not None
        if not grouped and not distinct:
            return rows
        keys = node.expressions if not grouped else group.expressions if group is not None else []
        if "session_window" in sight.windows:
            rows = replace(rows, append_only="session_window")
            if [called(key) for key in keys] == ["session_window"]:
                self._say(keys[0], "Spark needs more than session_window in GROUP BY on a stream; add a session key")
        if self._lacks_time(keys, group, sight):
            rows = replace(rows, untimed=True)
        return replace(rows, aggregations=rows.aggregations + grouped + distinct)

    def _lacks_time(self, keys: list[exp.Expr], group: exp.Expr | None, sight: Sight) -> bool:
        """Whether the rows are certainly not grouped by event time; only plain columns of the source are certain."""
        if group is not None and (set(group.args) - {"expressions"} or not keys):
            return False
        if len(sight.sources) != 1 or next(iter(sight.sources.values())) is not self._views[self._source].rows:
            return not keys
        plain = [each.unalias() for each in keys]
        if not all(isinstance(each, exp.Column) and not each.is_star for each in plain):
            return False
        names = {each.name.lower() for each in plain}
        known = {name.lower() for name in self._views[self._source].rows.names or []}
        return names <= known and (self._watermark or "").lower() not in names

    def _say(self, node: exp.Expr, text: str) -> None:
        self.findings.append(Finding(sql.offset_of(node), text))


def _inside(select: exp.Select) -> Iterator[exp.Expr]:
    """The nodes of a SELECT's own expressions; an inner query is one node."""
    todo: list[exp.Expr] = []
    for key, value in select.args.items():
        if key in ("with_", "from_"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, exp.Join):
                todo.extend(part for part in (each.args.get("on"),) if part is not None)
            elif isinstance(each, exp.Lateral):
                todo.append(each.this)
            elif isinstance(each, exp.Expr):
                todo.append(each)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, exp.Query):
            todo.extend(node.iter_expressions())


def _renamed(rows: Rows, node: exp.Expr) -> Rows:
    """Rows under the column names of an alias, `AS t(a, b)`."""
    columns = _alias_columns(node)
    return replace(rows, names=[column.name for column in columns]) if columns else rows


def _alias_columns(node: exp.Expr) -> list[exp.Expr]:
    alias = node.args.get("alias")
    return list(alias.args.get("columns") or []) if isinstance(alias, exp.TableAlias) else []


def _given(select: exp.Select) -> Iterator[str]:
    """Names that a SELECT adds to those of its input."""
    for each in select.expressions:
        if isinstance(each, exp.Aliases):
            yield from (name.name for name in each.aliases)
        elif isinstance(each, exp.Alias | exp.Dot) or (isinstance(each, exp.Column) and each.table):
            yield each.output_name
