"""JoinedHead: a trained head beside its target, loaded, lent what it lacks and packed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from ....core.errors import ModelLoadError
from ....core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ....core.model.decoder import Decoder
from ....core.ops.base import Ops, PackedLinear
from ....core.ops.batch import Segment, Taps, Wanted
from ....core.ops.kv_pool import KvDtype, KVPool, bytes_per_page
from ....core.sampling.logits_processors import SampleRow
from .block import BlockHead
from .block_drafter import BlockProposer, num_spare_pages
from .block_pass import BlockPass, can_pass
from .eagle import EagleHead
from .eagle_drafter import EagleProposer
from .eagle_pass import EaglePass
from .head_files import Head, Odds, open_head
from .head_proposer import HeadProposer
from .medusa import MedusaConfig, MedusaHead, MedusaProposer

logger = logging.getLogger(__name__)
NUM_DRAWN, NUM_SCORED = 32, 64  # tokens that distinguish two readings of tap ids


def join_target(head: Head, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks; for inference only.

    Its matrices are laid out for the target's kernels, quantised if the target's are.
    ``read_output``: see `lend`.
    """
    lend(head, target, read_output)
    pack(head, target)


def lend(head: Head, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks.

    ``read_output`` reads the target's output matrix [vocab, hidden], which a head of fewer ids
    takes rows of; it is called only if the target's embedding does not serve for it.
    """
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if isinstance(head, MedusaHead):  # it has its own output layers
        return
    weights, ops = target.weights, target.ops
    packed = weights.lm_head
    if head.draft_ids is not None and head.lm_head is None:
        is_tied = target.config.tie_embeddings
        matrix = weights.embedding if is_tied else read_output()
        rows = matrix[head.draft_ids.to(matrix.device)]
        packed = ops.pack_linear(rows.to(target.device, target.dtype).contiguous())
    logits = partial(ops.logits, cap=weights.logit_cap)
    head.borrow(weights.embedding, partial(_by_kernels, logits, packed, ops.min_rows))


def pack(head: Head, target: Decoder) -> None:
    """Lay out a head's matrices for the target's kernels: its layers as a pass, where they can."""
    if isinstance(head, BlockHead) and can_pass(head, target):
        head.block_pass = BlockPass(head, target, head.context_vectors)
        head.layers = nn.ModuleList()  # packed by now
    if isinstance(head, EagleHead) and can_pass(head, target):
        head.eagle_pass = EaglePass(head, target)
        del head.midlayer  # likewise
    _pack_linears(head, target.ops)


class _Packed(nn.Module):
    """A linear layer by the backend's own kernels. ``wide``: of logits, which are float32."""

    def __init__(self, linear: nn.Linear, ops: Ops, *, wide: bool) -> None:
        super().__init__()
        self._packed = ops.pack_linear(linear.weight.detach().contiguous(), linear.bias)
        self._min_rows = ops.min_rows
        self._kernel: Callable[[Tensor, PackedLinear], Tensor] = ops.logits if wide else ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return _by_kernels(self._kernel, self._packed, self._min_rows, x)


_WIDE = ("lm_head", "markov_w2")


def _pack_linears(module: nn.Module, ops: Ops) -> None:
    for name, each in module.named_children():
        if isinstance(each, nn.Linear):
            wide = name in _WIDE or isinstance(module, nn.Sequential)  # the last of a Medusa head
            setattr(module, name, _Packed(each, ops, wide=wide))
        else:
            _pack_linears(each, ops)


def _by_kernels(
    kernel: Callable[[Tensor, PackedLinear], Tensor], packed: PackedLinear, min_rows: int, x: Tensor
) -> Tensor:
    """``[.., in_features] -> [.., out_features]``; kernels want ``min_rows`` rows at least."""
    if x.ndim == 2 and len(x) >= min_rows:
        return kernel(x.contiguous(), packed)
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    if count < min_rows:
        flat = torch.cat((flat, flat[-1:].expand(min_rows - count, -1)))
    return kernel(flat.contiguous(), packed)[:count].view(*x.shape[:-1], -1)


class _PoolShape(TypedDict):
    num_layers: int
    num_kv_heads: int
    head_dim: int


class JoinedHead:
    """A head that was joined to its target: what pools and proposers are made of.

    ``odds``: those of `HeadFolder`, with which its proposers begin.
    """

    def __init__(
        self, head: Head, target: Decoder, odds: Mapping[bool, Odds] | None = None
    ) -> None:
        self.head, self.target = head, target
        self._odds = {} if odds is None else odds
        self.device = target.device

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """A pool for the head's KV, with a page for each of the target's.

        Head KV is small and is kept in the target's dtype whatever ``kv_dtype`` says.
        """
        del kv_dtype
        dtype, device = self.target.dtype, self.target.device
        if isinstance(self.head, BlockHead):
            num_pages += num_spare_pages(self.head, page_size)
        return KVPool(num_pages, **self._shape, page_size=page_size, dtype=dtype, device=device)

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of a page, of the feature too that EAGLE-3 keeps for it."""
        del kv_dtype
        own = bytes_per_page(**self._shape, page_size=page_size, dtype=self.target.dtype)
        is_eagle = isinstance(self.head, EagleHead)
        return own + is_eagle * self.head.config.hidden_size * self.target.dtype.itemsize

    def proposer(self, pool: KVPool, *, independent: bool = False) -> HeadProposer:
        """What drafts with it. ``independent``: for rejection sampling."""
        made = self._proposer(pool, independent=independent)
        made.begin_with(self._odds)
        return made

    def _proposer(self, pool: KVPool, *, independent: bool) -> HeadProposer:
        if isinstance(self.head, BlockHead):
            return BlockProposer(self.head, pool, self.target, independent=independent)
        if isinstance(self.head, MedusaHead):
            return MedusaProposer(self.head, pool, self.target, independent=independent)
        return EagleProposer(self.head, pool, self.target, independent=independent)

    @property
    def _shape(self) -> _PoolShape:
        config = self.head.config
        if isinstance(config, MedusaConfig):
            return {"num_layers": 0, "num_kv_heads": 1, "head_dim": 1}  # there is no KV
        return {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }


def load_head(path: Path, target: Decoder, read_output: Callable[[], Tensor]) -> JoinedHead:
    """The head in a folder, joined to its target; ``read_output``: see `join_target`.

    Where the config leaves open which hidden states the head reads, both readings are tried on
    what the target says, and a warning names the better one, which is used. Raises
    `ModelLoadError` for a head that is not supported or does not fit the target.
    """
    if target.path != "own":
        raise ModelLoadError(
            f"{path}: a trained head reads weights of its target's own decoder, and "
            f"{target.config.model_type} is computed by transformers' modules: take draft auto, or "
            "a draft model"
        )
    folder = open_head(path, target.config)
    head = folder.load()
    lend(head, target, read_output)
    if isinstance(head, EagleHead) and folder.shifted_taps is not None:
        _choose_taps(path, head, folder.shifted_taps, target)
    pack(head, target)
    config = head.config
    logger.info(
        "head %s: %s, taps %s, drafts %d of %d token ids",
        path, type(head).__name__, list(config.taps), config.draft_vocab_size, config.vocab_size,
    )  # fmt: skip
    return JoinedHead(head, target, folder.odds)


def _choose_taps(path: Path, head: EagleHead, others: Taps, target: Decoder) -> None:
    """Give a head the boundaries under which it guesses more of the target's own tokens."""
    readings = (head.config.taps, others)
    scores = [score_taps(head, taps, target) for taps in readings]
    best = readings[1] if scores[1] > scores[0] else readings[0]
    logger.warning(
        "%s: eagle_aux_hidden_state_layer_ids may mean the boundaries %s or %s; of %d tokens the "
        "head guesses %d and %d, so %s are read",
        path, list(readings[0]), list(readings[1]), NUM_SCORED, *scores, list(best),
    )  # fmt: skip
    head.config = replace(head.config, taps=best)


@torch.inference_mode()
def score_taps(head: EagleHead, taps: Taps, target: Decoder) -> int:
    """How many of `NUM_SCORED` greedy tokens of the target the head guesses, one at a time.

    They follow a text that the target draws at temperature 1. The head was lent what it lacks and
    is not packed.
    """
    ids, tapped = _own_text(target, taps)
    hidden = head(ids[:, :-1], tapped, 1)[0]  # column i decides token i + 2
    guessed = head.target_ids(head.logits(hidden).argmax(-1))
    return int((guessed[0, -NUM_SCORED:] == ids[0, -NUM_SCORED:]).sum())


def _own_text(target: Decoder, taps: Taps) -> tuple[Tensor, Tensor]:
    """Token ids ``[1, T + 1]`` that the target says, and the taps ``[1, T, ..]`` of all but one."""
    tokens = array("q", target.config.eos_token_ids[:1] or (0,))
    num_tokens, page_size = NUM_DRAWN + NUM_SCORED, 16
    pages = array("q", range(-(-num_tokens // page_size)))
    pool = target.make_pool(len(pages), page_size=page_size)
    once = tuple(dict.fromkeys(taps))
    found: list[Tensor] = []
    for index in range(num_tokens):
        params = TokenSamplingParams(temperature=1.0 if index < NUM_DRAWN else 0.0)
        sampling = SamplingMetadata(params=params, seed=0, prompt_len=1)
        batch = target.batch([Segment(tokens[-1:], index, pages, 1)], page_size=page_size)
        output = target.forward(batch, pool, Wanted(taps=once))
        assert output.taps is not None
        parts = output.taps[:1].chunk(len(once), dim=-1)
        found.append(torch.cat([parts[once.index(boundary)] for boundary in taps], dim=-1))
        (choice,) = target.sampler.sample(output.logits, [SampleRow(tokens, sampling)])
        tokens.append(max(0, choice.token_id))
    ids = torch.tensor([tokens.tolist()], device=target.device)
    return ids, torch.cat(found).unsqueeze(0)
