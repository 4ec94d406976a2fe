"""``foretoken run-batch``: answer the requests in a file, without a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from .config import Chosen, given_options
from .flags import Parser

if TYPE_CHECKING:
    from ..dialects.batches.bodies import OutputLine

KINDS = (Chosen, EngineConfig)
FAILED = 1  # exit status if a request failed
TOLD_ERRORS = 10


def add_flags(parser: Parser) -> None:
    """Add the files and flags of ``foretoken run-batch``, except the model and settings."""
    parser.add_argument("input", metavar="IN", help="JSON Lines file in the format of /v1/batches")
    parser.add_argument(
        "output", metavar="OUT", help="file for the answers, in order of completion"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an existing OUT: skip requests whose custom_id is in it",
    )


def run_batch(parsed: argparse.Namespace) -> int:
    """Answer all requests. Return 0 if all have status 200, else 1.

    Raises `InvalidRequest` for an invalid input, before the model is loaded.
    """
    model, options = given_options(parsed, KINDS)
    source, target = Path(parsed.input), Path(parsed.output)
    if _size(target) and not parsed.resume:
        raise InvalidRequest(f"{target} exists: use --resume to continue it", param="output")
    try:
        done = _done(target)
        return asyncio.run(_run(source, target, done, model, options))
    except OSError as error:
        raise ForetokenError(f"{error.filename or target}: {error.strerror}") from None


async def _run(
    source: Path,
    target: Path,
    done: Mapping[str, bool],
    model: str | None,
    options: Mapping[str, Any],
) -> int:
    from ..dialects import BATCH_PATHS, open_dialects
    from ..dialects.batches.lines import LineRunner, decode_line, numbered_lines, write_line
    from ..runtime.interrupts import ending_at_once
    from ..sdk.async_llm import AsyncLLM
    from ..serving.serving_context import Service
    from ..serving.settings import Settings

    num_lines = _checked(source)
    counts = {True: 0, False: 0}
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def put(line: OutputLine) -> None:
        write_line(descriptor, line)
        counts[line.is_answered] += 1

    async def wanted() -> AsyncIterator[bytes]:
        for _, line in numbered_lines(source):
            if decode_line(line).custom_id not in done:
                yield line

    try:
        llm = AsyncLLM(model, **options)
        with ending_at_once():
            await llm.start()
        async with llm:
            service = Service(llm, Settings())
            opened = open_dialects(service)
            runner = LineRunner(
                service,
                {path: opened[path] for path in BATCH_PATHS},
                num_places=lambda: llm.engine.limits.max_running,
            )
            await runner.run(wanted(), put)
    finally:
        os.close(descriptor)
    failed_before = [*done.values()].count(False)
    left_out = f", {len(done)} answered before, {failed_before} of them with errors" if done else ""
    answered = f"{counts[True]} of {num_lines} requests answered"
    print(f"{target}: {answered}, {counts[False]} failed{left_out}", file=sys.stderr)
    return FAILED if counts[False] or failed_before else 0


def _checked(source: Path) -> int:
    """Return the number of requests in a file. Raises `InvalidRequest`, which lists bad lines."""
    from ..dialects import BATCH_PATHS
    from ..dialects.batches.lines import LineCheck, numbered_lines

    check = LineCheck(None, BATCH_PATHS)
    check.add(numbered_lines(source))
    check.end()
    if not check.errors:
        return check.count
    if not check.count:
        raise InvalidRequest(f"{source}: {check.errors[0].message}", param="input")
    first = check.errors[:TOLD_ERRORS]
    told = "\n".join(f"  line {each.line}: {each.message}" for each in first)
    raise InvalidRequest(f"{source} has invalid lines:\n{told}", param="input")


def _size(target: Path) -> int:
    """Return the size of the output in bytes; 0 if it does not exist or is a pipe."""
    return target.stat().st_size if target.is_file() else 0


def _done(target: Path) -> dict[str, bool]:
    """Return the ids of requests answered in an earlier run, and whether each succeeded.

    An incomplete last line is removed. Raises `InvalidRequest` for an invalid file.
    """
    if not _size(target):
        return {}
    import msgspec

    from ..dialects.batches.bodies import OutputLine

    lines = target.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < len(lines):
        target.write_bytes(b"".join(whole))
    try:
        lines_before = [msgspec.json.decode(line, type=OutputLine) for line in whole]
        return {line.custom_id: line.is_answered for line in lines_before}
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{target} has an invalid line: {error}") from None
