"""Spark's state between the batches of a sink, and whether it still fits a changed pipeline.

Spark keeps state for aggregates, DISTINCT and joins of streams. It is built for one set of keys, aggregates and types.
After a change Spark fails with the name of a schema, or does not notice: a `sum(a)` that becomes `sum(b)` goes on from
the sum of `a`. So the notes keep the plan of a sink's first batch, to compare with the file before Spark starts.

    plan     the source's schema and watermark, the steps' SQL, and the sink's view: as the file has them
    state    the parts of a plan that affect state, computed from it at the comparison, so that another version of this
             module, or of sqlglot, judges both by the same rules

Filters, projections, names and the watermark's delay are not part of the state: Spark accepts new ones and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from sqlglot import exp

from millstream.pipeline import sql
from millstream.pipeline.functions import is_aggregate
from millstream.pipeline.spec import PipelineSpec, SourceSpec, StepSpec, Watermark
from millstream.pipeline.views import View, references

Views = Mapping[str, View]
"""By their names in lower case."""


@dataclass(frozen=True)
class Kept:
    """The state of one step."""

    step: str
    parts: Mapping[str, str]
    """Its parts, by clause."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The types of its columns, if they are certain."""


def plan_of(spec: PipelineSpec, view: str) -> dict[str, Any]:
    source = spec.source
    return {
        "source": {
            "name": source.name,
            "format": source.format,
            "schema": source.schema,
            "watermark": source.watermark.column if source.watermark is not None else None,
        },
        "steps": [[step.name, step.sql] for step in spec.steps],
        "from": view,
    }


def spec_of(plan: Mapping[str, Any], now: PipelineSpec) -> tuple[PipelineSpec, str]:
    """The pipeline of a plan, as far as state goes, and the sink's view in it."""
    given = plan["source"]
    mark = Watermark(given["watermark"], "0 seconds") if given["watermark"] is not None else None
    source = SourceSpec(
        given["name"], now.source.topic, now.source.pattern, given["format"], given["schema"], watermark=mark
    )
    steps = tuple(StepSpec(name, text) for name, text in plan["steps"])
    return replace(now, source=source, steps=steps), plan["from"]


def stateful_steps(spec: PipelineSpec, views: Views, view: str) -> list[StepSpec]:
    """The stateful steps on the way to a view, from the source on."""
    steps = {step.name.lower(): step for step in spec.steps}
    passed: set[str] = set()
    todo = [view.lower()]
    while todo:
        name = todo.pop()
        if name in steps and name not in passed:
            passed.add(name)
            todo.extend(references(steps[name].sql, views))
    return [step for name, step in steps.items() if name in passed and _adds_state(step, views)]


def kept(spec: PipelineSpec, views: Views, view: str) -> list[Kept]:
    mark = spec.source.watermark.column if spec.source.watermark is not None else ""
    return [_kept(step, views, mark) for step in stateful_steps(spec, views, view)]


def differences(before: list[Kept], after: list[Kept]) -> Iterator[tuple[str | None, str]]:
    """The changes: the step's current name, if there is one, and a sentence about it."""
    for old, new in zip_longest(before, after):
        if old is None:
            yield new.step, "it keeps state, which the earlier batches did not build"
        elif new is None:
            yield None, f"the state of the step {old.step} is no longer used"
        else:
            for part in sorted({*old.parts, *new.parts}):
                was, is_now = old.parts.get(part, "nothing"), new.parts.get(part, "nothing")
                if was != is_now:
                    yield new.step, f"{part} changed from {was} to {is_now}"
            for column in sorted({*old.types} & {*new.types}):
                if old.types[column] != new.types[column]:
                    yield new.step, f"column {column} changed from {old.types[column]} to {new.types[column]}"


def _adds_state(step: StepSpec, views: Views) -> bool:
    rows = views[step.name.lower()].rows
    below = [view.rows for view in _below(step, views)]
    aggregations = max((each.aggregations for each in below), default=0)
    return rows.aggregations > aggregations or (rows.joins and not any(each.joins for each in below))


def _below(step: StepSpec, views: Views) -> list[View]:
    return [views[name] for name in references(step.sql, views) if name != step.name.lower()]


def _kept(step: StepSpec, views: Views, mark: str) -> Kept:
    parts = {"the watermark's column": mark} if mark else {}
    try:
        query = sql.read(step.sql)
    except sql.BadSQL:
        query = None
    if query is None:
        return Kept(step.name, parts | {"its SQL": " ".join(step.sql.split())})
    nodes: dict[str, list[exp.Expr]] = {"GROUP BY": [], "aggregates": [], "DISTINCT": [], "JOIN": []}
    for select in query.find_all(exp.Select):
        group = select.args.get("group")
        if group is not None:
            nodes["GROUP BY"] += [_meant(key, select) for key in group.expressions]
        if select.args.get("distinct") is not None:
            nodes["DISTINCT"] += [each.unalias() for each in select.expressions]
        if joins := select.args.get("joins"):
            where = select.args.get("where")  # may have the keys, as in FROM a, b WHERE a.id = b.id
            nodes["JOIN"] += [*joins, *([where] if where is not None else [])]
    nodes["aggregates"] = [each for each in query.find_all(exp.Expr) if is_aggregate(each)]
    for name, found in nodes.items():
        texts = [each.sql("spark") for each in found]
        if texts:
            parts[name] = ", ".join(sorted({*texts}) if name == "aggregates" else texts)
    columns = {
        column.name.lower() for found in nodes.values() for each in found for column in each.find_all(exp.Column)
    }
    return Kept(step.name, parts, _types(columns, _below(step, views)))


def _meant(key: exp.Expr, select: exp.Select) -> exp.Expr:
    """A key of GROUP BY, resolved if it is the number or the alias of a column of the SELECT."""
    selects = select.expressions
    if isinstance(key, exp.Literal) and key.is_int and 0 < int(key.this) <= len(selects):
        key = selects[int(key.this) - 1].unalias()
    elif isinstance(key, exp.Column) and not key.table:
        named = [each for each in selects if isinstance(each, exp.Alias) and each.alias.lower() == key.name.lower()]
        key = named[0].unalias() if named else key
    return key


def _types(names: set[str], below: list[View]) -> dict[str, str]:
    known: dict[str, set[str]] = {}
    for view in below:
        for name, kind in view.columns or []:
            known.setdefault(name.lower(), set()).add(kind)
    return {
        name: kind for name in names for kind in known.get(name, ()) if len(known[name]) == 1 and kind != sql.UNKNOWN
    }
