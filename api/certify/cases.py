"""The requests of a certificate: all kinds of sampling parameters, and several kinds of text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..types.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.7, 1.0)
LEAST_TOKENS, MOST_TOKENS = 4, 24  # limits of an answer
CODE = '''def mean(values):
    """Return the mean of the values."""
    if not values:
        raise ValueError("mean of no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def spread(values):
    """Return the largest value less the smallest one."""
    return max(values) - min(values)
'''
PROSE = (
    "A radix tree keeps the beginnings that texts share only once. When a prompt arrives, its "
    "tokens are compared with the tree from the root on, and what is found there need not be "
    "computed again. Pages that no request uses are dropped in the order of their last use. "
)
TABLE = "\n".join(f"{n:3} {n * n:5} {n * n * n:6}" for n in range(1, 12))
LIST = '[{"name": "anna", "age": 31}, {"name": "ben", "age": 27}, {"name": "cara", "age": 45}, '
TEXTS = (CODE, PROSE, TABLE, LIST, f"{PROSE}{PROSE}", f"# {PROSE}\n{CODE}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all cuts": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {7: 4.0, 9: -50.0}},
    "allowed_token_ids": {"allowed_token_ids": [*range(10, 60)]},
    "bad_words": {"bad_words": ["the", "return"]},
    "min_tokens": {"min_tokens": 4},
    "stop": {"stop": [".", "\n\n"]},
    "stop_token_ids": {"stop_token_ids": [*range(11, 40)]},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-z]{3,9}( [a-z]{3,9}){0,3}"},
    "choice": {"choice": ["yes", "no", "perhaps later"]},
    "n": {"n": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request; its ``params`` include the seed."""

    index: int
    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams


def make_cases(
    texts: Sequence[Sequence[int]], number: int, vocab_size: int, adapters: Sequence[str] = ()
) -> list[Case]:
    """Return ``number`` reproducible requests, which cycle through `KINDS`.

    ``texts`` are the token ids of `TEXTS`. Most prompts are excerpts from them, and some are random
    token ids. Every third prompt begins with the same long prefix. Each request uses one of
    ``adapters``, given by name, or none.
    """
    shared = [token for text in texts for token in text][:160]
    return [_case(index, texts, shared, vocab_size, adapters) for index in range(number)]


def _case(
    index: int,
    texts: Sequence[Sequence[int]],
    shared: Sequence[int],
    vocab_size: int,
    adapters: Sequence[str],
) -> Case:
    rng = random.Random(index)
    kind = list(KINDS)[index % len(KINDS)]
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - 8))
    own = [*text[start : start + rng.randrange(4, 60)]]
    if index % 7 == 6:  # random token ids
        most = min(vocab_size, 32_000)
        own = [rng.randrange(most // 2, most) for _ in range(rng.randrange(1, 30))]
    prompt = [*shared, *own] if index % 3 == 2 else own
    structured = bool({"json_schema", "regex", "choice"} & KINDS[kind].keys())
    num_tokens = MOST_TOKENS if structured else rng.randrange(LEAST_TOKENS, MOST_TOKENS + 1)
    temperature = TEMPERATURES[index // len(KINDS) % len(TEMPERATURES)]
    params = SamplingParams(
        temperature=temperature,
        max_tokens=num_tokens,
        seed=1000 + index,
        # drawn last, so that adapters change nothing else about a request
        lora=rng.choice((None, *adapters)),
        **KINDS[kind],
    )
    return Case(index=index, kind=kind, prompt=tuple(prompt), params=params)
