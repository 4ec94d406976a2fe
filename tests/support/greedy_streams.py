"""Greedy decoding by hand in ragged batches, with chunks, shared pages and drafts that fail."""

from __future__ import annotations

import random

import torch

from foretoken.core.model.decoder import Decoder
from support.checkpoints import VOCAB_SIZE, ModelDriver, Stream

NUM_NEW = 14


def random_ids(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def generate(reference: object, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(  # type: ignore[attr-defined]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def greedy(
    decoder: Decoder, prompts: list[list[int]], drafts: list[list[int]], *, page_size: int = 4
) -> list[list[int]]:
    """Decode greedily, one prompt more per step, with drafts that are sometimes wrong."""
    driver = ModelDriver(decoder, page_size=page_size)
    vocab_size = decoder.config.vocab_size
    rng = random.Random(0)
    streams: list[Stream] = []
    done = [False] * len(prompts)
    while not all(done):
        if len(streams) < len(prompts):
            prompt = prompts[len(streams)]
            before = streams[-1] if streams and len(streams) != 3 else None
            streams.append(driver.add(prompt, capacity=len(prompt) + NUM_NEW + 8, prefix=before))
        active = [i for i in range(len(streams)) if not done[i]]
        rng.shuffle(active)
        rows, planned = [], []
        for i in active:
            row, draft = plan_row(streams[i], prompts[i], drafts[i], rng, vocab_size)
            rows.append(row)
            planned.append(draft)
        for i, (stream, ids, wanted), draft, logits in zip(
            active, rows, planned, driver.step(rows, [*map(len, planned)]), strict=True
        ):
            stream.num_computed += len(ids) - len(draft)
            if wanted:
                accept(stream, draft, logits.argmax(-1).tolist())
            done[i] = len(stream.tokens) >= len(prompts[i]) + NUM_NEW
    return [list(s.tokens[len(p) :][:NUM_NEW]) for s, p in zip(streams, prompts, strict=True)]


def plan_row(
    stream: Stream, prompt: list[int], expected: list[int], rng: random.Random, vocab_size: int
) -> tuple[tuple[Stream, list[int], int], list[int]]:
    """A chunk of at most 33 pending tokens; behind the last one a draft."""
    pending = list(stream.tokens[stream.num_computed :])
    chunk = pending[: rng.randrange(1, 34)]
    if len(chunk) < len(pending):
        return (stream, chunk, 0), []
    draft = expected[len(stream.tokens) - len(prompt) :][: rng.randrange(5)]
    if draft and rng.random() < 0.5:
        draft[-1] = (draft[-1] + 1) % vocab_size
    return (stream, chunk + draft, len(draft) + 1), draft


def accept(stream: Stream, draft: list[int], chosen: list[int]) -> None:
    """Keep the draft as far as it equals the model's choice, then the model's own token."""
    agreed = next((n for n, t in enumerate(draft) if chosen[n] != t), len(draft))
    stream.tokens.extend(chosen[: agreed + 1])
    stream.num_computed += agreed
