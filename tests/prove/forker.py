"""A process that has imported what takes long, and forks one for each run of tests.

``python -m tests.prove.forker`` in a copy of the repository. It reads a line of JSON for each run:
``args`` for pytest, ``output`` (a file), ``seconds``; and answers with a line: ``status``, null
where the tests took longer. Nothing of foretoken is imported before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HEAVY = (
    "torch", "numpy", "transformers", "safetensors.torch", "sortedcontainers", "msgspec", "jinja2",
    "llguidance", "prometheus_client", "starlette.applications", "uvicorn", "httpx", "openai",
    "jsonschema", "hypothesis.stateful", "pytest",
)  # fmt: skip
NOT_RUN = 70  # exit status: no test has begun


def main() -> None:
    """Serve until the end of the input."""
    for name in HEAVY:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        status = _run(asked["args"], Path(asked["output"]), asked["seconds"])
        print(json.dumps({"status": status}), flush=True)


def _run(args: Sequence[str], output: Path, seconds: float) -> int | None:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(args, output)
    ended = os.pidfd_open(pid)
    try:  # whoever asks says nothing meanwhile, unless it ends
        in_time = ended in select.select([ended, sys.stdin.fileno()], [], [], seconds)[0]
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):  # servers that a test left behind, too
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _be_child(args: Sequence[str], output: Path) -> None:
    status = NOT_RUN
    try:
        os.setsid()
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _require_copy()
        status = int(importlib.import_module("pytest").main(list(args)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _require_copy() -> None:
    """The installed package leads to the repository itself: it must not be what is tested."""
    found = find_spec("foretoken")
    wanted = str(Path.cwd() / "__init__.py")
    if found is None or found.origin != wanted:
        raise RuntimeError(f"tests would run on {found and found.origin}, not on {wanted}")


if __name__ == "__main__":
    main()
