"""Tiny heads for a tiny target: what tests need of each kind of head.

A new kind is a `TinyHead` here, and a line of `TINY`.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.description.config import DecoderConfig, LayerSpec
from foretoken.core.model.description.rope import RopeSpec
from foretoken.core.model.description.tensors import (
    FINAL_NORM,
    MTP_EMBEDDING_NORM,
    MTP_HIDDEN_NORM,
    MTP_PROJECTION,
    layer_prefix,
)
from foretoken.core.model.drafting.mtp import MtpLayer, mtp_config
from foretoken.core.model.weights.assembly import Assembly
from foretoken.core.ops.kv_pool import KvShape
from foretoken.draft.heads.block_network import BlockConfig, BlockHead
from foretoken.draft.heads.common.layers import (
    Head,
    KeysValues,
    Mlp,
    Projections,
    RmsNorm,
    RotaryTable,
)
from foretoken.draft.heads.eagle_network import EagleConfig, EagleHead
from foretoken.draft.heads.joined import JoinedHead, lend
from foretoken.draft.heads.joined import join as pack
from foretoken.draft.heads.kinds import save_head
from foretoken.draft.heads.medusa import MedusaConfig, MedusaHead
from foretoken.draft.heads.mtp import MtpConfig, join_mtp

TARGET = DecoderConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope=RopeSpec(),
    max_model_len=512,
    layers=(LayerSpec(),) * 4,
)


def _shape(target: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "taps": (1, 2, target.num_layers) if target.num_layers > 1 else (0, 1),
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rope": target.rope,
        "max_model_len": target.max_model_len,
    }


def block_config(target: DecoderConfig = TARGET, **changes: Any) -> BlockConfig:
    """Two layers, blocks of 4, a Markov head of rank 6."""
    usual = {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "markov_rank": 6}
    return BlockConfig(**(_shape(target) | usual | changes))


def eagle_config(target: DecoderConfig = TARGET, **changes: Any) -> EagleConfig:
    """The one layer."""
    return EagleConfig(**(_shape(target) | {"num_layers": 1} | changes))


def medusa_config(target: DecoderConfig = TARGET, **changes: Any) -> MedusaConfig:
    """Four heads of one block each."""
    return MedusaConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        taps=(target.num_layers,),
        **({"num_heads": 4} | changes),
    )


class Text(NamedTuple):
    """The tokens of a request, and what its target had computed of them from nothing."""

    target: Decoder
    token_ids: list[int]
    taps: Tensor  # [len(token_ids), num_taps * hidden]; 0 for the last token, which is not computed

    @property
    def last(self) -> int:
        """Position of the last token."""
        return len(self.token_ids) - 1


Behind: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Tokens that were drafted behind a text, to the logits of what follows, [ids of the head]."""


class TinyHead(ABC):
    """A small head of one kind, and the drafts of its plain network, computed without a cache."""

    tokens_per_pass: int  # tokens that one pass of it drafts

    @abstractmethod
    def make(self, target: DecoderConfig) -> Head:
        """The head; `random_head` draws its matrices."""

    @abstractmethod
    def behind(self, head: Any, text: Text) -> Behind:
        """Read a text at once, with the forward pass of training, if the head has one."""

    def head_kv(self, head: Any, text: Text, first: int) -> list[KeysValues]:
        """Head KV of each layer from position ``first`` to the one before the last token."""
        return []

    def save(self, head: Any, folder: Path) -> None:
        """Write the head's files."""
        save_head(head, folder)


class TinyBlock(TinyHead):
    """A block head; ``changes`` are of `block_config`."""

    def __init__(self, tokens_per_pass: int = 4, **changes: Any) -> None:
        self.tokens_per_pass = tokens_per_pass
        self._changes = changes

    def make(self, target: DecoderConfig) -> BlockHead:
        return BlockHead(block_config(target, **self._changes))

    def behind(self, head: BlockHead, text: Text) -> Behind:
        anchors = torch.tensor([[text.last]])
        hidden = head(torch.tensor([text.token_ids]), text.taps[None], anchors)[0, 0]

        def logits(drafted: Sequence[int]) -> Tensor:
            before = torch.tensor([text.token_ids[-1], *drafted])
            return head.logits(hidden[: len(before)], before)[-1]

        return logits

    def head_kv(self, head: BlockHead, text: Text, first: int) -> list[KeysValues]:
        return head.context(text.taps[first : text.last], torch.arange(first, text.last))


class TinyReduced(TinyBlock):
    """A block head of a part of the target's vocabulary."""

    def make(self, target: DecoderConfig) -> BlockHead:
        count = min(100, target.vocab_size // 2 - 2)
        changes = {"draft_vocab_size": count, "markov_vocab_size": count}
        head = BlockHead(block_config(target, **changes))
        head.set_draft_ids(torch.arange(count) * 2 + 3)
        return head


class TinyEagle(TinyHead):
    """An EAGLE-3 head."""

    tokens_per_pass = 1

    def make(self, target: DecoderConfig) -> EagleHead:
        return EagleHead(eagle_config(target))

    def behind(self, head: EagleHead, text: Text) -> Behind:
        def logits(drafted: Sequence[int]) -> Tensor:
            depth = len(drafted)
            ids = torch.tensor([[*text.token_ids, *drafted]])
            taps = torch.cat([text.taps, text.taps.new_zeros(depth, text.taps.shape[1])])
            return head.logits(head(ids, taps[None], depth + 1)[depth][0, text.last - 1])

        return logits

    def head_kv(self, head: EagleHead, text: Text, first: int) -> list[KeysValues]:
        before = head.features(text.taps[first - 1 : text.last - 1])
        ids = torch.tensor(text.token_ids[first : text.last])
        return [head.context(before, ids, torch.arange(first, text.last))]


class PlainMtp(Head):
    """An MTP layer of a Qwen3 model in plain torch, computed over whole texts."""

    def __init__(self, target: DecoderConfig) -> None:
        kv = KvShape(1, target.num_kv_heads, target.head_dim)
        hidden, eps = target.hidden_size, target.norm_eps
        super().__init__(
            MtpConfig(
                vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size,
                target_hidden_size=hidden, hidden_size=hidden, taps=(target.num_layers,), kv=kv,
            )
        )  # fmt: skip
        width = {"intermediate_size": target.intermediate_size, "num_layers": 1}
        shape = eagle_config(target, **width)
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            RmsNorm(hidden, eps) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn = Projections(shape, hidden, qk_norm=True)
        self.mlp = Mlp(shape)
        self.rotary = RotaryTable(target.rope, target.head_dim)

    def borrow(self, embedding: Any = None, output: Any = None) -> None:
        self.table = embedding

    def layer(self, target: OwnDecoder) -> MtpLayer:
        """The same layer by the kernels of its target."""
        own = {
            "norm.weight": FINAL_NORM,
            "enorm.weight": MTP_EMBEDDING_NORM,
            "hnorm.weight": MTP_HIDDEN_NORM,
            "eh_proj.weight": f"{MTP_PROJECTION}.weight",
        }
        tensors = {
            own.get(name, layer_prefix(0) + name): tensor
            for name, tensor in self.state_dict().items()
        }
        one = mtp_config(target.config)
        assembly = Assembly(
            one, tensors.__getitem__, target.ops, target.dtype, target.device, keeps_packed=False
        )
        found = assembly.mtp(target.weights, None)
        decoder = OwnDecoder(one, found.decoder, target.ops)
        return MtpLayer(decoder, found.embedding_norm, found.hidden_norm, found.projection, None)

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """The layer's input for tokens ``[n]`` and the states before them ``[n, hidden]``."""
        embedded = F.embedding(token_ids, self.table)
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1))

    def keys_values(self, x: Tensor, first: int) -> KeysValues:
        """``[n, num_kv_heads, head_dim]`` of inputs at positions from ``first`` on."""
        rotary = self.rotary(torch.arange(first, first + len(x)))
        return self.self_attn.keys_values(self.input_layernorm(x), rotary)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs ``[n, hidden]`` from position 1 on to what the final norm makes of them."""
        rotary = self.rotary(torch.arange(1, 1 + len(x)))
        q = self.self_attn.queries(self.input_layernorm(x), rotary).transpose(0, 1)
        k, v = (each.transpose(0, 1) for each in self.keys_values(x, 1))
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        x = x + self.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


class TinyMtp(TinyHead):
    """A layer of the target's own kind."""

    tokens_per_pass = 1

    def make(self, target: DecoderConfig) -> PlainMtp:
        return PlainMtp(target)

    def behind(self, head: PlainMtp, text: Text) -> Behind:
        states = _final_states(text)

        def logits(drafted: Sequence[int]) -> Tensor:
            x = head.inputs(torch.tensor(text.token_ids[1:]), states)
            out = head(x)
            for token_id in drafted:
                x = torch.cat((x, head.inputs(torch.tensor([token_id]), out[-1:])))
                out = head(x)
            return F.linear(out[-1], head.table)

        return logits

    def head_kv(self, head: PlainMtp, text: Text, first: int) -> list[KeysValues]:
        states, ids = _final_states(text), torch.tensor(text.token_ids[1 : text.last])
        k, v = head.keys_values(head.inputs(ids, states[:-1]), 1)
        return [(k[first - 1 :], v[first - 1 :])]


def _final_states(text: Text) -> Tensor:
    """The output of the target's final norm for all tokens but the last."""
    norm, ops = text.target.weights.final_norm, text.target.ops
    return ops.norm(text.taps[: text.last].contiguous(), norm)


class TinyMedusa(TinyHead):
    """Medusa heads."""

    tokens_per_pass = 4

    def make(self, target: DecoderConfig) -> MedusaHead:
        return MedusaHead(medusa_config(target))

    def behind(self, head: MedusaHead, text: Text) -> Behind:
        state = _final_states(text)[-1]
        return lambda drafted: head.logits(state, len(drafted))

    def save(self, head: MedusaHead, folder: Path) -> None:
        save_medusa(head, folder)


# Tests of all kinds of heads take them from here: one of each kind in `KINDS`, by its name there,
# and the target's own layer.
TINY: dict[str, TinyHead] = {
    "block": TinyBlock(5, block_size=5),
    "eagle3": TinyEagle(),
    "medusa": TinyMedusa(),
    "mtp": TinyMtp(),
}
VARIANTS: dict[str, TinyHead] = {
    "dflash": TinyBlock(block_size=5, predicts_at_anchor=False, markov_rank=0, windows=(None, 12)),
    "rnn": TinyBlock(markov_kind="rnn"),
    "reduced": TinyReduced(),
}
MANY = (*TINY, *VARIANTS)  # all kinds, and dialects that draft in a way of their own


def tiny(name: str) -> TinyHead:
    """The tiny head of a kind or a variant."""
    found = (TINY | VARIANTS).get(name)
    if found is None:
        raise ValueError(f"no tiny head {name!r}: a kind of head needs one in TINY of {__file__}")
    return found


def kinds_with_kv() -> list[str]:
    """Names of the kinds that keep KV of their own."""
    return [name for name in TINY if tiny(name).make(TARGET).config.kv_shape.num_layers]


def random_head(name: str, target: Decoder) -> Head:
    """A head of random weights, large enough that what it reads shows in what it drafts."""
    torch.manual_seed(11)
    head = tiny(name).make(target.config)
    for parameter_name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            std = 0.5 if "markov" in parameter_name else 0.25
            torch.nn.init.normal_(parameter, std=std)
    return head


def join_random(name: str, target: Decoder) -> JoinedHead:
    """The same, joined to its target."""
    return join(random_head(name, target), target)


def join(head: Head, target: Decoder) -> JoinedHead:
    """A head joined to its target, and `plain` of it."""
    twin = copy.deepcopy(head)
    twin.to(target.dtype).eval().requires_grad_(False)
    twin.borrow(target.weights.embedding, target.weights.embedding)
    lend(head, target, target.weights.embedding.clone)
    joined = (
        join_mtp(head.layer(target), target) if isinstance(head, PlainMtp) else pack(head, target)
    )
    _PLAIN[joined] = twin
    return joined


_PLAIN: WeakKeyDictionary[JoinedHead, Head] = WeakKeyDictionary()


def plain(joined: JoinedHead) -> Any:
    """The head of `join` as torch computes it, without its target's kernels."""
    return _PLAIN[joined]


def save_medusa(head: MedusaHead, folder: Path, *, pickled: bool = False) -> None:
    """Save heads as Medusa-1 publishes them: alone, numbered, and a config of a few values."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "base_model_name_or_path": "target",
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_blocks,
    }
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {
        name.removeprefix("medusa_head."): tensor.detach().clone()
        for name, tensor in head.state_dict().items()
    }
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
