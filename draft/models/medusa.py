"""MedusaHead: a few small networks, each of which guesses one token ahead (arXiv 2401.10774).

All read the target's hidden state behind its final norm. Head ``i`` guesses the token ``i + 2``
places behind the state's position, whatever stands between: so a pass yields the candidates of all
places at once, and a tree is made of the best of each. There is no KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from .head_layers import TapConfig


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
