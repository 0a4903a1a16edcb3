"""What a pipeline's file says, and every mistake in how it says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.pipeline.keys import seconds
from millstream.pipeline.mistakes import Mistake, format_mistakes
from millstream.pipeline.spec import (
    LakeSink,
    PipelineSpec,
    StepSpec,
    TableSink,
    TopicSink,
    Watermark,
    parse,
    redacted,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = Path("/somewhere/clicks.toml")
NAME = 'name = "n"\n'
SOURCE = '[source]\ntopic = "clicks"\nformat = "text"\n'
SINK = '[[sink]]\nfrom = "clicks"\nlake = "lake"\n'


def read(text: str) -> PipelineSpec:
    spec, mistakes = parse(FILE, text)
    assert mistakes == []
    assert spec is not None
    return spec


def mistakes_in(text: str) -> list[str]:
    return [f"{each.line}: {each.text}" for each in sorted(parse(FILE, text)[1])]


def test_reads_the_example_of_the_readme() -> None:
    spec, mistakes = parse(EXAMPLES / "clicks.toml")
    assert mistakes == []
    assert spec is not None
    assert spec.name == "clicks"
    assert (spec.source.name, spec.source.topic, spec.source.format) == ("clicks", "clicks", "json")
    assert spec.source.watermark == Watermark("at", "10 minutes")
    assert [step.name for step in spec.steps] == ["per_minute", "slow"]
    folder = EXAMPLES.absolute()
    assert spec.sinks == (
        LakeSink("lake-clicks", "clicks", str(folder / "lake/clicks")),
        TableSink("table-hits", "per_minute", f"sqlite:{folder / 'hits.db'}", "hits", ("minute", "url")),
        TopicSink("topic-alerts", "slow", "alerts"),
    )
    assert spec.dead_letters == "clicks.dead"
    assert spec.checkpoint == folder / ".millstream/clicks"
    assert (spec.on_error, spec.trigger, spec.rows_per_batch, spec.broker) == (
        "dead-letter",
        "1 second",
        None,
        None,
    )


def test_reads_every_key() -> None:
    spec = read(
        """
        name = "all"
        broker = "one:9092, [::1]:9093"
        dead_letters = "bad-ones"
        trigger = "1 minute 30 seconds"
        rows_per_batch = 5
        checkpoint = "/var/points"
        [source]
        name = "events"
        pattern = "app-.*"
        format = "csv"
        schema = "a INT"
        starting = "latest"
        headers = true
        options = { sep = ";", multiLine = true, maxColumns = 3 }
        [[step]]
        name = "Small"
        sql = "SELECT a FROM events"
        check = false
        [[sink]]
        id = "mine"
        from = "small"
        lake = "/lakes/a"
        format = "parquet"
        partition_by = "none"
        file_mb = 1
        [[sink]]
        from = "EVENTS"
        topic = "out"
        key = "a"
        format = "bytes"
        compression = "lz4"
        [[sink]]
        from = "events"
        table = "postgresql://h/db"
        name = "a.b c"
        key = "a"
        """
    )
    assert (spec.broker, spec.dead_letters, spec.trigger) == ("one:9092, [::1]:9093", "bad-ones", "1 minute 30 seconds")
    assert (spec.rows_per_batch, spec.checkpoint) == (5, Path("/var/points"))
    source = spec.source
    assert (source.name, source.topic, source.pattern, source.starting) == ("events", None, "app-.*", "latest")
    assert source.headers and source.options == {"sep": ";", "multiLine": "true", "maxColumns": "3"}
    assert spec.steps == (StepSpec("Small", "SELECT a FROM events", check=False),)
    assert spec.sinks == (
        LakeSink("mine", "Small", "/lakes/a", "parquet", "none", 1),
        TopicSink("topic-out", "events", "out", "a", "bytes", "lz4"),
        TableSink("table-a.b_c", "events", "postgresql://h/db", "a.b c", ("a",)),
    )


def test_views_and_dead_letters_have_names_by_default() -> None:
    spec = read(
        'name = "n"\n[source]\ntopic = "web-clicks.v2"\nformat = "text"\n[[sink]]\nfrom = "web_clicks_v2"\nlake = "x"'
    )
    assert (spec.source.name, spec.dead_letters) == ("web_clicks_v2", "web-clicks.v2.dead")
    spec = read(
        'name = "my-apps"\n[source]\npattern = "app-.*"\nformat = "text"\n[[sink]]\nfrom = "my_apps"\nlake = "x"'
    )
    assert (spec.source.name, spec.dead_letters) == ("my_apps", "my-apps.dead")


def test_there_are_no_dead_letters_where_no_row_can_go_there() -> None:
    assert read(NAME + 'on_error = "stop"\n' + SOURCE + SINK).dead_letters is None
    assert read(NAME + SOURCE.replace("text", "bytes") + SINK).dead_letters is None


def test_an_avro_schema_is_read_out_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.avsc").write_text('{"type": "record"}')
    text = 'name = "n"\n[source]\ntopic = "t"\nformat = "avro"\nschema = "{}.avsc"\n[[sink]]\nfrom = "t"\nlake = "x"'
    spec, mistakes = parse(tmp_path / "p.toml", text.format("a"))
    assert mistakes == [] and spec is not None and spec.source.schema == '{"type": "record"}'
    _, mistakes = parse(tmp_path / "p.toml", text.format("b"))
    assert mistakes == [Mistake(5, 'source.schema "b.avsc" cannot be read: No such file or directory')]


def test_tells_every_mistake_at_once_with_its_line() -> None:
    text = """\
nam = "x"
broker = "localhost"
trigger = "soon"
rows_per_batch = 0
on_error = "ignore"
[source]
topic = "clicks"
frmat = "json"
starting = 3
watermark = { column = "at", dely = "1 minute" }
[[step]]
sql = "SELECT 1"
[[step]]
name = "one"
sql = 1
[[step]]
name = "ONE"
sql = "SELECT 1"
[[sink]]
from = "two"
lake = "x"
file_mb = 5000
[[sink]]
from = "one"
lake = "y"
topic = "z"
[[sink]]
from = "clicks"
[[sink]]
from = "clicks"
table = "sqlite:x"
key = []
compression = "zstd"
[[sink]]
from = "clicks"
topic = "a b"
[[sink]]
from = "clicks"
topic = "clicks"
id = "dead-letters"
"""
    assert mistakes_in(text) == [
        "1: nam is not known; did you mean name?",
        '1: the file has no name; add one, as in name = "clicks"',
        '2: broker = "localhost" is not valid: write HOST:PORT, as in "127.0.0.1:9092"',
        '3: trigger = "soon" is not a duration; write it as in "1 second"',
        "4: rows_per_batch must be between 1 and 2,147,483,647, not 0",
        '5: on_error = "ignore" is not known; there are dead-letter, stop',
        '6: source has no schema; add one, as in schema = "user STRING, ms LONG, at TIMESTAMP"',
        "8: source.frmat is not known; did you mean format?",
        "9: source.starting must be a string, not 3",
        '10: source.watermark has no delay; add one, as in watermark = { column = "at", delay = "10 minutes" }',
        "10: source.watermark.dely is not known; did you mean delay?",
        '11: this step has no name; add one, as in name = "per_minute"',
        "15: sql must be a string, not 1",
        "17: the name ONE is taken by another step or the source; give each its own",
        '20: from = "two" is neither the source nor a step; there are clicks, one',
        "22: file_mb must be between 1 and 4,096, not 5,000",
        "26: this sink has lake and topic; make a [[sink]] of each",
        "27: this sink has no destination; add lake = FOLDER, table = URL or topic = NAME",
        '29: this sink has no key; add one, as in key = ["minute", "url"]',
        '29: this sink has no name; add one, as in name = "hits"',
        "33: compression is not known; there are from, id, table, name, key",
        "36: topic = \"a b\" is not valid: use 1 to 249 letters, digits, '.', '_' and '-'",
        "39: clicks is read by the source, so this would never end; name another topic",
        "40: another sink is called dead-letters already; give this one an id of its own",
    ]


PATTERN = SOURCE.replace('topic = "clicks"', 'pattern = "{}"\nname = "clicks"')


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SOURCE + SINK, "1: the file has no name; add one"),
        (NAME + SINK, "1: the file has no source; add one"),
        (NAME + "source = 3\n" + SINK, '2: source must be a table, as in [source] topic = "clicks", not 3'),
        (NAME + SOURCE, "1: the file has no [[sink]]; add one"),
        (NAME + SOURCE + "[sink]\n", "5: sink must be tables, each begun with [[sink]]"),
        (NAME + '[source]\nformat = "text"\n' + SINK, "2: source has no topic; add one"),
        (NAME + SOURCE + 'pattern = "x"\n' + SINK, "5: source has a topic and a pattern; keep one"),
        (NAME + SOURCE + 'schema = "a INT"\n' + SINK, "5: source.schema has no meaning for format text"),
        (
            NAME + SOURCE + "options = [1]\n" + SINK,
            "5: source.options must be a table, as in [source.options], not an array",
        ),
        (
            NAME + SOURCE + "options.x = 1979-05-27\n" + SINK,
            "5: source.options.x must be a string, a number or true or false",
        ),
        (NAME + SOURCE + 'headers = "yes"\n' + SINK, "5: source.headers must be true or false, not a string"),
        (NAME + SOURCE + SINK + 'lake = "x"\n', "8: is not valid TOML: the key occurs twice"),
        ('name = "n\n', "1: is not valid TOML: illegal character '\\n' (column 10)"),
        (NAME + SOURCE + SINK + SINK.replace('"lake"', '"more"'), "8: another sink is called lake-clicks already"),
        (NAME + SOURCE + SINK + SINK + 'id = "b"\n', '10: another sink writes to the lake "lake" already'),
        (
            NAME + 'on_error = "stop"\ndead_letters = "d"\n' + SOURCE + SINK,
            "3: dead_letters has no meaning with on_error",
        ),
        (NAME + PATTERN.format("n.*") + SINK, "2: n.dead is read by the source, so this would never end"),
        (NAME + PATTERN.format("(") + SINK, "3: source.pattern is not a regular expression: missing )"),
    ],
)
def test_tells_what_is_wrong_and_what_to_do(text: str, wanted: str) -> None:
    (found,) = mistakes_in(text)
    assert found.startswith(wanted)


def test_a_file_that_cannot_be_read_is_a_mistake_too(tmp_path: Path) -> None:
    assert parse(tmp_path / "no.toml") == (None, [Mistake(0, "cannot be read: No such file or directory")])
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    assert parse(tmp_path / "latin.toml")[1] == [Mistake(0, "is not UTF-8 at byte 11; save it as UTF-8")]
    deep = "x = " + "[" * 5000 + "]" * 5000
    assert parse(FILE, deep)[1][0].line == 0
    assert parse(FILE, "x = " + "9" * 5000)[1][0].line == 0


def test_mistakes_are_shown_in_the_order_of_the_file() -> None:
    shown = format_mistakes("a.toml", [Mistake(12, "b"), Mistake(3, "z"), Mistake(0, "whole"), Mistake(3, "z")])
    assert shown == ["a.toml: whole", "a.toml:3: z", "a.toml:12: b"]


def test_passwords_are_not_shown() -> None:
    spec = read(
        'name = "n"\n'
        + SOURCE
        + '[[sink]]\nfrom = "clicks"\ntable = "postgresql://u:pa@ss/w@h/d?password=s3"\nname = "t"\nkey = "value"'
    )
    sink = spec.sinks[0]
    assert isinstance(sink, TableSink)
    assert "pa@ss" not in repr(spec) and "s3" not in repr(spec)
    assert redacted(sink.url) == "postgresql://u:***@h/d?password=***"
    assert redacted("sqlite:/a/b.db") == "sqlite:/a/b.db"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("10 minutes", 600), ("1 hour 30 minutes", 5400), ("0 seconds", 0), ("2 DAYS", 172_800), ("500 milliseconds", 0.5)]
    + [(bad, None) for bad in ("", "soon", "10", "10minutes", "1 month", "-1 second", "1.5 hours", "1 hour x")],
)
def test_durations_are_those_of_spark(text: str, wanted: float | None) -> None:
    assert seconds(text) == wanted


PIECES = st.sampled_from([*'"[]={}#,.\\\n', '"""', "'''", "[[sink]]", "[source]", "name", "é", "\0", "1", "true"])


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """The example with some of it cut out, doubled, moved or put in."""
    text = (EXAMPLES / "clicks.toml").read_text()
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(start + draw(st.integers(0, 30)), len(text))
        kind = draw(st.sampled_from(["cut", "double", "insert", "replace", "line"]))
        if kind == "cut":
            text = text[:start] + text[end:]
        elif kind == "double":
            text = text[:end] + text[start:]
        elif kind == "insert":
            text = text[:start] + draw(PIECES) + text[start:]
        elif kind == "replace":
            text = text[:start] + draw(PIECES) + text[end:]
        else:
            lines = text.split("\n")
            lines.insert(draw(st.integers(0, len(lines))), lines.pop(draw(st.integers(0, len(lines) - 1))))
            text = "\n".join(lines)
    return text


@settings(max_examples=300)
@given(mutations())
def test_no_file_is_so_broken_that_reading_it_fails(text: str) -> None:
    spec, mistakes = parse(FILE, text)
    assert spec is not None or mistakes
    for mistake in mistakes:
        assert 0 <= mistake.line <= text.count("\n") + 1
        assert "\n" not in mistake.text
