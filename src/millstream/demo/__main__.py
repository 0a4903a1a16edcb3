"""The whole demo in one run, on free ports. The exit code is 0 only if every count is right.

The files stay in `millstream-demo` in the current directory, for inspection; the next run deletes them.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

from rich.text import Text

from millstream.demo import clicks, orders
from millstream.demo.broker import Broker
from millstream.demo.report import Report, console

HOME = Path("millstream-demo")


def run(broker: Broker, report: Report) -> clicks.Story:
    with report.step("start a broker") as say:
        seconds = broker.start()
        say(f"ready in {seconds:.2f} s on {broker.kafka}")
    orders.run(broker, report)
    story = clicks.run(broker, report, HOME)
    with report.step("stop the broker") as say:
        code = broker.end(signal.SIGTERM)
        say("cleanly, on SIGTERM")
        report.expect("exit code of the broker", 0, code)
    return story


def main() -> int:
    console.print("\n[bold]Millstream[/]: one log, every door\n")
    report = Report()
    started = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    broker = Broker(HOME.absolute())
    try:
        story = run(broker, report)
    except Exception as error:
        console.print("  [red]✗[/]", Text(str(error)))
        return 1
    finally:
        broker.close()
    good = report.show()
    story.show(HOME)
    verdict = "[green]Nothing acknowledged was lost.[/]" if good else "[red]The counts differ.[/]"
    console.print(f"\n{verdict} {time.monotonic() - started:.0f} s in all.")
    if good:
        console.print("Next: [bold].venv/bin/millstream serve[/], then any Kafka client on 127.0.0.1:9092\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
