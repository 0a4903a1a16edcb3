"""Spark's functions, as far as the check of a query needs them: aggregates, generators of columns, names
that are no columns. The lists are those of Spark 4.3.
"""

from __future__ import annotations

from sqlglot import exp

WINDOWS = frozenset({"window", "session_window"})
"""Each returns a struct of a start and an end, under its own name."""
AGGREGATES = frozenset(
    {
        *("any", "bitmap_and_agg", "collect_union", "count_min_sketch", "every", "histogram_numeric", "hll_sketch_agg"),
        *("hll_union_agg", "kll_merge_agg_bigint", "kll_merge_agg_double", "kll_merge_agg_float", "mean", "measure"),
        *("kll_sketch_agg_bigint", "kll_sketch_agg_double", "kll_sketch_agg_float", "schema_of_variant_agg", "some"),
        *("std", "theta_intersection_agg", "theta_sketch_agg", "theta_union_agg", "try_avg", "try_sum"),
        *("tuple_intersection_agg_double", "tuple_intersection_agg_integer", "tuple_sketch_agg_double"),
        *("tuple_sketch_agg_integer", "tuple_union_agg_double", "tuple_union_agg_integer"),
    }
)
"""Aggregates that sqlglot does not know as such."""
GENERATORS = frozenset(
    {
        *("explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack"),
        *("json_tuple", "variant_explode", "variant_explode_outer"),
    }
)
"""These name their own columns if the query does not."""
WITHOUT_PARENTHESES = frozenset(
    {
        *("current_date", "current_timestamp", "current_time", "current_user", "localtime", "localtimestamp"),
        *("user", "session_user", "grouping__id"),
    }
)
_UNITS = ("year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond", "microsecond")
UNITS = frozenset({*_UNITS, *(f"{unit}s" for unit in _UNITS), "dayofyear"})
"""Keywords used as an argument, as in timestampadd(HOUR, 1, at)."""


def called(node: exp.Expr) -> str:
    """The name of the function that a node calls, in lower case."""
    if isinstance(node, exp.Anonymous):
        return node.name.lower()
    return node.sql_name().lower().lstrip("_") if isinstance(node, exp.Func) else ""


def is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.AggFunc) or (isinstance(node, exp.Anonymous) and node.name.lower() in AGGREGATES)
