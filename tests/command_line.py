"""The `millstream` command, as tests run it against a broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}


class Cli:
    def __init__(self, address: str) -> None:
        self.address = address

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "millstream", *arguments],
            env=CLEAN | {"MILLSTREAM_BROKER": self.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def run(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=60)
        assert process.returncode == code, (arguments, process.returncode, out[-500:], err.decode())
        assert b"Traceback" not in err and b"%3|" not in err
        return out.decode(), err.decode()

    def __call__(self, *arguments: str, stdin: bytes = b"") -> str:
        return self.run(*arguments, stdin=stdin)[0]

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--output", "json"))

    def fails(self, *arguments: str, code: int = 1) -> str:
        """The one sentence that the command ended with."""
        _, err = self.run(*arguments, code=code)
        if code == 1:
            assert err.startswith("millstream: ") and err.count("\n") == 1, err
        return err
