"""transformers on the same card: ``generate`` and continuous batching, same weights and prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, utils

from ...common.report import Spread
from ...common.shapes import qwen3_06b, write_pair
from .bed import PAGE_SIZE
from .lab import THROUGHPUT, open_lab, random_prompts, together
from .stage import Stage

PROMPT_LEN, ANSWER = 512, 64  # tokens
BATCHES = (1, 8, 32)
CONTINUOUS = 64  # requests
REPEATS = 3
LEAST_SECONDS = 5.0  # with less left nothing is begun
EPS = 0.06  # of the pair's layers; see bench.common.shapes
Tokens = list[list[int]]
Run = Callable[[Sequence[Sequence[int]]], Tokens]


def run(stage: Stage) -> None:
    """One checkpoint for all; the 0.6B shape, for the peers' time is mostly the host's anyway."""
    utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = _checkpoint(stage)
    ours: dict[int, float] = {}  # tokens a second by requests
    stage.try_each(
        {
            "foretoken": partial(_ours, stage, folder, ours),
            "transformers": partial(_theirs, stage, folder, ours),
        }
    )


def _checkpoint(stage: Stage) -> Path:
    """Written once, on the device; weights are random, and the text does not collapse."""
    config = _tiny() if stage.rehearses else qwen3_06b()
    dtype = getattr(torch, stage.place.dtype)
    with torch.device(stage.place.device):
        write_pair(stage.place.work / "peers", config, dtype, eps=EPS)
    stage.gauge.release()
    return stage.place.work / "peers" / "target"


def _tiny() -> Qwen3Config:
    config = qwen3_06b()
    config.vocab_size, config.hidden_size, config.intermediate_size = 512, 64, 96
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    return config


def _sizes(stage: Stage) -> tuple[int, int, tuple[int, ...], int]:
    """Prompt, answer, batches, requests of the last row."""
    return (24, 6, (1, 2), 3) if stage.rehearses else (PROMPT_LEN, ANSWER, BATCHES, CONTINUOUS)


def _prompts(stage: Stage, vocab_size: int) -> list[list[int]]:
    prompt_len, _, _, most = _sizes(stage)
    return random_prompts(most, prompt_len, vocab_size, seed=9)


def _add(stage: Stage, engine: str, count: int, rate: Spread, ours: dict[int, float]) -> None:
    prompt_len, answer, _, _ = _sizes(stage)
    stage.add(
        "Answered tokens/s, Qwen3-0.6B's shape, same weights and prompts",
        {
            "engine": engine,
            "requests": count,
            "prompt": prompt_len,
            "answer": answer,
            "tokens/s": rate,
            "foretoken over it": ours[count] / rate.median if count in ours else "-",
        },
    )


# -- ours ---------------------------------------------------------------------------------------


async def _ours(stage: Stage, folder: Path, ours: dict[int, float]) -> None:
    prompt_len, answer, batches, most = _sizes(stage)
    options: dict[str, Any] = {
        "load_format": "auto",
        "kv_tokens": most * (prompt_len + answer + 2 * PAGE_SIZE),
        "max_batch_tokens": 8192,
        "max_slowdown": THROUGHPUT,
    }
    async with open_lab(stage, folder, **options) as lab:
        prompts = _prompts(stage, lab.built.vocab_size)
        for count in (*batches, most):
            rates = []
            for _ in range(REPEATS + 1):
                await lab.flush()
                began = time.perf_counter()
                await together(lab, prompts[:count], answer)
                rates.append(count * answer / (time.perf_counter() - began))
            rate = Spread.of(rates[1:])
            ours[count] = rate.median
            _add(stage, "foretoken", count, rate, ours)


# -- transformers -------------------------------------------------------------------------------


def _theirs(stage: Stage, folder: Path, ours: dict[int, float]) -> None:
    _, answer, batches, most = _sizes(stage)
    dtype = getattr(torch, stage.place.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(stage.place.device)  # type: ignore[arg-type]
    prompts = _prompts(stage, model.config.vocab_size)
    ways: dict[str, Run] = {
        "transformers generate": partial(_generate, stage, model, answer),
        "transformers continuous batching": partial(_continuous, stage, model, answer),
    }
    for way, run in ways.items():
        for count in (*batches, most):
            with stage.part(f"{way}, {count}"):
                _measure(stage, way, run, prompts[:count], ours)


def _measure(stage: Stage, way: str, run: Run, prompts: Tokens, ours: dict[int, float]) -> None:
    """The first run warms up, unless there is no time for another."""
    if stage.seconds_left < LEAST_SECONDS:
        stage.note(f"No time was left for {len(prompts)} requests of {way}.")
        return
    rates: list[float] = []
    while len(rates) <= REPEATS and (not rates or stage.seconds_left > LEAST_SECONDS):
        began = time.perf_counter()
        tokens = run(prompts)
        stage.gauge.synchronize()
        rates.append(sum(map(len, tokens)) / (time.perf_counter() - began))
    _add(stage, way, len(prompts), Spread.of(rates[1:] or rates), ours)


def _lengths(answer: int) -> dict[str, Any]:
    return {"max_new_tokens": answer, "do_sample": False, "pad_token_id": 0}


@torch.inference_mode()
def _generate(
    stage: Stage, model: PreTrainedModel, answer: int, prompts: Sequence[Sequence[int]]
) -> Tokens:
    batch = torch.tensor(prompts, device=stage.place.device)
    grown = model.generate(  # type: ignore[operator]
        batch,
        attention_mask=torch.ones_like(batch),
        min_new_tokens=answer,
        eos_token_id=None,
        **_lengths(answer),
    )
    tokens: Tokens = grown[:, batch.shape[1] :].tolist()
    return tokens


def _continuous(
    stage: Stage, model: PreTrainedModel, answer: int, prompts: Sequence[Sequence[int]]
) -> Tokens:
    """Generate with continuous batching, in pages of our size if this transformers allows it."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # not in every release

    prompt_len, _, _, most = _sizes(stage)
    wanted: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_blocks": -(-most * (prompt_len + answer + 2 * PAGE_SIZE) // PAGE_SIZE),
        "max_batch_tokens": 64 if stage.rehearses else 8192,
    }
    known = {each.name for each in fields(ContinuousBatchingConfig)}
    settings = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
    config = GenerationConfig(eos_token_id=-1, **_lengths(answer))  # type: ignore[no-untyped-call]
    found = model.generate_batch(  # type: ignore[operator]
        [list(prompt) for prompt in prompts],
        generation_config=config,
        continuous_batching_config=settings,
        progress_bar=False,
        persistent_manager=True,
    )
    return [list(output.generated_tokens) for output in found.values()]
