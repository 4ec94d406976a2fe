"""Mamba's selective scan from a state, for several rows at once.

transformers' scan always begins with zeros. It is linear in the state before its rows, so this
module adds the state's contribution to the outputs and to the final state:

    S_t = exp(A sum_(s <= t) dt_s) S_0 + (S_t of the scan that begins with zeros)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_NAME = "mamba_selective_scan"
_MARK = "_goes_on_from_a_state"


class ScannedStates(Protocol):
    """Protocol of an object that has the recurrent states before the rows of a pass."""

    def next_scanned(self) -> Tensor | None:
        """Return the state [1, channels, state_size] from which the next scan continues.

        Returns None if the next scan begins with zeros.
        """


_CURRENT: ContextVar[ScannedStates] = ContextVar("foretoken_scanned_states")


@contextmanager
def scanning(states: ScannedStates) -> Iterator[None]:
    """Let the scans of `replace_scans` continue from ``states`` inside the block."""
    token = _CURRENT.set(states)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def replace_scans(model: nn.Module) -> None:
    """Replace transformers' scan in the modules of a model by one that continues from a state.

    Outside `scanning` the new scan returns the same results as the old one.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        space = vars(sys.modules[name])
        if _NAME in space and not hasattr(space[_NAME], _MARK):
            space[_NAME] = _going_on(space[_NAME])


def _going_on(scan: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(scan)
    def found(
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - as transformers'
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        *args: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        result = scan(x, dt, A, B, C, *args, **options)
        states = _CURRENT.get(None)
        before = None if states is None else states.next_scanned()
        if before is None or args or not options.get("return_last_state"):
            return result
        out, last = result
        kept = _kept(before, dt, A, options)
        added = (kept * C.unsqueeze(1)).sum(2)
        if (gate := options.get("z")) is not None:
            added = added * F.silu(gate)
        return out + added.to(out.dtype), last + kept[..., -1].to(last.dtype)

    setattr(found, _MARK, True)
    return found


def _kept(before: Tensor, dt: Tensor, decay: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the state ``before``, decayed up to each row, [1, channels, state_size, T] float32."""
    bias = options.get("delta_bias")
    steps = dt.float() if bias is None else dt.float() + bias.float().unsqueeze(-1)
    if options.get("delta_softplus"):
        steps = F.softplus(steps)
    total = steps.cumsum(-1).unsqueeze(2)
    return torch.exp(decay.float().unsqueeze(-1) * total) * before.float().unsqueeze(-1)
