"""Hooks that replace a transformers model's attention and experts, and the probe.

The probe runs the model once on a few tokens to learn how each of its layers attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from ...errors import ModelLoadError
from ...ops.weights import HeadLayout
from .states import PagedCache, has_states, pass_arguments

HOOKS = "foretoken"  # name under which the hooks are registered in transformers
_PROBE_TOKENS = 4


# -- the hooks ------------------------------------------------------------------------------------


class Hooks(Protocol):
    """Functions that replace transformers' attention and experts."""

    def rule(self, mask_function: Callable[..., Any], window: int | None) -> int:
        """Record the rule of a mask and return its number."""

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        """Return the attention output [1, T, heads, value_dim].

        Queries, keys and values are [1, heads, T, dim].
        """

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' output ``[T, hidden]`` for rows ``x`` [T, hidden].

        ``chosen`` and ``weights`` are ``[T, slots]``: the experts of each row, and their weights.
        """


_CURRENT: ContextVar[Hooks] = ContextVar("foretoken_hooks")


class AttentionCall(NamedTuple):
    """Arguments of an attention function besides queries, keys and values."""

    mask: Tensor | None  # the number of a mask's rule, from `_keep_rule`
    scale: float | None
    cap: float | None
    sinks: Tensor | None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    call = AttentionCall(attention_mask, scaling, softcap, s_aux)
    return _CURRENT.get().attention(module, query, key, value, call), None


def _keep_rule(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_ignored: object
) -> Tensor:
    """Return a tensor with the number of a mask's rule, in place of the mask.

    The tensor has four dimensions, so that no model expands it.
    """
    return torch.full((1, 1, 1, 1), _CURRENT.get().rule(mask_function, local_size))


def _experts(module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return _CURRENT.get().experts(module, x, chosen, weights)


AttentionInterface.register(HOOKS, _attend)
AttentionMaskInterface.register(HOOKS, _keep_rule)
ExpertsInterface.register(HOOKS, _experts)


@contextmanager
def hooked(hooks: Hooks) -> Iterator[None]:
    """Let transformers' attention, masks and experts call ``hooks`` inside the block."""
    token = _CURRENT.set(hooks)
    try:
        yield
    finally:
        _CURRENT.reset(token)


# -- the probe ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """Shape and options of one attention module.

    Dimensions are a head's; the window is in tokens.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    max_len: int | None  # length in tokens up to which the mask is only causal; None: no limit
    cap: float | None
    has_sinks: bool

    @property
    def head_dim(self) -> int:
        """Dimensions of a head in the pages: the longer of key and value, rounded up to even."""
        longest = max(self.key_dim, self.value_dim)
        return longest + longest % 2

    @property
    def heads(self) -> HeadLayout:
        """Head layout for the backends."""
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim, self.scale)

    @property
    def is_plain(self) -> bool:
        """Whether every backend supports this attention."""
        return self.cap is None and not self.has_sinks

    def pad(self, x: Tensor) -> Tensor:
        """Pad ``[.., key_dim or value_dim]`` to ``[.., head_dim]``."""
        missing = self.head_dim - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x


class _Probe:
    """Hooks that compute nothing and record the options of each attention module."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._rules: list[tuple[Callable[..., Any], int | None]] = []
        self.sites: dict[str, AttentionSite] = {}

    def rule(self, mask_function: Callable[..., Any], window: int | None) -> int:
        self._rules.append((mask_function, window))
        return len(self._rules) - 1

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        name = self._names[module]
        if name in self.sites:
            raise ModelLoadError(f"{name} computes attention twice in a pass, which needs two KVs")
        window, max_len = self._reach(name, call.mask)
        sinks = call.sinks if call.sinks is not None else getattr(module, "sinks", None)
        self.sites[name] = AttentionSite(
            module=name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if call.scale is None else float(call.scale),
            window=window,
            max_len=max_len,
            cap=None if call.cap is None else float(call.cap),
            has_sinks=sinks is not None,
        )
        return value.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def experts(self, _module: nn.Module, x: Tensor, _chosen: Tensor, _weights: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def _reach(self, name: str, mask: Tensor | None) -> tuple[int | None, int | None]:
        """Return the window of a mask rule, and the length up to which the rule is only causal.

        Each is in tokens, and None means no such limit. Raises `ModelLoadError` for a rule that is
        neither causal nor a sliding window.
        """
        if mask is None or mask.shape != (1, 1, 1, 1) or mask.is_floating_point():
            raise ModelLoadError(f"{name} has no mask, or an unknown kind of mask, such as ALiBi")
        function, size = self._rules[int(mask)]
        if _is_causal(function, None, size):
            return None, None
        if size is not None and _is_causal(function, size, size):
            return size, None
        if size is not None and _is_causal(function, None, size - 1):  # Llama 4 attends in chunks.
            return None, size
        raise ModelLoadError(f"{name} has a mask that is neither causal nor a sliding window")


def _is_causal(function: Callable[..., Any], window: int | None, size: int | None) -> bool:
    """Whether a mask rule hides exactly the later positions, and the positions before the window.

    The rules are compared at positions around 0, ``size`` and ``2 * size``. Without a ``size``,
    they are compared around a few fixed positions.
    """
    edges = [0, 16, 40] if size is None else [0, size, 2 * size]
    near = sorted({p for edge in edges for p in range(edge - 3, edge + 4) if p >= 0})
    # Without a window the rule is compared only up to ``size``.
    if window is None and size is not None:
        near = [p for p in near if p <= size]
    at = torch.tensor(near)
    rows, columns = at[:, None], at[None, :]
    expected = columns <= rows
    if window is not None:
        expected &= columns > rows - window
    zero = torch.zeros((), dtype=torch.long)
    found = torch.as_tensor(function(zero, zero, rows, columns)).expand_as(expected)
    return torch.equal(found.bool(), expected)


class ProbeResult(NamedTuple):
    """The result of a probe.

    ``sites``: attention modules in the order of the layers. ``read_directly``: linears whose
    weights the model reads itself, so they stay unpacked. ``cache``: tensors of the model's states;
    None: it keeps no states.
    """

    sites: tuple[AttentionSite, ...]
    read_directly: frozenset[str]
    cache: PagedCache | None


def probe(model: nn.Module, device: torch.device | str) -> ProbeResult:
    """Run a model on a few tokens, on any device (also "meta"), and record its calls.

    Raises `ModelLoadError` for attention outside transformers' interface, for masks other than
    causal and windowed ones, and for states outside transformers' cache.
    """
    hooks = _Probe(model)
    config: Any = model.config
    cache = PagedCache(config=config) if has_states(config) else None
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    with hooked(hooks), _watched_linears(model) as read, torch.inference_mode():
        model(
            input_ids=ids,
            position_ids=positions,
            **pass_arguments(model, cache, ids),
        )
    if cache is not None and not cache.tensors:
        raise ModelLoadError("its recurrent layers do not keep their states in transformers' cache")
    if cache is None and not hooks.sites:
        raise ModelLoadError("no layer uses transformers' attention interface")
    return ProbeResult(tuple(hooks.sites.values()), frozenset(read), cache)


class _WatchedLinear(nn.Linear):
    """A linear that notices when other modules read its weight."""

    weight_was_read = False
    is_computing = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as of nn.Module
        if name == "weight" and not self.is_computing:
            self.weight_was_read = True
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        self.is_computing = True
        try:
            return super().forward(x)
        finally:
            self.is_computing = False


@contextmanager
def _watched_linears(model: nn.Module) -> Iterator[set[str]]:
    """Yield a set for the names of linears whose weights other modules read inside the block.

    The set is filled at the end of the block.
    """
    linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    read: set[str] = set()
    for module in linears.values():
        module.__class__ = _WatchedLinear
    try:
        yield read
    finally:
        for name, module in linears.items():
            if module.__dict__.pop("weight_was_read", False):
                read.add(name)
            module.__dict__.pop("is_computing", None)
            module.__class__ = nn.Linear
