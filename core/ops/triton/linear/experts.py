"""Mixtures of experts: addresses of their weights on the device, and the kernels' calls.

A tile always computes 64 rows, some of them perhaps empty, as in tiles.py. Each expert's rows begin
a tile, so that a row has the same instructions with and without other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from ...base import Ops
from ...layers import run_mlp
from ...weights import ExpertWeights, PackedLinear, Routing
from .experts_kernels import add_up_kernel, expert_linear_kernel, route_kernel, sort_kernel
from .tiled_linear import TiledLinear
from .tiles import FEW_ROWS, Bits, step_inputs

COLUMNS = 64  # outputs of a tile
NEIGHBOURS = 16  # consecutive programs that compute different rows with the same tile of a weight
SORTED_CHUNK = 1024  # pairs that a program reads at once
SUMMED_TILE = 1024  # columns of a program
EXPERT_OPTIONS = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}


class Addresses:
    """Addresses of tensors of one shape and dtype, aligned to 16 bytes; keeps them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(each.clone() if each.data_ptr() % 16 else each for each in tensors)
        self.like = self._tensors[0]
        found = [each.data_ptr() for each in self._tensors]
        self.table = torch.tensor(found, dtype=torch.int64, device=self.like.device)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One matrix of every expert, all of one shape, by their addresses on the device."""

    weights: Addresses
    scales: Addresses | None  # only for quantised weights
    biases: Addresses | None
    bits: Bits

    @classmethod
    def of(cls, matrices: Sequence[PackedLinear]) -> ExpertMatrices:
        """Return the addresses of ``matrices``; copies to the device, so not inside a graph."""
        scales = [each.scale for each in matrices if isinstance(each, TiledLinear)]
        return cls(
            weights=Addresses([each.weight for each in matrices]),
            scales=_addresses(scales),
            biases=_addresses([each.bias for each in matrices]),
            bits=matrices[0].tiles.bits if isinstance(matrices[0], TiledLinear) else 0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTables:
    """Both matrices of every expert of a layer."""

    gate_up: ExpertMatrices
    down: ExpertMatrices

    @classmethod
    def of(cls, weights: ExpertWeights) -> ExpertTables:
        """Return the tables of a layer; copies to the device, so not inside a graph."""
        first, second = zip(*(mlp.linears for mlp in weights.experts), strict=True)
        return cls(ExpertMatrices.of(first), ExpertMatrices.of(second))


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """Pairs of rows and experts, sorted by expert and cut into tiles."""

    order: Tensor  # [num_pairs] int32
    tiles: Tensor  # [num_tiles, 3] int32


def run_experts(
    ops: Ops, x: Tensor, weights: ExpertWeights, tables: ExpertTables, slots: Tensor | None
) -> Tensor:
    """Return the sum of the outputs of each row's experts, ``[T, hidden]``.

    ``slots`` [T]: -1 for an empty row, which chooses no expert; None: no row is empty.
    """
    (num_rows, hidden), count, top_k = x.shape, len(weights.experts), weights.routing.top_k
    logits = ops.logits(x, weights.router)
    scores, chosen = route(logits, weights.routing, weights.choice_bias, slots)
    by_expert = _sort(chosen, count)
    wide = _linear(x, by_expert, tables.gate_up, sharers=top_k)
    narrow = ops.activate(wide, weights.experts[0].activation)
    y = _linear(narrow, by_expert, tables.down, sharers=1)
    shared = None if weights.shared is None else run_mlp(ops, x, weights.shared)
    gate = None if weights.shared_gate is None else ops.logits(x, weights.shared_gate)
    out = torch.empty_like(x)
    add_up_kernel[(num_rows, -(-hidden // SUMMED_TILE))](
        y, scores, chosen, x if shared is None else shared, x if gate is None else gate, out,
        WIDTH=hidden, TILE=SUMMED_TILE, TOP_K=top_k, NUM_EXPERTS=count,
        HAS_SHARED=shared is not None, HAS_GATE=gate is not None,
    )  # fmt: skip
    return out


def route(
    logits: Tensor, routing: Routing, choice_bias: Tensor | None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's weights and experts, both ``[T, top_k]``, best first.

    ``logits``: [T, num_experts]. Empty rows have the expert number num_experts.
    """
    num_rows, count = logits.shape
    weights = logits.new_empty((num_rows, routing.top_k))
    chosen = torch.empty_like(weights, dtype=torch.int32)
    route_kernel[(num_rows,)](
        logits, logits if choice_bias is None else choice_bias,
        logits if slots is None else slots, weights, chosen,
        routing.renorm or 0.0, routing.factor,
        NUM_EXPERTS=count, TILE=next_power_of_2(count),
        TOP_K=routing.top_k, TOP_TILE=next_power_of_2(routing.top_k),
        IS_SIGMOID=routing.score == "sigmoid", OF_CHOSEN=routing.of_chosen,
        NUM_GROUPS=routing.num_groups, KEPT_GROUPS=routing.kept_groups,
        BY_TWO=routing.groups_by == "best two", RENORMS=routing.renorm is not None,
        HAS_BIAS=choice_bias is not None, HAS_SLOTS=slots is not None,
    )  # fmt: skip
    return weights, chosen


def _sort(chosen: Tensor, num_experts: int) -> _Sorted:
    """Sort the (row, expert) pairs by expert, with enough tiles for any choice.

    There is one tile per pair or, if that is less, one per ``FEW_ROWS`` pairs and one per expert.
    """
    num_pairs = chosen.numel()
    by_expert = num_pairs // FEW_ROWS + num_experts
    num_tiles = min(num_pairs, by_expert)
    order, tiles = chosen.new_empty(num_pairs), chosen.new_empty((num_tiles, 3))
    sort_kernel[(num_experts,)](
        chosen, order, tiles, num_pairs, num_tiles, NUM_EXPERTS=num_experts, TILE_ROWS=FEW_ROWS,
        IS_FEW=num_pairs <= by_expert, CHUNK=SORTED_CHUNK,
    )  # fmt: skip
    return _Sorted(order, tiles)


def _linear(x: Tensor, by_expert: _Sorted, matrices: ExpertMatrices, *, sharers: int) -> Tensor:
    """Multiply each pair's row by its expert's matrix, and return [num_pairs, out_features].

    ``x``: [num_pairs / sharers, in_features]; each row belongs to ``sharers`` consecutive pairs.
    """
    weights, scales, biases = matrices.weights, matrices.scales, matrices.biases
    num_tiles, out_features = len(by_expert.tiles), len(weights.like)
    out = x.new_empty((len(by_expert.order), out_features))
    row_tiles = min(num_tiles, NEIGHBOURS)
    grid = (row_tiles, -(-out_features // COLUMNS), -(-num_tiles // row_tiles))
    expert_linear_kernel[grid](
        x, by_expert.order, by_expert.tiles, weights.table,
        weights.table if scales is None else scales.table,
        weights.table if biases is None else biases.table,
        weights.like, x if scales is None else scales.like, out,
        num_tiles, x.shape[1], out_features,
        **expert_constants(
            x.dtype, x.shape[1], sharers=sharers, bits=matrices.bits,
            has_bias=biases is not None,
        ),
        **EXPERT_OPTIONS,
    )  # fmt: skip
    return out


def expert_constants(
    dtype: torch.dtype, in_features: int, *, sharers: int, bits: Bits, has_bias: bool
) -> dict[str, int]:
    """Return the constants that `expert_linear_kernel` is compiled with."""
    inner = step_inputs(dtype, bits)
    return {
        "SHARERS": sharers,
        "TILE_ROWS": FEW_ROWS,
        "TILE_OUT": COLUMNS,
        "TILE_IN": inner,
        "NEIGHBOURS": NEIGHBOURS,
        "IS_EVEN": in_features % inner == 0,
        "BITS": bits,
        "HAS_BIAS": has_bias,
    }


def _addresses(tensors: Sequence[Tensor | None]) -> Addresses | None:
    """Return the addresses of all tensors, or None if all are None."""
    found = [each for each in tensors if each is not None]
    return Addresses(found) if found else None
