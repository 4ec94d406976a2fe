"""``foretoken certify``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from .config import Chosen, given_options
from .flags import Parser, count
from .outputs import check_out

if TYPE_CHECKING:
    from ..certify.certificate import Certificate

REQUESTS, LONG_REQUESTS = 1_000, 10_000
DIFFERENT, INEXACT = 1, 3  # exit statuses: tokens differ; the model is not exact
KINDS = (Chosen, EngineConfig)


def add_certify_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken certify``, except the model and settings."""
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help=f"number of requests ({REQUESTS:,}); each is sent in every pass",
    )
    number.add_argument("--long", action="store_true", help=f"send {LONG_REQUESTS:,} requests")
    parser.add_argument(
        "--only", metavar="TEXT", help="run only passes whose name contains TEXT (all)"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="path of the report without extension: writes PATH.md and PATH.json "
        "(certificate-MODEL)",
    )


def certify(parsed: argparse.Namespace) -> int:
    """Make a certificate, write it to files, and return the exit status.

    The status is 0 if all tokens are equal, 1 if any differ, and 3 if the model is not exact, so
    that its answers may depend on the batch.
    """
    model, options = given_options(parsed, KINDS)
    from ..certify.certificate import Certifier
    from ..certify.report import markdown, verdict

    _check_out(parsed.out)
    number = parsed.requests or (LONG_REQUESTS if parsed.long else REQUESTS)
    certifier = Certifier(model, options, number=number, only=parsed.only, tell=_tell)
    found = asyncio.run(certifier.run())
    if found.exact and not found.passes:
        why = "; ".join(found.skipped.values()) or f"no pass has {parsed.only!r} in its name"
        raise ForetokenError(f"the certificate has no results: {why}")
    found.command = _command()
    path = Path(parsed.out or f"certificate-{found.model.replace('/', '-')}")
    print(verdict(found), flush=True)
    try:
        _write(path, found, markdown(found))
    except OSError as error:  # for example a full disk
        raise ForetokenError(f"{path}: {error.strerror}") from None
    print(f"report: {path}.md, {path}.json")
    if not found.exact:
        return INEXACT
    return DIFFERENT if found.differing_tokens else 0


def _check_out(given: str | None) -> None:
    """Create the folder of the report. Raises `InvalidRequest` if it is not writable."""
    path = Path(given or "certificate")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--out: {path.parent}: {error.strerror}", param="out") from None
    check_out(path.with_name(f"{path.name}.md"))


def _write(path: Path, found: Certificate, text: str) -> None:
    import msgspec

    path.with_name(f"{path.name}.md").write_text(text, encoding="utf-8")
    plain = json.dumps(msgspec.to_builtins(found), indent=1)
    path.with_name(f"{path.name}.json").write_text(f"{plain}\n", encoding="utf-8")
    if found.first_difference is not None:
        record = msgspec.json.encode(found.first_difference.request) + b"\n"
        path.with_name(f"{path.name}.jsonl").write_bytes(record)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command() -> str:
    """Return the command line, with absolute paths reduced to their last part."""
    said = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return " ".join(["foretoken", *said])
