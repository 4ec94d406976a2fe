"""A decode step of one shape by its own decoder, by transformers' modules on our pages and kernels,
and by transformers alone: ``python -m foretoken.bench.lab.model_paths [--layers N]``.

Random weights of the 0.6B shape of Qwen3; milliseconds are the best of several steps, taken in
turn so that a slow spell of the machine harms no path alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from ...core.model.decoder import Decoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PROMPT = 128  # tokens behind which a step decodes
PAGE = 16


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3Config(**SHAPE, num_hidden_layers=parsed.layers)
        config.save_pretrained(folder)
        for batch in (1, 8):
            steps: dict[str, Callable[[], object]] = {}
            for quantize in ("none", "int8"):
                for impl in ("own", "transformers"):
                    decoder = load_decoder(
                        Path(folder), load_format="random", dtype="bfloat16", backend="native",
                        impl=impl, quantize=quantize,
                    )  # fmt: skip
                    decoder.ops.set_threads(parsed.threads)
                    steps[f"{impl}, {quantize}"] = _step(decoder, batch)
            steps["transformers alone"] = _alone(config, batch)
            _print(batch, best_times(steps, parsed.rounds))


def _step(decoder: Decoder, batch: int) -> Callable[[], object]:
    pages = -(-(PROMPT + 1) // PAGE)
    pool = decoder.make_pool(batch * pages, page_size=PAGE)
    tables = [array("q", range(i * pages, (i + 1) * pages)) for i in range(batch)]
    prompts = [Segment([7] * PROMPT, 0, table, 1) for table in tables]
    for prompt in prompts:
        decoder.forward(decoder.batch([prompt], page_size=PAGE), pool)
    rows = [Segment([5], PROMPT, table, 1) for table in tables]
    return lambda: decoder.forward(decoder.batch(rows, page_size=PAGE), pool)


def _alone(config: transformers.PreTrainedConfig, batch: int) -> Callable[[], object]:
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ids = torch.full((batch, PROMPT), 7)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values

    @torch.inference_mode()
    def step() -> object:
        out = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return out

    return step


def best_times(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each call over some rounds, one after the other, in milliseconds."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best


def _print(batch: int, best: dict[str, float]) -> None:
    base = best["own, none"]
    for name, milliseconds in best.items():
        print(f"batch {batch}  {name:20} {milliseconds:7.1f} ms  {milliseconds / base:5.2f} x")


if __name__ == "__main__":
    main()
