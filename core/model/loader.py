"""load_decoder: from a checkpoint folder to a decoder with packed weights."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..ops.backends import Backend, choose_ops
from ..ops.base import (
    Activation,
    AttentionWeights,
    ConvWeights,
    DecoderWeights,
    DeltaWeights,
    Exactness,
    ExpertsBeside,
    ExpertWeights,
    Gemma4Extras,
    HeadLayout,
    HeadNorm,
    LatentShape,
    LatentWeights,
    LayerWeights,
    Mamba2Weights,
    MixerWeights,
    MlpWeights,
    Norm,
    Ops,
    PackedLinear,
    RecurrentWeights,
    TokenInputs,
    TokenInputWeights,
)
from ..ops.device import choose_device
from ..ops.kv_pool import KvDtype
from ..ops.parallel import Comm
from ..ops.quantize import Quantize, QuantizedStack, QuantizedWeight, StoredWeight, stack
from .config import (
    BesideNames,
    ConvSpec,
    DecoderConfig,
    DeltaSpec,
    ExpertsSpec,
    HeadSpec,
    Mamba2Spec,
    MixerSpec,
    MlpNames,
)
from .decoder import Decoder, OwnDecoder
from .fields import UnsupportedConfig
from .fold import (
    Recipe,
    ba_order,
    head_order,
    mamba_orders,
    mamba_widths,
    qkvz_order,
    rounded,
    scaled,
    scaled_rows,
)
from .formats.checkpoint import OnRead
from .opening import open_model, read_config
from .page_layout import PageLayout
from .rope import RopeSpec, rotary_dim
from .shapes import (
    CENTROIDS,
    CONV,
    DELTA,
    EMBEDDING,
    FINAL_NORM,
    FUSED_GATE_UP,
    LM_HEAD,
    MAMBA,
    MTP_EMBEDDING_NORM,
    MTP_HIDDEN_NORM,
    MTP_PROJECTION,
    POST_PROJECTION,
    PRE_PROJECTION,
    TOKEN_GATE,
    TOKEN_NORM,
    TOKEN_OUT,
    TOKEN_OUT_NORM,
    TOKEN_PROJECTION,
    TOKEN_TABLE,
    layer_prefix,
    tensor_shapes,
)
from .sharding import check_shards, read_others, shard_config, shard_reader

LATENT_EPS = 1e-6  # of the norms within latent attention, whatever the config says of the others
logger = logging.getLogger(__name__)
LoadFormat: TypeAlias = Literal["auto", "random"]
ModelImpl: TypeAlias = Literal["auto", "own", "transformers"]
_Read: TypeAlias = Callable[[str], StoredWeight]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Random weights of standard deviation 0.02 collapse to one repeated token; these factors keep
# attention from averaging everything and let the layers outweigh the embedding.
_RANDOM_STD = 0.02
_RANDOM_FACTORS = {
    "o_proj.weight": 0.2,
    "out_proj.weight": 0.2,
    "down_proj.weight": 8.0,
    "conv1d.weight": 25.0,
    "conv.conv.weight": 25.0,
    "A_log": 100.0,  # log decays of a token from 0.01 to 10
}


def load_decoder(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    exact: Exactness = "spec",
    backend: Backend = "torch",
    quantize: Quantize = "none",
    kv_dtype: KvDtype = "auto",
    impl: ModelImpl = "auto",
    on_read: OnRead | None = None,
    comm: Comm | None = None,
) -> Decoder:
    """A decoder from a folder in Hugging Face layout or a GGUF file.

    ``dtype="auto"`` keeps the checkpoint's: weights that are stored quantised stay so where the
    backend has kernels for them (activations are bfloat16), and float16 is computed in float32 on
    the CPU, which holds every float16 value. Any other dtype holds all weights in that dtype.
    ``load_format="random"`` needs the config only and draws seeded weights of the real shapes; on
    a GPU, where they are drawn there, others than on the CPU. ``quantize`` packs every matrix of
    the layers and the output as int8 or int4, for the backends that compute so; ``kv_dtype`` is
    that of the pools to come. ``impl``: "own" takes the decoder of this engine, "transformers" the
    modules of transformers on our pages and kernels, "auto" the latter for models that the former
    does not compute. ``on_read`` is called with every tensor but random ones, whatever rank has it.
    ``comm``: of a model that several ranks compute, each with its part of the weights; the output
    matrix is rank 0's alone. Raises `ModelLoadError` before memory is spent on weights,
    `InvalidRequest` for a model that ranks cannot share.
    """
    device = choose_device(device)
    options = _Options(
        dtype, device, load_format, exact, backend, quantize, kv_dtype, on_read, comm
    )
    if impl == "transformers":
        return _by_transformers(Path(path), options, "--model-impl transformers")
    try:
        decoder = _own(path, options)
    except UnsupportedConfig as reason:
        if impl == "own" or comm is not None:
            raise
        return _by_transformers(Path(path), options, str(reason))
    logger.info("%s: computed by foretoken's decoder", decoder.config.model_type)
    return decoder


class _Options(NamedTuple):
    """Options of `load_decoder`."""

    dtype: str
    device: torch.device
    load_format: LoadFormat
    exact: Exactness
    backend: Backend
    quantize: Quantize
    kv_dtype: KvDtype
    on_read: OnRead | None
    comm: Comm | None

    def ops(self, dtype: torch.dtype, heads: Sequence[HeadLayout]) -> Ops:
        """The backend. ``heads``: of the parts of the pool."""
        return choose_ops(
            self.device,
            exact=self.exact,
            backend=self.backend,
            dtype=dtype,
            heads=heads,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
        )


def _by_transformers(path: Path, options: _Options, reason: str) -> Decoder:
    """A decoder of transformers' modules. ``reason``: why they compute, for the log."""
    # Not at the top: transformers takes a second to import.
    from .fallback.transformers_loader import load_text_model, read_text_model

    source = read_text_model(path, has_weights=options.load_format != "random")
    chosen = _choose_dtype(options.dtype, source.config.dtype, options.device)
    # Triton's samplers choose tokens on the device, which this path does not wait for.
    if options.device.type != "cpu":
        options = options._replace(backend="torch")
    ops = options.ops(chosen, ())
    plain = ops if options.quantize == "none" else options._replace(quantize="none").ops(chosen, ())
    decoder = load_text_model(
        source,
        ops,
        plain,
        dtype=chosen,
        device=options.device,
        on_read=options.on_read,
    )
    bits = "the same bits in any batch" if decoder.exact else "bits that depend on the batch"
    if decoder.states:
        rows = "" if decoder.takes_chunks else ", and one row after another behind a state"
        bits += f", one sequence after another{rows}"
    logger.info(
        "%s: computed by transformers' modules on foretoken's KV pages and kernels, with %s (%s)",
        source.config.model_type,
        bits,
        reason,
    )
    return decoder


def _own(path: str | Path, options: _Options) -> OwnDecoder:
    """A decoder of this engine's. Raises `UnsupportedConfig` for a model that has none."""
    dtype, device, load_format, _, _, quantize, _, on_read, comm = options
    if load_format == "random":
        config = read_config(path)
        chosen = _choose_dtype(dtype, config.dtype, device)
        read = _random_reader(config, chosen, device)
    else:
        config, checkpoint = open_model(path)
        chosen = _choose_dtype(dtype, checkpoint.stored_dtype, device)
        read = checkpoint.read if on_read is None else observed(checkpoint.read, on_read)
    part = config
    if comm is not None:
        check_shards(config, comm.size)
        part = shard_config(config, comm, None if load_format == "random" else checkpoint.read)
        read = shard_reader(read, config, part, comm)
    layout = PageLayout.of(part)
    if config.latent is not None and options.kv_dtype != "auto":
        raise ModelLoadError(
            f"kv_cache_dtype {options.kv_dtype} is not supported for {config.model_type}, which "
            "keeps latents in the place of keys and values: leave it at auto"
        )
    ops = options.ops(chosen, [part.heads for part in layout.parts])
    keeps_packed = dtype == "auto" and quantize == "none"
    assembly = Assembly(part, read, ops, chosen, device, keeps_packed=keeps_packed, comm=comm)
    weights = assembly.weights()
    if on_read is not None and load_format != "random":
        read_others(observed(checkpoint.read, on_read), part)
    return OwnDecoder(config, weights, ops, layout, recipes=assembly.recipes, compiles=comm is None)


def observed(read: _Read, on_read: OnRead) -> _Read:
    """Reads tensors, and calls ``on_read`` with each."""
    return lambda name: on_read(name, read(name))


def _choose_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    on_cpu = device.type == "cpu"
    if requested == "auto":
        return torch.float32 if stored == "float16" and on_cpu else _DTYPES[stored]
    if requested not in _DTYPES:
        raise ModelLoadError(f"dtype {requested!r} is not one of auto, {', '.join(_DTYPES)}")
    if requested == "float16" and on_cpu:
        raise ModelLoadError("float16 is not supported on the CPU; use bfloat16 or float32")
    return _DTYPES[requested]


def _random_reader(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> _Read:
    """Seeded by name, so a tensor does not depend on which others were read.

    A CPU draws float32 whatever the dtype, so that all of them are roundings of the same weights.
    A GPU draws in place: billions of them would take a CPU minutes.
    """
    shapes = tensor_shapes(config)
    drawn = torch.float32 if device.type == "cpu" else dtype

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            ones = torch.ones(shapes[name], dtype=drawn, device=device)
            is_gated = name.endswith((f"{DELTA}norm.weight", f"{MAMBA}norm.weight"))
            return ones if is_gated else ones - config.fold.norm_offset
        factors = (f for suffix, f in _RANDOM_FACTORS.items() if name.endswith(suffix))
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shapes[name], generator=generator, dtype=drawn, device=device)
        return values.mul_(_RANDOM_STD * next(factors, 1.0))

    return read


def _head_order(head_dim: int, rope: RopeSpec, *, interleaved: bool) -> Tensor | None:
    """The items of a head in the kernels' order; None where it is the family's own."""
    turning = rotary_dim(rope, head_dim)
    if turning == head_dim and not interleaved:
        return None
    return head_order(head_dim, turning, interleaved=interleaved)


def _qkv_order(heads: HeadSpec, head: Tensor | None, *, has_gate: bool) -> Tensor | None:
    """The rows of Q, K, V and the gate in the kernels' order, given that of a head's items.

    In the files each head's gate lies behind its query.
    """
    if head is None and not has_gate:
        return None
    num_queries, num_kv = heads.num_heads * (1 + has_gate), heads.num_kv_heads
    rows = torch.arange((num_queries + 2 * num_kv) * heads.head_dim).view(-1, heads.head_dim)
    queries, keys, values = torch.split(rows, [num_queries, num_kv, num_kv])
    queries, gates = (queries[0::2], queries[1::2]) if has_gate else (queries, queries[:0])
    turned = torch.cat((queries, keys))
    turned = turned if head is None else turned[:, head]
    return torch.cat((turned, values, gates)).flatten()


def _in_order(weight: Tensor | QuantizedWeight, order: Tensor) -> Tensor | QuantizedWeight:
    """Rows of a weight, plain or quantised, in the given order."""
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]


def _shape(weight: StoredWeight) -> tuple[int, int]:
    """Rows and columns of a stored matrix."""
    assert not isinstance(weight, QuantizedStack)
    rows, columns = (weight if isinstance(weight, Tensor) else weight.values).shape
    return rows, columns


class MtpWeights(NamedTuple):
    """A layer that predicts a further token: its decoder's weights, and what makes its input."""

    decoder: DecoderWeights
    embedding_norm: Norm
    hidden_norm: Norm
    projection: PackedLinear


class AssistantWeights(NamedTuple):
    """An assistant: its decoder's weights, and what joins these to the target.

    ``table`` [vocab, hidden]: of all tokens, where the decoder's output is that of clusters.
    """

    decoder: DecoderWeights
    pre_projection: PackedLinear
    post_projection: PackedLinear
    table: Tensor | None


class Assembly:
    """Reads, casts and packs layer by layer, so that at most one layer exists twice.

    ``keeps_packed``: quantised weights stay as they are stored where the ops have kernels for them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        read: _Read,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_packed: bool,
        layout: PageLayout | None = None,
        comm: Comm | None = None,
    ) -> None:
        """``layout``: of the pages, where they are another model's. ``comm``: of one rank's part of
        a model, whose config and tensors these are.
        """
        self._config, self._read, self._ops = config, read, ops
        self._dtype, self._device = dtype, device
        self._kept = ops.stored_kinds if keeps_packed else frozenset()
        self._layout = layout or PageLayout.of(config)
        self.recipes: dict[PackedLinear, Recipe] = {}
        self._comm = comm

    def weights(self) -> DecoderWeights:
        """The whole model; the output matrix of ranks but the first is void."""
        config, fold = self._config, self._config.fold
        embedding = self._read(EMBEDDING)
        table = self._cast(embedding)
        is_tied = config.tie_embeddings
        is_first = self._comm is None or self._comm.rank == 0
        stored = embedding if is_tied or not is_first else self._read(LM_HEAD)
        lm_head: Tensor | QuantizedWeight
        if not is_first:
            lm_head = table[:1]
        elif (
            isinstance(stored, QuantizedWeight) and self._keeps(stored) and fold.logit_scale == 1.0
        ):
            lm_head = stored
        else:
            lm_head = scaled(table if is_tied else self._cast(stored), fold.logit_scale)
        embed_scale = fold.embed_scale
        if fold.rounds_embed_scale:
            embed_scale = rounded(embed_scale, table.dtype)
        return DecoderWeights(
            embedding=scaled(table, embed_scale),
            layers=tuple(self._layer(i) for i in range(config.num_layers)),
            final_norm=self._norm(FINAL_NORM),
            lm_head=self._ops.pack_linear(lm_head),
            token_inputs=self._token_inputs() if config.token_input_size else None,
            logit_cap=config.logit_cap,
        )

    def mtp(self, model: DecoderWeights, draft_ids: Tensor | None) -> MtpWeights:
        """A layer beside the ``model`` that it predicts a further token of; see mtp.py.

        ``draft_ids``: those that its output has; None: the model's output serves.
        """
        weights = DecoderWeights(
            embedding=model.embedding,
            layers=(self._layer(0),),
            final_norm=self._norm(FINAL_NORM),
            lm_head=model.lm_head if draft_ids is None else self._output_of(draft_ids),
            logit_cap=model.logit_cap,
        )
        return MtpWeights(
            weights,
            self._norm(MTP_EMBEDDING_NORM),
            self._norm(MTP_HIDDEN_NORM),
            self._linear([MTP_PROJECTION], bias=False),
        )

    def assistant(self, output: str, *, is_clustered: bool) -> AssistantWeights:
        """An assistant, whose matrix of all tokens is named ``output``; see assistant.py."""
        table, stored = None, self._read(output)
        if is_clustered:
            table = self._cast(stored)
            lm_head = self._plain(CENTROIDS, bias=False)
        elif isinstance(stored, QuantizedWeight) and self._keeps(stored):
            lm_head = self._ops.pack_linear(stored)
        else:
            lm_head = self._ops.pack_linear(self._cast(stored))
        config = self._config
        nothing = torch.zeros(1, config.hidden_size, dtype=self._dtype, device=self._device)
        weights = DecoderWeights(
            embedding=nothing,  # all rows are given
            layers=tuple(self._layer(i) for i in range(config.num_layers)),
            final_norm=self._norm(FINAL_NORM),
            lm_head=lm_head,
        )
        return AssistantWeights(
            weights,
            self._linear([PRE_PROJECTION], bias=False),
            self._linear([POST_PROJECTION], bias=False),
            table,
        )

    def _output_of(self, token_ids: Tensor) -> PackedLinear:
        """The rows of the output for some ids."""
        scale, token_ids = self._config.fold.logit_scale, token_ids.cpu()  # where tensors are read
        stored = self._read(EMBEDDING if self._config.tie_embeddings else LM_HEAD)
        if isinstance(stored, QuantizedWeight) and self._keeps(stored) and scale == 1.0:
            return self._ops.pack_linear(stored.rows(token_ids))
        rows = stored[token_ids] if isinstance(stored, Tensor) else stored.dequantize()[token_ids]
        return self._ops.pack_linear(scaled(self._cast(rows), scale))

    def _layer(self, index: int) -> LayerWeights:
        config, prefix, names = self._config, layer_prefix(index), self._config.norms
        spec, experts = config.layers[index], config.layers[index].experts
        extras = self._extras(prefix, experts)
        return LayerWeights(
            mixer_norm=self._layer_norm(prefix, names.attention),
            mixer=self._mixer(index),
            mixer_out_norm=self._layer_norm(prefix, names.attention_out),
            mlp_norm=self._layer_norm(prefix, names.mlp),
            mlp_out_norm=self._layer_norm(prefix, names.mlp_out) if extras is None else None,
            mlp=None if spec.parts == "mixer" else self._mlp_or_experts(prefix, experts),
            is_parallel=config.is_parallel,
            extras=extras,
            beside=self._beside_attention(index),
        )

    def _attending(self, index: int) -> AttentionWeights | LatentWeights:
        latent = self._config.latent
        return self._attention(index) if latent is None else self._latent(index, latent)

    def _latent(self, index: int, shape: LatentShape) -> LatentWeights:
        config, at = self._config, f"{layer_prefix(index)}self_attn."
        turned = head_order(shape.rope_dim, shape.rope_dim, interleaved=config.fold.interleaved)
        of_head = torch.cat((torch.arange(shape.nope_dim), shape.nope_dim + turned))
        heads = shape.query_dim * torch.arange(config.num_heads)
        of_queries = (heads.unsqueeze(1) + of_head).flatten()
        first = torch.arange(shape.q_rank) if shape.q_rank else of_queries
        latent = torch.arange(len(first), len(first) + shape.rank)
        keys, values = self._up_of_latents(at, shape)
        place = self._layout.places[index]
        assert place is not None  # of a layer with attention
        return LatentWeights(
            down=self._linear(
                [f"{at}{'q_a' if shape.q_rank else 'q'}_proj", f"{at}kv_a_proj_with_mqa"],
                bias=config.qkv_bias,
                order=torch.cat((first, latent, len(first) + shape.rank + turned)),
            ),
            q_norm=self._latent_norm(f"{at}q_a_layernorm") if shape.q_rank else None,
            q_up=self._linear([f"{at}q_b_proj"], bias=False, order=of_queries)
            if shape.q_rank
            else None,
            kv_norm=self._latent_norm(f"{at}kv_a_layernorm"),
            keys=keys,
            values=values,
            o=self._linear(
                [f"{at}o_proj"], bias=config.o_bias, factors=[config.fold.residual_scale]
            ),
            place=place,
            shape=shape,
            tables=self._layout.tables[index],
        )

    def _up_of_latents(self, at: str, shape: LatentShape) -> list[tuple[PackedLinear, ...]]:
        """Matrices of each head by which queries meet latents, and that make values of these."""
        count = self._config.num_heads
        found: list[Iterator[Tensor | QuantizedWeight]]
        if self._config.has_split_latents:
            names = (f"{at}k_b_proj.weight", f"{at}v_b_proj.weight")
            found = [self._stack(name, count, is_turned=False) for name in names]
        else:
            up = self._vector(f"{at}kv_b_proj.weight").view(count, -1, shape.rank)
            keys, values = torch.split(up, [shape.nope_dim, shape.value_dim], dim=1)
            found = [(head.T.contiguous() for head in keys), (head.contiguous() for head in values)]
        return [tuple(map(self._ops.pack_linear, heads)) for heads in found]

    def _latent_norm(self, name: str) -> Norm:
        return Norm(self._vector(f"{name}.weight"), LATENT_EPS)

    def _mlp_or_experts(
        self, prefix: str, experts: ExpertsSpec | None
    ) -> MlpWeights | ExpertWeights:
        if experts is None or experts.beside is not None:
            return self._mlp(f"{prefix}mlp.")
        return self._experts(prefix, experts)

    def _mixer(self, index: int) -> MixerWeights | None:
        spec = self._config.layers[index]
        if spec.has_attention:
            return self._attending(index)
        return None if spec.mixer is None else self._with_state(index, spec.mixer)

    def _beside_attention(self, index: int) -> RecurrentWeights | None:
        spec = self._config.layers[index]
        if not spec.beside_attention:
            return None
        assert isinstance(spec.mixer, Mamba2Spec)
        return self._mamba(index, spec.mixer)

    def _with_state(self, index: int, spec: MixerSpec) -> RecurrentWeights | ConvWeights:
        if isinstance(spec, DeltaSpec):
            return self._delta(index, spec)
        if isinstance(spec, ConvSpec):
            return self._conv(index, spec)
        return self._mamba(index, spec)

    def _attention(self, index: int) -> AttentionWeights:
        config, prefix, fold = self._config, layer_prefix(index), self._config.fold
        spec, heads = config.layers[index], config.heads_of(index)
        qkv = ["qkv"] if fold.fused_qkv else ["q", "k", "k" if spec.keys_as_values else "v"]
        if spec.kv_of is not None:
            qkv, heads = ["q"], heads._replace(num_kv_heads=0)
        order = _head_order(heads.head_dim, config.rope, interleaved=fold.interleaved)
        place = self._layout.places[index]
        assert place is not None  # of a layer with attention
        return AttentionWeights(
            qkv=self._linear(
                [f"{prefix}self_attn.{n}_proj" for n in qkv],
                bias=config.qkv_bias,
                order=_qkv_order(heads, order, has_gate=config.has_gate),
            ),
            head_norm=None if config.head_norm == "none" else self._head_norm(prefix, heads, order),
            o=self._linear(
                [f"{prefix}self_attn.o_proj"],
                bias=config.o_bias,
                factors=[fold.residual_scale * fold.attention_out_scale],
            ),
            window=spec.window,
            is_mutual=spec.is_mutual,
            tables=self._layout.tables[index],
            cap=config.attention_cap,
            sinks=self._float(f"{prefix}self_attn.sinks") if config.has_sinks else None,
            place=place,
            gate=heads.num_heads * heads.head_dim * config.has_gate,
            comm=self._comm,
        )

    def _delta(self, index: int, spec: DeltaSpec) -> DeltaWeights:
        at, shape = layer_prefix(index) + DELTA, spec.shape
        qkvz = ["in_proj_qkvz"] if spec.fused_qkvz else ["in_proj_qkv", "in_proj_z"]
        ba = ["in_proj_ba"] if spec.fused_ba else ["in_proj_b", "in_proj_a"]
        of_steps = torch.cat([self._vector(f"{at}{name}.weight") for name in ba])
        if spec.fused_ba:
            of_steps = of_steps[ba_order(shape)]
        return DeltaWeights(
            in_proj=self._linear(
                [at + name for name in qkvz],
                bias=False,
                order=qkvz_order(shape) if spec.fused_qkvz else None,
            ),
            gates=self._ops.pack_linear(of_steps, plain=True),
            conv=self._float(f"{at}conv1d.weight").view(-1, shape.conv_len),
            decay=-torch.exp(self._float(f"{at}A_log")),
            dt_bias=self._float(f"{at}dt_bias"),
            norm=self._float(f"{at}norm.weight"),
            norm_eps=self._config.norm_eps,
            out=self._linear([f"{at}out_proj"], bias=False),
            shape=shape,
            layer=self._config.state_of(index),
        )

    def _mamba(self, index: int, spec: Mamba2Spec) -> Mamba2Weights:
        at, shape, fold = layer_prefix(index) + MAMBA, spec.shape, self._config.fold
        rows, gates, channels = mamba_orders(shape)
        stored = self._read(f"{at}in_proj.weight")
        if spec.factors is None:
            weight = self._stacked([stored], [1.0])
        else:
            weight = scaled_rows(self._cast(stored), mamba_widths(shape), spec.factors)
        bias = self._vector(f"{at}in_proj.bias") if spec.has_bias else None
        conv = self._float(f"{at}conv1d.weight").view(-1, shape.conv_len)
        conv_bias = self._float(f"{at}conv1d.bias")[channels] if spec.has_conv_bias else None
        return Mamba2Weights(
            in_proj=self._ops.pack_linear(
                _in_order(weight, rows), None if bias is None else bias[rows]
            ),
            gates=self._ops.pack_linear(
                self._cast(_in_order(weight, gates)),
                None if bias is None else bias[gates],
                plain=True,
            ),
            conv=conv[channels],
            conv_bias=conv_bias,
            decay=-torch.exp(self._float(f"{at}A_log")),
            dt_bias=self._float(f"{at}dt_bias"),
            skip=self._float(f"{at}D"),
            norm=self._float(f"{at}norm.weight") if spec.num_norms else None,
            norm_eps=self._config.norm_eps,
            num_norms=spec.num_norms,
            out=self._linear(
                [f"{at}out_proj"],
                bias=spec.has_bias,
                factors=[fold.residual_scale * fold.mixer_out_scale],
            ),
            shape=shape,
            layer=self._config.state_of(index),
        )

    def _conv(self, index: int, spec: ConvSpec) -> ConvWeights:
        at, has_bias = layer_prefix(index) + CONV, spec.has_bias
        return ConvWeights(
            in_proj=self._linear([f"{at}in_proj"], bias=has_bias),
            conv=self._float(f"{at}conv.weight").view(spec.shape),
            bias=self._float(f"{at}conv.bias") if has_bias else None,
            out=self._linear([f"{at}out_proj"], bias=has_bias),
            layer=self._config.state_of(index),
        )

    def _extras(self, prefix: str, experts: ExpertsSpec | None) -> Gemma4Extras | None:
        """The parts of a layer that only Gemma 4 has; it alone has a factor on the stream."""
        config = self._config
        if config.layer_factor is None:
            return None
        return Gemma4Extras(
            out_norm=self._norm(f"{prefix}{config.norms.mlp_out}.weight"),
            factor=self._vector(prefix + config.layer_factor).item(),
            beside=None
            if experts is None or experts.beside is None
            else self._beside(prefix, experts, experts.beside),
            token_input=self._token_input(prefix) if config.token_input_size else None,
        )

    def _beside(self, prefix: str, spec: ExpertsSpec, names: BesideNames) -> ExpertsBeside:
        config = self._config
        router_norm = self._float(prefix + names.router_norm) * config.hidden_size**-0.5
        return ExpertsBeside(
            self._experts(prefix, spec),
            norm=self._norm(f"{prefix}{names.norm}.weight"),
            router_norm=Norm(router_norm, config.norm_eps),
            out_norm=self._norm(f"{prefix}{names.out_norm}.weight"),
            mlp_out_norm=self._norm(f"{prefix}{names.mlp_out_norm}.weight"),
        )

    def _token_input(self, prefix: str) -> TokenInputWeights:
        return TokenInputWeights(
            gate=self._linear([prefix + TOKEN_GATE], bias=False),
            activation=self._config.activation,
            out=self._linear([prefix + TOKEN_OUT], bias=False),
            out_norm=self._norm(f"{prefix}{TOKEN_OUT_NORM}.weight"),
        )

    def _token_inputs(self) -> TokenInputs:
        """``(norm(c * projected) * w + s * row) / sqrt(2)``: c is hidden ** -0.5 and goes into the
        norm's eps, s is width ** 0.5 and divides w. So no matrix is rounded once more.
        """
        config = self._config
        scale = config.token_input_size**0.5
        return TokenInputs(
            table=self._vector(TOKEN_TABLE),
            projection=self._linear([TOKEN_PROJECTION], bias=False),
            norm=Norm(self._float(TOKEN_NORM) / scale, config.norm_eps * config.hidden_size),
            factor=scale * 0.5**0.5,
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        config = self._config
        mlp = self._mlp_of(
            prefix,
            config.mlp_names,
            config.activation,
            fused=config.fold.fused_gate_up,
            bias=config.mlp_bias,
            factor=config.fold.residual_scale * config.fold.mlp_out_scale,
        )
        return mlp if self._comm is None else replace(mlp, comm=self._comm)

    def _experts(self, prefix: str, spec: ExpertsSpec) -> ExpertWeights:
        names = spec.names
        experts = (
            self._stacked_experts(prefix, spec)
            if names.stacked != "none"
            else tuple(
                self._mlp_of(prefix + names.expert.format(number), names.mlp, spec.activation)
                for number in spec.numbers
            )
        )
        shared = gate = None
        if spec.shared_width:
            shared = self._mlp_of(
                prefix + names.shared,
                names.shared_mlp,
                spec.activation,
                fused=self._config.fold.fused_gate_up,
                factor=self._config.fold.residual_scale,
            )
            if names.shared_gate is not None:
                gate = self._plain(prefix + names.shared_gate, bias=False)
        return ExpertWeights(
            router=self._plain(prefix + names.router, bias=spec.router_bias),
            routing=spec.routing,
            experts=experts,
            choice_bias=None
            if names.choice_bias is None
            else self._float(prefix + names.choice_bias),
            factors=None if names.factors is None else self._float(prefix + names.factors),
            shared=shared,
            shared_gate=gate,
            comm=self._comm,
            first=spec.numbers.start,
        )

    def _mlp_of(
        self,
        prefix: str,
        names: MlpNames,
        activation: Activation,
        *,
        fused: bool = False,
        bias: bool = False,
        factor: float = 1.0,
    ) -> MlpWeights:
        """``factor``: of its output."""
        fold = self._config.fold
        first = [names.up] if names.gate is None else [names.gate, names.up]
        if fused:
            first = [FUSED_GATE_UP]
        factors = [fold.gate_scale, 1.0] if len(first) == 2 else []
        return MlpWeights(
            self._linear([prefix + name for name in first], bias=bias, factors=factors),
            self._linear([prefix + names.down], bias=bias, factors=[factor]),
            activation,
        )

    def _stacked_experts(self, prefix: str, spec: ExpertsSpec) -> tuple[MlpWeights, ...]:
        """Pack experts whose matrices are stored as one tensor.

        gpt-oss stores each matrix transposed, with rows of gate and factor in turn.
        """
        at, stacked = prefix + spec.names.expert, spec.names.stacked
        is_turned = stacked in ("gpt-oss", "columns")
        first, second = (
            self._stack(at + name, len(spec.numbers), is_turned=is_turned)
            for name in ("gate_up_proj", "down_proj")
        )
        if stacked != "gpt-oss":
            pack = self._ops.pack_linear
            pairs = zip(first, second, strict=True)
            return tuple(MlpWeights(pack(a), pack(b), spec.activation) for a, b in pairs)
        biases = [self._vector(at + name) for name in ("gate_up_proj_bias", "down_proj_bias")]
        apart = torch.arange(2 * spec.width, device=self._device).view(-1, 2).T.flatten()
        return tuple(
            MlpWeights(
                self._ops.pack_linear(_in_order(gate_up, apart), bias[apart]),
                self._ops.pack_linear(down, down_bias),
                spec.activation,
            )
            for gate_up, down, bias, down_bias in zip(first, second, *biases, strict=True)
        )

    def _stack(
        self, name: str, count: int, *, is_turned: bool
    ) -> Iterator[Tensor | QuantizedWeight]:
        """The matrices ``[out_features, in_features]`` of a stack, one by one."""
        found = self._read(name)
        if isinstance(found, QuantizedStack):
            for each in (found.one(index) for index in range(count)):
                yield each if self._keeps(each) else self._cast(each)
        else:
            plain = self._cast(found)
            yield from ((each.T if is_turned else each).contiguous() for each in plain)

    def _plain(self, name: str, *, bias: bool) -> PackedLinear:
        """A matrix that is never quantised: of a router."""
        row = self._vector(f"{name}.bias") if bias else None
        return self._ops.pack_linear(self._vector(f"{name}.weight"), row, plain=True)

    def _float(self, name: str) -> Tensor:
        """A vector in float32, as it is stored."""
        weight = self._read(name)
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self._device).float()

    def _layer_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self._norm(f"{prefix}{name}.weight")

    def _norm(self, name: str) -> Norm:
        config, offset = self._config, self._config.fold.norm_offset
        weight = self._vector(name)
        if config.layer_norm != "none" or offset:
            weight = weight.float() + offset
        bias = None
        if config.layer_norm == "bias":
            bias = self._vector(f"{name.removesuffix('weight')}bias").float()
        return Norm(weight, config.norm_eps, bias, config.layer_norm != "none")

    def _linear(
        self,
        names: list[str],
        *,
        bias: bool,
        order: Tensor | None = None,
        factors: Sequence[float] = (),
    ) -> PackedLinear:
        """Matrices stacked into one, so that one call reads the input once.

        ``order``: of the rows, where the family has another one than the kernels. ``factors``: of
        each matrix with its bias.
        """
        factors = factors or [1.0] * len(names)
        stored = [self._read(f"{name}.weight") for name in names]
        shapes = [_shape(each) for each in stored]
        weight = self._stacked(stored, factors)
        stacked = None
        if bias:
            biases = (self._vector(f"{name}.bias") for name in names)
            stacked = torch.cat([scaled(*each) for each in zip(biases, factors, strict=True)])
        if order is not None:
            weight = _in_order(weight, order)
            stacked = None if stacked is None else stacked[order]
        packed = self._ops.pack_linear(weight, stacked)
        counts = tuple(rows for rows, _ in shapes)
        self.recipes[packed] = Recipe(tuple(names), counts, shapes[0][1], tuple(factors), order)
        return packed

    def _stacked(
        self, weights: list[StoredWeight], factors: Sequence[float]
    ) -> Tensor | QuantizedWeight:
        """Stack weights: as stored if all are of one kind that is kept, else cast.

        A factor is rounded into plain weights alone: scales of 16 bits would lose more.
        """
        if any(factor != 1.0 for factor in factors):
            pairs = zip(map(self._cast, weights), factors, strict=True)
            return torch.cat([scaled(*each) for each in pairs])
        kept = [each for each in weights if isinstance(each, QuantizedWeight) and self._keeps(each)]
        joined = stack(kept) if len(kept) == len(weights) else None
        return joined or torch.cat([self._cast(each) for each in weights])

    def _head_norm(self, prefix: str, heads: HeadSpec, order: Tensor | None) -> HeadNorm:
        config = self._config
        counts = zip(config.head_norm_names, (heads.num_heads, heads.num_kv_heads), strict=True)
        rows = [
            self._vector(f"{prefix}self_attn.{name}.weight")
            .view(-1, heads.head_dim)  # one for all heads, or of the whole row
            .expand(count, -1)
            for name, count in counts
            if count
        ]
        weight = torch.cat(rows).float() + config.fold.norm_offset
        if order is not None:
            weight = weight[:, order]
        return HeadNorm(
            weight.contiguous(),
            config.norm_eps,
            config.head_norm == "whole",
            config.norms_behind_rope,
        )

    def _keeps(self, weight: QuantizedWeight) -> bool:
        return weight.kind in self._kept

    def _vector(self, name: str) -> Tensor:
        return self._cast(self._read(name))

    def _cast(self, weight: StoredWeight) -> Tensor:
        # The bytes as they are stored go to the device and are cast there: in one call the host
        # would make a copy in the other dtype first.
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self._device).to(self._dtype)
