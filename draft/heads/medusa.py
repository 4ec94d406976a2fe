"""MedusaHead: a few small networks, each of which predicts one later token (arXiv 2401.10774).

All read the target's hidden state after its final norm. Head ``i`` predicts the token ``i + 2``
positions after the state's position, independently of the tokens between. So one pass yields the
candidates of all positions, and a tree combines the best ones. There is no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.description.fields import Fields
from ...core.ops.batch import DeviceTokens, SamplingPlan
from ...core.ops.kv_pool import KVPool
from ..proposers.tree_grower import Scored
from .common.base import HeadKind, PackedHead, ParsedHead, Tensors
from .common.files import fill
from .common.head_kv import Written
from .common.layers import Head, OutputLayer, TapConfig
from .common.packing import pack_linears
from .common.proposer import Drafting, DraftStart, HeadProposer, Query, features_of


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(TapConfig):
    """Shape of Medusa heads."""

    kind: ClassVar[str] = "medusa"

    num_heads: int  # number of heads, each of which drafts one token of a path
    num_blocks: int = 1  # residual blocks per head

    @property
    def tokens_per_pass(self) -> int:
        """Number of heads: each one drafts one token of a path."""
        return self.num_heads


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[.., size] -> [.., size]``."""
        out: Tensor = x + F.silu(self.linear(x))
        return out


class MedusaHead(Head):
    """All Medusa heads of a target. Token ids are the target's."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.medusa_head = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(size) for _ in range(config.num_blocks)),
                OutputLayer(size, config.vocab_size),
            )
            for _ in range(config.num_heads)
        )

    def logits(self, hidden: Tensor, index: int) -> Tensor:
        """Return the logits ``[.., vocab]`` of head ``index`` for states ``[.., hidden]``."""
        found: Tensor = self.medusa_head[index](hidden)
        return found


# -- files ----------------------------------------------------------------------------------------


def _is_medusa(values: Mapping[str, Any], folder: Path) -> bool:  # noqa: ARG001
    return "medusa_num_heads" in values


def _parse(fields: Fields, target: DecoderConfig, names: set[str]) -> ParsedHead:  # noqa: ARG001
    """Parse a Medusa-1 config, which contains only the number of heads and of blocks per head."""
    for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        value = fields.positive(name, own)
        if value != own:
            raise fields.error(name, f"is {value}, but the target's is {own}")
    config = MedusaConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        taps=(target.num_layers,),
        num_heads=fields.positive("medusa_num_heads"),
        num_blocks=fields.positive("medusa_num_layers", 1),
    )
    return ParsedHead(config)


def _load(where: Path, config: MedusaConfig, tensors: Tensors) -> MedusaHead:
    return fill(where, MedusaHead(config), tensors)


# -- drafting -------------------------------------------------------------------------------------


def _pack(head: MedusaHead, target: OwnDecoder) -> PackedHead:
    pack_linears(head, target.ops)
    return PackedHead(partial(MedusaProposer, head))


class MedusaProposer(HeadProposer):
    """Drafts trees of the best tokens of each head of a `MedusaHead`."""

    head: MedusaHead

    def __init__(self, head: MedusaHead, pool: KVPool, target: OwnDecoder) -> None:
        super().__init__(head, pool, target)
        self._final_norm = partial(target.ops.norm, norm=target.weights.final_norm)

    def write_head_kv(self, written: Written) -> Tensor:
        """Return the target's last hidden states after its final norm; there is no KV to write."""
        return self._final_norm(written.taps.contiguous())

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Draft from the target's state at the position before each request's last token."""
        del num_drafted
        return _MedusaDrafting(self.head, features_of(starts))


class _MedusaDrafting(Drafting):
    """Drafts from ``hidden`` [b, hidden], the state before each request's last token."""

    def __init__(self, head: MedusaHead, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden

    def score(
        self,
        queries: Sequence[Query],
        draws: SamplingPlan | None,  # noqa: ARG002
        device_tokens: DeviceTokens | None = None,  # noqa: ARG002
    ) -> Scored:
        """Return the logits of the head for this level, equal for all tokens of a request."""
        requests = sorted({each.request for each in queries})
        found = self._head.logits(self._hidden[requests], queries[0].level)
        if len(requests) == len(queries):
            return Scored(found)
        at = {request: index for index, request in enumerate(requests)}
        return Scored(found[[at[each.request] for each in queries]])


MEDUSA = HeadKind(
    name=MedusaConfig.kind,
    words=("medusa",),
    recognises=_is_medusa,
    parse=_parse,
    load=_load,
    pack=_pack,
)
