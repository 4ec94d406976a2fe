"""A mixture of experts of about a billion random weights, by its own decoder and by transformers'
modules on the same kernels: ``python -m foretoken.bench.lab.experts [--threads N]``.

A decode step of 1 and of 8 requests with different texts, and a prompt of 512 tokens; milliseconds
are the best of several, taken in turn so that a slow spell of the machine harms no path alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from ...core.model.decoder import Decoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment
from .model_paths import best_times

SHAPE: dict[str, Any] = {  # a quarter of the widths of Qwen3 30B-A3B, and its choice
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PROMPT = 512  # tokens, and a quarter of it behind which a step decodes
PAGE = 16


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3MoeConfig(**SHAPE, num_hidden_layers=parsed.layers).save_pretrained(
            folder
        )
        for quantize in parsed.quantize:
            decoders = {
                impl: _load(Path(folder), impl, quantize, parsed.threads)
                for impl in ("own", "transformers")
            }
            for name, make in WORK.items():
                calls = {impl: make(decoder) for impl, decoder in decoders.items()}
                _print(f"{quantize}, {name}", best_times(calls, parsed.rounds))


def _load(folder: Path, impl: Any, quantize: Any, threads: int) -> Decoder:  # noqa: ANN401
    decoder = load_decoder(
        folder, load_format="random", dtype="bfloat16", backend="native", impl=impl,
        quantize=quantize,
    )  # fmt: skip
    decoder.ops.set_threads(threads)
    return decoder


def _decode(decoder: Decoder, batch: int) -> Callable[[], object]:
    """A step of one row a request."""
    rng, length = random.Random(0), PROMPT // 4
    pages = -(-(length + 1) // PAGE)
    pool = decoder.make_pool(batch * pages, page_size=PAGE)
    tables = [array("q", range(i * pages, (i + 1) * pages)) for i in range(batch)]
    for table in tables:
        prompt = Segment(_ids(rng, length), 0, table, 1)
        decoder.forward(decoder.batch([prompt], page_size=PAGE), pool)
    rows = [Segment(_ids(rng, 1), length, table, 1) for table in tables]
    return lambda: decoder.forward(decoder.batch(rows, page_size=PAGE), pool)


def _prefill(decoder: Decoder) -> Callable[[], object]:
    pool = decoder.make_pool(PROMPT // PAGE, page_size=PAGE)
    prompt = Segment(_ids(random.Random(0), PROMPT), 0, array("q", range(PROMPT // PAGE)), 1)
    return lambda: decoder.forward(decoder.batch([prompt], page_size=PAGE), pool)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(count)]


WORK: dict[str, Callable[[Decoder], Callable[[], object]]] = {
    "decode 1": lambda decoder: _decode(decoder, 1),
    "decode 8": lambda decoder: _decode(decoder, 8),
    f"prompt {PROMPT}": _prefill,
}


def _print(title: str, best: dict[str, float]) -> None:
    for name, milliseconds in best.items():
        print(f"{title:20} {name:13} {milliseconds:8.1f} ms  {milliseconds / best['own']:5.2f} x")


if __name__ == "__main__":
    main()
