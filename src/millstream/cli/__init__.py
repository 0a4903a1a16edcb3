"""The command line: one module per noun, and here the exit codes of all commands.

    0    done
    1    it failed; one sentence on standard error says why and what to do next
    2    the command was not understood
    130  interrupted with Ctrl-C

Users do not see tracebacks: MILLSTREAM_DEBUG=1 shows them.
"""

from __future__ import annotations

import errno
import os
import sys


def main() -> None:
    from millstream.core.errors import MillstreamError

    debug = os.environ.get("MILLSTREAM_DEBUG", "") not in ("", "0")
    try:
        _run(sys.argv[1:])
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        _end("", end.code)
    except MillstreamError as error:
        if debug:
            raise
        _end(f"millstream: {error}", 1)
    except KeyboardInterrupt:
        _end("", 130)
    except BrokenPipeError:
        hush()
        _end("", 0)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _end(f"millstream: the output cannot be written ({error.strerror}); make room for it, and try again", 1)
        _end(f"millstream: {type(error).__name__}: {error} (this is a bug; MILLSTREAM_DEBUG=1 shows where)", 1)


def _run(arguments: list[str]) -> None:
    from millstream.cli import serving

    flags = serving.plain_flags(arguments[1:]) if arguments[:1] == ["serve"] else None
    if flags is not None:
        sys.exit(serving.run(flags))
    from millstream.cli.app import app

    app(prog_name="millstream")


def hush() -> None:
    """Redirects standard output to the null device, so that the flush at exit does not fail on the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(sentence: str, code: int) -> None:
    if sentence:
        print(sentence, file=sys.stderr)
    interrupt = sys.modules.get("millstream.cli.interrupt")  # if librdkafka was used
    if interrupt is not None:
        interrupt.leave(code)
    sys.exit(code)
