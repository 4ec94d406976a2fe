"""Rotary position embedding (RoPE): inverse frequencies of each kind, and cos/sin by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.weights import Tables
from .fields import Fields

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]

_CHUNK = 4096  # positions by which tables grow; with equal steps the bits are always the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The RoPE fields of a config.json; unused fields keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0  # context length of the original training, in tokens
    low_freq_factor: float = 1.0  # for kind "llama3"
    high_freq_factor: float = 4.0  # for kind "llama3"
    beta_fast: float = 32.0  # for kind "yarn", as the fields up to `truncate`
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Divisors of each frequency, for longrope and for GGUF files with llama3's scaling.
    divisors: tuple[float, ...] = ()
    # Fraction of a head's items that RoPE rotates: the first ones; 0: no RoPE. With kind
    # "proportional", the first items of each half rotate, with the frequencies of a whole head.
    partial: float = 1.0
    # Queries are multiplied by 1 + beta * log(1 + floor(position / original_max_len)) (Llama 4).
    # With 0 they are not scaled.
    query_beta: float = 0.0
    # Numbers of frequencies that use a row's position in time, height and width, for images. The
    # three positions of a text row are equal.
    sections: tuple[int, ...] = ()
    # Time, height and width alternate; time also has the frequencies that remain.
    interleaves_sections: bool = False


NO_ROPE = RopeSpec(partial=0.0)


def parse_rope(
    config: Fields, *, max_len: int, partial: float | None = None, theta: float = 10000.0
) -> RopeSpec:
    """Return the RoPE of a config.json in the format of transformers v4 (``rope_scaling``) or v5.

    ``partial``: default share of a head that rotates, in families where a part of it may.
    ``theta``: the family's default. Raises `ModelLoadError` for a kind that is not supported.
    """
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.object(name)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in get_args(RopeKind):
        supported = ", ".join(get_args(RopeKind))
        raise config.unsupported(
            name, f"has type {kind!r}, which is not supported; supported: {supported}"
        )
    if partial is None:
        _refuse_partial(config, rope)
    share = 1.0 if partial is None else _partial(config, rope, partial)
    theta = rope.above_zero("rope_theta", config.number("rope_theta", theta))
    if kind == "default":
        sections = rope.values.get("mrope_section")
        return RopeSpec(
            theta=theta,
            partial=share,
            sections=tuple(map(int, sections)) if isinstance(sections, list | tuple) else (),
            interleaves_sections=rope.flag("mrope_interleaved", False),
        )
    if kind == "proportional":
        factor = rope.above_zero("factor", 1.0)
        return RopeSpec(kind="proportional", theta=theta, partial=share, factor=factor)
    if kind == "longrope":
        return _parse_longrope(config, rope, theta, share, max_len)
    # A value beside the scaling (Phi) overrides one inside it, as in transformers.
    holder = config if config.has("original_max_position_embeddings") else rope
    original = holder.positive("original_max_position_embeddings", max_len)
    stretch = max_len / original if kind == "yarn" else None
    return RopeSpec(
        kind=cast(RopeKind, kind),
        theta=theta,
        factor=rope.above_zero("factor", stretch),
        original_max_len=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        partial=share,
    )


def _parse_longrope(
    config: Fields, rope: Fields, theta: float, partial: float, max_len: int
) -> RopeSpec:
    """Return the RoPE of longrope with its short factors (arXiv 2402.13753).

    They are valid up to the original length.
    """
    holder = config if config.has("original_max_position_embeddings") else rope
    original = holder.positive("original_max_position_embeddings", max_len)
    factor = rope.above_zero("factor", max_len / original)
    scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = rope.values.get("short_factor")
    is_numbers = isinstance(divisors, list) and all(isinstance(d, int | float) for d in divisors)
    if not is_numbers or not divisors:
        raise rope.error("short_factor", "must be a list of numbers")
    return RopeSpec(
        kind="longrope",
        theta=theta,
        factor=factor,
        original_max_len=original,
        attention_factor=rope.number("attention_factor", scaling),
        divisors=tuple(float(each) for each in divisors),
        partial=partial,
    )


def parse_ropes(
    config: Fields,
    *,
    max_len: int,
    theta: float,
    local_theta: float | None = None,
    partial: float | None = None,
) -> tuple[RopeSpec, RopeSpec]:
    """Return the RoPE of full-attention layers, and of layers with a window.

    ``partial``: default share of a head that rotates, in families where a part of it may. In
    transformers v5 each kind of layer has an object. In v4 scaling applies to full-attention layers
    only, and the theta of the others is ``rope_local_base_freq``, by default ``local_theta``; if
    ``local_theta`` is None, it is the theta of full-attention layers.
    """
    kinds = config.object("rope_parameters")
    if kinds.has("full_attention"):
        full, local = (
            parse_rope(
                _of_kind(config, kinds, kind), max_len=max_len, theta=default, partial=partial
            )
            for kind, default in (
                ("full_attention", theta),
                ("sliding_attention", local_theta or theta),
            )
        )
        return full, local
    full = parse_rope(config, max_len=max_len, theta=theta)
    if local_theta is None:
        return full, RopeSpec(theta=full.theta)
    return full, RopeSpec(theta=config.number("rope_local_base_freq", local_theta))


def _of_kind(config: Fields, kinds: Fields, kind: str) -> Fields:
    values = {**config.values, "rope_parameters": kinds.object(kind).values}
    return Fields(values, config.where)


def _partial(config: Fields, rope: Fields, default: float) -> float:
    name = "partial_rotary_factor"
    share = rope.number(name, config.number(name, default))
    if not 0 < share <= 1:
        raise config.error(name, f"must be above 0 and at most 1, not {share}")
    return share


def rotary_dim(spec: RopeSpec, head_dim: int) -> int:
    """Return how many dimensions of a head RoPE rotates: even, and all for "proportional"."""
    return head_dim if spec.kind == "proportional" else int(head_dim * spec.partial)


def _refuse_partial(config: Fields, rope: Fields) -> None:
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported("partial_rotary_factor", "other than 1 is not supported")


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the rotation of each pair of dimensions, in radians per position.

    The result is [head_dim / 2] float32, with 0 for a pair that does not rotate.
    """
    turning = _frequencies(spec, rotary_dim(spec, head_dim))
    return torch.nn.functional.pad(turning, (0, head_dim // 2 - len(turning)))


def _frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return frequencies of a head whose items all rotate, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.divisors:
        if len(spec.divisors) != len(plain):
            raise ModelLoadError(
                f"there are {len(spec.divisors)} RoPE factors for {len(plain)} frequencies"
            )
        return plain / torch.tensor(spec.divisors, dtype=torch.float32)
    if spec.kind == "proportional":  # Gemma 4
        turning = int(spec.partial * head_dim // 2)
        return torch.where(torch.arange(len(plain)) < turning, plain / spec.factor, 0.0)
    if spec.kind == "linear":  # arXiv 2306.15595
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Divide the low frequencies by the factor (``apply_scaling`` of the Llama 3.1 release)."""
    turns = spec.original_max_len * plain / (2 * math.pi)
    span = spec.high_freq_factor - spec.low_freq_factor
    smooth = ((turns - spec.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - smooth) * plain / spec.factor + smooth * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Divide the low frequencies and keep the high ones (arXiv 2309.00071, section 3.2)."""
    low = _yarn_dim(spec, head_dim, spec.beta_fast)
    high = _yarn_dim(spec, head_dim, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # transformers uses this value
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _yarn_dim(spec: RopeSpec, head_dim: int, turns: float) -> float:
    """Return the dimension that makes ``turns`` rotations within the original context."""
    ratio = spec.original_max_len / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(spec.theta))


def attention_scaling(spec: RopeSpec) -> float:
    """Return the factor on cos and sin: yarn's (arXiv 2309.00071, section 3.4), longrope's or 1."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:  # DeepSeek's variant
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def mscale_all(spec: RopeSpec) -> float:
    """Return the factor on whole queries and keys in DeepSeek's variant of yarn; otherwise 1."""
    if spec.kind == "default" or not spec.mscale_all_dim:
        return 1.0
    return _mscale(spec.factor, spec.mscale_all_dim)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class LayerTables(NamedTuple):
    """Distinct RoPEs of a model, and the index of the RoPE of each layer's queries and keys."""

    specs: tuple[RopeSpec, ...]  # `RopeSpec.query_beta` is set only in tables of queries
    by_layer: tuple[Tables, ...]


def layer_tables(ropes: Sequence[RopeSpec]) -> LayerTables:
    """Return the distinct RoPEs among ``ropes``, and for each layer the indices of its own.

    ``ropes``: the RoPE of each layer.
    """
    numbers: dict[RopeSpec, int] = {}
    by_layer = [
        Tables(
            numbers.setdefault(rope, len(numbers)),
            numbers.setdefault(replace(rope, query_beta=0.0), len(numbers)),
        )
        for rope in ropes
    ]
    return LayerTables(tuple(numbers), tuple(by_layer))


def _axes(spec: RopeSpec, num_frequencies: int) -> Tensor:
    """Return the axis whose position each frequency uses, [num_frequencies].

    0 is time, 1 is height and 2 is width. The axes alternate if ``interleaves_sections`` is set;
    otherwise each axis has consecutive frequencies.
    """
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    if spec.interleaves_sections:
        for axis, count in enumerate(spec.sections[1:], start=1):
            axes[axis : 3 * count : 3] = axis
    elif spec.sections:
        axes[: sum(spec.sections)] = torch.repeat_interleave(torch.tensor(spec.sections))
    return axes


class RopeTable:
    """Tables of cos and sin by position, float32, which grow on demand."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str) -> None:
        self._spec = spec
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        # Items that do not rotate keep their length.
        self._scaling = torch.where(self._frequencies == 0, 1.0, attention_scaling(spec))
        self._cos = self._sin = self._frequencies.new_empty((0, head_dim // 2))
        self._axes = _axes(spec, head_dim // 2).to(device)

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, head_dim / 2] of ``positions`` [T], which are all below ``stop``.

        ``positions`` may be [3, T], in time, height and width; then each frequency uses the
        position of its own axis.
        """
        cos, sin = self.table(stop)
        if positions.dim() == 2:
            by_frequency = positions[self._axes].T  # [T, head_dim / 2]
            return cos.gather(0, by_frequency), sin.gather(0, by_frequency)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def turns(self, positions: Tensor) -> Tensor:
        """Return the complex rotations [T, head_dim / 2] of positions [T], without the tables."""
        angles = positions.double().unsqueeze(1) * self._frequencies.double().to(positions.device)
        scaling = torch.as_tensor(self._scaling).to(positions.device)
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64) * scaling

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[stop or more, head_dim / 2]``.

        Calls return the same tensors until the tables must grow.
        """
        while len(self._cos) < stop:
            self._grow()
        return self._cos, self._sin

    def _grow(self) -> None:
        start = len(self._cos)
        positions = torch.arange(start, start + _CHUNK, device=self._frequencies.device)
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        if self._spec.query_beta:  # The factor applies to all items, rotated or not.
            turns = torch.floor(positions.float() / self._spec.original_max_len)
            longer = (1 + self._spec.query_beta * torch.log1p(turns)).unsqueeze(1)
            cos, sin = cos * longer, sin * longer
        self._cos = torch.cat((self._cos, cos))
        self._sin = torch.cat((self._sin, sin))


class Still:
    """A `Rope` that rotates nothing, for modules that apply RoPE themselves or have no RoPE.

    Its tables are [num_positions, head_dim / 2].
    """

    def __init__(self, head_dim: int, device: torch.device) -> None:
        self._half, self._device = head_dim // 2, device

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return tables with one row per position."""
        return self.table(len(positions))

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """Return tables of the first ``stop`` positions."""
        cos = torch.ones((stop, self._half), device=self._device)
        return cos, torch.zeros_like(cos)
