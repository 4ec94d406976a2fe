"""``foretoken compare``: which of two variants answers tasks better."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ..serving.settings import Settings
from ..types.sampling_params import SamplingParams
from .config import Chosen, Given, model_options
from .flags import Parser, above_zero, count
from .outputs import check_out, write_out

if TYPE_CHECKING:
    from ..compare.runner import Plan
    from ..compare.statistics import ConfidenceSequence
    from ..compare.tasks import TaskFile
    from ..compare.variants import Variant

KINDS = (Chosen, EngineConfig, SamplingParams)
LOOKS_TOLD = 10  # lines of progress


def _percent(text: str) -> float:
    """Return a share between 0 and 1 from a text in percent."""
    number = _number(text)
    if not 0 < number < 100:
        raise argparse.ArgumentTypeError("must be a number above 0 and below 100")
    return number / 100


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


FLAGS: Sequence[tuple[str, str, Callable[[str], object], object, str]] = (
    ("tasks", "FILE", Path, None,
     "JSON Lines file; each task has messages or a prompt, and what its scorer needs"),
    ("scorer", "NAME", str, "exact",
     "scorer of tasks that name none: exact, regex, number, json, calls, pytest, judge or "
     "python:FILE:FUNCTION (exact)"),
    ("judge", "MODEL|URL", str, None, "model or server that scores for the scorer judge"),
    ("scorer-seconds", "S", above_zero, 10.0,
     "time limit of a run of regex, pytest or a function, in seconds (10)"),
    ("server-seconds", "S", above_zero, 600.0,
     "time limit of an answer of a server, in seconds (600)"),
    ("samples", "N", count, 1,
     "answers of each variant to a task, each with a seed of its own (1)"),
    ("level", "PERCENT", _percent, 0.95,
     "confidence of the interval and the verdict, in percent (95)"),
    ("margin", "POINTS", _percent, None,
     "stop, too, if the difference is certainly not greater than POINTS (never)"),
    ("concurrency", "N", count, 16,
     "number of tasks answered at a time; no result depends on it (16)"),
    ("json", "FILE", Path, None, "write the result with all answers to FILE"),
)  # fmt: skip
"""Flags with a value: name, form of the value, its reader, default, and help text."""


def add_flags(parser: Parser) -> None:
    """Add the variants and flags of ``foretoken compare``, except the model and settings."""
    for name in "AB":
        parser.add_argument(
            name.lower(),
            metavar=name,
            help="a model, the address of a server, or base (the model of --model), followed by "
            'settings: "base temperature=0.2 system=FILE". Settings are model, system=FILE, '
            "tools=FILE, lora=DIR, and the names of flags without dashes",
        )
    for name, metavar, kind, default, text in FLAGS:
        is_required = name == "tasks"
        parser.add_argument(
            f"--{name}", metavar=metavar, type=kind, default=default, required=is_required,
            help=text,
        )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help="answer all tasks, even after the verdict is certain"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key of the servers (FORETOKEN_API_KEY)",
    )


def compare(parsed: argparse.Namespace) -> int:
    """Compare two variants, print the verdict, and return 0.

    Raises `InvalidRequest` for invalid variants or tasks, before a model is loaded.
    """
    from ..compare.runner import Plan
    from ..compare.tasks import read_tasks
    from ..compare.variants import Variant, read_variant

    given = Given(parsed, KINDS)
    given.warn_of_unknown_variables()
    model, options = model_options(given)
    if options.get("lora"):
        raise InvalidRequest("--lora: compare takes lora=DIR in a variant", param="lora")
    given.make(SamplingParams)
    sampling = given.options(SamplingParams)
    plan = Plan(
        seed=sampling.pop("seed", 0),
        num_samples=parsed.samples,
        level=parsed.level,
        margin=parsed.margin,
        stops=not parsed.all,
        concurrency=parsed.concurrency,
    )
    base = Variant(model=model, engine=options, sampling=sampling)
    variants = [read_variant(text, base) for text in (parsed.a, parsed.b)]
    for each in variants:
        _check(each)
    if parsed.json is not None:
        check_out(parsed.json, "json")
    key = next(iter(given.make(Settings).api_keys), None)
    return asyncio.run(_run(parsed, variants, read_tasks(parsed.tasks, plan.seed), plan, key))


def _check(variant: Variant) -> None:
    """Raise `InvalidRequest`, which names the variant, if one of its settings is invalid."""
    try:
        SamplingParams(**variant.sampling)
        EngineConfig(**variant.engine)
    except InvalidRequest as error:
        raise InvalidRequest(f"{variant.text!r}: {error}", param="variant") from None


async def _run(
    parsed: argparse.Namespace,
    variants: list[Variant],
    file: TaskFile,
    plan: Plan,
    key: str | None,
) -> int:
    from ..compare.answering import Access, opened
    from ..compare.report import detail_lines, json_of, progress_line, verdict_line
    from ..compare.runner import run
    from ..compare.scorers import Scorers

    num_tasks = len(file.tasks)
    scorers = Scorers(
        file.tasks,
        parsed.scorer,
        seconds=parsed.scorer_seconds,
        has_judge=parsed.judge is not None,
    )

    def tell(look: ConfidenceSequence) -> None:
        if look.num % max(1, num_tasks // LOOKS_TOLD) == 0:
            print(progress_line(look, num_tasks), file=sys.stderr, flush=True)

    async with opened(variants, parsed.judge, Access(key, parsed.server_seconds)) as both:
        found = await run(both, file.tasks, scorers, plan, tell)
        print(verdict_line(found, plan))
        print(*detail_lines(found, both), sep="\n", flush=True)
        if parsed.json is not None:
            write_out(parsed.json, json_of(found, plan, both, file))
    return 0
