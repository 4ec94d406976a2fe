"""EagleHead: drafts one token per pass from the target's features (EAGLE-3, arXiv 2503.01840).

A column joins the feature of one position, ``fc(taps)``, and the token after it; its output
predicts the next token. At positions that the target has not computed yet, the head's own output of
the previous column replaces the feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from .common.layers import (
    HIDDEN,
    MOST_PASSES,
    HeadConfig,
    KeysValues,
    Mlp,
    Projections,
    RmsNorm,
    RotaryTable,
    Vocabulary,
    attend,
    init_weights,
    without,
)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """The configuration of an EAGLE-3 head; the flags select the norms of its dialect."""

    kind: ClassVar[str] = "eagle3"
    first_position: ClassVar[int] = 1  # position 0 has no column
    keeps_page_features: ClassVar[bool] = True

    fc_bias: bool = False
    norm_before_residual: bool = False  # whether the residual begins with the normed feature
    norm_before_fc: bool = False  # whether there is one norm over all taps
    fc_norm: bool = False  # whether there is a norm for each tap
    norm_output: bool = False  # whether the next feature is normed (EAGLE-3.1)

    @property
    @override
    def tokens_per_pass(self) -> int:
        return 1

    @property
    @override
    def longest(self) -> int:
        return MOST_PASSES


class EagleLayer(nn.Module):
    """The head's only layer, whose attention reads the embedding and the feature side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.num_kv_heads = config.num_kv_heads
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RmsNorm(hidden, eps)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.self_attn = Projections(config, 2 * hidden, qk_norm=False)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(config)

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return the inputs of the attention for columns, ``[.., 2 * hidden]``."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)

    def outputs(self, features: Tensor, attended: Tensor) -> Tensor:
        """Return hidden states ``[.., hidden]`` of columns.

        ``attended`` [.., heads * head_dim]: output of the attention.
        """
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        x = residual + self.self_attn.o_proj(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def attended(
        self, q: Tensor, context: KeysValues, seen: Tensor, own: list[KeysValues]
    ) -> Tensor:
        """Attend with ``q`` [b, columns, heads, head_dim]; return [b, columns, heads * head_dim].

        Each column attends to the positions of ``context`` [b, num_kv_heads, T, head_dim] that are
        True in ``seen`` [b, columns, T]. In addition, column i attends to column i of each later
        pass, whose keys and values are in ``own`` [b, columns, num_kv_heads, head_dim].
        """
        keys, values = context
        b, columns, _, dim = q.shape
        q = q.view(b, columns, self.num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        far = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1)
        scores = [far.masked_fill(~seen[:, None, None], HIDDEN)]
        weigh = [partial(_weigh_far, values)]
        for k, v in own:
            k, v = (each.transpose(1, 2).unsqueeze(2) for each in (k, v))  # [b, kv, 1, columns, d]
            scores.append((q * k).sum(dim=-1, keepdim=True))
            weigh.append(partial(torch.mul, v))
        return attend(scores, weigh).permute(0, 3, 1, 2, 4).reshape(b, columns, -1)


def _weigh_far(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the context's values.

    ``weights`` [b, kv, group, columns, T]; ``values`` [b, kv, T, dim].
    """
    return (weights.flatten(2, 3) @ values).view(*weights.shape[:-1], -1)


class EagleFrame(Vocabulary):
    """The modules of an EAGLE-3 head outside its layer: input projection, norms and output."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, midlayer: EagleLayer | None = None) -> None:
        super().__init__(config)
        taps, width, eps = len(config.taps), config.target_hidden_size, config.norm_eps
        self.input_norm = RmsNorm(taps * width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([RmsNorm(width, eps) for _ in range(taps)]) if config.fc_norm else None
        )
        self.fc = nn.Linear(taps * width, config.hidden_size, bias=config.fc_bias)
        if midlayer is not None:  # Added here to keep the order of the parameters in files.
            self.midlayer = midlayer
        self.norm = RmsNorm(config.hidden_size, eps)

    def features(self, taps: Tensor) -> Tensor:
        """Project taps to features, ``[.., num_taps * target_hidden] -> [.., hidden]``."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            taps = torch.cat(normed, dim=-1)
        out: Tensor = self.fc(taps)
        return out

    def next_features(self, hidden: Tensor) -> Tensor:
        """Return the head's own output as features, for positions the target has not computed."""
        out: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map the layer's output for columns to logits, ``[.., hidden] -> [.., draft_vocab]``."""
        return self.project(self.norm(hidden))


class EagleHead(EagleFrame):
    """The complete EAGLE-3 head, with its layer. All token ids are the target's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, EagleLayer(config))
        self.rotary = RotaryTable(config.rope, config.head_dim)
        init_weights(self)

    def frame(self) -> EagleFrame:
        """Return a view of the head without its layer; all other modules are shared."""
        return without(self, "midlayer", EagleFrame)

    def context(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> KeysValues:
        """Return keys and values ``[.., num_kv_heads, head_dim]`` of columns.

        ``features`` [.., hidden]: features of the preceding positions. ``token_ids`` [..]: tokens
        at ``positions`` [..].
        """
        x = self.midlayer.inputs(self.embed(token_ids), features)
        return self.midlayer.self_attn.keys_values(x, self.rotary(positions))

    def forward(self, token_ids: Tensor, taps: Tensor, num_passes: int) -> list[Tensor]:
        """Compute, for training, hidden states of ``num_passes`` passes over whole sequences.

        ``token_ids`` [b, T] and ``taps`` [b, T, num_taps * target_hidden] belong to the same
        positions. Pass ``k`` returns ``[b, T - 1 - k, hidden]``, the input of `logits`. Its column
        ``i`` predicts token ``i + 2 + k``: its last ``k`` features are the head's own output, as in
        drafting ("training-time test").
        """
        length = token_ids.shape[1]
        features = self.features(taps[:, :-1])
        seen = torch.ones(length - 1, length - 1, dtype=torch.bool, device=taps.device).tril()
        positions = torch.arange(1, length, device=taps.device).expand(len(taps), -1)
        first = self.context(features, token_ids[:, 1:], positions)
        keys, values = (each.transpose(1, 2) for each in first)
        own: list[KeysValues] = []
        found = []
        for index in range(num_passes):
            count = length - 1 - index
            features = features[:, :count]
            own = [(k[:, :count], v[:, :count]) for k, v in own]
            x = self.midlayer.inputs(self.embed(token_ids[:, 1 + index :]), features)
            rotary = self.rotary(positions[:, index:])
            if index:  # The context already has the KV of the first pass.
                own.append(self.midlayer.self_attn.keys_values(x, rotary))
            q = self.midlayer.self_attn.queries(x, rotary)
            mask = seen[None, :count].expand(len(taps), -1, -1)
            hidden = self.midlayer.outputs(
                features, self.midlayer.attended(q, (keys, values), mask, own)
            )
            found.append(hidden)
            features = self.next_features(hidden)
        return found
