"""Tensors of a checkpoint, each declared once: name, shape, and the part of it that a rank has.

The parts of a layer (core/model/weights/) declare their tensors as attributes of these types. The
shapes of a checkpoint, the parts of ranks, packing and adapters all read these declarations. Names
are those of transformers.
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
# Beside the embedding of a model with inputs by layer.
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
TOKEN_NORM = "model.per_layer_projection_norm.weight"
# Beside a layer that predicts a further token.
MTP_EMBEDDING_NORM, MTP_HIDDEN_NORM = "model.mtp.enorm.weight", "model.mtp.hnorm.weight"
MTP_PROJECTION = "model.mtp.eh_proj"
# Beside the layers of an assistant.
PRE_PROJECTION, POST_PROJECTION = "pre_projection", "post_projection"
CENTROIDS, TOKEN_ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
# Prefixes of mixers, behind the layer's.
DELTA, MAMBA, CONV = "linear_attn.", "mamba.", "conv."


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


class Cut(NamedTuple):
    """A rank has an equal share of a tensor along ``axis`` (arXiv 1909.08053).

    Along that axis the tensor has blocks, whose widths are in proportion to ``blocks``; a rank has
    its share of each. ``of_one``: that axis in a matrix ``[out_features, in_features]`` of a stack,
    which is cut matrix by matrix if it is quantised.
    """

    axis: int
    blocks: tuple[int, ...] = (1,)
    of_one: int = 0


class Held(NamedTuple):
    """A rank has the experts from number ``start`` up to ``stop`` of a stack of experts."""

    start: int
    stop: int


Share: TypeAlias = Cut | Held | Literal["whole", "first"]
"""The part of a tensor that a rank has. "first": rank 0 has it, the others have zeros."""

ROWS, COLUMNS = Cut(0), Cut(1)


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: Shape
    share: Share = "whole"

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensor itself."""
        yield self


class NormSpec(NamedTuple):
    """The weight ``[size]`` of a norm of the residual stream, and its bias if it has one."""

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
    """A matrix of a linear, which is multiplied by ``factor`` when it is packed."""

    name: str  # without ".weight"
    rows: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LinearSpec:
    """A packed linear: matrices ``[rows, in_features]`` that are stacked, and their biases.

    ``order``: of the stacked rows, where the kernels have another order than the files.
    ``is_plain``: the matrix is never quantised. ``adapts``: LoRA adapters may change it.
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
        """Return the factor of each matrix."""
        return [matrix.factor for matrix in self.matrices]

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the weights and the biases.

        The outputs of ranks that share columns are added up: only one of them adds the bias.
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
    """Return a linear of one matrix."""
    return LinearSpec((MatrixSpec(name, rows, factor),), in_features, **options)


class LayerPart:
    """A part of a model: the attributes that are tensors, linears, norms or parts make it up."""

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors that the part is made of; one that is used twice comes twice."""
        for value in vars(self).values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, TensorSpec | NormSpec | LinearSpec | LayerPart):
                    yield from each.tensors

    @property
    def shapes(self) -> Shapes:
        """Return the shapes of the tensors by name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}
