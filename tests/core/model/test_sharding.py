"""The parts of a model on several ranks give the logits of the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from foretoken.core.errors import InvalidRequest
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import read_config
from foretoken.core.model.sharding import check_shards, shard_config
from foretoken.core.ops.native import native_library
from foretoken.core.ops.quantize import QuantizedWeight, quantize_weight
from foretoken.core.ops.weights import ExpertWeights, Gemma4Extras
from foretoken.core.tiers.fingerprint import WeightsDigest
from support.checkpoints import KINDS, make_checkpoint
from support.gguf_files import write_gguf
from support.native_variants import BACKENDS
from support.quantized_checkpoints import quantize_checkpoint
from support.rank_threads import logits_of, rank_decoders, thread_comms

DRAW = torch.Generator().manual_seed(0)
CHUNKS = [torch.randint(3, 60, (count,), generator=DRAW).tolist() for count in (30, 1, 5)]
FOUR = {"num_key_value_heads": 4}
WIDE = FOUR | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
# What differs between families in how matrices are stored: biases, all in one, gates, sinks, and
# experts apart, stacked in three ways, shared, and beside an MLP.
SHARED = [
    "llama_biased", "phi3", "glm", "starcoder2", "nemotron", "cohere", "gemma2", "qwen3_biased",
    "mixtral", "qwen2_moe", "glm4_moe", "hunyuan_moe", "gpt_oss", "gemma4_shared",
    "gemma4_experts",
]  # fmt: skip


def checkpoint(folder: Path, kind: str, **more: Any) -> Path:
    own = KINDS[kind][1]
    sizes = {} if kind.startswith("gemma4") else FOUR
    return make_checkpoint(folder, kind, **{k: v for k, v in sizes.items() if k not in own} | more)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, 4 if index % 2 and "gemma4" not in kind else 2) for index, kind in enumerate(SHARED)],
)
def test_ranks_give_the_logits_of_one(tmp_path: Path, kind: str, size: int) -> None:
    folder = checkpoint(tmp_path, kind)
    alone = logits_of([load_decoder(folder)], CHUNKS)
    ranks = rank_decoders(folder, size)
    torch.testing.assert_close(logits_of(ranks, CHUNKS), alone, atol=3e-5, rtol=0)
    heads = read_config(folder).num_heads
    kept = [each.layout.parts[0].heads.num_heads for each in ranks]
    assert kept == [heads // size] * size, "no rank has heads of others"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss", "gemma4_experts"])
def test_experts_whose_columns_cannot_be_cut_are_shared_out_whole(
    tmp_path: Path, kind: str, backend: str
) -> None:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    odd = {"intermediate_size": 37} if kind in ("mixtral", "gpt_oss") else {}
    folder = checkpoint(tmp_path, kind, moe_intermediate_size=37, **odd)
    alone = logits_of([load_decoder(folder, backend=backend)], CHUNKS)  # type: ignore[arg-type]
    ranks = rank_decoders(folder, 2, backend=backend)
    torch.testing.assert_close(logits_of(ranks, CHUNKS), alone, atol=3e-5, rtol=0)
    for number, each in enumerate(ranks):
        mlp = each.weights.layers[-1].extras or each.weights.layers[-1].mlp
        experts = mlp.experts.experts if isinstance(mlp, Gemma4Extras) and mlp.experts else mlp
        assert isinstance(experts, ExpertWeights)
        assert (experts.first, len(experts.experts)) == (4 * number, 4)


def test_experts_of_a_gguf_file_whose_groups_cannot_be_cut_are_shared_out_whole(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **WIDE, moe_intermediate_size=32)
    file = write_gguf(folder, tmp_path / "model.gguf", kind=GgmlType.Q8_0)
    alone = logits_of([load_decoder(file, dtype="float32")], CHUNKS)
    ranks = rank_decoders(file, 2, dtype="float32")
    torch.testing.assert_close(logits_of(ranks, CHUNKS), alone, atol=3e-5, rtol=0)
    mlp = ranks[1].weights.layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    assert (mlp.first, len(mlp.experts)) == (4, 4)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "GGUF"])
def test_rank_0_digests_experts_that_others_have(tmp_path: Path, kind: str) -> None:
    """Models that differ in these alone have other fingerprints."""
    options: dict[str, Any] = {}
    if kind == "GGUF":
        folder = make_checkpoint(tmp_path, "qwen3_moe", **WIDE, moe_intermediate_size=32)
        folder = write_gguf(folder, tmp_path / "model.gguf", kind=GgmlType.Q8_0)
        options = {"backend": "native"} if native_library() is not None else {}
    else:
        folder = checkpoint(tmp_path, kind, intermediate_size=37, moe_intermediate_size=37)
    alone, of_rank_0 = WeightsDigest(), WeightsDigest()
    load_decoder(folder, on_read=alone, **options)
    load_decoder(folder, on_read=of_rank_0, comm=thread_comms(2)[0], **options)
    assert of_rank_0.digest() == alone.digest()


def test_weights_are_shared_out_and_the_output_matrix_is_rank_0s(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen3")
    alone, ranks = load_decoder(folder), rank_decoders(folder, 2)
    assert isinstance(alone, OwnDecoder)
    for index, layer in enumerate(alone.weights.layers):
        halves = [[w.weight.numel() for w in each.weights.layers[index].linears] for each in ranks]
        whole = [weight.weight.numel() for weight in layer.linears]
        assert halves[0] == halves[1] == [count // 2 for count in whole]
    assert ranks[1].weights.lm_head.weight.numel() < alone.weights.lm_head.weight.numel()


@pytest.mark.parametrize("name", ["awq_32", "gptq_act_order", "w4a16_zeros_32", "w8a8"])
def test_quantised_weights_are_cut_at_groups(tmp_path: Path, name: str) -> None:
    """Kernels read what is kept of them; int8 rounds activations by what a rank has of a row."""
    folder = make_checkpoint(tmp_path, "qwen3", **WIDE)
    quantize_checkpoint(folder, name)
    options = {"backend": "native" if native_library() is not None else "torch"}
    alone = logits_of([load_decoder(folder, **options)], CHUNKS)  # type: ignore[arg-type]
    ranks = logits_of(rank_decoders(folder, 2, **options), CHUNKS)
    assert (ranks - alone).norm() < (0.06 if name == "w8a8" else 0.02) * alone.norm()


def test_groups_that_ranks_would_have_to_share_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", **WIDE | {"intermediate_size": 96})
    quantize_checkpoint(folder, "awq_32")
    with pytest.raises(
        InvalidRequest, match=r"down_proj\.weight: columns 0 to 48 must start and end at"
    ):
        rank_decoders(folder, 2)


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("llama", 3, "4 attention heads, which 3 ranks"),
        ("llama", 4, "2 KV heads, which 4 ranks"),
        ("olmo2", 2, "a norm over all heads together"),
        ("deepseek_v3", 2, "one latent key for all heads"),
        ("gemma4", 2, "1 KV heads, which 2 ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    tmp_path: Path, kind: str, size: int, reason: str
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    with pytest.raises(InvalidRequest, match=reason) as refused:
        check_shards(read_config(folder), size)
    assert refused.value.param == "tp"


def test_widths_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = read_config(checkpoint(tmp_path, "qwen2_moe"))
    check_shards(config, 2)
    experts = config.layers[0].experts
    assert experts is not None
    odd = replace(config.layers[0], experts=replace(experts, width=37, count=7))
    with pytest.raises(InvalidRequest, match="7 experts of width 37, which 2"):
        check_shards(replace(config, layers=(odd, *config.layers[1:])), 2)
    with pytest.raises(InvalidRequest, match="intermediate columns of an MLP, which 2 ranks"):
        check_shards(
            replace(read_config(checkpoint(tmp_path / "x", "llama")), intermediate_size=97), 2
        )


def test_the_config_of_a_part_has_the_whole_stream(tmp_path: Path) -> None:
    config = read_config(checkpoint(tmp_path, "qwen3"))
    part = shard_config(config, thread_comms(4)[0])
    assert (part.hidden_size, part.vocab_size) == (config.hidden_size, config.vocab_size)
    assert (part.num_heads, part.num_kv_heads) == (config.num_heads // 4, 1)


def test_columns_of_a_quantised_weight_end_at_groups() -> None:
    weight = torch.randn(6, 128, generator=DRAW)
    for kind in ("int8", "int4"):
        found = quantize_weight(weight, kind)  # type: ignore[arg-type]
        part = found.columns(32, 96)
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantize(), found.dequantize()[:, 32:96])
    with pytest.raises(ValueError, match="columns 16 to 96 must start and end at multiples of 32"):
        quantize_weight(weight, "int4").columns(16, 96)
