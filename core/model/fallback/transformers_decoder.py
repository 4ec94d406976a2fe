"""TransformersDecoder: transformers' own modules on this engine's pages, attention and linears.

It serves model types that have no decoder of their own here. Three hooks replace parts of
transformers. The attention function writes and reads pages. The mask function records the model's
mask rule instead of making a mask, so that no config is interpreted. The experts function uses the
backend's linears and sums their outputs in the order of the router's slots. A ragged batch is one
row of tokens ``[1, T]``, be it chunked prompts, shared prefixes, drafts or decoding rows.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from ...ops.base import ForwardPlan, Ops
from ...ops.batch import (
    NOTHING_MORE,
    ForwardOutput,
    RaggedBatch,
    Segment,
    Taps,
    Wanted,
    build_batch,
)
from ...ops.kv_pool import KVPool, KvShape
from ...ops.layers import linear_of_few
from ...ops.quantize import QuantizedWeight
from ...ops.state_pool import StatePool
from ...ops.torch.torch_ops import TorchOps
from ...ops.weights import HeadLayout, PackedLinear
from ..decoder import ModelPath, PagedDecoder, check_taps
from ..description.config import DecoderConfig
from ..description.rope import Still
from .selective_scan import replace_scans, scanning
from .states import ModuleStatePool, ModuleStates, PagedCache, SequenceRun, pass_arguments
from .transformers_probe import AttentionCall, AttentionSite, hooked

_MAX_NATIVE_DIM = 576
# Routers, and linears that give decays and step sizes of recurrent layers, are never quantised.
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate", "wg"))
_DECAYS = frozenset(("a_proj", "b_proj", "f_a_proj", "f_b_proj", "x_proj", "dt_proj"))


# -- packed weights -------------------------------------------------------------------------------


class Packed(nn.Module):
    """An `nn.Linear` in the backend's kernel. ``weight`` has a shape and a dtype but no values."""

    def __init__(self, ops: Ops, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty(weight.shape, dtype=dtype, device="meta")
        self.bias = None
        self.ops, self.packed = ops, ops.pack_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear's output [.., out_features] for ``x`` [.., in_features]."""
        if x.numel() == 0:  # An expert may have no rows to compute.
            return x.new_zeros((*x.shape[:-1], self.out_features))
        return linear_of_few(self.ops, x, self.packed)


def pack(model: nn.Module, ops: Ops, plain: Ops, kept: frozenset[str]) -> None:
    """Replace every linear of a model by a `Packed` one, one after another.

    ``plain`` packs linears that are never quantised. ``kept``: names of linears that are not
    replaced. Linears that share a weight are packed once.
    """
    found: dict[tuple[int, ...], Packed] = {}
    for name, module in list(model.named_modules()):
        if name in kept or type(module) not in (nn.Linear, Conv1D):
            continue
        parent, _, own = name.rpartition(".")
        is_plain = own in _ROUTERS | _DECAYS
        tied = (id(module.weight), id(module.bias), is_plain)
        if tied not in found:
            weight = module.weight.data
            weight = weight.T.contiguous() if type(module) is Conv1D else weight
            bias = None if module.bias is None else module.bias.data
            found[tied] = Packed(plain if is_plain else ops, weight, bias)
        setattr(model.get_submodule(parent), own, found[tied])
    for name, module in list(model.named_modules()):
        if type(module) in _EXACT_ACTIVATIONS:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _EXACT_ACTIVATIONS[type(module)]())


# torch's silu, sigmoid and gelu round the last items of a tensor differently from the others, so
# a result depends on its position. exp, tanh, add and divide give the same bits at any position.


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x.float()).add_(1.0).reciprocal_().to(x.dtype)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:  # noqa: ARG001 - as torch's
    wide = x.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2 / math.pi))
    return (inner.tanh_().add_(1.0) * wide).mul_(0.5).to(x.dtype)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    wide = x.float() * beta
    return torch.where(wide > threshold, wide, torch.exp(wide).log1p()).div_(beta).to(x.dtype)


class _Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _silu(x)


class _GeluTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _gelu_tanh(x)


_EXACT_ACTIVATIONS: dict[type, type[nn.Module]] = {
    nn.SiLU: _Silu,
    SiLUActivation: _Silu,
    GELUTanh: _GeluTanh,
    NewGELUActivation: _GeluTanh,
}


class _ExactRows(TorchFunctionMode):
    """Mode that computes linears on plain parameters, such as routers, with packed kernels.

    So the bits of a row do not depend on the other rows.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._packed: dict[int, tuple[Tensor, PackedLinear]] = {}
        self._instead: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.silu: _silu,
            F.softplus: _softplus,
            torch.sigmoid: _sigmoid,
            Tensor.sigmoid: _sigmoid,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        instead = self._instead.get(func, func)
        return instead(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.numel() == 0:
            return input.new_zeros((*input.shape[:-1], len(weight)))
        return linear_of_few(self._ops, input, self._of(weight, bias))

    def _of(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if not isinstance(weight, nn.Parameter):  # A cast or a slice is a new tensor in each pass.
            return self._ops.pack_linear(weight.contiguous(), bias)
        if id(weight) not in self._packed:
            self._packed[id(weight)] = weight, self._ops.pack_linear(weight.data, bias)
        return self._packed[id(weight)][1]


def _has_plain_linears(model: nn.Module) -> bool:
    """Whether a module other than an embedding still has a matrix that was not packed."""
    return any(
        parameter.dim() >= 2 and parameter.numel() > 0
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


class _PackedExperts(NamedTuple):
    """The two packed linears of each expert of a layer: gate and up together, then down."""

    first: list[PackedLinear]
    second: list[PackedLinear]


def _pack_experts(module: Any, ops: Ops) -> _PackedExperts:  # noqa: ANN401 - of transformers
    """Pack a transformers module of experts and drop its own weights."""

    def packed(name: str) -> list[PackedLinear]:
        stacked = getattr(module, name).data
        biases = getattr(module, f"{name}_bias").data if module.has_bias else None
        setattr(module, name, nn.Parameter(stacked.new_empty(0), requires_grad=False))
        return [
            ops.pack_linear(
                (each.T if module.is_transposed else each).contiguous(),
                None if biases is None else biases[index],
            )
            for index, each in enumerate(stacked)
        ]

    return _PackedExperts(
        packed("gate_up_proj" if module.has_gate else "up_proj"), packed("down_proj")
    )


# -- a pass ---------------------------------------------------------------------------------------


class _PagedAttention(NamedTuple):
    """An attention module, and the part and layer of the pool that hold its KV."""

    site: AttentionSite
    part: int  # part of the pool
    layer: int  # layer within the part
    ops: Ops  # operations for this module: the backend's, or torch's if the backend's cannot


class _Experts:
    """Hooks that replace only the experts; transformers computes the attention."""

    def __init__(self, decoder: TransformersDecoder) -> None:
        self._decoder = decoder

    def rule(self, mask_function: Callable[..., Any], window: int | None) -> int:  # noqa: ARG002
        return 0  # Nothing reads it: transformers computes the attention here.

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        raise NotImplementedError("attention without KV pages is left to transformers")

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ops, packed = self._decoder.ops, self._decoder.experts(module)
        slots = x.new_zeros((*chosen.shape, x.shape[-1]))
        for expert in sorted(set(chosen.flatten().tolist())):
            if expert >= len(packed.first):  # The row takes no expert in this slot.
                continue
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            inner = linear_of_few(ops, x[row], packed.first[expert])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # type: ignore[operator]
            slots[row, slot] = linear_of_few(ops, inner, packed.second[expert])
        out = slots[:, 0] * weights[:, :1]
        for index in range(1, chosen.shape[1]):
            out = out + slots[:, index] * weights[:, index : index + 1]
        return out.to(x.dtype)


class _Pass(_Experts):
    """Hooks that replace attention and experts in one forward pass."""

    def __init__(
        self, decoder: TransformersDecoder, batch: RaggedBatch, parts: Sequence[KVPool]
    ) -> None:
        super().__init__(decoder)
        self._batch, self._parts = batch, parts
        self._plans: dict[tuple[int, HeadLayout, Ops], ForwardPlan] = {}

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        place = self._decoder.places[module]
        site, ops, plan = place.site, place.ops, self._plan(place)
        rows = query.shape[2]
        padded = torch.cat([site.pad(x[0]) for x in (query, key, value)])
        qkv = padded.transpose(0, 1).reshape(rows, -1)
        scaled = ops.rope_write(qkv, place.layer, plan, None)
        sinks = call.sinks if call.sinks is not None else getattr(module, "sinks", None)
        out = ops.attention(scaled, place.layer, plan, site.window, cap=site.cap, sinks=sinks)
        return out.view(1, rows, site.num_heads, -1)[..., : site.value_dim]

    def _plan(self, place: _PagedAttention) -> ForwardPlan:
        heads = place.site.heads
        key = (place.part, heads, place.ops)
        if key not in self._plans:
            still = Still(heads.head_dim, self._decoder.device)
            self._plans[key] = place.ops.plan(self._batch, self._parts[place.part], heads, still)
        return self._plans[key]


class TransformersDecoder(PagedDecoder):
    """A `Decoder` that runs a transformers model with packed linears.

    ``exact``: whether a row's bits were found to be independent of the rest of the batch. A model
    that keeps states (``cache``) computes one sequence after another; ``takes_chunks``: its modules
    can compute several rows at once after a state.
    """

    path: ModelPath = "transformers"

    def __init__(
        self,
        config: DecoderConfig,
        model: Any,  # noqa: ANN401 - a causal language model of transformers
        sites: Sequence[AttentionSite],
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cache: PagedCache | None = None,
    ) -> None:
        self.config, self.model, self.ops = config, model, ops
        self.sampler, self.dtype, self.device = ops.sampler, dtype, device
        # The startup test decides both.
        self.exact, self.takes_chunks = False, True
        self._cache = cache
        self.kept = None if cache is None else ModuleStates.of(cache)
        self.states = () if self.kept is None else (self.kept,)
        if cache is not None:
            replace_scans(model)
        self.sites = tuple(sites)
        self.shapes = kv_shapes(sites)
        self.places = _places(model, sites, self.shapes, ops)
        self._packed_experts: dict[nn.Module, _PackedExperts] = {}
        self._mode: AbstractContextManager[Any] = nullcontext()
        self._inner = _inner(model)
        self._keeps_rows = _takes(model, "logits_to_keep")
        self._layers = _layers(self._inner, config.num_layers)

    @property
    def identity(self) -> dict[str, str]:
        """Identity of the operations and of transformers, and the config of its modules."""
        values = self.model.config.to_dict()
        values.pop("_name_or_path", None)  # The folder's path does not change the result.
        return {
            **super().identity,
            "transformers": transformers.__version__,
            "text config": json.dumps(values, sort_keys=True, default=str),
        }

    def warm_up(self, pool: KVPool, max_len: int, wanted: Wanted = NOTHING_MORE) -> None:
        """Do nothing: the first pass is as fast as any other."""

    def hooked(self) -> AbstractContextManager[None]:
        """Return a context in which transformers' own attention runs on the packed weights."""
        return hooked(_Experts(self))

    def experts(self, module: nn.Module) -> _PackedExperts:
        """Return the packed experts of a module."""
        return self._packed_experts[module]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return bool(self._packed_experts)

    def pack_experts(self, ops: Ops) -> None:
        """Pack the experts of every layer and drop transformers' copy of their weights."""
        for module in self.model.modules():
            if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
                self._packed_experts[module] = _pack_experts(module, ops)
        # Chunks of a model with states are not exact in any case.
        if self.device.type == "cpu" and not self.states and _has_plain_linears(self.model):
            self._mode = _ExactRows(TorchOps())

    def make_state_pool(self, num_slots: int, num_logs: int, *, page_size: int) -> StatePool:
        """Return a pool of the modules' states. Raises ValueError as `StatePool` does."""
        if self.kept is None:
            raise ValueError("the model has no recurrent states, so it has no state pool")
        return ModuleStatePool(
            num_slots,
            num_logs,
            self.kept,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, batch: RaggedBatch, pool: KVPool, wanted: Wanted = NOTHING_MORE
    ) -> ForwardOutput:
        """Compute every row's KV into the pool, and return the outputs in ``wanted``.

        Raises ValueError for taps that do not exist, for input vectors, and for segments without a
        state from which a model with states can continue.
        """
        check_taps(wanted.taps, self.config.num_layers)
        if wanted.inputs is not None:
            raise ValueError("transformers' modules accept token ids only, not input vectors")
        wanted.notify_started()
        if self._cache is None:
            return self._compute(batch, pool.parts, wanted.taps)
        return self._by_sequence(self._cache, batch, pool, wanted.taps)

    def _by_sequence(
        self, cache: PagedCache, batch: RaggedBatch, pool: KVPool, taps: Taps
    ) -> ForwardOutput:
        """Compute one segment after another, each in the passes that its states require."""
        states = pool.states
        if batch.states is None or not isinstance(states, ModuleStatePool):
            raise ValueError("the model needs recurrent states in the pool and in each segment")
        parts = [_without_states(part) for part in pool.parts]
        found = []
        for index in range(len(batch.lens)):
            run = SequenceRun(states, batch, index)
            for piece in run.pieces(row_by_row=not self.takes_chunks):
                cache.lend(piece.state, is_begun=piece.start > 0)
                first = max(piece.start, run.stop - run.num_logits)
                rows = Segment(
                    piece.token_ids, piece.start, run.page_ids, max(0, piece.stop - first)
                )
                own = build_batch([rows], page_size=batch.page_size, device=self.device, min_rows=1)
                output = self._compute(own, parts, taps, cache)
                found.append(_without_first(output, run.start - piece.start))
        return _joined(found)

    def _compute(
        self,
        batch: RaggedBatch,
        parts: Sequence[KVPool],
        taps: Taps,
        cache: PagedCache | None = None,
    ) -> ForwardOutput:
        """Compute one pass of the modules over all rows of a batch."""
        rows = {
            "input_ids": batch.token_ids[None],
            "position_ids": batch.positions[None],
            **pass_arguments(self.model, cache, batch.token_ids[None]),
        }
        goes_on = nullcontext() if cache is None else scanning(cache)
        hooks = hooked(_Pass(self, batch, parts))
        with self._mode, hooks, goes_on, self._watched(taps) as outputs:
            if batch.num_logits:
                logits = self._logits_of(rows, batch)
            else:
                self._inner(**rows)
                logits = outputs.hidden[0].new_empty(
                    (0, self.config.vocab_size), dtype=torch.float32
                )
        tapped = torch.cat([outputs.taps[tap][0] for tap in taps], dim=-1) if taps else None
        return ForwardOutput(outputs.hidden[0], logits, None, tapped)

    def _logits_of(self, rows: Mapping[str, Any], batch: RaggedBatch) -> Tensor:
        if self._keeps_rows:
            kept = self.model(**rows, logits_to_keep=batch.logit_rows).logits[0]
        else:
            kept = self.model(**rows).logits[0].index_select(0, batch.logit_rows)
        logits: Tensor = kept[: batch.num_logits, : self.config.vocab_size].float()
        return logits

    @contextmanager
    def _watched(self, taps: Taps) -> Iterator[_PassOutputs]:
        """Record the final norm's output of the pass, and the residual stream at the taps."""
        outputs = _PassOutputs()
        handles = [self._inner.register_forward_hook(outputs.keep_hidden)]
        for tap in taps:
            if tap == 0:
                hook = outputs.keep_input
                handles.append(self._layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(
                    self._layers[tap - 1].register_forward_hook(outputs.keep_output(tap))
                )
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


class _PassOutputs:
    """Hidden states and taps of a pass, recorded by hooks."""

    def __init__(self) -> None:
        self.hidden: Tensor
        self.taps: dict[int, Tensor] = {}

    def keep_hidden(self, _module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
        self.hidden = output[0]

    def keep_input(self, _module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self.taps[0] = args[0] if args else kwargs["hidden_states"]

    def keep_output(self, tap: int) -> Callable[[nn.Module, object, Any], None]:
        def keep(_module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            self.taps[tap] = output[0] if isinstance(output, tuple) else output

        return keep


def _without_first(output: ForwardOutput, count: int) -> ForwardOutput:
    """Return ``output`` without its first ``count`` rows, which were only computed again."""
    if count <= 0:
        return output
    taps = None if output.taps is None else output.taps[count:]
    return output._replace(hidden=output.hidden[count:], taps=taps)


def _joined(outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    """Return the concatenated outputs of consecutive passes."""
    taps = [each.taps for each in outputs if each.taps is not None]
    return ForwardOutput(
        torch.cat([each.hidden for each in outputs]),
        torch.cat([each.logits for each in outputs]),
        taps=torch.cat(taps) if taps else None,
    )


def _without_states(part: KVPool) -> KVPool:
    """Return a pool part without states, because backends expect states of their own kind."""
    found = copy(part)
    found.states = None
    return found


def kv_shapes(sites: Sequence[AttentionSite]) -> list[KvShape]:
    """Return the distinct KV shapes of a model's layers, in the order of first use.

    A model without attention has one shape, with vectors of two numbers, so that it still has
    pages.
    """
    pairs = [(site.num_kv_heads, site.head_dim) for site in sites]
    if not pairs:
        return [KvShape(1, 1, 2)]
    return [KvShape(pairs.count(pair), *pair) for pair in dict.fromkeys(pairs)]


def _places(
    model: nn.Module, sites: Sequence[AttentionSite], shapes: Sequence[KvShape], ops: Ops
) -> dict[nn.Module, _PagedAttention]:
    modules, torch_ops = dict(model.named_modules()), TorchOps()
    pairs = [(shape.num_kv_heads, shape.head_dim) for shape in shapes]
    used = [0] * len(shapes)
    places = {}
    for site in sites:
        part = pairs.index((site.num_kv_heads, site.head_dim))
        fits = site.heads.head_dim <= _MAX_NATIVE_DIM
        chosen = ops if site.is_plain and fits else torch_ops
        places[modules[site.module]] = _PagedAttention(site, part, used[part], chosen)
        used[part] += 1
    return places


def _inner(model: Any) -> nn.Module:  # noqa: ANN401
    """Return the module with the layers and the final norm, without the output matrix."""
    inner: nn.Module = model.get_decoder()
    # One transformers class has an output matrix at this name.
    return model.base_model if isinstance(inner, Packed) else inner


def _layers(inner: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """Return the decoder layers, at whose boundaries the taps are."""
    for module in inner.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
