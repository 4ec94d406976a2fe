"""Rows to sample, plain and strange, for the tests of every `Sampler`."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.sampling import Constraint, ConstraintFailed, Mask, SamplingMetadata
from foretoken.core.sampling.drafted_row import DraftedRow

PROMPT_LEN = 2


def sampling_of(seed: int = 1, **form: Any) -> SamplingMetadata:
    own = {name: form.pop(name) for name in ("stop_ids", "bad_words_ids") if name in form}
    constraint = form.pop("constraint", None)
    params = SamplingParams(**form)
    return SamplingMetadata(
        params=params, seed=seed, prompt_len=PROMPT_LEN, constraint=constraint, **own
    )


def row_of(seed: int = 1, tokens: Sequence[int] = (0, 0), **form: Any) -> DraftedRow:
    return DraftedRow(array("q", tokens), sampling_of(seed, **form))


def logits_of(num_rows: int, vocab: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator, device="cpu") * spread
    return logits.to(torch.get_default_device())


def random_wishes(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Any mixture of every parameter."""

    def some_ids(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randrange(1, most))]

    choices: dict[str, Any] = {
        "top_k": rng.choice([1, 2, 5, vocab // 2, vocab, 10 * vocab]),
        "top_p": rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53]),
        "min_p": rng.choice([1e-6, 0.01, 0.3, 1.0]),
        "logit_bias": dict.fromkeys(some_ids(5), rng.uniform(-9, 9)),
        "repetition_penalty": rng.uniform(0.6, 1.7),
        "frequency_penalty": rng.uniform(-1, 2),
        "presence_penalty": rng.uniform(-1, 2),
        "allowed_token_ids": some_ids(30),
        "bad_words_ids": tuple((*some_ids(3)[1:], rng.randrange(vocab)) for _ in range(4)),
        "min_tokens": rng.randrange(8),
        "stop_ids": frozenset([*some_ids(4), vocab + 7]),
        "temperature": rng.choice([0.0, 1e-30, 0.01, 0.7, 2.0, 100.0]),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.35}


def random_row(rng: random.Random, vocab: int) -> DraftedRow:
    path = [rng.choice([rng.randrange(vocab), rng.randrange(vocab), vocab, -1]) for _ in range(9)]
    tail = path[:PROMPT_LEN]
    sampling = sampling_of(rng.getrandbits(64), **random_wishes(rng, vocab))
    return DraftedRow(array("q", path), sampling, tail)


class Countdown(Constraint):
    """Allows ids below ``10 - number of output tokens``; notes what it was asked."""

    def __init__(self, vocab: int, fails_at: int = 99) -> None:
        self._vocab, self._fails_at = vocab, fails_at
        self.asked: list[int] = []

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        out = len(tokens) - start + len(tail)
        self.asked.append(out)
        if out >= self._fails_at:
            raise ConstraintFailed("no way on")
        return memoryview(bytearray([1] * (10 - out) + [0] * (self._vocab - 10 + out)))

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        return ()

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        return len(guess)

    def fork(self) -> Constraint:
        return Countdown(self._vocab)


def best_of(logits: torch.Tensor, rng: random.Random) -> list[int]:
    """A draft that is often right, and sometimes no token at all."""
    best = logits.argmax(-1).tolist()
    return [rng.choice([i, i, i, i, 0, -1, len(logits[0]), -(2**62)]) for i in best]
