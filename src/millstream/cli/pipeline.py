"""`millstream pipeline`: check, run, list, show, reset, replay.

Only `run` starts Spark. The others read files, the broker and Spark's checkpoint, and return at once.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.admin.failure import Failure
from millstream.admin.position import Kind
from millstream.cli.connection import DEFAULT_BROKER, Connection
from millstream.cli.connection import BrokerOption as GivenBroker
from millstream.cli.moment import moment_ms
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import parse_position
from millstream.cli.produce import Compression
from millstream.cli.progress import Progress
from millstream.cli.setting import pairs
from millstream.cli.spark import need_spark

if TYPE_CHECKING:
    from millstream.pipeline.mistakes import Mistake
    from millstream.pipeline.spec import PipelineSpec

app = typer.Typer(
    help="Check, run, list, show and reset pipelines; send a lake's rows back to a topic.", no_args_is_help=True
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The pipeline, in TOML.")]
BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        "-b",
        metavar="HOST:PORT",
        envvar="MILLSTREAM_BROKER",
        show_default=f"the file's, else {DEFAULT_BROKER}",
        help="The broker; several with commas.",
    ),
]


@app.command()
def check(file: FileArgument, broker: BrokerOption = None, output: OutputOption = Format.TABLE) -> None:
    """Report every mistake in a pipeline's file, with its line. Does not start Spark.

    Topics are looked up if a broker answers. Exits with 1 if there is a mistake.
    """
    need_spark("millstream pipeline check")
    from millstream.pipeline.mistakes import format_mistakes

    _, mistakes = _read(file, broker, must_reach=broker is not None)
    if output is Format.JSON:
        found = [{"line": each.line or None, "text": each.text} for each in sorted({*mistakes})]
        show_json({"file": str(file), "valid": not found, "mistakes": found})
    else:
        print("\n".join(format_mistakes(file, mistakes)) if mistakes else f"{file}: no mistakes")
    if mistakes:
        raise typer.Exit(1)


@app.command()
def run(
    file: FileArgument,
    once: Annotated[bool, typer.Option("--once", help="Process the records that exist now, then exit.")] = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", show_default="local[*]", help="A Spark cluster, as spark://HOST:7077.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", "-c", metavar="KEY=VALUE", help="A Spark setting; repeatable.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve metrics for Prometheus on this HOST:PORT.")
    ] = None,
    broker: BrokerOption = None,
) -> None:
    """Run a pipeline until SIGTERM or Ctrl-C, or with --once until it has processed the current records.

    On a terminal the state of each sink is shown; otherwise each batch is a line of JSON.

    A stopped or killed pipeline resumes from its checkpoint.
    """
    need_spark("millstream pipeline run")
    from millstream.cli import running
    from millstream.pipeline.mistakes import format_mistakes

    settings = pairs(conf, "spark.executor.memory=2g")
    spec, mistakes = _read(file, broker, must_reach=True)
    if mistakes or spec is None:
        print("\n".join(format_mistakes(file, mistakes)), file=sys.stderr)
        count = len({*mistakes})
        raise Failure(f"{file} has {count} mistake{'s' * (count != 1)}, so nothing was started")
    running.run(spec, address_of(spec, broker), running.Wish(once, master, settings, metrics))


@app.command("list")
def list_pipelines(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to search, subfolders included.")] = Path("."),
    output: OutputOption = Format.TABLE,
) -> None:
    """List the pipelines in a folder, with the progress of each sink."""
    need_spark("millstream pipeline list")
    from millstream.pipeline import catalog

    if not folder.is_dir():
        raise Failure(f"{folder} is not a folder; name one that has pipelines in it")
    rows = [_listed(entry) for entry in catalog.find_pipelines(folder)]
    if output is Format.JSON:
        show_json(rows)
        return
    for row in rows:
        row["sinks"] = ", ".join(
            f"{name} ({'not begun' if batch is None else f'batch {batch}'})" for name, batch in row["sinks"].items()
        )
        row["steps"] = ", ".join(row["steps"])
        count = len(row["mistakes"])
        row["valid"] = "yes" if not count else f"no, {count} mistake{'s' * (count != 1)}; `pipeline check` lists them"
    columns = {key: key.upper() for key in ("file", "name", "source", "steps", "sinks", "valid")}
    show_table(columns, rows, f"no pipelines in {folder}; one is a TOML file with [source] and [[sink]]")


@app.command()
def show(file: FileArgument, broker: BrokerOption = None, output: OutputOption = Format.TABLE) -> None:
    """Show a pipeline: its source, the columns of each view, its sinks and their progress."""
    need_spark("millstream pipeline show")
    spec, mistakes = _parsed(file)
    if spec is None or mistakes:
        raise Failure(f"{file} has mistakes; `millstream pipeline check {file}` lists them")
    described = _described(spec, address_of(spec, broker))
    if output is Format.JSON:
        show_json(described)
        return
    for key in ("name", "source", "broker", "checkpoint", "dead_letters"):
        print(f"{key.replace('_', ' '):<14}{described[key] or '-'}")
    for view, columns in described["views"].items():
        print(f"\n{view}")
        for name, kind in columns.items():
            print(f"  {name:<24} {kind}")
    print()
    headings = {key: key.upper() for key in ("sink", "from", "to", "batch", "done", "late", "lag")}
    show_table(headings, described["sinks"], "no sinks")
    if described["unreachable"]:
        print(f"\nno broker answers at {described['broker']}, so the lag is not known", file=sys.stderr)


@app.command()
def reset(
    file: FileArgument,
    sink: Annotated[str, typer.Argument(metavar="SINK", show_default=False, help="Its name in `pipeline show`.")],
    delete_output: Annotated[
        bool, typer.Option("--delete-output", help="Delete its lake, or every row of its table.")
    ] = False,
    keep_output: Annotated[
        bool, typer.Option("--keep-output", help="Keep them: a lake then has rows twice, a table is updated.")
    ] = False,
    broker: BrokerOption = None,
) -> None:
    """Reset a sink: delete its progress and Spark's state for it. The pipeline must not be running.

    The next run begins where the source's `starting` says: at the earliest records by default.
    """
    need_spark("millstream pipeline reset")
    from millstream.pipeline import reset as resetting
    from millstream.pipeline.catalog import sink_names
    from millstream.pipeline.lock import CheckpointLock
    from millstream.pipeline.mistakes import closest
    from millstream.pipeline.spec import LakeSink, TableSink

    spec, _ = _parsed(file)
    if spec is None:
        raise Failure(f"{file} has mistakes; `millstream pipeline check {file}` lists them")
    names = sink_names(spec)
    if sink not in names:
        raise Failure(f"the pipeline {spec.name} has no sink {sink}{closest(sink, names)}")
    found = next((each for each in spec.sinks if each.name == sink), None)
    stored = found if isinstance(found, LakeSink | TableSink) else None
    if delete_output and stored is None:
        raise Failure(f"{sink} writes to a topic, whose records stay; trim it with `millstream topic trim`")
    if stored is not None and delete_output == keep_output:
        raise Failure(f"{sink} will get every row again: choose --delete-output or --keep-output for its old rows")
    with CheckpointLock(spec.name, spec.checkpoint):
        if delete_output and stored is not None:
            print(f"Deleted {resetting.delete_output(spec, stored)}")
        began = resetting.delete_checkpoint(spec, sink)
    _forget_group(address_of(spec, broker), f"{spec.name}.{sink}")
    start = "the beginning" if spec.source.starting == "earliest" else "the latest records"
    print(f"Reset {sink}; its next run starts at {start}" if began else f"{sink} had not begun")


@app.command()
def replay(
    lake: Annotated[Path, typer.Argument(metavar="LAKE", show_default=False, help="The folder of a lake sink.")],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="Where the rows go; it must exist.")],
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Rows from this time on (ISO or @ms).")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Rows before this time (ISO or @ms).")] = None,
    keep_partitions: Annotated[
        bool, typer.Option("--keep-partitions", help="Send a row to its original partition, not to its key's.")
    ] = False,
    compression: Annotated[Compression, typer.Option("--compression", "-z", help="Of the batches.")] = Compression.ZSTD,
    broker: GivenBroker = DEFAULT_BROKER,
) -> None:
    """Send a lake's rows back to a topic, with their keys and timestamps. Does not start Spark.

    Rows in bytes or text format become their original records; other rows become JSON objects.

    Rows with the same key keep their order. With --keep-partitions, all rows of a partition keep theirs.
    """
    need_spark("millstream pipeline replay")
    from millstream.pipeline.replay import Replay, Span

    span = Span(_time(from_, "--from"), _time(until, "--until"))
    Connection(broker).topic(to)
    started = time.monotonic()
    sent = 0
    replaying = Replay(str(lake), span, broker, to, compression.value, keep_partitions)
    with Progress(to, replaying.total) as progress:
        try:
            for sent in replaying:
                progress.update(sent, sent, time.monotonic() - started)
        except KeyboardInterrupt:
            print(f"interrupted; up to {sent:,} rows were sent to {to}", file=sys.stderr)
            raise
    seconds = max(time.monotonic() - started, 1e-9)
    print(f"Sent {sent:,} record{'s' * (sent != 1)} to {to} ({seconds:.1f} s, {sent / seconds:,.0f} records/s)")


def _forget_group(broker: str, group: str) -> None:
    """Its offsets only show the sink's progress to other tools, so an unreachable broker is no failure."""
    try:
        connection = Connection(broker)
    except Failure as failure:
        print(f"the offsets of group {group} stay until the next run commits new ones: {failure}", file=sys.stderr)
        return
    if group in {each.group_id for each in connection.settle(connection.admin.list_consumer_groups()).valid}:
        connection.settle(connection.admin.delete_consumer_groups([group])[group], group)


# -- reading ---------------------------------------------------------------------------------------------------------


def address_of(spec: PipelineSpec, given: str | None) -> str:
    """The flag and the environment win over the file."""
    return given or spec.broker or DEFAULT_BROKER


def _parsed(file: Path) -> tuple[PipelineSpec | None, list[Mistake]]:
    from millstream.pipeline.spec import parse

    return parse(file)


def _read(file: Path, broker: str | None, *, must_reach: bool) -> tuple[PipelineSpec | None, list[Mistake]]:
    from millstream.client.cluster import KafkaCluster
    from millstream.pipeline import check as checking

    spec, mistakes = _parsed(file)
    if spec is None:
        return None, mistakes
    address = address_of(spec, broker)
    cluster: KafkaCluster | None = None
    try:
        Connection(address)
        cluster = KafkaCluster(address, "millstream-pipeline-check")
    except Failure:
        if must_reach:
            raise
        print(f"no broker answers at {address}, so topics were not looked up", file=sys.stderr)
    try:
        return spec, mistakes + checking.check(spec, cluster)
    finally:
        if cluster is not None:
            cluster.close()


def _time(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    position = parse_position(text)
    if position.kind is not Kind.TIME:
        raise typer.BadParameter(f"{option} {text} is not a time, as in 2025-11-04T14:00 or @1762264800000")
    return datetime.fromtimestamp(moment_ms(text, option) / 1000, UTC)


# -- output ----------------------------------------------------------------------------------------------------------


def _listed(entry: Any) -> dict[str, Any]:
    from millstream.pipeline import catalog
    from millstream.pipeline.mistakes import format_mistakes

    spec = entry.spec
    row: dict[str, Any] = {"file": str(entry.path), "name": None, "source": None, "steps": [], "sinks": {}}
    row["mistakes"] = format_mistakes(entry.path, entry.mistakes)
    if spec is not None:
        row |= {
            "name": spec.name,
            "source": catalog.describe_source(spec),
            "steps": [step.name for step in spec.steps],
            "sinks": {name: catalog.read_progress(spec.checkpoint, name).batch for name in catalog.sink_names(spec)},
        }
    return row


def _described(spec: PipelineSpec, broker: str) -> dict[str, Any]:
    from millstream.client.cluster import ClusterError
    from millstream.pipeline import catalog
    from millstream.pipeline import check as checking
    from millstream.pipeline.notes import read_notes

    progress = {name: catalog.read_progress(spec.checkpoint, name) for name in catalog.sink_names(spec)}
    lag: dict[str, dict[tuple[str, int], int]] = {}
    unreachable = False
    try:
        Connection(broker)
        lag = {name: catalog.find_lag(broker, each.offsets) for name, each in progress.items()}
    except (Failure, ClusterError):
        unreachable = True
    targets = {sink.name: (sink.source, catalog.describe_sink(sink)) for sink in spec.sinks}
    sinks = []
    for name, each in progress.items():
        late = read_notes(spec.checkpoint / name).rows_dropped_by_watermark
        source, target = targets.get(name, (spec.source.name, f"topic {spec.dead_letters}"))
        behind = lag.get(name)
        sinks.append(
            {
                "sink": name,
                "from": source,
                "to": target,
                "batch": each.batch,
                "done": datetime.fromtimestamp(each.done_at).isoformat(" ", "seconds") if each.done_at else None,
                "offsets": {f"{topic}-{part}": end for (topic, part), end in sorted(each.offsets.items())},
                "late": sum(late.values()) if late else None,
                "rows_dropped_by_watermark": dict(late),
                "lag": sum(behind.values()) if behind and each.batch is not None else None,
            }
        )
    return {
        "name": spec.name,
        "source": catalog.describe_source(spec),
        "broker": broker,
        "checkpoint": str(spec.checkpoint),
        "dead_letters": spec.dead_letters,
        "views": {view: dict(columns) for view, columns in checking.step_columns(spec).items()},
        "sinks": sinks,
        "unreachable": unreachable,
    }
