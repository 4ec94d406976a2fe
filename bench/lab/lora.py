"""Time of a decode step with LoRA adapters: `python -m foretoken.bench.lab.lora`.

A model of Qwen3-0.6B's shape with random weights decodes one row, and eight, in turn without
adapters and with: of one, and of four with two rows each. Figures are milliseconds of a step, the
least quarter's end of all turns, so that what else a machine does counts little. Rows of
`bench.lab.peers`' table: ``lora-0.6b-1`` and ``lora-0.6b-8x4``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ...core.model.lora import adaptable
from ...core.ops.batch import Segment
from ...core.ops.lora import LoraBlock, LoraUpdate, LoraWeights, PackedLora
from ..common.report import heading, table, write_json

CONTEXT = 64  # positions before the row
PAGE_SIZE = 16
NUM_PAGES = CONTEXT // PAGE_SIZE + 1  # of a row
ROWS: dict[str, tuple[int, int]] = {"lora-0.6b-1": (1, 1), "lora-0.6b-8x4": (8, 4)}
_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 0,
}


class Figure(msgspec.Struct, frozen=True):
    """Milliseconds of a step of ``requests`` rows; ``share``: of the speed without adapters."""

    row: str
    requests: int
    adapters: int
    without_ms: float
    with_ms: float
    share: float


@contextmanager
def model(quantize: str) -> Iterator[OwnDecoder]:
    """The decoder, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG), "utf-8")
        decoder = load_decoder(
            folder,
            load_format="random",
            backend="auto",
            quantize=quantize,  # type: ignore[arg-type]
        )
        assert isinstance(decoder, OwnDecoder)
        yield decoder


def make_adapter(decoder: OwnDecoder, rank: int) -> LoraWeights:
    """An adapter of all linears of attention and MLPs, with random numbers."""
    parts: dict[object, PackedLora] = {}
    for packed, recipe in adaptable(decoder).items():
        blocks, first = [], 0
        for index, count in enumerate(recipe.counts):
            blocks.append(LoraBlock(first, index * rank, torch.randn(count, rank) / 100))
            first += count
        a = torch.randn(rank * len(recipe.counts), recipe.in_features) / 100
        update = LoraUpdate(a, tuple(blocks), first)
        parts[packed] = decoder.ops.pack_lora(update, decoder.dtype)
    return LoraWeights(parts)


@torch.inference_mode()
def measure(decoder: OwnDecoder, name: str, adapters: Sequence[LoraWeights], turns: int) -> Figure:
    """One row of the table."""
    requests, count = ROWS[name]
    pool = decoder.make_pool(requests * NUM_PAGES, page_size=PAGE_SIZE)
    own = [adapters[index * count // requests] for index in range(requests)]

    def step(each: Sequence[LoraWeights | None]) -> float:
        segments = [
            Segment(
                [5],
                CONTEXT,
                array("q", range(index * NUM_PAGES, (index + 1) * NUM_PAGES)),
                1,
                adapter=adapter,
            )
            for index, adapter in enumerate(each)
        ]
        batch = decoder.batch(segments, page_size=PAGE_SIZE)
        began = time.perf_counter()
        decoder.forward(batch, pool)
        return (time.perf_counter() - began) * 1e3

    times = [(step([None] * requests), step(own)) for _ in range(turns)]
    without, with_them = (sorted(each)[len(times) // 4] for each in zip(*times, strict=True))
    return Figure(name, requests, count, without, with_them, without / with_them)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it as JSON where ``--out`` names a file; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.lora")
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    with model(args.quantize) as decoder:
        decoder.ops.set_threads(args.threads)
        torch.set_num_threads(1)
        adapters = [make_adapter(decoder, args.rank) for _ in range(4)]
        measured = [measure(decoder, name, adapters, args.turns) for name in ROWS]
    figures = [msgspec.structs.asdict(each) for each in measured]
    print(table(figures))
    settings = {name: getattr(args, name) for name in ("quantize", "rank", "threads", "turns")}
    if args.out is not None:
        write_json(args.out, heading() | settings | {"figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
