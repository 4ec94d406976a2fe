"""Cost of a draft pass: the model's own 4-bit copy, and trained heads.

Heads have random weights: their drafts are meaningless, but the time of a pass is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....core.model.decoder import OwnDecoder
from ....core.model.description.config import DecoderConfig
from ....core.model.drafting.rough_copy import NoRoughCopyError, rough_decoder, rounded_matrices
from ....core.ops.batch import SamplingPlan, Wanted
from ....core.ops.weights import whole_table
from ....draft.control.outcome import NUM_BEST
from ....draft.control.profiler import profile_proposer
from ....draft.heads.block_network import BlockConfig, BlockHead
from ....draft.heads.common.layers import Head
from ....draft.heads.eagle_network import EagleConfig, EagleHead
from ....draft.heads.joined import join, lend
from ....draft.proposers.self_draft import SelfProposer
from .bed import PAGE_SIZE, Bed
from .stage import QWEN, SMALL, Stage

BATCHES = (1, 4, 16)
CONTEXT = 512  # Context per request of a plain step, in tokens.
DRAFT_IDS = 32_000  # Size of a head's output vocabulary, as in published heads.
BLOCK_SIZE, RANK = 8, 256
TABLE = "A pass of a draft, choice of the best four tokens included"


def run(stage: Stage) -> None:
    """Measure the models, the 8B shape first."""
    stage.try_each({name: partial(_model, stage, name) for name in stage.few(QWEN, SMALL)})


def _model(stage: Stage, name: str) -> None:
    backend = {"backend": "auto"} if stage.rehearses else {}  # The torch backend has no 4-bit copy.
    target = stage.place.decoder(stage.place.shape(name), **backend)
    assert isinstance(target, OwnDecoder)
    batches, context = ((1, 2), 64) if stage.rehearses else (BATCHES, CONTEXT)
    bed = Bed.make(target, max(batches), context + 2 * PAGE_SIZE)
    repeats = 3 if stage.rehearses else 20
    plain = {n: bed.seconds(bed.plan(n, context), repeats=repeats).median for n in batches}
    parts: Mapping[str, Callable[[], dict[int, float]]] = {
        "self": partial(_rough_passes, stage, target, bed),
        "eagle3": partial(_head_passes, EagleHead, _eagle, target, bed),
        "block": partial(_head_passes, BlockHead, _block, target, bed),
    }
    for drafter, measure in parts.items():
        with stage.part(f"{name}, {drafter}"):
            found = measure()
            for batch in (each for each in batches if each in found):
                stage.add(
                    TABLE,
                    {
                        "model": name,
                        "drafter": drafter,
                        "requests": batch,
                        "ms a pass": 1e3 * found[batch],
                        "ms a plain step": 1e3 * plain[batch],
                        "of a plain step": found[batch] / plain[batch],
                    },
                )


def _rough_passes(stage: Stage, target: OwnDecoder, bed: Bed) -> dict[int, float]:
    """Return the seconds of a pass of the 4-bit copy by number of requests; empty without it."""
    try:
        copy = rough_decoder(target)
    except NoRoughCopyError as reason:
        stage.note(f"self {reason}.")
        return {}
    whole, rough = (
        sum(each.num_bytes for each in rounded_matrices(decoder.weights))
        for decoder in (target, copy)
    )
    stage.note(f"A pass of the 4-bit copy reads {rough / whole:.3f} of the matrices' bytes.")
    copy.warm_up(bed.pool, bed.pages_each * PAGE_SIZE, Wanted(SamplingPlan((), (), NUM_BEST)))
    return profile_proposer(SelfProposer(copy, bed.pool))


def _head_passes(
    kind: Callable[[Any], Head],
    config_of: Callable[[DecoderConfig, dict[str, Any]], Any],
    target: OwnDecoder,
    bed: Bed,
) -> dict[int, float]:
    """Return the seconds of a head's pass by number of requests.

    A pass of a block head drafts a whole block.
    """
    config = target.config
    same = {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": min(DRAFT_IDS, config.vocab_size),
        "target_hidden_size": config.hidden_size,
        "taps": (0, config.num_layers // 2, config.num_layers),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope": config.rope,
        "max_model_len": config.max_model_len,
        "owns_output": True,
    }
    head = kind(config_of(config, same))
    lend(head, target, lambda: whole_table(target.weights.embedding))
    joined = join(head, target)
    proposer = joined.proposer(joined.make_pool(bed.pool.num_pages, page_size=PAGE_SIZE))
    proposer.warm_up(bed.pages_each * PAGE_SIZE, NUM_BEST)
    return profile_proposer(proposer)


def _eagle(config: DecoderConfig, same: dict[str, Any]) -> EagleConfig:
    del config
    return EagleConfig(num_layers=1, **same)


def _block(config: DecoderConfig, same: dict[str, Any]) -> BlockConfig:
    ids = {"mask_token_id": config.vocab_size - 1, "markov_vocab_size": same["draft_vocab_size"]}
    return BlockConfig(num_layers=2, block_size=BLOCK_SIZE, markov_rank=RANK, **same, **ids)
