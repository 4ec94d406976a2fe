"""Common parts of trained heads: their shape, their layers, and weights borrowed from the target.

A head is a small network that reads hidden states of the target (its taps) and drafts. The modules
compute whole sequences, for training; in serving, kernel passes use the same matrices in packed
form (packing.py). A head without its own embedding or output layer borrows the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ....core.model.description.rope import RopeSpec, attention_scaling, inverse_frequencies
from ....core.ops.batch import Taps
from ....core.ops.kv_pool import KvShape
from ....core.ops.weights import Table, table_rows

KeysValues: TypeAlias = tuple[Tensor, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]
MOST_PASSES = 64  # maximum number of passes per draft of a head that reads its own output
HIDDEN = -1e30  # masked score; finite, so that a row with only masked scores does not become NaN


@dataclass(frozen=True, kw_only=True)
class TapConfig:
    """Configuration of any head: the hidden states that it reads and the tokens that it drafts."""

    kind: ClassVar[str]  # name of the kind in the table of kinds, and as a source of drafts
    first_position: ClassVar[int] = 0  # first position that has head KV

    # Whether head KV after a prefix hit depends on the feature of the hit's last position.
    keeps_page_features: ClassVar[bool] = False

    vocab_size: int  # vocabulary size of the target
    draft_vocab_size: int  # number of ids that the head can draft
    target_hidden_size: int
    taps: Taps  # boundaries of the target's residual stream, see `Wanted.taps`
    hidden_size: int

    @property
    def is_reduced(self) -> bool:
        """Whether the head drafts only a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def tokens_per_pass(self) -> int:
        """Number of draft tokens on a path that one pass of the head yields."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Maximum length of a draft in tokens.

        By default this is what one pass yields. A head that can read its own output may run more
        passes.
        """
        return self.tokens_per_pass

    @property
    def kv_shape(self) -> KvShape:
        """Layers, KV heads and head size of the head's KV; by default it has no KV."""
        return KvShape(0, 1, 1)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TapConfig):
    """Shape of a head with layers."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    max_model_len: int  # tokens
    norm_eps: float = 1e-6
    attention_bias: bool = False
    owns_embedding: bool = False  # whether the head has an embedding or borrows the target's
    owns_output: bool = False  # whether the head has an output layer or borrows the target's

    @property
    @override
    def kv_shape(self) -> KvShape:
        return KvShape(self.num_layers, self.num_kv_heads, self.head_dim)


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[.., size] -> [.., size]``."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class OutputLayer(nn.Linear):
    """A linear layer without bias that computes logits. In serving, they are float32."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class Mlp(nn.Module):
    """The gated MLP of Llama's layers."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[.., hidden] -> [.., hidden]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Projections(nn.Module):
    """Projections of queries, keys, values and output; the layers compute the attention itself."""

    def __init__(self, config: HeadConfig, width: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale: float = config.head_dim**-0.5
        q_width, kv_width = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Return rotated and scaled queries, ``[.., width] -> [.., num_heads, head_dim]``."""
        q = self._heads(self.q_proj, self.q_norm, x)
        return rotate(q, rotary) * self.scale

    def keys_values(self, x: Tensor, rotary: Rotary) -> KeysValues:
        """Return rotated keys and values, ``[.., width] -> [.., num_kv_heads, head_dim]`` each."""
        k = self._heads(self.k_proj, self.k_norm, x)
        return rotate(k, rotary), self._heads(self.v_proj, None, x)

    def _heads(self, linear: nn.Module, norm: nn.Module | None, x: Tensor) -> Tensor:
        heads: Tensor = linear(x).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        return heads


class RotaryTable(nn.Module):
    """Computes cos and sin of any positions on demand."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        super().__init__()
        # The frequencies are not a buffer, because casting the module to bfloat16 would cast them.
        self._frequencies = inverse_frequencies(spec, head_dim)
        self.scaling = attention_scaling(spec)

    def forward(self, positions: Tensor) -> Rotary:
        """Return cos and sin ``[.., 1, head_dim / 2]`` of positions ``[..]``, in float32."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.unsqueeze(-2), sin.unsqueeze(-2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to the halves of ``x`` [.., heads, head_dim] (arXiv 2104.09864)."""
    cos, sin = rotary
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Head(nn.Module):
    """The network of a head.

    ``draft_ids`` [draft_vocab_size]: the target's id of each id that the head can draft; None if it
    can draft all.
    """

    draft_ids: Tensor | None

    def __init__(self, config: TapConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def lacks_output(self) -> bool:
        """Whether the head has no output layer and must use the target's."""
        return False

    def borrow(
        self,
        embedding: Table | None = None,
        output: Tensor | Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take missing weights from the target; do nothing unless a kind overrides it."""


class Vocabulary(Head):
    """A head with an embedding and an output layer: its own, or borrowed from the target."""

    config: HeadConfig
    known_ids: Tensor  # [vocab] the head's id of each target id, or -1

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, hidden) if config.owns_embedding else None
        )
        self.lm_head = OutputLayer(hidden, config.draft_vocab_size) if config.owns_output else None
        if config.is_reduced:
            self.set_draft_ids(torch.arange(config.draft_vocab_size))
        self._table: Table | None = None
        self._output: Callable[[Tensor], Tensor] | None = None

    @property
    @override
    def lacks_output(self) -> bool:
        return self.lm_head is None

    def set_draft_ids(self, draft_ids: Tensor) -> None:
        """Set the target's ids that the head can draft, [draft_vocab], all distinct.

        Must be called before `borrow`. Raises ValueError for a wrong number of ids.
        """
        if len(draft_ids) != self.config.draft_vocab_size:
            raise ValueError(
                f"expected {self.config.draft_vocab_size} draft ids, got {len(draft_ids)}"
            )
        self.draft_ids = draft_ids.to(torch.int64)
        known = torch.full((self.config.vocab_size,), -1, dtype=torch.int64)
        known[self.draft_ids.cpu()] = torch.arange(len(draft_ids))
        self.register_buffer("known_ids", known.to(draft_ids.device), persistent=False)

    def borrow(
        self,
        embedding: Table | None = None,
        output: Tensor | Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the missing weights from the target; they are neither trained nor saved.

        ``embedding``: table [vocab, hidden]. ``output``: the target's matrix [vocab, hidden], from
        which a reduced head takes its rows, or a function that returns logits of the head's ids.
        """
        if embedding is not None and self.embed_tokens is None:
            self._table = embedding
        if output is None or self.lm_head is not None:
            return
        if isinstance(output, Tensor):
            rows = output if self.draft_ids is None else output[self.draft_ids.to(output.device)]
            self._output = lambda x: F.linear(x, rows.to(x.dtype))
        else:
            self._output = output

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings ``[.., hidden]`` of the target's ids ``[..]``.

        Raises ValueError if the head neither has nor borrows an embedding.
        """
        if self.embed_tokens is not None:
            found: Tensor = self.embed_tokens(token_ids)
            return found
        return table_rows(self.table, token_ids)

    @property
    def table(self) -> Table:
        """The embedding table, [vocab, hidden].

        Raises ValueError if the head neither has nor borrows one.
        """
        own = self.embed_tokens
        table = self._table if own is None else own.weight.detach()
        if table is None:
            raise ValueError("the head has no embedding and must use the target's")
        return table

    @property
    def output(self) -> Callable[[Tensor], Tensor] | None:
        """The borrowed output layer, or None."""
        return self._output

    def project(self, hidden: Tensor) -> Tensor:
        """Map hidden states to logits, ``[.., hidden] -> [.., draft_vocab]``.

        Raises ValueError if the head neither has nor borrows an output layer.
        """
        output = self._output if self.lm_head is None else self.lm_head
        if output is None:
            raise ValueError("the head has no output layer and must use the target's")
        logits: Tensor = output(hidden)
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Convert ids of the head to the target's ids, ``[..] -> [..]``."""
        return draft_ids if self.draft_ids is None else self.draft_ids[draft_ids]


_Frame = TypeVar("_Frame", bound=Vocabulary)


def without(head: Vocabulary, layers: str, kind: type[_Frame]) -> _Frame:
    """Return a view of a head without the module named ``layers``, as an instance of ``kind``.

    The view shares all other modules with the head, but does not keep its layers in memory.
    """
    frame = kind.__new__(kind)
    frame.__dict__.update(head.__dict__)
    frame._modules = {name: each for name, each in head._modules.items() if name != layers}
    return frame


def attend(scores: list[Tensor], values: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Compute attention over several groups of keys with one softmax.

    ``scores[i]`` [.., keys]: scores of group ``i``. ``values[i]`` maps the weights of group ``i``
    to the weighted sum of its values.
    """
    weights = torch.cat(scores, dim=-1).float().softmax(dim=-1)
    parts = torch.split(weights.to(scores[0].dtype), [s.shape[-1] for s in scores], dim=-1)
    outs = [weigh(part) for weigh, part in zip(values, parts, strict=True)]
    return torch.stack(outs).sum(dim=0) if len(outs) > 1 else outs[0]


def init_weights(module: nn.Module) -> None:
    """Draw matrices from a normal distribution; scale the n residual outputs by 1 / sqrt(n)."""
    outputs = ("o_proj", "down_proj")
    num_outputs = sum(name.endswith(outputs) for name, _ in module.named_modules())
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            scale = 1.0 / math.sqrt(max(1, num_outputs)) if name.endswith(outputs) else 1.0
            nn.init.normal_(each.weight, std=0.02 * scale)
        if isinstance(each, nn.Linear) and each.bias is not None:
            nn.init.zeros_(each.bias)
