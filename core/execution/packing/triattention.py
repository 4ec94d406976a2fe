"""TriAttention: keep the tokens that later queries are likely to attend to (arXiv 2604.04921).

Before RoPE turns them, queries of a head gather around one direction. So how much a later query
attends to a key follows, pair of dimensions by pair, from the mean query, the key and the distance
between the two. What spreads around the mean adds the key's length. The means are measured once for
a model (`QueryStats`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import override

from ...errors import InvalidRequest
from ...interface.extras.packing import KvPack
from ...interface.plan import ScheduledRequest
from ...model.decoder import OwnDecoder
from ...model.description.rope import RopeTable
from ...ops.kv_pool import KVPool
from ...ops.weights import AttentionWeights, table_rows
from .policies import KeepPolicy

OFFSETS = tuple(2**power for power in range(17))  # distances of later queries: 1 to 65,536 tokens
FORMAT = "foretoken query statistics 2"
NUM_SIGN_ROWS = 1024  # of the embedding, whose signs identify the model


@dataclass(frozen=True, slots=True)
class QueryStats:
    """Queries of a model before RoPE, in pairs of dimensions, by layer and query head.

    ``mean`` [num_layers, num_heads, head_dim / 2] complex, ``mean_abs`` the same shape, float32.
    ``model`` identifies the weights.
    """

    mean: Tensor
    mean_abs: Tensor
    model: str

    def save(self, path: Path) -> None:
        """Write a file. Raises OSError."""
        tensors = {"mean": torch.view_as_real(self.mean).contiguous(), "mean_abs": self.mean_abs}
        # Not save_file, whose errors are no OSError.
        path.write_bytes(save(tensors, metadata={"format": FORMAT, "model": self.model}))

    @classmethod
    def load(cls, path: Path, decoder: OwnDecoder) -> QueryStats:
        """Read a file of `save`. Raises `InvalidRequest` for one that is not of this model."""
        try:
            with safe_open(path, framework="pt") as file:
                known = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"kv_evict_stats: {error}", param="kv_evict_stats") from None
        if known.get("format") != FORMAT or {*tensors} != {"mean", "mean_abs"}:
            message = f"kv_evict_stats: {path} is no file of foretoken calibrate"
            raise InvalidRequest(message, param="kv_evict_stats")
        if known.get("model") != model_id(decoder):
            message = f"kv_evict_stats: {path} was measured on another model"
            raise InvalidRequest(message, param="kv_evict_stats")
        heads, mean, mean_abs = decoder.part_heads(0), tensors["mean"], tensors["mean_abs"]
        shape = (decoder.config.num_layers, heads.num_heads, heads.head_dim // 2)
        if (mean.shape, mean_abs.shape) != ((*shape, 2), shape) or not (
            mean.dtype == mean_abs.dtype == torch.float32
        ):
            message = f"kv_evict_stats: {path} has tensors of other shapes than the model's queries"
            raise InvalidRequest(message, param="kv_evict_stats")
        return cls(torch.view_as_complex(mean), mean_abs, known["model"])


def model_id(decoder: OwnDecoder) -> str:
    """Identify the weights by the model's shape, its norms, and signs of its embedding.

    These are the same whatever the weights are stored as: matrices may be quantised, and a factor
    of the embedding rounded.
    """
    weights = decoder.weights
    digest = hashlib.blake2b(repr(decoder.config.layers).encode(), digest_size=16)
    norms = [norm for layer in weights.layers for norm in (layer.mixer_norm, layer.mlp_norm)]
    for norm in (*norms, weights.final_norm):
        if norm is not None:
            digest.update(_bytes(norm.weight.float().to(torch.bfloat16)))
    num_rows = min(NUM_SIGN_ROWS, len(weights.embedding))
    first = torch.arange(num_rows, device=decoder.device)
    digest.update(_bytes(table_rows(weights.embedding, first).signbit()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    found: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def attention_ropes(decoder: OwnDecoder) -> list[RopeTable]:
    """The RoPE of the queries of each layer, in order. Raises ValueError for other layers."""
    if len(decoder.shapes) > 1:
        raise ValueError("pages of several layouts")
    found = []
    for layer in decoder.weights.layers:
        if not isinstance(layer.mixer, AttentionWeights):
            raise ValueError("a layer without attention, or with latent KV")
        found.append(decoder.ropes[layer.mixer.place.part][layer.mixer.tables.queries])
    return found


class KeepByTriAttention(KeepPolicy):
    """Keeps the best scored tokens of each KV head, and the latest ones always."""

    def __init__(self, stats: QueryStats, ropes: Sequence[RopeTable]) -> None:
        self._mean = stats.mean
        self._spread = stats.mean_abs - stats.mean.abs()
        self._ropes = ropes

    @torch.inference_mode()
    @override
    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        places = torch.arange(pack.first, pack.stop)
        num_kept = len(places) - pack.num_packed_away
        ahead = scheduled.start - 1 + torch.tensor(OFFSETS)  # positions of later queries
        found = []
        for layer, rope in enumerate(self._ropes):
            keys = pairs(read_keys(pool, scheduled.page_ids, places, layer))
            turns = rope.turns(ahead).mean(dim=0).to(keys.device)
            scores = self._scores(keys, turns, layer)
            scores[:, -pack.num_packed_away :] = float("inf")  # the latest ones
            best = scores.topk(num_kept, dim=1).indices.sort(dim=1).values
            found.append(best + pack.first)
        return torch.stack(found)

    def _scores(self, keys: Tensor, turns: Tensor, layer: int) -> Tensor:
        """Scores [num_kv_heads, n] of keys [num_kv_heads, n, pairs] complex.

        ``turns`` [pairs]: mean turn of later queries. Each query head's scores are standardised,
        and a group's largest counts.
        """
        num_kv_heads = len(keys)
        shape = (num_kv_heads, -1, keys.shape[2])
        queries = (self._mean[layer].to(keys.device) * turns).view(shape)
        spread = self._spread[layer].to(keys.device).view(shape)
        scores = (queries @ keys.mH).real + spread @ keys.abs().mT
        scores = scores - scores.mean(dim=2, keepdim=True)
        scores = scores / scores.std(dim=2, keepdim=True).clamp_min_(1e-12)
        return scores.amax(dim=1)


def pairs(rows: Tensor) -> Tensor:
    """``[.., head_dim]`` to the pairs that RoPE turns, ``[.., head_dim / 2]`` complex."""
    first, second = rows.float().chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def read_keys(pool: KVPool, page_ids: Sequence[int], places: Tensor, layer: int) -> Tensor:
    """Keys of some places of a request, ``[num_kv_heads, len(places), head_dim]`` float32."""
    pages = torch.tensor(list(page_ids), dtype=torch.int64)
    heads = (
        torch.arange(pool.num_kv_heads).unsqueeze(1) + layer * pool.num_blocks * pool.num_kv_heads
    )
    blocks = pages[places // pool.page_size] * pool.page_blocks + heads
    at = (blocks.to(pool.data.device), (places % pool.page_size).to(pool.data.device))
    return pool.load(pool.blocks, at, torch.float32)
