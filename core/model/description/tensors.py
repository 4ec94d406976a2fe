"""Declarations of a checkpoint's tensors: name, shape, and the share that a rank has.

The parts of a layer (core/model/weights/) declare their tensors as attributes of the types below.
The check of a checkpoint's shapes, the shards of ranks, packing and adapters all read these
declarations. Tensors have the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
# Models with per-layer token inputs (Gemma 4) have these tensors beside the embedding.
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
TOKEN_NORM = "model.per_layer_projection_norm.weight"
# An MTP layer, which predicts an additional token, has these tensors.
MTP_EMBEDDING_NORM, MTP_HIDDEN_NORM = "model.mtp.enorm.weight", "model.mtp.hnorm.weight"
MTP_PROJECTION = "model.mtp.eh_proj"
# An assistant has these tensors beside its layers.
PRE_PROJECTION, POST_PROJECTION = "pre_projection", "post_projection"
CENTROIDS, TOKEN_ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
# The prefixes of mixers follow the layer's prefix.
DELTA, MAMBA, CONV = "linear_attn.", "mamba.", "conv."


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


class Cut(NamedTuple):
    """The division of a tensor among ranks along ``axis`` (arXiv 1909.08053).

    Along that axis the tensor consists of blocks whose widths are proportional to ``blocks``; each
    rank has an equal share of each block. ``of_one``: for a stack of matrices, the axis in one
    matrix [out_features, in_features], because a quantised stack is divided matrix by matrix.
    """

    axis: int
    blocks: tuple[int, ...] = (1,)
    of_one: int = 0


class Held(NamedTuple):
    """The share of a rank that has the experts ``start`` to ``stop`` of a stack."""

    start: int
    stop: int


Share: TypeAlias = Cut | Held | Literal["whole", "first"]
"""The part of a tensor on a rank. "first": rank 0 has all of it, and the others have zeros."""

ROWS, COLUMNS = Cut(0), Cut(1)


class TensorSpec(NamedTuple):
    """Declaration of a tensor of a checkpoint. ``share``: the part of it that a rank has."""

    name: str
    shape: Shape
    share: Share = "whole"

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensor itself."""
        yield self


class NormSpec(NamedTuple):
    """Declaration of a norm on the residual stream: its weight [size], and an optional bias."""

    name: str
    size: int
    has_bias: bool

    @property
    def bias(self) -> str:
        """Return the name of the bias."""
        return f"{self.name.removesuffix('weight')}bias"

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the weight and the bias."""
        names = (self.name, self.bias) if self.has_bias else (self.name,)
        return (TensorSpec(name, (self.size,)) for name in names)


class MatrixSpec(NamedTuple):
    """Declaration of a matrix of a linear, which is multiplied by ``factor`` when it is packed."""

    name: str  # without ".weight"
    rows: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LinearSpec:
    """Declaration of a linear: matrices [rows, in_features] that are packed stacked, and biases.

    ``order``: stored index of each packed row, if the kernels' order differs from the files'.
    ``share``: the part that a rank has. ``is_plain``: the matrices are never quantised. ``adapts``:
    LoRA adapters may change them.
    """

    matrices: tuple[MatrixSpec, ...]
    in_features: int
    bias: bool = False
    order: Tensor | None = None
    share: Share = "whole"
    is_plain: bool = False
    adapts: bool = False

    @property
    def factors(self) -> list[float]:
        """Factor of each matrix."""
        return [matrix.factor for matrix in self.matrices]

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the declarations of the weights and the biases.

        If ranks have shares of the columns, their outputs are summed, so only rank 0 has the bias.
        """
        share: Share = "first" if self.share == COLUMNS else self.share
        for name, rows, _ in self.matrices:
            yield TensorSpec(f"{name}.weight", (rows, self.in_features), self.share)
            if self.bias:
                yield TensorSpec(f"{name}.bias", (rows,), share)


def linear_of(
    name: str,
    rows: int,
    in_features: int,
    factor: float = 1.0,
    **options: Any,  # noqa: ANN401 - fields of `LinearSpec`
) -> LinearSpec:
    """Return the declaration of a linear with a single matrix."""
    return LinearSpec((MatrixSpec(name, rows, factor),), in_features, **options)


class LayerPart:
    """A part of a model, whose attributes declare its tensors.

    These attributes are tensors, linears, norms, other parts, or lists of them.
    """

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of the part; a tensor that is used twice is yielded twice."""
        for value in vars(self).values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, TensorSpec | NormSpec | LinearSpec | LayerPart):
                    yield from each.tensors

    @property
    def shapes(self) -> Shapes:
        """Shape of each tensor of the part, by name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}
