"""Rollouts on the tiny checkpoint: log-probabilities, groups, replay and what training changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import AsyncLLM, InvalidRequest
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.train.losses import engine_valued, importance_sampling
from foretoken.api.train.policy import FILE, LoraPolicy
from foretoken.api.train.rollouts import Rollout, Tokens, sample, score

TARGET = BUILTIN / "target"
OPTIONS: dict[str, Any] = {
    "kv_tokens": 4096,
    "max_model_len": 512,
    "threads": 1,
    "exact": "batch",
}
LOOP = "    total += total * item\n"
PROMPTS = ["def add(first, second):\n    return", f"for item in items:\n{LOOP * 6}"]


async def rollouts(llm: AsyncLLM, num_answers: int = 3) -> list[Rollout]:
    groups = await sample(llm, PROMPTS, num_answers=num_answers, max_tokens=20, seeds=[3, 4])
    assert [len(group) for group in groups] == [num_answers] * 2
    return [each for group in groups for each in group]


async def test_sampled_log_probabilities_are_scored_ones_with_drafts_and_caches() -> None:
    async with AsyncLLM(TARGET, draft="auto", speculation=3, **OPTIONS) as llm:
        cold = await rollouts(llm)
        cached = await rollouts(llm)
        assert cold == cached
        given = [each.tokens for each in cold]
        expected = [each.logprobs for each in cold]
        assert await score(llm, given) == expected
        assert [await score(llm, [each]) for each in given] == [[each] for each in expected]
    assert len({each.tokens.answer for each in cold}) == len(cold), "the answers differ"


async def test_a_replayed_rollout_equals_the_first_after_a_restart() -> None:
    found = []
    for draft in ("auto", "none"):
        async with AsyncLLM(TARGET, draft=draft, **OPTIONS) as llm:
            found.append(await rollouts(llm))
    assert found[0] == found[1]


async def test_an_answer_of_a_group_depends_on_its_number_and_not_on_the_groups_size() -> None:
    async with AsyncLLM(TARGET, **OPTIONS) as llm:
        three, one = await rollouts(llm), await rollouts(llm, num_answers=1)
    assert one == [three[0], three[3]]


def test_the_engine_learns_what_torch_differentiates(tmp_path: Path) -> None:
    """Updates that follow the gradient raise the engine's own probability of the good answer."""
    asyncio.run(learns(tmp_path))


async def learns(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    policy = LoraPolicy(TARGET, rank=4)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    async with AsyncLLM(TARGET, allow_weight_updates=True, **OPTIONS) as llm:
        good, bad, *_ = await rollouts(llm)
        values, totals = [good.logprobs, bad.logprobs], []
        sampled = torch.tensor([*good.logprobs, *bad.logprobs])
        advantages = torch.tensor([1.0] * len(good.logprobs) + [-1.0] * len(bad.logprobs))
        for _ in range(3):
            own = torch.cat(policy.logprobs([good.tokens, bad.tokens]))
            engine = engine_valued(torch.tensor([*values[0], *values[1]]), own)
            (importance_sampling(engine, sampled, advantages) / len(sampled)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            digest = policy.write(tmp_path)
            await llm.update_weights(tmp_path, sha256={FILE: digest})
            values = await score(llm, [good.tokens, bad.tokens])
            totals.append(sum(values[0]) - sum(values[1]))
    assert sum(good.logprobs) - sum(bad.logprobs) < totals[0] < totals[-1]


async def test_what_cannot_be_scored_or_seeded_is_refused() -> None:
    async with AsyncLLM(TARGET, **OPTIONS) as llm:
        with pytest.raises(InvalidRequest, match="seeds must have one seed for each prompt"):
            await sample(llm, PROMPTS, num_answers=1, max_tokens=4, seeds=[1])
        for given in (Tokens((), (1,)), Tokens((1,), ())):
            with pytest.raises(InvalidRequest, match="must have tokens"):
                await score(llm, [given])
        assert await score(llm, []) == []
