"""``foretoken selftest --tp N``: compare a model sharded across N processes with one process."""

from __future__ import annotations

import json
import tempfile
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.execution.ranks.ranks import Ranks, TpDecoder
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.loader import load_decoder
from ...core.model.opening import read_config
from ...core.model.sharding import check_shards
from ...core.ops.batch import Segment

LIMIT = 1e-4  # maximum difference of a logit
_PAGE_SIZE, _PROMPT = 16, range(40, 100)
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
}
_OPTIONS: dict[str, Any] = {"dtype": "float32", "backend": "auto", "load_format": "random"}


def selftest_ranks(size: int, *, threads: int) -> int:
    """Print the results. Return 0 if the ranks agree with one process, else 1.

    The model has seeded random weights. Raises `InvalidRequest` if it cannot be sharded into
    ``size`` ranks, and `ForetokenError` if a rank does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), "utf-8")
        return _compare(Path(folder), size, threads)


def _compare(path: Path, size: int, threads: int) -> int:
    check_shards(read_config(path), size)
    alone = load_decoder(path, **_OPTIONS)
    ranks = Ranks(path, size, _OPTIONS, threads=threads)
    try:
        part = load_decoder(path, **_OPTIONS, comm=ranks.comm)
        assert isinstance(part, OwnDecoder), "Qwen3 is computed by this decoder"
        ranks.wait_until_loaded()
        together = TpDecoder(part, ranks)
        print(f"ranks: this process and {', '.join(map(str, ranks.pids))}, gloo on 127.0.0.1")
        together.ops.set_threads(threads)
        found, beside = _logits(together)
        expected, _ = _logits(alone)
    finally:
        ranks.end()
    error = (found - expected).abs().max().item()
    checks = {
        f"logits: error {error:.1e} of {LIMIT:.0e}": error <= LIMIT,
        "a row in a batch with others: the same bits": torch.equal(found[-1], beside[-1]),
    }
    for name, holds in checks.items():
        print(f"{name:42} {'ok' if holds else 'WRONG'}")
    return 0 if all(checks.values()) else 1


def _logits(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Return a prompt's logits, and its last token's logits in a batch with another prompt."""
    pages = array("q", range(8))
    pool = decoder.make_pool(16, page_size=_PAGE_SIZE)
    tokens = array("q", _PROMPT)

    def run(*segments: Segment) -> Tensor:
        batch = decoder.batch(segments, page_size=_PAGE_SIZE)
        return decoder.forward(batch, pool).logits.clone()

    whole = run(Segment(tokens, 0, pages, len(tokens)))
    last = Segment(tokens[-1:], len(tokens) - 1, pages, 1)
    other = Segment(tokens, 0, array("q", range(8, 16)), 0)
    return whole, run(other, last)
