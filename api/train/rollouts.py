"""Rollouts: sampled answers with the log-probabilities that the engine sampled them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.errors import InvalidRequest
from ...core.options.checks import require
from ..runtime.preprocess import Prompt
from ..sdk.async_llm import AsyncLLM
from ..types.sampling_params import SamplingParams

POLICY = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, logprobs=0
)
"""Samples from the model's own distribution, whatever the model recommends."""


class Tokens(NamedTuple):
    """Token ids of a prompt and of an answer to it; neither is empty."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An answer, and the log-probability of each of its tokens when it was sampled."""

    tokens: Tokens
    logprobs: tuple[float, ...]  # [len(tokens.answer)]
    text: str
    finish_reason: str


async def sample(
    llm: AsyncLLM,
    prompts: Sequence[Prompt],
    *,
    num_answers: int,
    max_tokens: int,
    seeds: Sequence[int],
    stop: str | Sequence[str] = (),
) -> list[list[Rollout]]:
    """Return ``num_answers`` rollouts for each prompt (text or token ids), sampled at
    temperature 1 from the model's whole distribution.

    ``seeds`` has one seed for each prompt; its answers draw from it in a fixed order. Raises
    `InvalidRequest`.
    """
    require(len(seeds) == len(prompts), "seeds", "must have one seed for each prompt")
    params = [
        replace(POLICY, n=num_answers, max_tokens=max_tokens, seed=seed, stop=stop)
        for seed in seeds
    ]
    completions = await llm.generate([*prompts], params)
    return [
        [
            Rollout(
                tokens=Tokens(tuple(each.prompt_token_ids), tuple(choice.token_ids)),
                logprobs=tuple(token.logprob for token in choice.logprobs or ()),
                text=choice.text,
                finish_reason=choice.finish_reason,
            )
            for choice in each.choices
        ]
        for each in completions
    ]


async def score(llm: AsyncLLM, given: Sequence[Tokens]) -> list[tuple[float, ...]]:
    """Return the engine's log-probability of each answer token: [len(answer)] per entry.

    Answers are computed as prompts, in one pass each. With ``exact="batch"`` sampling with the same
    weights gives the same values, bit for bit. Raises `InvalidRequest`.
    """
    for each in given:
        if not each.prompt or not each.answer:
            raise InvalidRequest("a prompt and an answer must have tokens", param="given")
    params = replace(POLICY, logprobs=None, prompt_logprobs=0, prompt_only=True)
    texts = [[*each.prompt, *each.answer] for each in given]
    found = await llm.generate(texts, params)
    scored = []
    for each, completion in zip(given, found, strict=True):
        rows = (completion.prompt_logprobs or [])[len(each.prompt) :]
        scored.append(tuple(row.logprob for row in rows if row is not None))
    return scored
