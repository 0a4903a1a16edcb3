"""Decodes values into columns: the view that a pipeline's SQL reads from.

A row of the view has the decoded columns and, after them, the record's origin (`META`). Rows that cannot be decoded are
marked with a cause (`CAUSE`) instead of being dropped or failing: the caller chooses between
`good` and `bad`. A record without a value (a tombstone) is a row whose columns are all null, and no mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from millstream.pipeline import avro
from millstream.pipeline.ddl import quoted
from millstream.pipeline.spec import SourceSpec

META = {
    "_key": "key",
    "_topic": "topic",
    "_partition": "partition",
    "_offset": "offset",
    "_timestamp": "timestamp",
    "_headers": "headers",
}
CAUSE = "_cause"
COLUMN = "_column"
"""The column that could not be decoded, if it is one."""
RAW = "_value"
"""The original value, for dead letters."""
_BAD = "_bad"
_BAD_COLUMN = "_bad_column"
_END = "_millstream_end"


def decode(records: DataFrame, source: SourceSpec) -> DataFrame:
    """Records of `format("millstream")` as decoded columns, META, RAW, CAUSE and COLUMN."""
    text, nothing = F.col("value").cast("string"), F.lit(None).cast("string")
    if source.format == "bytes":
        return _rows(records, [F.col("value")], nothing, nothing)
    if source.format == "text":
        return _rows(records, [text.alias("value")], _not_text(), nothing)
    assert source.schema is not None
    if source.format == "avro":
        parsed = avro.decode(records, source.schema, source.schema_ids, _BAD, _BAD_COLUMN)
        found = F.col("_parsed")
        return _spread(parsed, avro.columns(source.schema), found[_BAD], found[_BAD_COLUMN])
    fields = cast(StructType, StructType.fromDDL(source.schema))
    options = {**source.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = records.withColumn("_parsed", _parse(source.format, text, fields, options))
    wrong = F.col("_parsed")[_BAD].isNotNull() | (F.col("value").isNotNull() & F.col("_parsed").isNull())
    cause = F.when(wrong, F.lit(f"the value is not {source.format.upper()} that fits {source.schema}"))
    if source.format == "json":
        cause = cause.when(_goes_on(text, options), F.lit("the value continues after its JSON object"))
    column = F.when(wrong & _not_text().isNull(), _wrong_column(source.format, text, fields, options))
    return _spread(parsed, fields, F.coalesce(_not_text(), cause), column)


def good(rows: DataFrame) -> DataFrame:
    return rows.where(F.col(CAUSE).isNull()).drop(CAUSE, COLUMN, RAW)


def good_or_stop(rows: DataFrame) -> DataFrame:
    """For `on_error = "stop"`: the first undecodable row fails the batch, and the error names its record."""
    where = F.concat(F.col("_topic"), F.lit("-"), F.col("_partition"), F.lit(" at offset "), F.col("_offset"))
    column = F.coalesce(F.concat(F.lit(", column "), F.col(COLUMN)), F.lit(""))
    stop = F.raise_error(F.concat(where, F.lit(": "), F.col(CAUSE), column, F.lit(' (on_error = "stop")')))
    return rows.where(F.when(F.col(CAUSE).isNotNull(), stop.cast("boolean")).otherwise(True)).drop(CAUSE, COLUMN, RAW)


def bad(rows: DataFrame) -> DataFrame:
    return rows.where(F.col(CAUSE).isNotNull())


def _goes_on(text: Column, options: Mapping[str, str]) -> Column:
    """Whether text follows the object, such as another object: Spark reads the first, and silently ignores the rest.

    The text is parsed as the first of two array elements, and the second must be ours: after a bracket in the text
    Spark would be silent again. Only a text with a brace before its last character needs this.
    """
    both = F.from_json(
        F.concat(F.lit("["), text, F.lit(f'\n,{{"{_END}":"{_END}"}}]')), f"ARRAY<STRUCT<{_END}: STRING>>", dict(options)
    )
    is_whole = (F.size(both) == 2) & (F.get(both, F.lit(1))[_END] == _END)
    return text.rlike(r"\}\s*\S") & ~F.coalesce(is_whole, F.lit(False))


def _wrong_column(kind: str, text: Column, fields: StructType, options: Mapping[str, str]) -> Column:
    """The first column whose own value does not fit; null if the whole value is not of its format.

    A JSON object is parsed once for each column, alone: then only that column's value can be wrong, whatever its type.
    In CSV a column has a position and a plain type, so a column is wrong if it is null and has text.
    """
    if kind == "json":
        alone = [_parse(kind, text, StructType([field]), options) for field in fields.fields]
        whole = _parse(kind, text, StructType([StructField(_END, StringType())]), options)
        is_wrong = [whole[_BAD].isNull() & each[_BAD].isNotNull() for each in alone]
    else:
        texts = _parse(
            kind, text, StructType([StructField(each.name, StringType()) for each in fields.fields]), options
        )
        parsed = F.col("_parsed")
        is_wrong = [
            texts[_BAD].isNull() & texts[each.name].isNotNull() & parsed[each.name].isNull() for each in fields.fields
        ]
    return F.coalesce(*(F.when(wrong, F.lit(each.name)) for each, wrong in zip(fields.fields, is_wrong, strict=True)))


def _parse(kind: str, text: Column, fields: StructType, options: Mapping[str, str]) -> Column:
    schema = StructType([*fields.fields, StructField(_BAD, StringType())])
    if kind == "json":
        return F.from_json(text, schema, dict(options))
    return F.from_csv(
        text, ", ".join(f"{quoted(each.name)} {each.dataType.simpleString()}" for each in schema), dict(options)
    )


def _not_text() -> Column:
    valid = F.is_valid_utf8(F.col("value").cast("string"))
    return F.when(F.col("value").isNotNull() & ~valid, F.lit("the value is not UTF-8"))


def _spread(parsed: DataFrame, fields: StructType, cause: Column, column: Column) -> DataFrame:
    """The fields of the struct `_parsed` as columns."""
    return _rows(parsed, [F.col("_parsed")[field.name].alias(field.name) for field in fields.fields], cause, column)


def _rows(records: DataFrame, columns: list[Column], cause: Column, column: Column) -> DataFrame:
    meta = [F.col(name).alias(alias) for alias, name in META.items() if name in records.columns]
    return records.select(*columns, *meta, F.col("value").alias(RAW), cause.alias(CAUSE), column.alias(COLUMN))
