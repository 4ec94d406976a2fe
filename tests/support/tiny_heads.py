"""Configs of tiny heads for a tiny target."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file

from foretoken.core.model.config import DecoderConfig, LayerSpec
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.rope import RopeSpec
from foretoken.draft.heads.block_network import BlockConfig, BlockHead
from foretoken.draft.heads.eagle_network import EagleConfig, EagleHead
from foretoken.draft.heads.joined import JoinedHead, join_target
from foretoken.draft.heads.layers import Head
from foretoken.draft.heads.medusa import MedusaConfig, MedusaHead

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


def random_head(kind: str, target: Decoder) -> Head:
    """A head of random weights, large enough that what it reads shows in what it drafts."""
    torch.manual_seed(11)
    shape: dict[str, Any] = {"intermediate_size": 40}
    head: Head
    if kind == "block":
        head = BlockHead(block_config(target.config, block_size=5, **shape))
    elif kind == "dflash":
        shape |= {"predicts_at_anchor": False, "markov_rank": 0, "windows": (None, 12)}
        head = BlockHead(block_config(target.config, block_size=5, **shape))
    elif kind == "rnn":
        head = BlockHead(block_config(target.config, markov_kind="rnn", **shape))
    elif kind == "reduced":
        count = min(100, target.config.vocab_size // 2 - 2)
        shape |= {"draft_vocab_size": count, "markov_vocab_size": count}
        head = BlockHead(block_config(target.config, **shape))
        head.set_draft_ids(torch.arange(count) * 2 + 3)
    elif kind == "medusa":
        head = MedusaHead(medusa_config(target.config))
    elif kind.startswith("eagle"):
        head = EagleHead(eagle_config(target.config, **shape))
    else:
        raise ValueError(f"no kind of head {kind!r}")
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "markov" in name else 0.25)
    return head


def join_random(kind: str, target: Decoder) -> JoinedHead:
    """The same, joined to its target."""
    return join(random_head(kind, target), target)


def join(head: Head, target: Decoder) -> JoinedHead:
    """A head joined to its target, and `plain` of it."""
    twin = copy.deepcopy(head)
    twin.to(target.dtype).eval().requires_grad_(False)
    twin.borrow(target.weights.embedding, target.weights.embedding)
    joined = join_target(head, target, target.weights.embedding.clone)
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
