"""BlockHead: drafts a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark).

The head's context is one vector a position, ``hidden_norm(fc(taps))``, which every layer turns
into keys and values of its own; so the KV of a position depends on that position alone. A block is
the last token (the anchor) and mask tokens behind it. Its rows see all of the context before the
anchor and each other. A Markov head adds to the logits of each token what the token before it
says, without another pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from .common.layers import (
    HIDDEN,
    HeadConfig,
    KeysValues,
    Mlp,
    OutputLayer,
    Projections,
    RmsNorm,
    Rotary,
    RotaryTable,
    Vocabulary,
    attend,
    init_weights,
    without,
)

MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Shape of a block head."""

    kind: ClassVar[str] = "block"

    block_size: int  # rows of a block, the anchor included
    mask_token_id: int
    predicts_at_anchor: bool = True  # DSpark; without it the anchor's row predicts nothing (DFlash)
    markov_rank: int = 0  # 0: no Markov head
    markov_kind: MarkovKind = "vanilla"
    markov_vocab_size: int = 0  # ids that the Markov head reads: all, or the draft's; 0: all
    windows: tuple[int | None, ...] = ()  # [num_layers] positions that a row sees; none: all

    @property
    def num_drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - (not self.predicts_at_anchor)

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of a block."""
        return self.num_drafted


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3 whose rows attend to injected keys and values and to each other."""

    def __init__(self, config: BlockConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.num_kv_heads = config.num_kv_heads
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Projections(config, config.hidden_size, qk_norm=True)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary, context: KeysValues, seen: Tensor) -> Tensor:
        """Blocks ``x`` [b, n, rows, hidden] over a ``context`` [b, num_kv_heads, T, head_dim].

        ``seen`` [b, n, rows or 1, T]: which of the context each row sees.
        """
        normed = self.input_layernorm(x)
        q = self.self_attn.queries(normed, rotary)
        k, v = self.self_attn.keys_values(normed, rotary)
        x = x + self.self_attn.o_proj(self._attended(q, k, v, context, seen))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, context: KeysValues, seen: Tensor
    ) -> Tensor:
        """``[b, n, rows, heads, head_dim]`` of a block to ``[b, n, rows, heads * head_dim]``."""
        b, n, rows, _, dim = q.shape
        keys, values = context
        # queries of all blocks against one context: [b, kv, n * group * rows, dim]
        q = q.view(b, n, rows, self.num_kv_heads, -1, dim).permute(0, 3, 1, 4, 2, 5)
        flat = q.flatten(2, 4)
        far = (flat @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1)
        far = far.masked_fill(~seen[:, None, :, None], HIDDEN)
        own_k, own_v = (each.permute(0, 3, 1, 2, 4) for each in (k, v))  # [b, kv, n, rows, dim]
        near = (q.flatten(3, 4) @ own_k.transpose(-1, -2)).view(*q.shape[:-1], rows)
        out = attend([far, near], [partial(_weigh_far, values), partial(_weigh_near, own_v)])
        return out.permute(0, 2, 4, 1, 3, 5).reshape(b, n, rows, -1)


def _weigh_far(values: Tensor, weights: Tensor) -> Tensor:
    """``[b, kv, n, group, rows, T]`` of ``values`` [b, kv, T, dim]."""
    return (weights.flatten(2, 4) @ values).view(*weights.shape[:-1], -1)


def _weigh_near(values: Tensor, weights: Tensor) -> Tensor:
    """``[b, kv, n, group, rows, rows]`` of ``values`` [b, kv, n, rows, dim]."""
    return (weights.flatten(3, 4) @ values).view(*weights.shape[:-1], -1)


class MarkovHead(nn.Module):
    """The Markov head: a low-rank bias of the token before on the next one's logits (DSpark)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.rank, self.kind = rank, config.markov_kind
        self.markov_w1 = nn.Embedding(config.markov_vocab_size or config.vocab_size, rank)
        self.markov_w2 = OutputLayer(rank, config.draft_vocab_size)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias ``[.., draft_vocab]`` and the next state ``[.., rank]``; only "rnn" has one.

        ``before`` [..]: ids of the tokens before, as this head counts them; negative: unknown.
        """
        w = self.markov_w1(before.clamp_min(0)) * (before >= 0).unsqueeze(-1)
        if self.kind == "gated":
            w = w * torch.sigmoid(self.gate_proj(torch.cat((hidden, w), dim=-1)))
        elif self.kind == "rnn":
            gate, new, out = self.joint_proj(torch.cat((state, w, hidden), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(new)
            w = torch.tanh(out)
        return self.markov_w2(w), state


class BlockFrame(Vocabulary):
    """A head but for its layers: what joins the taps, and what makes logits of hidden states."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, layers: nn.ModuleList | None = None) -> None:
        super().__init__(config)
        self.fc = nn.Linear(
            len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RmsNorm(config.hidden_size, config.norm_eps)
        if layers is not None:  # in the order of the files
            self.layers = layers
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def context_vectors(self, taps: Tensor) -> Tensor:
        """``[.., num_taps * target_hidden]`` to ``[.., hidden]``, which every layer reads."""
        out: Tensor = self.hidden_norm(self.fc(taps))
        return out

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """``[.., num, hidden]`` to logits ``[.., num, draft_vocab]``.

        ``before`` [.., num]: the token before each, from the anchor on.
        """
        values = self.project(hidden)
        if self.markov_head is None:
            return values
        ids = self.markov_ids(before)
        if self.config.markov_kind != "rnn":
            bias: Tensor = self.markov_head(ids, hidden, self.first_state(hidden))[0]
            return values + bias
        state, biases = self.first_state(hidden[..., 0, :]), []
        for index in range(hidden.shape[-2]):
            bias, state = self.markov_head(ids[..., index], hidden[..., index, :], state)
            biases.append(bias)
        return values + torch.stack(biases, dim=-2)

    def markov_ids(self, token_ids: Tensor) -> Tensor:
        """Ids of tokens as the Markov head counts them, -1 for those that it does not know."""
        size = self.config.markov_vocab_size or self.config.vocab_size
        if size == self.config.vocab_size or self.draft_ids is None:
            return token_ids
        return self.known_ids[token_ids]

    def first_state(self, hidden: Tensor) -> Tensor:
        """The Markov head's state at the anchor, ``[.., rank]`` for ``hidden`` [.., hidden]."""
        return hidden.new_zeros((*hidden.shape[:-1], self.config.markov_rank))


class BlockHead(BlockFrame):
    """The whole head. Token ids are the target's, everywhere."""

    def __init__(self, config: BlockConfig) -> None:
        windows = config.windows or (None,) * config.num_layers
        super().__init__(config, nn.ModuleList([BlockLayer(config, window) for window in windows]))
        self.rotary = RotaryTable(config.rope, config.head_dim)
        init_weights(self)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    def frame(self) -> BlockFrame:
        """The head without its layers; both share the rest."""
        return without(self, "layers", BlockFrame)

    def context(self, taps: Tensor, positions: Tensor) -> list[KeysValues]:
        """KV of each layer from ``taps`` [.., num_taps * target_hidden] at ``positions`` [..].

        Keys and values are ``[.., num_kv_heads, head_dim]``.
        """
        features = self.context_vectors(taps)
        rotary = self.rotary(positions)
        return [layer.self_attn.keys_values(features, rotary) for layer in self.decoder_layers()]

    def forward(self, token_ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """Compute hidden states of blocks in whole sequences, ``[b, n, num_drafted, hidden]``.

        It is for training. State ``i`` is that of the token at ``anchor + 1 + i``, behind the final
        norm. ``token_ids`` [b, T] and ``taps`` [b, T, num_taps * target_hidden] of the same
        positions; ``anchors`` [b, n]: positions of the blocks' last known tokens.
        """
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        context = self.context(taps, places.expand(token_ids.shape))
        seen = places < anchors.unsqueeze(-1)
        x = self._rows(token_ids.gather(1, anchors))
        positions = anchors.unsqueeze(-1) + torch.arange(x.shape[2], device=anchors.device)
        rotary = self.rotary(positions)
        for layer, (keys, values) in zip(self.decoder_layers(), context, strict=True):
            known = keys.transpose(1, 2), values.transpose(1, 2)
            x = layer(x, rotary, known, _within(seen, positions, layer.window))
        x = cast(Tensor, self.norm(x))
        return x if self.config.predicts_at_anchor else x[:, :, 1:]

    def _rows(self, anchor_ids: Tensor) -> Tensor:
        """Embeddings of anchors and masks, ``[b, n, block, hidden]``."""
        masks = anchor_ids.new_full(
            (*anchor_ids.shape, self.config.block_size - 1), self.config.mask_token_id
        )
        return self.embed(torch.cat((anchor_ids.unsqueeze(-1), masks), dim=-1))

    def decoder_layers(self) -> list[BlockLayer]:
        """The layers, the first one first."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]


def _within(seen: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """``[b, n, T]`` to ``[b, n, rows or 1, T]``: what each row of a block sees."""
    if window is None:
        return seen.unsqueeze(2)
    places = torch.arange(seen.shape[-1], device=seen.device)
    return seen.unsqueeze(2) & (places > positions.unsqueeze(-1) - window)
