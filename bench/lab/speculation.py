"""Speculation measured: what each source guesses, and what the engine gains.

First the sources alone, on recorded streams made of the standard library's code: tokens per step,
precision, time of a proposal; beside prompt look-up as transformers does it. Then the whole engine
with the built-in pair or a model of yours, speculation on over off in the same run, at rising
concurrency. Run: ``python -m foretoken.bench.lab.speculation``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from ...api.build.engine_builder import LocalBuilt, build
from ...api.build.model_files import find_model
from ...api.types.sampling_params import SamplingParams
from ...core.config import EngineConfig
from ...core.interface.draft import NO_DRAFT_PLAN, DraftPlan
from ...core.interface.output import RequestOutput, StepOutput
from ...core.interface.plan import ScheduledRequest, StepPlan
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata
from ...draft.control.controller import Controller
from ...draft.control.cost_model import CostModel, StepProfile
from ...draft.control.estimators import AcceptanceModel
from ...draft.sources.prefix import PrefixSource
from ...draft.sources.source import Source
from ...draft.sources.suffix import SuffixSource
from ...draft.speculator import DraftSpeculator
from ...radix_cache import RadixTree
from ..common.machine import torch_read_bandwidth
from ..common.real_tasks import adversarial
from ..common.replay import ReplayRunner
from ..common.report import heading, table, write_json
from ..common.roofline import file_bytes
from .speculation_load import Load, compare
from .streams import KINDS, Stream, builtin_tokenizer, streams

NUM_DRAFTS = 16
CHEAP, DEAR = 0.02, 0.15  # of a step, for one more row: what the controller weighs a draft by


# -- the sources alone --------------------------------------------------------------------------


class Guesser(Protocol):
    """Something that drafts along a recorded stream."""

    def begin(self, request: Request) -> None:
        """A request comes."""

    def guess(self, request: Request) -> Sequence[Sequence[int]]:
        """Paths that may follow its tokens, the first one being the draft proper."""

    def learn(self, request: Request, num_accepted: int, num_new: int) -> None:
        """Learn from ``num_new`` appended tokens, ``num_accepted`` of them of the longest path."""

    def end(self, request: Request) -> None:
        """Forget a request, which ended."""


@dataclass(slots=True)
class Speculation:
    """The engine's own speculator over some sources."""

    speculator: DraftSpeculator
    row_cost: float
    plan: DraftPlan = NO_DRAFT_PLAN

    @classmethod
    def over(cls, *sources: Source, row_cost: float = CHEAP) -> Speculation:
        """A speculator over ``sources``; a row costs ``row_cost`` of a step."""
        profile = StepProfile({n: 1.0 + row_cost * n for n in (1, 2, 4, 8, 16, 32, 64)})
        controller = Controller(CostModel(profile))
        return cls(DraftSpeculator(sources, controller, AcceptanceModel()), row_cost)

    def begin(self, request: Request) -> None:
        """See `Guesser.begin`."""
        self.speculator.join(request)
        self.speculator.work()

    def guess(self, request: Request) -> Sequence[Sequence[int]]:
        """See `Guesser.guess`."""
        limits = [min(NUM_DRAFTS, request.max_len - len(request.tokens) - 1)]
        (self.plan,) = self.speculator.plan([request], limits, budget=1000, num_prefill=0)
        draft = self.plan.draft
        leaves = set(range(len(draft.token_ids))).difference(draft.parents)
        if not draft.parents:
            return [draft.token_ids]
        return [[draft.token_ids[node] for node in draft.path(leaf)] for leaf in leaves]

    def learn(self, request: Request, num_accepted: int, num_new: int) -> None:
        """See `Guesser.learn`."""
        size = len(request.tokens)
        row = ScheduledRequest(
            request_id=request.request_id,
            tokens=request.tokens,
            start=size - num_new - 1,
            stop=size - num_new,
            page_ids=array("q"),
            sampling=request.sampling,
        )
        output = RequestOutput(
            request_id=request.request_id,
            token_ids=request.tokens[size - num_new :],
            draft=self.plan.draft,
            path=range(num_accepted),
        )
        self.speculator.observe(request, row, output, num_new)
        num_rows = 1 + self.plan.num_rows
        spent = {"forward": 1.0 + self.row_cost * num_rows}
        plan = StepPlan(requests=[row], newly_allocated_pages=array("q"))
        outcome = StepOutput(requests=[output], times=spent, num_rows=num_rows)
        self.speculator.observe_step(plan, outcome, spent["forward"])
        self.speculator.work()

    def end(self, request: Request) -> None:
        """See `Guesser.end`."""
        self.speculator.leave(request)
        self.speculator.work()


class PromptLookup:
    """transformers' candidate generator behind ``prompt_lookup_num_tokens``."""

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=NUM_DRAFTS, max_matching_ngram_size=2, max_length=1 << 20
        )

    def begin(self, request: Request) -> None:
        """Do nothing: the generator reads whole requests."""

    def guess(self, request: Request) -> Sequence[Sequence[int]]:
        """See `Guesser.guess`."""
        ids = torch.frombuffer(request.tokens, dtype=torch.int64)[None].clone()
        found, _ = self._generator.get_candidates(ids)  # type: ignore[arg-type]
        return [found[0, len(request.tokens) :].tolist()]

    def learn(self, request: Request, num_accepted: int, num_new: int) -> None:
        """Do nothing: the generator keeps no state."""

    def end(self, request: Request) -> None:
        """Do nothing: the generator keeps no state."""


GUESSERS: dict[str, Callable[[], Guesser]] = {
    "radix": lambda: Speculation.over(PrefixSource()),
    "suffix": lambda: Speculation.over(SuffixSource()),
    "ngram": lambda: Speculation.over(SuffixSource(own_only=True)),
    "merge": lambda: Speculation.over(PrefixSource(), SuffixSource()),
    "merge, dear rows": lambda: Speculation.over(PrefixSource(), SuffixSource(), row_cost=DEAR),
    "transformers prompt look-up": PromptLookup,
}


def measure_guesser(
    guesser: Guesser, recorded: Sequence[Stream], unscored: Collection[int] = ()
) -> dict[str, object]:
    """Drive it along every stream, one request after the other; ``unscored`` ones only teach."""
    tree = RadixTree(page_size=16)  # tells how much of a prompt the prefix cache would hold
    steps = proposed = accepted = 0
    guess_s = 0.0
    for index, (prompt, answer) in enumerate(recorded):
        request = _request(index, prompt, answer)
        request.usage.cached_tokens = tree.match(request.tokens, limit=len(prompt) - 1).num_tokens
        guesser.begin(request)
        at, before = 0, (steps, proposed, accepted, guess_s)
        while at < len(answer):
            began = time.perf_counter()
            paths = guesser.guess(request)
            guess_s += time.perf_counter() - began
            room = len(answer) - at - 1
            best = max(_agreement(path[:room], answer, at) for path in paths)
            steps, accepted = steps + 1, accepted + best
            # what paths share is verified once
            proposed += len({tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)})
            request.tokens.extend(answer[at : at + best + 1])
            at += best + 1
            guesser.learn(request, best, best + 1)
        guesser.end(request)
        if index in unscored:
            steps, proposed, accepted, guess_s = before
        whole = len(request.tokens) // 16
        tree.insert(request.tokens[: whole * 16], array("q", range(whole)))
    return {
        "tokens/step": (steps + accepted) / steps,
        "precision": accepted / max(1, proposed),
        "drafted/step": proposed / steps,
        "us/step": 1e6 * guess_s / steps,
    }


def _agreement(path: Sequence[int], answer: Sequence[int], at: int) -> int:
    length = 0
    while length < len(path) and path[length] == answer[at + length]:
        length += 1
    return length


def _request(index: int, prompt: Sequence[int], answer: Sequence[int]) -> Request:
    return Request(
        request_id=str(index),
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=SamplingParams(), seed=index, prompt_len=len(prompt)),
        max_len=len(prompt) + len(answer),
    )


def source_speed(make: Callable[[], Source], recorded: Sequence[Stream]) -> dict[str, object]:
    """Microseconds of one look-up, and of one token taken into the index."""
    source, propose_s, index_s, num_proposed, num_indexed = make(), 0.0, 0.0, 0, 0
    for index, (prompt, answer) in enumerate(recorded):
        request = _request(index, prompt, answer)
        for at in range(0, len(answer), 4):
            began = time.perf_counter()
            while count := source.index(request):
                num_indexed += count
            indexed = time.perf_counter()
            source.propose(request, NUM_DRAFTS)
            propose_s += time.perf_counter() - indexed
            index_s += indexed - began
            num_proposed += 1
            request.tokens.extend(answer[at : at + 4])
        source.leave(request)
    return {
        "us/proposal": 1e6 * propose_s / num_proposed,
        "us/indexed token": 1e6 * index_s / num_indexed if num_indexed else "-",
    }


def _measure_sources() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    tokenize = builtin_tokenizer()
    quality, speed = [], []
    for kind in KINDS:
        recorded = streams(kind, tokenize=tokenize)
        firsts = range(0, len(recorded), 2) if kind == "identical retry" else ()
        for name, make in GUESSERS.items():
            figures = measure_guesser(make(), recorded, firsts)
            quality.append({"stream": kind, "source": name} | figures)
    recorded = streams("agent edit", tokenize=tokenize)
    for make_source in (PrefixSource, SuffixSource, partial(SuffixSource, own_only=True)):
        speed.append({"source": make_source().name} | source_speed(make_source, recorded))
    return quality, speed


# -- the engine ---------------------------------------------------------------------------------


def _loads(built: LocalBuilt, num_requests: int, output_len: int) -> list[Load]:
    tokenize = builtin_tokenizer()
    edits = [(p, a[:output_len]) for p, a in streams("agent edit", tokenize=tokenize)]
    fresh = [(p[-256:], a[:output_len]) for p, a in streams("fresh code", tokenize=tokenize)]
    several = (edits * num_requests)[:num_requests]
    return [
        Load("agent edit (replayed)", several, is_replayed=True),
        Load("fresh text", (fresh * num_requests)[:num_requests], False, temperature=1.0),
        Load(
            "adversarial (replayed)",
            adversarial(num_requests, 256, output_len, built.vocab_size),
            is_replayed=True,
        ),
    ]


def _build(args: argparse.Namespace) -> LocalBuilt:
    config = EngineConfig(device="cpu", threads=args.threads, max_batch_tokens=256)
    if args.draft is not None:
        config = replace(config, draft=args.draft)
    return build(args.model, config)


async def _measure_engine(args: argparse.Namespace) -> list[dict[str, object]]:
    built = _build(args)
    await built.engine.start()
    replay = ReplayRunner.over(built.engine.runner)  # type: ignore[arg-type]
    plain = built.engine.runner
    settings: list[int | str] = ["auto", *args.depths]
    rows = []
    for concurrency in args.concurrency:
        num_requests = max(args.requests, concurrency)
        for load in _loads(built, num_requests, args.output_len):
            built.engine.runner = replay if load.is_replayed else plain
            rows += await compare(built, load, concurrency, settings, args.repeats)
            print(table(rows[-len(settings) :]), flush=True)
    await built.engine.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.speculation", description=__doc__
    )
    parser.add_argument("--part", choices=["all", "sources", "engine"], default="all")
    parser.add_argument("--model", default="builtin", help="model, as for `foretoken serve`")
    parser.add_argument("--draft", help="drafters, as for `foretoken serve --draft`")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--depths", type=int, nargs="*", default=[], help="fixed depths to measure as well"
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--out", type=Path, default=Path("bench/results/speculation.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report: dict[str, object] = heading()
    bandwidth = torch_read_bandwidth()
    num_bytes = file_bytes(find_model(args.model).path)
    report["read_gb_per_s"] = bandwidth / 1e9
    # Weights read once a token: what no plain decoding of one request can exceed.
    report["roofline_tok_per_s_batch_1"] = bandwidth / num_bytes
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    if args.part in ("all", "sources"):
        quality, speed = _measure_sources()
        report |= {"sources": quality, "speed": speed}
        print(f"\nsources, {NUM_DRAFTS} drafts\n\n{table(quality)}\n\n{table(speed)}", flush=True)
    if args.part in ("all", "engine"):
        rows = asyncio.run(_measure_engine(args))
        report["engine"] = rows
        print(f"\nengine\n\n{table(rows)}", flush=True)
    write_json(args.out, report)


if __name__ == "__main__":
    main()
