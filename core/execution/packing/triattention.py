"""TriAttention: keep the tokens that later queries are likely to attend to (arXiv 2604.04921).

Before RoPE, the queries of a head cluster around one direction. So the attention of a later query
to a key can be predicted for each pair of dimensions that RoPE rotates: from the mean query, the
key and the distance between the two. The spread of the queries around their mean adds a term that
is proportional to the key's length. The means are measured once for a model (`QueryStats`).
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
from ...ops.mixers.attention import AttentionWeights
from ...ops.weights import table_rows
from .policies import KeepPolicy

OFFSETS = tuple(2**power for power in range(17))  # distances to later queries: 1 to 65,536 tokens
FORMAT = "foretoken query statistics 2"
NUM_SIGN_ROWS = 1024  # number of embedding rows whose signs identify the model


@dataclass(frozen=True, slots=True)
class QueryStats:
    """Statistics of a model's queries before RoPE, by layer, query head and pair of dimensions.

    ``mean`` [num_layers, num_heads, head_dim / 2] is complex: each pair of dimensions that RoPE
    rotates is one number. ``mean_abs``, of the same shape in float32, is the mean of the absolute
    values. ``model`` identifies the weights (`model_id`).
    """

    mean: Tensor
    mean_abs: Tensor
    model: str

    def save(self, path: Path) -> None:
        """Write the statistics to a file. Raises OSError."""
        tensors = {"mean": torch.view_as_real(self.mean).contiguous(), "mean_abs": self.mean_abs}
        # `save_file` would raise errors other than OSError.
        path.write_bytes(save(tensors, metadata={"format": FORMAT, "model": self.model}))

    @classmethod
    def load(cls, path: Path, decoder: OwnDecoder) -> QueryStats:
        """Read a file that `save` wrote.

        Raises `InvalidRequest` if the file is no such file or was measured on another model.
        """
        try:
            with safe_open(path, framework="pt") as file:
                known = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"kv_evict_stats: {error}", param="kv_evict_stats") from None
        if known.get("format") != FORMAT or {*tensors} != {"mean", "mean_abs"}:
            message = f"kv_evict_stats: {path} was not written by foretoken calibrate"
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
    """Return an id of the weights: a hash of the layers' config, the norms and embedding signs.

    The id does not depend on the storage format, because quantisation and rounding change neither
    norms nor signs.
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
    """Return the RoPE table of each layer's queries, in the order of the layers.

    Raises ValueError if a layer has no attention or has latent KV, or if the shapes of the layers'
    KV differ.
    """
    if len(decoder.shapes) > 1:
        raise ValueError("the model has KV pages of several layouts")
    found = []
    for layer in decoder.weights.layers:
        if not isinstance(layer.mixer, AttentionWeights):
            raise ValueError("the model has a layer without attention, or with latent KV")
        found.append(decoder.ropes[layer.mixer.kv.part][layer.mixer.tables.queries])
    return found


class KeepByTriAttention(KeepPolicy):
    """Policy that keeps the latest tokens, and those with the highest scores, of each KV head."""

    def __init__(self, stats: QueryStats, ropes: Sequence[RopeTable]) -> None:
        self._mean = stats.mean
        self._spread = stats.mean_abs - stats.mean.abs()
        self._ropes = ropes

    @torch.inference_mode()
    @override
    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        places = torch.arange(pack.first, pack.stop)
        num_kept = len(places) - pack.num_packed_away
        ahead = scheduled.start - 1 + torch.tensor(OFFSETS)  # positions assumed for later queries
        found = []
        for layer, rope in enumerate(self._ropes):
            keys = pairs(read_keys(pool, scheduled.page_ids, places, layer))
            turns = rope.turns(ahead).mean(dim=0).to(keys.device)
            scores = self._scores(keys, turns, layer)
            scores[:, -pack.num_packed_away :] = float("inf")  # The latest tokens are always kept.
            best = scores.topk(num_kept, dim=1).indices.sort(dim=1).values
            found.append(best + pack.first)
        return torch.stack(found)

    def _scores(self, keys: Tensor, turns: Tensor, layer: int) -> Tensor:
        """Return scores [num_kv_heads, n] of complex ``keys`` [num_kv_heads, n, head_dim / 2].

        ``turns`` [head_dim / 2]: mean RoPE rotation of later queries, as complex factors. The
        scores of each query head are standardised, and each KV head gets the largest score among
        its query heads.
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
    """Convert ``rows`` [.., head_dim] to complex numbers [.., head_dim / 2], as RoPE pairs them."""
    first, second = rows.float().chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def read_keys(pool: KVPool, page_ids: Sequence[int], places: Tensor, layer: int) -> Tensor:
    """Return the keys of one layer at the token indices ``places`` of the page table ``page_ids``.

    The result is [num_kv_heads, len(places), head_dim] float32.
    """
    pages = torch.tensor(list(page_ids), dtype=torch.int64)
    heads = (
        torch.arange(pool.num_kv_heads).unsqueeze(1) + layer * pool.num_blocks * pool.num_kv_heads
    )
    blocks = pages[places // pool.page_size] * pool.page_blocks + heads
    at = (blocks.to(pool.data.device), (places % pool.page_size).to(pool.data.device))
    return pool.load(pool.blocks, at, torch.float32)
