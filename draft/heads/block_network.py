"""BlockHead: drafts a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark).

The taps of a position are the hidden states of the target that the head reads. The head's context
is one vector per position, ``hidden_norm(fc(taps))``, from which every layer computes its own keys
and values. So the KV of a position depends on the taps of that position only. A block is the last
token (the anchor) and mask tokens after it. Its rows attend to each other and to the whole context
before the anchor. A Markov head adds a bias to the logits of each token. The bias depends on the
token before it and needs no further pass.
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

    block_size: int  # number of rows of a block, the anchor included
    mask_token_id: int
    predicts_at_anchor: bool = True  # whether the anchor's row predicts (DSpark: yes, DFlash: no)
    markov_rank: int = 0  # 0: no Markov head
    markov_kind: MarkovKind = "vanilla"
    markov_vocab_size: int = 0  # size of the Markov head's input vocabulary; 0: the target's
    windows: tuple[int | None, ...] = ()  # [num_layers] sliding windows in tokens; empty: no window

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size - (not self.predicts_at_anchor)

    @property
    def tokens_per_pass(self) -> int:
        """Number of tokens that a block drafts: one pass computes a block."""
        return self.num_drafted


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3 whose rows attend to injected KV and to each other."""

    def __init__(self, config: BlockConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.num_kv_heads = config.num_kv_heads
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Projections(config, config.hidden_size, qk_norm=True)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary, context: KeysValues, seen: Tensor) -> Tensor:
        """Map blocks ``x`` [b, n, rows, hidden] to the same shape.

        ``context`` [b, num_kv_heads, T, head_dim]: injected keys and values. ``seen``
        [b, n, rows or 1, T]: whether each row attends to a position of the context.
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
        """Attend with ``q`` [b, n, rows, heads, dim]; return ``[b, n, rows, heads * dim]``."""
        b, n, rows, _, dim = q.shape
        keys, values = context
        # The queries of all blocks are joined for one product: [b, kv, n * group * rows, dim].
        q = q.view(b, n, rows, self.num_kv_heads, -1, dim).permute(0, 3, 1, 4, 2, 5)
        flat = q.flatten(2, 4)
        far = (flat @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1)
        far = far.masked_fill(~seen[:, None, :, None], HIDDEN)
        own_k, own_v = (each.permute(0, 3, 1, 2, 4) for each in (k, v))  # [b, kv, n, rows, dim]
        near = (q.flatten(3, 4) @ own_k.transpose(-1, -2)).view(*q.shape[:-1], rows)
        out = attend([far, near], [partial(_weigh_far, values), partial(_weigh_near, own_v)])
        return out.permute(0, 2, 4, 1, 3, 5).reshape(b, n, rows, -1)


def _weigh_far(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the context's values.

    ``weights`` [b, kv, n, group, rows, T]; ``values`` [b, kv, T, dim].
    """
    return (weights.flatten(2, 4) @ values).view(*weights.shape[:-1], -1)


def _weigh_near(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the values of each block's own rows.

    ``weights`` [b, kv, n, group, rows, rows]; ``values`` [b, kv, n, rows, dim].
    """
    return (weights.flatten(3, 4) @ values).view(*weights.shape[:-1], -1)


class MarkovHead(nn.Module):
    """The Markov head: a low-rank bias on a token's logits from the token before it (DSpark)."""

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
        """Return the bias ``[.., draft_vocab]`` and the next state ``[.., rank]``.

        Only the kind "rnn" changes the state. ``before`` [..]: ids of the previous tokens in this
        head's input vocabulary, negative if unknown.
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
    """The modules of a block head outside its layers: input projection, output and Markov head."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, layers: nn.ModuleList | None = None) -> None:
        super().__init__(config)
        self.fc = nn.Linear(
            len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RmsNorm(config.hidden_size, config.norm_eps)
        if layers is not None:  # Added here to keep the order of the parameters in files.
            self.layers = layers
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def context_vectors(self, taps: Tensor) -> Tensor:
        """Project taps to the head's width, ``[.., num_taps * target_hidden] -> [.., hidden]``.

        All layers compute their keys and values from the result.
        """
        out: Tensor = self.hidden_norm(self.fc(taps))
        return out

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Map hidden states to logits, ``[.., num, hidden] -> [.., num, draft_vocab]``.

        ``before`` [.., num]: the token before each drafted token; the first one is the anchor.
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
        """Return the ids of tokens in the Markov head's input vocabulary, or -1 if unknown."""
        size = self.config.markov_vocab_size or self.config.vocab_size
        if size == self.config.vocab_size or self.draft_ids is None:
            return token_ids
        return self.known_ids[token_ids]

    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the Markov head's initial state, zeros [.., rank], for ``hidden`` [.., hidden]."""
        return hidden.new_zeros((*hidden.shape[:-1], self.config.markov_rank))


class BlockHead(BlockFrame):
    """The complete block head, with its layers. All token ids are the target's."""

    def __init__(self, config: BlockConfig) -> None:
        windows = config.windows or (None,) * config.num_layers
        super().__init__(config, nn.ModuleList([BlockLayer(config, window) for window in windows]))
        self.rotary = RotaryTable(config.rope, config.head_dim)
        init_weights(self)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    def frame(self) -> BlockFrame:
        """Return a view of the head without its layers; all other modules are shared."""
        return without(self, "layers", BlockFrame)

    def context(self, taps: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return the keys and values ``[.., num_kv_heads, head_dim]`` of each layer.

        ``taps`` [.., num_taps * target_hidden]: taps at ``positions`` [..].
        """
        features = self.context_vectors(taps)
        rotary = self.rotary(positions)
        return [layer.self_attn.keys_values(features, rotary) for layer in self.decoder_layers()]

    def forward(self, token_ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """Compute, for training, hidden states of blocks in whole sequences.

        Returns ``[b, n, num_drafted, hidden]`` after the final norm; state ``i`` predicts the
        token at ``anchor + 1 + i``. ``token_ids`` [b, T] and ``taps`` [b, T, num_taps *
        target_hidden] belong to the same positions. ``anchors`` [b, n]: positions of the blocks'
        anchors.
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
        """Return the embeddings of anchors and masks, ``[b, n, block_size, hidden]``."""
        masks = anchor_ids.new_full(
            (*anchor_ids.shape, self.config.block_size - 1), self.config.mask_token_id
        )
        return self.embed(torch.cat((anchor_ids.unsqueeze(-1), masks), dim=-1))

    def decoder_layers(self) -> list[BlockLayer]:
        """Return the layers in order."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]


def _within(seen: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Restrict ``seen`` [b, n, T] to a sliding window; return a mask [b, n, rows or 1, T]."""
    if window is None:
        return seen.unsqueeze(2)
    places = torch.arange(seen.shape[-1], device=seen.device)
    return seen.unsqueeze(2) & (places > positions.unsqueeze(-1) - window)
