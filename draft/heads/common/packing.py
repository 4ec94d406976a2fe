"""Packing of a head's matrices for its target's kernels, and batches for passes over head KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ....core.interface.plan import ScheduledRequest
from ....core.model.decoder import OwnDecoder
from ....core.model.description.rope import RopeTable
from ....core.ops.base import ForwardPlan, Ops
from ....core.ops.batch import IntArray, RaggedBatch, padded_rows
from ....core.ops.kv_pool import KVPool
from ....core.ops.torch.torch_ops import TorchOps
from ....core.ops.weights import HeadLayout, HeadNorm, MlpWeights, Norm, PackedLinear
from .head_kv import Written
from .layers import HeadConfig, Mlp, OutputLayer, Projections, RmsNorm, Vocabulary

logger = logging.getLogger(__name__)


# -- linear layers --------------------------------------------------------------------------------


class _Packed(nn.Module):
    """A linear layer that the backend's kernels compute."""

    def __init__(self, linear: nn.Linear, ops: Ops) -> None:
        super().__init__()
        self.packed = ops.pack_linear(linear.weight.detach().contiguous(), linear.bias)
        self._min_rows = ops.min_rows
        is_output = isinstance(linear, OutputLayer)
        self._kernel: Callable[[Tensor, PackedLinear], Tensor] = (
            ops.logits if is_output else ops.linear
        )

    def forward(self, x: Tensor) -> Tensor:
        return by_kernel(self._kernel, self.packed, self._min_rows, x)


@dataclass(frozen=True, slots=True)
class LentOutput:
    """The target's output layer, lent to a head; a reduced head gets only the rows of its ids."""

    ops: Ops
    packed: PackedLinear
    cap: float | None  # soft cap of the logits

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return float32 logits, ``[.., hidden] -> [.., draft_vocab]``."""
        logits = partial(self.ops.logits, cap=self.cap)
        return by_kernel(logits, self.packed, self.ops.min_rows, hidden)


def packed_output(frame: Vocabulary) -> tuple[PackedLinear, float | None] | None:
    """Return the packed output layer of a head and the soft cap of its logits.

    Returns None if the output layer is not packed.
    """
    own, output = frame._modules.get("lm_head"), frame.output
    if isinstance(own, _Packed):
        return own.packed, None
    return (output.packed, output.cap) if isinstance(output, LentOutput) else None


def pack_linears(module: nn.Module, ops: Ops) -> None:
    """Replace every linear layer of a module by a packed one, for inference only."""
    for name, each in module.named_children():
        if isinstance(each, nn.Linear):
            setattr(module, name, _Packed(each, ops))
        else:
            pack_linears(each, ops)


def by_kernel(
    kernel: Callable[[Tensor, PackedLinear], Tensor], packed: PackedLinear, min_rows: int, x: Tensor
) -> Tensor:
    """Multiply ``x`` [.., in_features] by a packed matrix; return ``[.., out_features]``.

    The input of the kernel is padded to ``min_rows`` rows.
    """
    if x.ndim == 2 and len(x) >= min_rows:
        return kernel(x.contiguous(), packed)
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    flat = filled(flat, min_rows).contiguous()
    return kernel(flat, packed)[:count].view(*x.shape[:-1], -1)


def filled(x: Tensor, num_rows: int) -> Tensor:
    """Return ``x`` [n, ..], padded with copies of its last row to ``num_rows`` rows."""
    missing = num_rows - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x[-1:].expand(missing, *x.shape[1:])))


# -- layers ---------------------------------------------------------------------------------------


def head_layout(config: HeadConfig) -> HeadLayout:
    """Return the layout of heads in a row of packed queries, keys and values."""
    scale = config.head_dim**-0.5
    return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, scale)


def pack_qkv(attention: Projections, ops: Ops, *, has_bias: bool) -> PackedLinear:
    """Pack the projections of queries, keys and values side by side."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([part.weight for part in parts]).detach()
    if not has_bias:
        return ops.pack_linear(weight)
    return ops.pack_linear(weight, torch.cat([part.bias for part in parts]).detach())


def pack_mlp(mlp: Mlp, ops: Ops) -> MlpWeights:
    """Pack a gated MLP, with the gate and up projections side by side."""
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    return MlpWeights(
        ops.pack_linear(gate_up.detach()),
        ops.pack_linear(mlp.down_proj.weight.detach().contiguous()),
    )


def head_norm(attention: Projections) -> HeadNorm:
    """Return the norms of queries and keys: a row for each query head, then for each key head."""
    parts = ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
    rows, eps = list[Tensor](), 0.0
    for linear, norm in parts:
        assert norm is not None  # Layers of a block head have both norms.
        heads = linear.out_features // attention.head_dim
        rows.append(norm.weight.detach().float().expand(heads, -1))
        eps = norm.eps
    return HeadNorm(torch.cat(rows).contiguous(), eps)


def plain_norm(norm: RmsNorm) -> Norm:
    """Convert a norm for the kernels."""
    return Norm(norm.weight.detach().contiguous(), norm.eps)


# -- passes ---------------------------------------------------------------------------------------


_NONE: IntArray = np.zeros(0, dtype=np.int64)


class SeenKv(NamedTuple):
    """The head KV of a request that a row of a pass attends to.

    ``pages``: ids of the pages that it attends to from their first position on; at least one page,
    even if ``num_in_pages`` is 0. ``num_in_pages``: number of positions in these pages that it
    attends to. ``edge``: slots of the earlier positions that it attends to; they are at the end of
    another page.
    """

    pages: IntArray
    num_in_pages: int
    edge: IntArray


def seen_kv(scheduled: ScheduledRequest, first: int, page_size: int) -> SeenKv:
    """Return the head KV from position ``first`` to the position before the last token."""
    page_ids, anchor, edge = scheduled.page_ids, len(scheduled.tokens) - 1, _NONE
    first_page = -(-first // page_size)
    stop, count = min(anchor, first_page * page_size), max(0, anchor - first_page * page_size)
    if first < stop:  # All these positions are in one page.
        shift = (page_ids[first_page - 1] - (first_page - 1)) * page_size  # slot minus position
        edge = np.arange(first + shift, stop + shift)
    pages = page_ids[first_page : first_page + max(1, -(-count // page_size))] or page_ids[:1]
    return SeenKv(np.asarray(pages, dtype=np.int64), count, edge)


class PassRows(NamedTuple):
    """Consecutive tokens of a pass whose rows attend to the same KV.

    ``position``: position of the first token. ``slots``: slots for the keys and values of the
    tokens. ``draft_slots``: slots of the draft tokens that the rows attend to, their own
    included.
    """

    token_ids: Sequence[int]
    position: int
    slots: Sequence[int]
    seen: SeenKv
    draft_slots: IntArray


class HeadPass:
    """Layers of a head, computed by its target's backend, which reads the head's KV in place."""

    def __init__(self, config: HeadConfig, target: OwnDecoder) -> None:
        self._heads = head_layout(config)
        self._ops, self._device = target.ops, target.device
        if problem := target.ops.unsuited(self._heads):
            logger.warning("using PyTorch for the layers of the draft head: %s", problem)
            self._ops = TorchOps()
        self._rope = RopeTable(config.rope, config.head_dim, target.device)
        self._layout = PassLayout(self._ops, target.device)

    def _plan_writing(self, pool: KVPool, written: Written) -> ForwardPlan:
        """Return a plan to write the head KV of positions that the target has computed."""
        batch = self._layout.writing(pool.page_size, written)
        return self._ops.plan(batch, pool, self._heads, self._rope)

    def _plan_rows(self, pool: KVPool, rows: Sequence[PassRows]) -> tuple[Tensor, ForwardPlan]:
        """Return the token ids of a pass on the device, and its plan.

        The rows, and with them the token ids, are padded to `Ops.min_rows`.
        """
        batch = self._layout.rows(pool.page_size, rows)
        plan = self._ops.plan(batch, pool, self._heads, self._rope)
        return batch.token_ids.to(self._device), plan


class PassLayout:
    """Lays out the rows of a head's passes as batches, for a backend and a device.

    Each row is a segment of its own, and the start of the segment is the number of other keys that
    the row attends to. The page table of a segment begins with the first page that the row attends
    to as a whole. The tail of a segment lists single slots: first slots of the page before, then
    slots of draft tokens. The order of the keys does not matter, because each key is rotated by its
    position. So kernels for causal attention can compute trees, and blocks whose rows attend to
    each other.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._device, self._least = ops.batch_device or device, ops.min_rows

    def writing(self, page_size: int, written: Written) -> RaggedBatch:
        """Return a batch of rows whose keys and values are written and whose token ids are 0."""
        count, positions = len(written.lens), written.positions
        return self._batch(
            page_size, np.zeros_like(positions), positions, written.slots,
            positions[written.firsts], written.lens,
            (np.ones(count, np.int64), np.zeros(count, np.int64)),  # dummy pages: they are not read
            (np.zeros(count, np.int64), _NONE),
        )  # fmt: skip

    def rows(
        self, page_size: int, rows: Sequence[PassRows], *, wants_logits: bool = False
    ) -> RaggedBatch:
        """Return a batch of rows that attend to head KV and to each other.

        ``wants_logits``: whether logits are computed, for all rows.
        """
        counts = [len(each.token_ids) for each in rows]
        sizes = [
            (
                each.seen.num_in_pages,
                len(each.seen.pages),
                len(each.seen.edge) + len(each.draft_slots),
            )
            for each in rows
        ]
        columns = np.array(sizes).repeat(counts, axis=0).T
        in_pages, page_counts, tail_lens = np.ascontiguousarray(columns)  # C reads them
        pages = [(each.seen.pages,) * len(each.token_ids) for each in rows]
        tails = [(each.seen.edge, each.draft_slots) * len(each.token_ids) for each in rows]
        return self._batch(
            page_size,
            np.array([token_id for each in rows for token_id in each.token_ids]),
            np.array([each.position + at for each in rows for at in range(len(each.token_ids))]),
            np.array([slot for each in rows for slot in each.slots]),
            in_pages + tail_lens - 1,
            np.ones(len(tail_lens), dtype=np.int64),
            (page_counts, np.concatenate(list(chain.from_iterable(pages)))),
            (tail_lens, np.concatenate(list(chain.from_iterable(tails)))),
            num_logits=len(tail_lens) if wants_logits else 0,
        )

    def _batch(
        self,
        page_size: int,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        starts: IntArray,
        lens: IntArray,
        pages: tuple[IntArray, IntArray],  # number of pages of each segment, and all page ids
        tails: tuple[IntArray, IntArray],
        num_logits: int = 0,
    ) -> RaggedBatch:
        device, least = self._device, self._least
        return RaggedBatch(
            token_ids=padded_rows(token_ids, least, device),
            positions=padded_rows(positions, least, device),
            slots=padded_rows(slots, least, device),
            logit_rows=padded_rows(np.arange(num_logits), least, device),
            num_logits=num_logits,
            page_size=page_size,
            starts=starts,
            lens=lens,
            first_rows=np.cumsum(lens) - lens,
            page_counts=pages[0],
            pages=pages[1],
            tail_lens=tails[0],
            tails=tails[1],
            rope_until=int(positions.max()) + 1,
        )
