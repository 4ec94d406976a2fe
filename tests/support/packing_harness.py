"""Requests whose KV is evicted on a real decoder, and what masks over the full cache say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.core.execution.model_runner import LaunchedStep, ModelRunner
from foretoken.core.execution.packing.policies import KeepPolicy, KeepWindow
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.sampling.verifier import Verified
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache
from support.equality_harness import make_speculator
from support.fake_model import Driver

EVERY, BUDGET, PAGE_SIZE = 16, 24, 4
PROMPT_LEN, ANSWER_LEN = 21, 100
STOP = PROMPT_LEN + ANSWER_LEN


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 256) for _ in range(length)]


def request(
    name: str,
    tokens: Sequence[int],
    *,
    answer_len: int = ANSWER_LEN,
    said: Sequence[int] = (),
    **options: Any,
) -> Request:
    """A greedy request; ``said``: what it has of its answer already."""
    params = TokenSamplingParams(temperature=0.0, max_tokens=answer_len)
    sampling = SamplingMetadata(params=params, seed=1, prompt_len=len(tokens))
    tokens = array("q", [*tokens, *said])
    return Request(request_id=name, tokens=tokens, sampling=sampling, **options)


class Watched(ModelRunner):
    """Keeps the logits of each position that decided a token of a request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: dict[str, dict[int, Tensor]] = {}

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        verified = super()._verify(work)
        rows = work.layout.sampled_logits(work.output.logits)
        for scheduled, draft, outcome in zip(
            work.layout.requests, work.layout.drafts, verified, strict=True
        ):
            if not outcome.token_ids:
                continue
            own, rows = rows[: 1 + len(draft.token_ids)], rows[1 + len(draft.token_ids) :]
            kept = self.logits.setdefault(scheduled.request_id, {})
            for index, node in enumerate([-1, *outcome.path]):
                kept[scheduled.stop + index] = own[node + 1].clone()
        return verified


class Twice(Watched):
    """Computes each step twice, as one that failed behind its pass."""

    def step(self, plan: StepPlan) -> StepOutput:
        super().step(plan)
        return super().step(plan)


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    logits: dict[str, dict[int, Tensor]]
    scheduler: Scheduler
    most_pages: dict[str, int] = field(default_factory=dict)


def serve(
    decoder: Decoder,
    *requests: Request,
    budget: int = BUDGET,
    num_pages: int = 400,
    max_batch_tokens: int = 64,
    drafter: str | None = None,
    proposer: Any = None,
    runner: type[Watched] = Watched,
    policy: KeepPolicy | None = None,
    preempt_at: Sequence[int] = (),
    later: Sequence[Request] = (),
) -> Outcome:
    """Serve requests, then ``later`` ones from the same cache.

    The first one is preempted when it has said ``preempt_at`` tokens.
    """
    cache = PrefixCache(num_pages, PAGE_SIZE)
    limits = SchedulerLimits(
        max_batch_tokens=max_batch_tokens,
        max_running=8,
        max_queued=20,
        max_model_len=1000,
        vocab_size=decoder.config.vocab_size,
        kv_budget=budget,
    )
    speculator = [] if drafter is None else [make_speculator(drafter)]
    scheduler = Scheduler(cache, limits, *speculator)
    pool = decoder.make_pool(num_pages, page_size=PAGE_SIZE)
    made = runner(decoder, pool, proposer, keep_policy=policy or KeepWindow())
    driver = Driver(scheduler, made)  # type: ignore[arg-type]
    driver.add(*requests)
    most: dict[str, int] = {}
    left = list(preempt_at)
    while scheduler.num_requests or later:
        if not scheduler.num_requests:
            driver.add(*later)
            later = ()
        if left and requests[0].num_output == left[0] and requests[0].lease is not None:
            del left[0]
            scheduler._preempt(requests[0])
        plan = driver.step()
        for row in plan.requests:
            most[row.request_id] = max(most.get(row.request_id, 0), len(row.page_ids))
    assert set(driver.ended.values()) == {"length"}, driver.ended
    return Outcome(driver.served, made.logits, scheduler, most)


def same(first: Outcome, other: Outcome, name: str = "a") -> None:
    """The same tokens by the same bits."""
    assert first.tokens[name] == other.tokens[name]
    assert first.logits[name].keys() == other.logits[name].keys()
    for position, row in first.logits[name].items():
        assert torch.equal(row, other.logits[name][position]), position


def masked_logits(folder: Path, tokens: Sequence[int], budget: int = BUDGET) -> Tensor:
    """Logits of all positions by transformers, over everything, with a mask of what is left."""
    count = len(tokens)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    for position in range(count):
        # The rows from the i-th packing on do not see the first i * EVERY tokens of the answer.
        beyond = max(0, (position - PROMPT_LEN - budget) // EVERY) * EVERY
        seen[position, PROMPT_LEN : PROMPT_LEN + beyond] = False
    mask = torch.zeros(count, count).masked_fill_(~seen, float("-inf"))[None, None]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([list(tokens)]), attention_mask=mask).logits[0]
    return found
