"""Chains, trees and look-ups beside them, of the built-in draft model.

    python -m foretoken.bench.lab.trees [--temperature 0] [--every-position] [--out FILE]

One request after the other, on one thread; every setting serves the same requests, whose tokens
must be equal under all of them. Prices are those of a row and of a pass, in tokens. The second
table is of the controller with prices held fixed: a row and a pass of the draft model cost what
`ROW` and `PASS` say, in plain steps; its units of time are simulated, its tokens are not. A step
begins where the last draft failed, mostly behind a token that was hard to guess;
``--every-position`` counts a step from each position of the text instead, fixed drafts alone.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from ...api.build.engine_builder import build
from ...core.config import EngineConfig
from ...core.execution.model_runner import ModelRunner
from ...core.interface.draft import DraftPlan
from ...core.interface.output import RequestOutput
from ...core.interface.protocols import ProposerTraits, Speculator
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.scheduling.chunk_budget import num_step_tokens
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...draft.control.controller import Controller
from ...draft.control.cost_model import CostModel, StepProfile
from ...draft.control.estimators import AcceptanceModel
from ...draft.control.outcome import DraftOutcome
from ...draft.sources.prefix import PrefixSource
from ...draft.sources.source import Source
from ...draft.sources.suffix import SuffixSource
from ...draft.speculator import DraftSpeculator
from ...radix_cache import PrefixCache
from ..drafting import FixedDrafts
from ..report import Row, command, machine, table, write_json
from .streams import builtin_tokenizer, streams

PROMPT_LEN, PAGE_SIZE, NUM_PAGES = 256, 16, 400
ROW, PASS = 0.035, 0.1  # of a plain step
MOST_ROWS = 20  # that a draft may have
MODEL = ProposerTraits(tokens_per_pass=1, catches_up=True, weighs=True)  # of the draft model
KINDS = ("fresh code", "agent edit")


@dataclass(frozen=True)
class Setting(FixedDrafts):
    """Every step drafts by the same plan."""

    name: str


def settings() -> list[Setting]:
    """Fixed chains and trees, and both ended by prices."""
    fixed = [
        Setting(DraftPlan(max_draft=n, may_branch=tree), f"{'tree' if tree else 'chain'} of {n}")
        for n in (4, 8, 12, 16)
        for tree in (False, True)
    ]
    priced = [
        Setting(
            DraftPlan(max_draft=16, may_branch=tree, row_price=price),
            f"{'tree' if tree else 'chain'}, row price {price}",
        )
        for tree in (False, True)
        for price in (0.4, 0.35, 0.3, 0.25, 0.2, 0.1, 0.05)
    ]
    return fixed + priced


class Fixed(CostModel):
    """Costs that no measurement changes."""

    def __init__(self) -> None:
        super().__init__()
        most = 64
        self.load(StepProfile({1: 1.0, most: 1 + ROW * (most - 1)}, {1: PASS, most: 1.2 * PASS}))

    def observe(self, **_: object) -> None:
        """Nothing."""

    def observe_draft(self, *_: object) -> None:
        """Nothing."""


def controlled() -> list[tuple[str, Speculator]]:
    """The controller with look-ups, with the draft model, and with both in one tree."""
    free: list[tuple[str, bool, bool]] = [
        ("off", False, False),
        ("look-ups", True, False),
        ("model", False, True),
        ("look-ups and model", True, True),
    ]
    made: list[tuple[str, Speculator]] = []
    for name, has_free, has_proposer in free:
        sources: list[Source] = [PrefixSource(), SuffixSource()] if has_free else []
        speculator = DraftSpeculator(
            sources,
            Controller(Fixed()),
            AcceptanceModel(),
            proposer=MODEL if has_proposer else None,
            clock=lambda: 0.0,
        )
        made.append((name, speculator))
    return made


def requests(
    kind: str, name: str, count: int, temperature: float, output_len: int
) -> list[Request]:
    """Prompts of a kind, the last part of each; under ids that no other setting has."""
    recorded = streams(kind, tokenize=builtin_tokenizer())
    prompts = [prompt[-PROMPT_LEN:] for prompt, _ in recorded][:count]
    params = TokenSamplingParams(temperature=temperature, max_tokens=output_len)
    return [
        Request(
            request_id=f"{kind} {name} {index}",
            tokens=array("q", prompt),
            sampling=SamplingMetadata(params=params, seed=index, prompt_len=len(prompt)),
            max_len=len(prompt) + output_len,
        )
        for index, prompt in enumerate(prompts)
    ]


def measure(
    runner: ModelRunner,
    name: str,
    speculator: Speculator,
    asked: Sequence[Request],
    *,
    every_position: bool = False,
) -> tuple[Row, list[list[int]]]:
    """Its figures, and what each request got."""
    limits = SchedulerLimits(
        max_batch_tokens=512, max_running=1, max_queued=99, max_model_len=1024,
        vocab_size=runner.decoder.config.vocab_size,
    )  # fmt: skip
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, speculator)
    waiting = list(asked)[::-1]
    seconds, units, num_steps, num_tokens, num_proposed = 0.0, 0.0, 0, 0, 0
    while scheduler.num_requests or waiting:
        if not scheduler.num_requests:  # prompts that wait would keep a draft model from drafting
            scheduler.add(waiting.pop(), 0.0)
        plan = scheduler.schedule(0.0)
        began = time.perf_counter()
        output = runner.step(plan)
        (row,) = output.requests
        (scheduled,) = plan.requests
        if num_step_tokens(plan.requests) == 1 and not (
            every_position and _is_near_end(scheduled.stop, asked)
        ):
            seconds += time.perf_counter() - began
            num_levels = DraftOutcome(row.draft, row.path).note.num_levels
            units += 1.0 + ROW * len(row.draft.token_ids) + PASS * num_levels
            num_steps += 1
            num_tokens += len(row.token_ids)
            num_proposed += len(row.draft.token_ids)
        if every_position:
            output = replace(output, requests=[first_token(row)])
        scheduler.commit(plan, output, 0.0)
    figures: Row = {
        "setting": name,
        "rows": round(num_proposed / num_steps, 2),
        "tokens/step": round(num_tokens / num_steps, 3),
        "accepted/proposed": round((num_tokens - num_steps) / max(1, num_proposed), 3),
        "tokens/s": round(num_tokens / seconds),
        "tokens/simulated step": round(num_tokens / units, 3),
    }
    return figures, [list(request.tokens[request.prompt_len :]) for request in asked]


def _is_near_end(position: int, asked: Sequence[Request]) -> bool:
    """Whether a draft behind the position may be cut by the end of the request."""
    return position + MOST_ROWS >= min(request.max_len for request in asked)


def first_token(row: RequestOutput) -> RequestOutput:
    """The step as if nothing had been drafted: the next one begins a position later."""
    return replace(row, token_ids=row.token_ids[:1], path=())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every setting, print the tables, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--every-position", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    built = build("builtin", EngineConfig(device="cpu", threads=1, kv_tokens=NUM_PAGES * PAGE_SIZE))
    runner = built.engine.runner
    assert isinstance(runner, ModelRunner)
    fixed: list[tuple[str, Speculator]] = [(each.name, each) for each in settings()]
    wanted = [("fresh code", fixed)]
    if not args.every_position:
        wanted += [(kind, controlled()) for kind in KINDS]
    report: dict[str, object] = {"command": command(), "machine": machine()}
    for at, (kind, speculators) in enumerate(wanted):
        rows, told = [], []
        label = f"{kind}, {'controlled' if at else 'given'}"
        for name, speculator in speculators:
            asked = requests(kind, name, args.requests, args.temperature, args.output_len)
            figures, tokens = measure(
                runner, name, speculator, asked, every_position=args.every_position
            )
            rows.append(figures)
            told.append(tokens)
            print(figures, flush=True)
        assert all(tokens == told[0] for tokens in told), "a draft changed a token"
        print(label, table(rows), sep="\n\n")
        report[label] = rows
    if args.out is not None:
        write_json(args.out, report)


if __name__ == "__main__":
    main()
