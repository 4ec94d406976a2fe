"""Sharding: the part of a model that one of several ranks computes (``--tp``, arXiv 1909.08053).

A rank has some of the heads and some of the columns in the middle of each MLP: of the matrices that
make these its rows, of those that read them its columns. What the latter give are summands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..ops.parallel import Comm
from ..ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight
from .description.config import DecoderConfig, ExpertsSpec, LayerSpec, MlpNames
from .description.shapes import FUSED_GATE_UP, layer_prefix
from .formats.checkpoint import Read

_Cut: TypeAlias = Callable[[StoredWeight], StoredWeight]


def check_shards(config: DecoderConfig, size: int) -> None:
    """Raise `InvalidRequest` for a model that cannot be shared out among ``size`` ranks."""
    kind = config.model_type
    if config.states:
        raise _refused(f"{kind} has recurrent layers, which are not shared out")
    if config.latent is not None:
        raise _refused(f"{kind} has one latent key for all heads, which cannot be shared out")
    if config.head_norm == "whole":
        raise _refused(f"{kind} has a norm over all heads together, which no rank has")
    for spec in (layer.experts for layer in config.layers):
        if spec is not None and spec.width % size and spec.count % size:
            what = f"{spec.count} experts with {spec.width} columns in the middle"
            raise _refused(f"{kind} has {what}, which {size} ranks cannot share evenly")
    for what, count in _counts(config):
        if count % size:
            raise _refused(f"{kind} has {count} {what}, which {size} ranks cannot share evenly")


def shard_config(config: DecoderConfig, comm: Comm, read: Read | None = None) -> DecoderConfig:
    """The config of this rank's part: heads and widths divided by the number of ranks.

    Each rank has columns of every expert. Where these cannot be cut, of width or of the groups of
    quantised weights, which ``read`` gives, each has some of the experts whole.
    """
    size, by_number = comm.size, _shares_experts(config, comm, read)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        layers=tuple(_shard_layer(layer, comm, by_number=by_number) for layer in config.layers),
    )


def shard_reader(read: Read, config: DecoderConfig, part: DecoderConfig, comm: Comm) -> Read:
    """Read a checkpoint's tensors and keep the part of this rank.

    ``config``: of the whole model; ``part``: of `shard_config`. The bias of a matrix that gives
    summands is that of rank 0, on the others it is 0. Raises `InvalidRequest` for a quantised
    matrix whose groups of columns the ranks cannot share.
    """
    cuts = _cuts(config, comm)

    def part_of(name: str) -> StoredWeight:
        spec = _expert_of(name, part)
        if spec is not None:
            return _held(read(name), spec) if spec.names.stacked != "none" else read(name)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith(".bias"):
            leaf = f"{name.removesuffix('.bias').rpartition('.')[2]}.bias"
        cut = cuts.get(leaf)
        weight = read(name)
        try:
            return weight if cut is None else cut(weight)
        except ValueError as problem:
            raise _refused(f"{name}: {problem}") from None

    return part_of


def read_others(read: Read, part: DecoderConfig) -> None:
    """Read the experts that other ranks have whole, for the sake of what looks on.

    ``read``: of the whole model; ``part``: of `shard_config`.
    """
    for index, layer in enumerate(part.layers):
        spec = layer.experts
        if spec is None or spec.held is None:
            continue
        at, mlp = f"{layer_prefix(index)}{spec.names.expert}", spec.names.mlp
        others = [number for number in range(spec.count) if number not in spec.numbers]
        if spec.names.stacked == "none":
            names = [name for name in (mlp.gate, mlp.up, mlp.down) if name is not None]
            for number in others:
                for name in names:
                    read(f"{at.format(number)}{name}.weight")
            continue
        for name in ("gate_up_proj", "down_proj"):
            weight = read(f"{at}{name}")
            if isinstance(weight, QuantizedStack):
                for number in others:
                    weight.one(number)


def _shares_experts(config: DecoderConfig, comm: Comm, read: Read | None) -> bool:
    """Whether ranks have whole experts. Raises `InvalidRequest` where they must and cannot."""
    for index, layer in enumerate(config.layers):
        spec = layer.experts
        if spec is None:
            continue
        reason = "" if spec.width % comm.size == 0 else f"{spec.width} columns"
        if read is not None and not reason:
            reason = _uncut(read, f"{layer_prefix(index)}{spec.names.expert}", spec, comm)
        if reason and spec.count % comm.size:
            count = f"{config.model_type} has {spec.count} experts"
            raise _refused(f"{count}, which {comm.size} ranks cannot share, and {reason} in each")
        if reason:
            return True
    return False


def _uncut(read: Read, at: str, spec: ExpertsSpec, comm: Comm) -> str:
    """Why the columns of an expert cannot be cut; empty if they can."""
    is_stacked = spec.names.stacked != "none"
    name = f"{at}down_proj" if is_stacked else f"{at.format(0)}{spec.names.mlp.down}.weight"
    weight = read(name)
    if isinstance(weight, Tensor):
        return ""
    one = weight.one(0) if isinstance(weight, QuantizedStack) else weight
    try:
        _slice(one, 1, comm)
    except ValueError as problem:
        return str(problem)
    return ""


def _expert_of(name: str, part: DecoderConfig) -> ExpertsSpec | None:
    """The experts that a tensor is of, if this rank has some of them whole."""
    found = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    if found is None or int(found[1]) >= len(part.layers):
        return None
    spec = part.layers[int(found[1])].experts
    if spec is None or spec.held is None:
        return None
    return spec if found[2].startswith(spec.names.expert.partition("{")[0]) else None


def _held(weight: StoredWeight, spec: ExpertsSpec) -> StoredWeight:
    """The experts of a stack that this rank has."""
    start, stop = spec.numbers.start, spec.numbers.stop
    if isinstance(weight, QuantizedStack):
        return QuantizedStack(stop - start, lambda index: weight.one(start + index))
    assert isinstance(weight, Tensor)
    return weight[start:stop]


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"tp: {why}", param="tp")


def _counts(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """All that is divided, with its name."""
    for index, layer in enumerate(config.layers):
        heads = config.heads_of(index)
        yield "attention heads", heads.num_heads
        yield "KV heads", heads.num_kv_heads
        if layer.experts is None or layer.experts.beside is not None:
            yield "columns in the middle of an MLP", layer.width or config.intermediate_size
        if layer.experts is not None:
            yield "columns in the middle of a shared expert", layer.experts.shared_width


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


def _cuts(config: DecoderConfig, comm: Comm) -> dict[str, _Cut]:
    """The cuts by the last part of a tensor's name; other tensors every rank has whole."""

    def rows(weight: StoredWeight) -> StoredWeight:
        return _slice(weight, 0, comm)

    def columns(weight: StoredWeight) -> StoredWeight:
        return _slice(weight, 1, comm)

    def halves(weight: StoredWeight) -> StoredWeight:
        return _parts_of_rows(weight, (1, 1), comm)

    def fused_heads(weight: StoredWeight) -> StoredWeight:
        queries, keys = config.num_heads * (1 + config.has_gate), config.num_kv_heads
        return _parts_of_rows(weight, (queries, keys, keys), comm)

    def of_first_rank(bias: StoredWeight) -> StoredWeight:
        assert isinstance(bias, Tensor), "a bias is not quantised"
        return bias if comm.rank == 0 else torch.zeros_like(bias)

    makes, reads = {"q_proj", "k_proj", "v_proj"}, {"o_proj"}
    for names in _mlps(config):
        makes |= {name for name in (names.gate, names.up) if name is not None}
        reads.add(names.down)
    cuts: dict[str, _Cut] = {"sinks": rows, "qkv_proj": fused_heads, FUSED_GATE_UP: halves}
    cuts |= dict.fromkeys(makes, rows)
    cuts |= {f"{name}.bias": cut for name, cut in cuts.items()}
    cuts |= dict.fromkeys(reads, columns)
    cuts |= {f"{name}.bias": of_first_rank for name in reads}
    plain = dict(cuts)
    for spec in (layer.experts for layer in config.layers):
        if spec is not None and spec.names.stacked != "none":
            cuts |= _stacked_cuts(spec, comm, plain)
    return cuts


def _mlps(config: DecoderConfig) -> Iterator[MlpNames]:
    yield config.mlp_names
    for layer in config.layers:
        if layer.experts is not None:
            yield layer.experts.names.mlp
            yield layer.experts.names.shared_mlp


def _stacked_cuts(spec: ExpertsSpec, comm: Comm, plain: dict[str, _Cut]) -> dict[str, _Cut]:
    """Cuts of experts in one tensor of each kind; of matrices by these names those of ``plain``."""
    kind = spec.names.stacked

    def first(weight: StoredWeight) -> StoredWeight:
        if isinstance(weight, Tensor) and weight.dim() < 3:
            return plain[FUSED_GATE_UP](weight)
        if kind == "gpt-oss":  # rows of gate and factor in turn
            return _of_stack(weight, 2, 0, comm)
        assert isinstance(weight, Tensor)
        gate, up = weight.chunk(2, dim=1 if kind == "rows" else 2)
        axis = 1 if kind == "rows" else 2
        return torch.cat([_slice_tensor(each, axis, comm) for each in (gate, up)], dim=axis)

    def second(weight: StoredWeight) -> StoredWeight:
        if not isinstance(weight, QuantizedStack) and _dims(weight) < 3:
            return plain[spec.names.mlp.down](weight)
        return _of_stack(weight, 2 if kind == "rows" else 1, 1, comm)

    def first_bias(bias: StoredWeight) -> StoredWeight:
        return _slice(bias, 1, comm)

    return {
        "gate_up_proj": first,
        "down_proj": second,
        "gate_up_proj_bias": first_bias,
        "down_proj_bias": plain[f"{spec.names.mlp.down}.bias"],
    }


def _dims(weight: StoredWeight) -> int:
    return weight.dim() if isinstance(weight, Tensor) else 2


def _of_stack(weight: StoredWeight, axis: int, of_one: int, comm: Comm) -> StoredWeight:
    """Cut a stack along ``axis``; where it is quantised, each ``[out, in]`` along ``of_one``."""
    if not isinstance(weight, QuantizedStack):
        return _slice(weight, axis, comm)

    def one(index: int) -> QuantizedWeight:
        found = _slice(weight.one(index), of_one, comm)
        assert isinstance(found, QuantizedWeight)
        return found

    return QuantizedStack(weight.count, one)


def _slice(weight: StoredWeight, axis: int, comm: Comm) -> StoredWeight:
    """The rank's part of the rows (axis 0) or columns. Raises ValueError inside of a group."""
    if isinstance(weight, Tensor):
        return _slice_tensor(weight, axis, comm)
    assert isinstance(weight, QuantizedWeight)
    size = weight.shape[axis] // comm.size
    start, stop = comm.rank * size, (comm.rank + 1) * size
    return weight.rows(torch.arange(start, stop)) if axis == 0 else weight.columns(start, stop)


def _slice_tensor(weight: Tensor, axis: int, comm: Comm) -> Tensor:
    return weight.chunk(comm.size, dim=axis)[comm.rank].contiguous()


def _parts_of_rows(weight: StoredWeight, sizes: Sequence[int], comm: Comm) -> StoredWeight:
    """The rank's rows of each of the matrices that are stacked into one, in these proportions."""
    assert not isinstance(weight, QuantizedStack)
    num_rows = weight.shape[0]
    unit = num_rows // sum(sizes)
    parts = torch.split(torch.arange(num_rows), [size * unit for size in sizes])
    order = torch.cat([part.chunk(comm.size)[comm.rank] for part in parts])
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
