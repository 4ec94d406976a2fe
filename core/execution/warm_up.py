"""Warm-up: compile kernels, capture graphs and reserve memory before the first request."""

from __future__ import annotations

from array import array

import torch

from ..interface.sampling import SamplingMetadata, TokenSamplingParams
from ..model.decoder import Decoder
from ..ops.batch import NOTHING_MORE, Segment, Taps, Wanted
from ..ops.kv_pool import KVPool
from ..ops.row_extras import fresh_state
from ..sampling.drafted_row import DraftedRow

FEW_ROWS = 64  # For more rows of logits, the output layer uses another kernel.

# Sampling parameters that use different kernels.
_KINDS = (
    TokenSamplingParams(temperature=0.0),
    TokenSamplingParams(temperature=1.0),
    TokenSamplingParams(temperature=1.0, top_p=0.9, top_k=50),
    TokenSamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={0: 1.0}),
)


@torch.inference_mode()
def warm_up(
    decoder: Decoder,
    pool: KVPool,
    *,
    max_len: int,
    num_tokens: int,
    num_requests: int,
    wanted: Wanted = NOTHING_MORE,
    num_best: int = 0,
) -> None:
    """Capture the CUDA graphs, if any, then compute steps of the largest size.

    ``max_len``: number of tokens of the longest request. ``num_tokens``, ``num_requests``: prompt
    tokens and requests of the largest step. ``wanted``: outputs that each step will need, such as
    the taps of a `Proposer`. ``num_best``: number of candidate tokens that a draft model will rank
    at each position. The pool's content is overwritten. Raises the errors of a step, such as
    torch's out-of-memory error.
    """
    longest = min(max_len, pool.num_pages * pool.page_size)
    decoder.warm_up(pool, longest, wanted)
    taps = wanted.taps
    prompt = array("q", [0] * min(num_tokens, longest))
    _compute(decoder, pool, [_segment(pool, prompt)], taps, num_best)
    rows = [_segment(pool, prompt[:1], index) for index in range(num_requests)]
    _compute(decoder, pool, rows, taps)
    # Drafts may raise the number of rows of logits above `FEW_ROWS`.
    if num_requests <= FEW_ROWS and pool.states is None:
        _compute(decoder, pool, [rows[0]] * (FEW_ROWS + 1), taps)


def _segment(pool: KVPool, tokens: array[int], index: int = 0) -> Segment:
    """Return a segment of ``tokens`` at position 0 on the pool's first pages.

    If the model has recurrent states, the segment gets state slot ``index``.
    """
    num_pages = -(-len(tokens) // pool.page_size)
    extras = fresh_state(pool.states, index, len(tokens))
    return Segment(tokens, 0, array("q", range(num_pages)), 1, extras=extras)


def _compute(
    decoder: Decoder, pool: KVPool, segments: list[Segment], taps: Taps, num_best: int = 0
) -> None:
    """Compute a pass over the segments and sample from its logits.

    ``num_best``: number of best tokens to rank at each position; 0: rank none.
    """
    batch = decoder.batch(segments, page_size=pool.page_size)
    logits = decoder.forward(batch, pool, Wanted(taps=taps)).logits
    rows = [
        DraftedRow(array("q", [0, 0]), SamplingMetadata(params=params, seed=0, prompt_len=1))
        for params in (_KINDS * len(segments))[: max(len(segments), len(_KINDS))]
    ]
    for start in range(0, len(rows), len(segments)):
        block = rows[start : start + len(segments)]
        decoder.sampler.sample(logits[: len(block)], block)
        if num_best:
            decoder.sampler.best(logits[: len(block)], block, num_best)
