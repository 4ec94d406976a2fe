"""``foretoken selftest --tp N``: check that N processes compute the built-in model as one does."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ...core.execution.ranks import Ranks, TpDecoder
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.loader import load_decoder
from ...core.model.opening import read_config
from ...core.model.sharding import check_shards
from ...core.ops.batch import Segment
from ..build.model_files import find_model

LIMIT = 1e-4  # of a logit's difference to one process
_PAGE_SIZE, _PROMPT = 16, range(40, 100)


def selftest_ranks(size: int, *, threads: int) -> int:
    """Print the results; 0 if the ranks agree with one process, else 1.

    Raises `InvalidRequest` where the built-in model cannot be shared out among so many ranks, and
    `ForetokenError` where a rank does not come.
    """
    path = find_model("builtin").path
    check_shards(read_config(path), size)
    options = {"dtype": "float32", "backend": "auto"}
    alone = load_decoder(path, dtype="float32", backend="auto")
    ranks = Ranks(path, size, options, threads=threads)
    try:
        part = load_decoder(path, dtype="float32", backend="auto", comm=ranks.comm)
        assert isinstance(part, OwnDecoder), "the built-in model is computed by this decoder"
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
        "a row beside others: the same bits": torch.equal(found[-1], beside[-1]),
    }
    for name, holds in checks.items():
        print(f"{name:42} {'ok' if holds else 'WRONG'}")
    return 0 if all(checks.values()) else 1


def _logits(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Logits of a prompt, and those of its last row computed again beside another sequence."""
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
