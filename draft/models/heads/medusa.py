"""MedusaHead: a few small networks, each of which guesses one token ahead (arXiv 2401.10774).

All read the target's hidden state behind its final norm. Head ``i`` guesses the token ``i + 2``
places behind the state's position, whatever stands between: so a pass yields the candidates of all
places at once, and a tree is made of the best of each. There is no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from ....core.interface.plan import ScheduledRequest
from ....core.model.decoder import Decoder
from ....core.ops.kv_pool import KVPool
from .head_layers import KeysValues, TapConfig
from .head_proposer import Drafting, DraftStart, HeadProposer, Place, Written, features_of


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(TapConfig):
    """Shape of Medusa heads."""

    num_heads: int  # tokens that they draft
    num_blocks: int = 1  # residual blocks of each


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., size] -> [.., size]``."""
        out: Tensor = x + F.silu(self.linear(x))
        return out


class MedusaHead(nn.Module):
    """All heads of a target. Token ids are the target's."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.medusa_head = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(size) for _ in range(config.num_blocks)),
                nn.Linear(size, config.vocab_size, bias=False),
            )
            for _ in range(config.num_heads)
        )

    def logits(self, hidden: Tensor, index: int) -> Tensor:
        """Logits ``[.., vocab]`` of head ``index`` for states ``[.., hidden]``."""
        found: Tensor = self.medusa_head[index](hidden)
        return found


class MedusaProposer(HeadProposer):
    """Drafts trees of the best tokens that each head of a `MedusaHead` gives."""

    source = "medusa"

    def __init__(
        self, head: MedusaHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head
        self._final_norm = partial(target.ops.norm, norm=target.weights.final_norm)

    @property
    def tokens_per_pass(self) -> int:
        """A token of each head."""
        return self.longest

    @property
    def longest(self) -> int:
        """A token of each head."""
        return self.head.config.num_heads

    def columns(self, written: Written) -> tuple[list[KeysValues], Tensor]:
        """No KV; the features are what the target's final norm makes of its last layer's output."""
        return [], self._final_norm(written.taps.contiguous())

    def page_feature(self, page_id: int) -> None:
        """None is read: the last position before a draft was always computed for its request."""

    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """None is kept."""

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        head_kv = self._head_kvs.get(scheduled.request_id)
        if head_kv is None or head_kv.stop < len(scheduled.tokens) - 1:
            return None
        return DraftStart(scheduled, 0, head_kv.feature)

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """From the state before each last token."""
        del num_drafted
        return _Heads(self.head, features_of(starts))


class _Heads(Drafting):
    """``hidden`` [b, hidden]: the state before each anchor."""

    def __init__(self, head: MedusaHead, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden

    def logits(self, places: Sequence[Place]) -> Tensor:
        """What the level's own head says; the same behind every token of a request."""
        requests = sorted({each.request for each in places})
        found = self._head.logits(self._hidden[requests], places[0].level)
        if len(requests) == len(places):
            return found
        at = {request: index for index, request in enumerate(requests)}
        return found[[at[each.request] for each in places]]
