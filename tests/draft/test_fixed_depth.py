"""Drafts of a fixed depth by real models: look-ups beside a draft model, and one that is lost."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.engine.engine import Engine
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import (
    NO_SPECULATION,
    OnKernelsStarted,
    Pending,
    Speculator,
    ignore_kernels,
)
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.control.controller import Controller
from foretoken.draft.control.cost_model import CostModel
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.speculator import DraftSpeculator
from foretoken.radix_cache import PrefixCache
from support.launch_behind import launch_behind
from support.proposers import MODEL, BareProposer
from support.tiny_pair import write_pair

DEPTH, VOCAB_SIZE, NUM_TOKENS = 4, 64, 120
PROMPTS = [
    "def fibonacci(n):\n",
    "import collections\n\n\nclass Queue:\n    def __init__(self, items):\n",
    "import os\n\ndef read",
]


# -- look-ups beside a draft model ----------------------------------------------------------------


def verify_steps(draft: str) -> tuple[int, list[list[int]], set[str]]:
    """Steps of the built-in target for three answers, the answers, and whose tokens came true."""
    params = [
        SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    with LLM("builtin", draft=draft, speculation=DEPTH, kv_tokens=2048, threads=1) as llm:
        answers = llm.generate(PROMPTS, params)
    usages = [answer.usage for answer in answers]
    sources = {source for usage in usages for source in usage.accepted_by_source}
    steps = sum(usage.verify_steps for usage in usages)
    return steps, [answer.token_ids for answer in answers], sources


def test_look_ups_do_not_displace_a_draft_model_that_knows_more() -> None:
    """A guess by one equal token has odds of 0.2: where it took the model's place, steps grew."""
    model = str(BUILTIN / "draft")
    alone, expected, _ = verify_steps(model)
    together, answers, sources = verify_steps(f"auto,{model}")
    assert answers == expected
    assert together <= 1.05 * alone
    assert {"lm", "suffix"} <= sources, "where a look-up is likelier it is drafted"


# -- a draft model that is lost -------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("pair")
    return load_decoder(write_pair(folder, vocab_size=VOCAB_SIZE)[0])


class Broken(BareProposer):
    """Fails whenever it is asked."""

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        raise RuntimeError("the draft model is broken")


class Watched(ModelRunner):
    """Keeps the plans that it is given, and how many of them were made ahead, as for a device."""

    is_async = True

    def __init__(self, decoder: Decoder, proposer: BareProposer) -> None:
        super().__init__(decoder, decoder.make_pool(64, page_size=8), proposer)
        self.plans: list[StepPlan] = []
        self.num_ahead = 0

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        if after is None:  # a plan made ahead comes again once the step before it is over
            self.plans.append(plan)
        if after is None:
            return super().launch(plan, on_kernels_started=on_kernels_started)
        self.num_ahead += 1
        return launch_behind(super().launch, plan, after.finish())


def served(target: Decoder, speculator: Speculator) -> tuple[list[int], Watched, str]:
    """One answer with overlapping steps; the metrics at its end."""
    runner = Watched(target, Broken())
    limits = SchedulerLimits(
        max_batch_tokens=64, max_running=2, max_queued=2, max_model_len=256, vocab_size=VOCAB_SIZE
    )
    params = TokenSamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
    sampling = SamplingMetadata(params=params, seed=3, prompt_len=5)
    request = Request(request_id="a", tokens=array("q", [5, 9, 2, 6, 4]), sampling=sampling)

    async def answer() -> tuple[list[int], str]:
        engine = Engine(Scheduler(PrefixCache(64, 8), limits, speculator), runner, overlap=True)
        await engine.start()
        token_ids = [token async for delta in engine.submit(request) for token in delta.token_ids]
        metrics = engine.metrics.render()[0].decode()
        await engine.close()
        return token_ids, metrics

    token_ids, metrics = asyncio.run(answer())
    return token_ids, runner, metrics


def test_a_lost_draft_model_is_planned_for_no_more_and_steps_are_launched_ahead(
    target: Decoder,
) -> None:
    speculator = DraftSpeculator(
        [PredictionSource()],  # there is none: look-ups find nothing
        Controller(CostModel()),
        AcceptanceModel(),
        depth=DEPTH,
        proposer=MODEL,
        overlaps=True,
    )
    token_ids, runner, metrics = served(target, speculator)
    assert token_ids == served(target, NO_SPECULATION)[0]
    asked = [any(row.draft_plan.max_draft for row in plan.requests) for plan in runner.plans]
    assert asked == [False] + [True] * MAX_FAILURES + [False] * (len(asked) - MAX_FAILURES - 1)
    rest = runner.plans[MAX_FAILURES + 1 :]
    assert sum(plan.is_plain for plan in rest) > len(rest) // 3
    assert runner.num_ahead > 10
    assert 'foretoken:drafter_disabled{source="proposer"} 1.0' in metrics
    for name in ("prediction", "all"):
        assert f'foretoken:drafter_disabled{{source="{name}"}} 0.0' in metrics
