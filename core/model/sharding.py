"""Sharding: the shard of a model that one of several ranks computes (``--tp``, arXiv 1909.08053).

A rank has some of the heads and some of the inner columns of each MLP. So it has the rows of the
matrices that produce them, and the columns of the matrices that read them. The outputs of the
reading matrices are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..ops.parallel import Comm
from ..ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight
from .description.config import DecoderConfig, LayerSpec
from .description.tensors import COLUMNS, Cut, Share, TensorSpec, layer_prefix
from .formats.checkpoint import Read
from .weights.layer import decoder_tensors
from .weights.mlp import Experts


def check_shards(config: DecoderConfig, size: int) -> None:
    """Raise `InvalidRequest` for a model that cannot be sharded over ``size`` ranks."""
    kind = config.model_type
    if config.states:
        raise _refused(f"{kind} has recurrent layers, which cannot be split over ranks")
    if config.latent is not None:
        raise _refused(f"{kind} has one latent key for all heads, which cannot be split over ranks")
    if config.head_norm == "whole":
        raise _refused(
            f"{kind} has a norm over all heads together, which cannot be split over ranks"
        )
    for spec in (layer.experts for layer in config.layers):
        if spec is not None and spec.width % size and spec.count % size:
            what = f"{spec.count} experts of width {spec.width}"
            raise _refused(f"{kind} has {what}, which {size} ranks cannot share evenly")
    for what, count in _counts(config):
        if count % size:
            raise _refused(f"{kind} has {count} {what}, which {size} ranks cannot share evenly")


def shard_config(config: DecoderConfig, comm: Comm, read: Read | None = None) -> DecoderConfig:
    """Return the config of this rank's shard: heads and widths divided by the number of ranks.

    Each rank has columns of every expert. If the expert width, or the groups of quantised weights
    in ``read``, cannot be split evenly, each rank has whole experts instead.
    """
    size, by_number = comm.size, _shares_experts(config, comm, read)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        layers=tuple(_shard_layer(layer, comm, by_number=by_number) for layer in config.layers),
    )


def shard_reader(read: Read, config: DecoderConfig, shard: DecoderConfig, comm: Comm) -> Read:
    """Return a reader of this rank's shard of each tensor of a checkpoint.

    ``config``: the whole model's; ``shard``: this rank's, from `shard_config`. Its reads raise
    `InvalidRequest` for a quantised matrix whose column groups the ranks cannot share.
    """
    shares = {each.name: each.share for each in decoder_tensors(_with_held(config, shard))}

    def part_of(name: str) -> StoredWeight:
        weight = read(name)
        try:
            return _share_of(weight, shares.get(name, "whole"), comm)
        except ValueError as problem:
            raise _refused(f"{name}: {problem}") from None

    return part_of


def read_others(read: Read, shard: DecoderConfig) -> None:
    """Read the experts of other ranks, so that observers of reads see every tensor.

    ``read`` reads the whole model; ``shard``: this rank's config, from `shard_config`.
    """
    for index, layer in enumerate(shard.layers):
        spec = layer.experts
        if spec is None or spec.held is None:
            continue
        experts = Experts(shard, layer_prefix(index), spec)
        others = [number for number in range(spec.count) if number not in spec.numbers]
        for tensor in (each for number in others for each in experts.of(number)):
            read(tensor.name)
        for tensor in experts.stacks[:2]:
            weight = read(tensor.name)
            if isinstance(weight, QuantizedStack):
                for number in others:
                    weight.one(number)


def _shares_experts(config: DecoderConfig, comm: Comm, read: Read | None) -> bool:
    """Whether each rank has whole experts, because their columns cannot be divided among ranks.

    Raises `InvalidRequest` if the number of experts cannot be divided either.
    """
    for index, layer in enumerate(config.layers):
        spec = layer.experts
        if spec is None:
            continue
        reason = "" if spec.width % comm.size == 0 else f"{spec.width} columns"
        if read is not None and not reason:
            experts = Experts(config, layer_prefix(index), replace(spec, held=None))
            reason = _uncut(read, experts.first_down, comm)
        if reason and spec.count % comm.size:
            count = f"{config.model_type} has {spec.count} experts"
            raise _refused(
                f"{count}: {comm.size} ranks cannot share them evenly, nor split each ({reason})"
            )
        if reason:
            return True
    return False


def _uncut(read: Read, down: TensorSpec, comm: Comm) -> str:
    """Return why the ranks cannot share the columns of each expert; empty if they can."""
    weight = read(down.name)
    if isinstance(weight, Tensor):
        return ""
    one = weight.one(0) if isinstance(weight, QuantizedStack) else weight
    try:
        _cut(one, COLUMNS, comm)
    except ValueError as problem:
        return str(problem)
    return ""


def _with_held(config: DecoderConfig, shard: DecoderConfig) -> DecoderConfig:
    """Return the whole model's config with the experts that this rank holds."""
    layers = (
        layer
        if layer.experts is None or held.experts is None
        else replace(layer, experts=replace(layer.experts, held=held.experts.held))
        for layer, held in zip(config.layers, shard.layers, strict=True)
    )
    return replace(config, layers=tuple(layers))


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"tp: {why}", param="tp")


def _counts(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of everything that is divided among ranks, such as heads."""
    for index, layer in enumerate(config.layers):
        heads = config.heads_of(index)
        yield "attention heads", heads.num_heads
        yield "KV heads", heads.num_kv_heads
        if layer.experts is None or layer.experts.beside is not None:
            yield "intermediate columns of an MLP", layer.width or config.intermediate_size
        if layer.experts is not None:
            yield "intermediate columns of a shared expert", layer.experts.shared_width


def _shard_layer(layer: LayerSpec, comm: Comm, *, by_number: bool) -> LayerSpec:
    heads, experts, size = layer.heads, layer.experts, comm.size
    if heads is not None:
        heads = heads._replace(
            num_heads=heads.num_heads // size, num_kv_heads=heads.num_kv_heads // size
        )
    if experts is not None:
        experts = replace(experts, shared_width=experts.shared_width // size)
        count = experts.count // size
        if by_number:
            held = (comm.rank * count, (comm.rank + 1) * count)
            experts = replace(experts, held=held)
        else:
            experts = replace(experts, width=experts.width // size)
    width = None if layer.width is None else layer.width // size
    return replace(layer, heads=heads, experts=experts, width=width)


def _share_of(weight: StoredWeight, share: Share, comm: Comm) -> StoredWeight:
    """Return the rank's shard of a tensor. Raises ValueError for a cut inside a quantised group."""
    if share == "whole":
        return weight
    if share == "first":
        assert isinstance(weight, Tensor), "a bias must not be quantised"
        return weight if comm.rank == 0 else torch.zeros_like(weight)
    if isinstance(share, Cut):
        return _cut(weight, share, comm)
    start, stop = share
    if isinstance(weight, QuantizedStack):
        return QuantizedStack(stop - start, lambda index: weight.one(start + index))
    assert isinstance(weight, Tensor)
    return weight[start:stop]


def _cut(weight: StoredWeight, cut: Cut, comm: Comm) -> StoredWeight:
    """Return the rank's share of each block of a tensor.

    Raises ValueError if a share would end inside a quantised group.
    """
    if isinstance(weight, QuantizedStack):
        return QuantizedStack(
            weight.count, lambda index: _cut_matrix(weight.one(index), cut.of_one, cut.blocks, comm)
        )
    if isinstance(weight, QuantizedWeight):
        return _cut_matrix(weight, cut.axis, cut.blocks, comm)
    if len(cut.blocks) == 1:
        return weight.chunk(comm.size, dim=cut.axis)[comm.rank].contiguous()
    return weight.index_select(cut.axis, _items(weight.shape[cut.axis], cut.blocks, comm))


def _cut_matrix(
    weight: QuantizedWeight, axis: int, blocks: Sequence[int], comm: Comm
) -> QuantizedWeight:
    items = _items(weight.shape[axis], blocks, comm)
    if axis == 0:
        return weight.rows(items)
    assert len(blocks) == 1, "columns must be one block"
    return weight.columns(int(items[0]), int(items[-1]) + 1)


def _items(size: int, blocks: Sequence[int], comm: Comm) -> Tensor:
    """Return the indices along an axis that the rank has: its share of each block."""
    unit = size // sum(blocks)
    parts = torch.split(torch.arange(size), [block * unit for block in blocks])
    return torch.cat([part.chunk(comm.size)[comm.rank] for part in parts])
