"""TriAttention: each KV head keeps its best tokens, by the paper's formula over the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.core.errors import InvalidRequest
from foretoken.core.execution.packing.calibration import measure_queries
from foretoken.core.execution.packing.triattention import (
    OFFSETS,
    KeepByTriAttention,
    QueryStats,
    attention_ropes,
    pairs,
)
from foretoken.core.interface.extras import packing
from foretoken.core.interface.extras.packing import KvPack
from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.ops.quantize import Quantize
from support.checkpoints import make_checkpoint
from support.native_variants import BACKENDS
from support.packing_harness import EVERY, PROMPT_LEN, Outcome, prompt, request, same, serve

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 3, 4, 2


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EVERY", EVERY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("triattention"), "qwen3")


@pytest.fixture(scope="module")
def stats(folder: Path) -> QueryStats:
    decoder = load_decoder(folder, dtype="float32", backend="torch")
    assert isinstance(decoder, OwnDecoder)
    return measure_queries(decoder, [prompt(seed, 200) for seed in range(3)])


@pytest.fixture(scope="module", params=BACKENDS)
def decoder(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return load_decoder(folder, dtype="float32", backend=request.param)


def test_statistics_are_the_same_by_every_backend(decoder: OwnDecoder, stats: QueryStats) -> None:
    counts: list[int] = []
    texts = [prompt(seed, 200) for seed in range(3)]
    found = measure_queries(decoder, texts, counts.append)
    torch.testing.assert_close(found.mean, stats.mean)
    torch.testing.assert_close(found.mean_abs, stats.mean_abs)
    assert counts == [200, 400, 600]


class Noting(KeepByTriAttention):
    """Notes what is kept, as positions: [layer][KV head]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept_positions: list[Tensor] = []

    def kept(self, pool: Any, scheduled: Any, pack: KvPack) -> Tensor:
        found = super().kept(pool, scheduled, pack)
        own = self.kept_positions[-1] if self.kept_positions else torch.empty(0)
        first_new = scheduled.start - (
            pack.stop - pack.first - (own.shape[-1] if own.numel() else 0)
        )
        new = torch.arange(first_new, scheduled.start).expand(NUM_LAYERS, NUM_KV_HEADS, -1)
        whole = torch.cat((own, new), dim=2) if own.numel() else new
        self.kept_positions.append(whole.gather(2, found - pack.first))
        return found


def policy(stats: QueryStats, decoder: Decoder) -> Noting:
    assert isinstance(decoder, OwnDecoder)
    return Noting(stats, attention_ropes(decoder))


def seen_by_layer(kept: Sequence[Tensor], count: int, budget: int) -> Tensor:
    """Return the places that each row sees, [num_layers, num_kv_heads, count, count]."""
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    seen = seen.expand(NUM_LAYERS, NUM_KV_HEADS, -1, -1).clone()
    for turn, positions in enumerate(kept, 1):
        first = PROMPT_LEN + budget + turn * EVERY
        left = torch.zeros(NUM_LAYERS, NUM_KV_HEADS, first, dtype=torch.bool)
        left[..., :PROMPT_LEN] = True
        left.scatter_(2, positions, True)
        seen[:, :, first:, :first] = left.unsqueeze(2)
    return seen


def masked(folder: Path, tokens: Sequence[int], seen: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits by transformers over everything, and its keys, [num_kv_heads, count, head_dim]."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for layer, block in enumerate(model.model.layers):
        by_head = seen[layer].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0)
        mask = torch.zeros(by_head.shape).masked_fill_(~by_head, float("-inf"))[None]

        def put(module: Any, args: Any, kwargs: dict[str, Any], mask: Tensor = mask) -> Any:
            return args, kwargs | {"attention_mask": mask}

        block.self_attn.register_forward_pre_hook(put, with_kwargs=True)
    with torch.inference_mode():
        found = model(torch.tensor([list(tokens)]), use_cache=True)
    keys = [layer.keys[0] for layer in found.past_key_values.layers]
    return found.logits[0], keys


def check_masks(
    folder: Path, outcome: Outcome, kept: Sequence[Tensor], budget: int
) -> list[Tensor]:
    said = [*prompt(1), *outcome.tokens["a"]]
    logits, keys = masked(folder, said, seen_by_layer(kept, len(said), budget))
    for stop, row in outcome.logits["a"].items():
        torch.testing.assert_close(row, logits[stop - 1], atol=1e-4, rtol=0)
        assert row.argmax() == logits[stop - 1].argmax()
    return keys


def test_packed_pages_are_masks_by_layer_and_head(
    decoder: Decoder, stats: QueryStats, folder: Path
) -> None:
    chosen = policy(stats, decoder)
    outcome = serve(decoder, request("a", prompt(1)), policy=chosen)
    assert len(chosen.kept_positions) == outcome.scheduler.num_packed_away_tokens // EVERY > 2
    keys = check_masks(folder, outcome, chosen.kept_positions, 24)
    different = {tuple(each.tolist()) for each in chosen.kept_positions[0].flatten(0, 1)}
    assert len(different) > 1, "heads choose for themselves"
    latest = torch.arange(PROMPT_LEN + 24, PROMPT_LEN + 24 + EVERY)
    assert (chosen.kept_positions[0][..., -EVERY:] == latest).all()
    expected = by_formula(stats, keys, decoder, PROMPT_LEN + 24 + EVERY)
    assert torch.equal(chosen.kept_positions[0], expected)


def by_formula(stats: QueryStats, keys: list[Tensor], decoder: Decoder, now: int) -> Tensor:
    """The first choice, offset by offset, from keys that transformers has turned."""
    assert isinstance(decoder, OwnDecoder)
    found = []
    for layer, rope in enumerate(attention_ropes(decoder)):
        for head in range(NUM_KV_HEADS):
            key = pairs(keys[layer][head, PROMPT_LEN:now])
            best = torch.full((len(key),), -torch.inf)
            for query in range(2 * head, 2 * head + 2):
                score = torch.zeros(len(key))
                for offset in OFFSETS:
                    angle = (now - 1 + offset) * rope._frequencies.double()
                    turn = torch.polar(torch.ones_like(angle), angle)
                    later = (stats.mean[layer, query] * turn).to(torch.complex64)
                    score += (later * key.conj()).real.sum(dim=1) / len(OFFSETS)
                spread = stats.mean_abs[layer, query] - stats.mean[layer, query].abs()
                score += (spread * key.abs()).sum(dim=1)
                best = torch.maximum(best, (score - score.mean()) / score.std())
            best[-EVERY:] = torch.inf
            found.append(best.topk(24).indices.sort().values + PROMPT_LEN)
    return torch.stack(found).view(NUM_LAYERS, NUM_KV_HEADS, -1)


def test_preemptions_give_the_same_bits(decoder: Decoder, stats: QueryStats) -> None:
    plain = serve(decoder, request("a", prompt(1)), policy=policy(stats, decoder))
    broken = serve(
        decoder,
        request("a", prompt(1)),
        request("b", prompt(2)),
        policy=KeepByTriAttention(stats, attention_ropes(decoder)),  # type: ignore[arg-type]
        preempt_at=(30, 60, 90),
    )
    same(plain, broken)


def test_queries_are_measured_before_rope(stats: QueryStats, folder: Path) -> None:
    """Against the projections of transformers, normed by head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows: list[Tensor] = []
    norm = model.model.layers[1].self_attn.q_norm
    norm.register_forward_hook(lambda module, args, out: rows.append(out[0]))
    with torch.inference_mode():
        for seed in range(3):
            model(torch.tensor([prompt(seed, 200)]))
    queries = pairs(torch.cat(rows))
    torch.testing.assert_close(stats.mean[1], queries.mean(dim=0), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(stats.mean_abs[1], queries.abs().mean(dim=0), atol=1e-4, rtol=1e-3)


def test_a_file_of_statistics_comes_back_and_another_models_is_refused(
    stats: QueryStats, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    decoder = load_decoder(folder, dtype="bfloat16", backend="torch")
    assert isinstance(decoder, OwnDecoder)
    again = QueryStats.load(path, decoder)
    assert torch.equal(again.mean, stats.mean)
    assert torch.equal(again.mean_abs, stats.mean_abs)
    other = load_decoder(make_checkpoint(tmp_path / "other", "llama_biased"), backend="torch")
    assert isinstance(other, OwnDecoder)
    for file, told in (
        (path, "another model"),
        (folder / "model.safetensors", "was not written by"),
    ):
        with pytest.raises(InvalidRequest, match=told) as caught:
            QueryStats.load(file, other)
        assert caught.value.param == "kv_evict_stats"
    with pytest.raises(InvalidRequest, match="kv_evict_stats"):
        QueryStats.load(tmp_path / "nowhere", decoder)


def test_a_model_of_the_same_shape_with_other_weights_is_another_model(
    stats: QueryStats, folder: Path, tmp_path: Path
) -> None:
    """Norms of new models are all ones; a fine-tuned one may have the embedding of its base."""
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    quantizations: tuple[Quantize, ...] = ("none", "int8", "int4")
    for quantize in quantizations:
        if quantize == "none" or native_library() is not None:
            same_model = load_decoder(folder, dtype="bfloat16", backend="auto", quantize=quantize)
            assert isinstance(same_model, OwnDecoder)
            QueryStats.load(path, same_model)
    other = load_decoder(folder, backend="torch")
    assert isinstance(other, OwnDecoder)
    for weight in (other.weights.embedding[7], other.weights.layers[1].mlp_norm.weight):  # type: ignore[union-attr]
        weight.neg_()
        with pytest.raises(InvalidRequest, match="another model"):
            QueryStats.load(path, other)
        weight.neg_()


def test_statistics_of_other_shapes_are_refused(
    stats: QueryStats, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "stats.safetensors"
    QueryStats(stats.mean[:1], stats.mean_abs[:1], stats.model).save(path)
    decoder = load_decoder(folder, backend="torch")
    assert isinstance(decoder, OwnDecoder)
    with pytest.raises(InvalidRequest, match="other shapes") as caught:
        QueryStats.load(path, decoder)
    assert caught.value.param == "kv_evict_stats"
