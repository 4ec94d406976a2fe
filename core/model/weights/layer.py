"""The declared tensors of a layer and of a whole decoder.

To add a mixer, write a `Mixer` in its own file and add it to `_MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ...ops.weights import LayerWeights
from ..description.config import ConvSpec, DecoderConfig, DeltaSpec, LightningSpec, Mamba2Spec
from ..description.tensors import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    LayerPart,
    NormSpec,
    Shapes,
    TensorSpec,
    layer_prefix,
)
from .attention import Attention
from .conv import Conv
from .delta import Delta
from .gemma4 import Gemma4Inputs, Gemma4Layer
from .latent import Latent
from .lightning import Lightning
from .mamba import Mamba2
from .mlp import Experts, Mlp
from .packer import Mixer, Packer, norm_of, optional

_MIXERS: dict[type, Callable[[DecoderConfig, int, Any], Mixer]] = {
    DeltaSpec: Delta,
    Mamba2Spec: Mamba2,
    ConvSpec: Conv,
    LightningSpec: Lightning,
}


class Layer(LayerPart):
    """Declared tensors of a layer: its norms, its mixer or mixers, and its MLP or experts."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        spec, prefix = config.layers[index], layer_prefix(index)
        self._config, self._index, norms = config, index, spec.norms or config.norms
        self.mixer_norm = _norm_at(config, prefix, norms.attention)
        self.mixer_out_norm = _norm_at(config, prefix, norms.attention_out)
        self.mlp_norm = _norm_at(config, prefix, norms.mlp)
        self.mlp_out_norm = _norm_at(config, prefix, norms.mlp_out)
        self.attention = _attention(config, index) if spec.has_attention else None
        mixer = spec.mixer
        self.recurrent = None if mixer is None else _MIXERS[type(mixer)](config, index, mixer)
        self.experts = None if spec.experts is None else Experts(config, prefix, spec.experts)
        self.mlp = None
        if spec.parts != "mixer" and (spec.experts is None or spec.experts.beside is not None):
            self.mlp = Mlp.of_layer(config, prefix, spec.width or config.intermediate_size)
        self.extras = self.factor = None
        if config.layer_factor is not None:
            self.factor = TensorSpec(prefix + config.layer_factor, (1,))
            self.extras = Gemma4Layer(config, prefix, spec.experts)

    def pack(self, packer: Packer) -> LayerWeights:
        """Read the tensors of the layer, and pack them for the kernels."""
        attention = None if self.attention is None else self.attention.pack(packer)
        recurrent = None if self.recurrent is None else self.recurrent.pack(packer)
        beside = recurrent if attention is not None else None
        experts = None if self.experts is None else self.experts.pack(packer)
        mlp = None if self.mlp is None else self.mlp.pack(packer, packer.comm)
        mlp_out_norm, extras = optional(packer.norm, self.mlp_out_norm), None
        factors = self._config.layers[self._index].factors
        if self.extras is not None:
            assert mlp_out_norm is not None, "Gemma 4 must have a norm after the MLP"
            extras, mlp_out_norm = self.extras.pack(packer, mlp_out_norm, experts), None
        if self.factor is not None:
            factors = (1.0, packer.vector(self.factor).item())
        return LayerWeights(
            mixer_norm=optional(packer.norm, self.mixer_norm),
            mixer=recurrent if attention is None else attention,
            mixer_out_norm=optional(packer.norm, self.mixer_out_norm),
            mlp_norm=optional(packer.norm, self.mlp_norm),
            mlp_out_norm=mlp_out_norm,
            mlp=experts if mlp is None else mlp,
            is_parallel=self._config.is_parallel,
            extras=extras,
            second_mixer=beside,
            factors=factors,
            norms_stream=self._config.norms_stream,
        )


def _attention(config: DecoderConfig, index: int) -> Mixer:
    latent = config.latent
    return Attention(config, index) if latent is None else Latent(config, index, latent)


def _norm_at(config: DecoderConfig, prefix: str, name: str | None) -> NormSpec | None:
    """Return the declaration of the norm ``name`` of a layer; None if ``name`` is None."""
    return None if name is None else norm_of(config, f"{prefix}{name}.weight")


# -- a whole decoder ------------------------------------------------------------------------------


def decoder_tensors(config: DecoderConfig) -> Iterator[TensorSpec]:
    """Yield every tensor that a checkpoint must hold."""
    yield TensorSpec(EMBEDDING, (config.vocab_size, config.hidden_size))
    yield from norm_of(config, FINAL_NORM).tensors
    if not config.tie_embeddings:
        yield TensorSpec(LM_HEAD, (config.vocab_size, config.hidden_size))
    if config.token_input_size:
        yield from Gemma4Inputs(config).tensors
    for index in range(config.num_layers):
        yield from Layer(config, index).tensors


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Return the shape of every tensor that a checkpoint must hold."""
    return {tensor.name: tensor.shape for tensor in decoder_tensors(config)}


def ignored(config: DecoderConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the ``names`` that a checkpoint may have although the decoder does not read them.

    These tensors are the output matrix, if the output is tied to the embedding; MTP layers, which
    core/model/drafting/mtp.py reads; and keys and values of layers that read another layer's KV.
    """
    names = list(names)
    further, unread = set(further_tensors(config, names)), _unread_keys(config)
    return tuple(
        name
        for name in names
        if (name == LM_HEAD and config.tie_embeddings) or name in further or name.startswith(unread)
    )


def _unread_keys(config: DecoderConfig) -> tuple[str, ...]:
    """Return the name prefixes of unused tensors for keys and values.

    They belong to layers that read another layer's KV.
    """
    found = []
    for index, spec in enumerate(config.layers):
        if spec.kv_of is not None:
            layers = list(config.layers)
            layers[index] = replace(spec, kv_of=None, keys_as_values=False)
            own = Attention(replace(config, layers=tuple(layers)), index).shapes
            read = Attention(config, index).shapes
            found += [name.rpartition(".")[0] + "." for name in own if name not in read]
    return tuple(found)


def further_tensors(config: DecoderConfig, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that belong to MTP layers; none if the model cannot have such layers."""
    if config.mtp is None:
        return []
    return [
        name for name in names if name.startswith("mtp.") or _layer_of(name) >= config.num_layers
    ]


def _layer_of(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; -1 for a tensor of no layer."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if name.startswith("model.layers.") and number.isdigit() else -1
