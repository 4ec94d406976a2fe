"""Differences that families fold into their weights: without any one the logits change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.description.config import DecoderConfig, ExpertNames, LayerSpec, NormNames
from foretoken.core.model.description.fields import Fields
from foretoken.core.model.description.fold import Fold, head_order, scaled
from foretoken.core.model.families.registry import MODEL_FAMILIES
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.weights import Activation
from support.checkpoints import KINDS, ModelDriver, make_checkpoint, make_reference, save
from support.greedy_streams import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

# A difference of a family, and the config without it.
TAKEN_AWAY: dict[tuple[str, str], Any] = {
    ("granite", "embed_scale"): lambda c: replace(c, fold=replace(c.fold, embed_scale=1.0)),
    ("granite", "residual_scale"): lambda c: replace(c, fold=replace(c.fold, residual_scale=1.0)),
    ("granite", "logit_scale"): lambda c: replace(c, fold=replace(c.fold, logit_scale=1.0)),
    ("granite", "attention_scale"): lambda c: replace(c, attention_scale=None),
    ("glm", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("helium", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("ernie4_5", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("glm", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("phi3_partial", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("phi3", "window"): lambda c: replace(c, layers=(LayerSpec(),) * c.num_layers),
    ("phi3_longrope", "divisors"): lambda c: replace(c, rope=replace(c.rope, divisors=())),
    ("gemma2", "embed_scale"): lambda c: replace(c, fold=replace(c.fold, embed_scale=1.0)),
    ("gemma2", "norm_offset"): lambda c: replace(c, fold=replace(c.fold, norm_offset=0.0)),
    ("gemma2", "activation"): lambda c: replace(c, activation=Activation()),
    ("gemma2", "attention_scale"): lambda c: replace(c, attention_scale=None),
    ("gemma2", "attention_cap"): lambda c: replace(c, attention_cap=None),
    ("gemma2", "logit_cap"): lambda c: replace(c, logit_cap=None),
    ("gemma2", "windows"): lambda c: replace(c, layers=_all(c, window=None)),
    ("gemma3", "ropes"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("gemma3", "head_norm_offset"): lambda c: replace(c, fold=replace(c.fold, norm_offset=0.0)),
    ("gemma4", "ropes"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("gemma4", "proportional"): lambda c: replace(c, rope=replace(c.rope, kind="default")),
    ("gemma4", "turning"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("gemma4", "windows"): lambda c: replace(c, layers=_all(c, window=None)),
    ("gemma4", "values"): lambda c: replace(c, norms_values=False),
    ("gemma4", "attention_scale"): lambda c: replace(c, attention_scale=None),
    ("gemma4", "logit_cap"): lambda c: replace(c, logit_cap=None),
    ("gemma4_shared", "kv_of"): lambda c: replace(c, layers=_reading(c, 0)),
    ("gemma4_experts", "top_k"): lambda c: _routed(c, top_k=2),
    ("gemma4_experts", "activation"): lambda c: _experts(c, activation=Activation()),
    ("gemma4", "embed_scale"): lambda c: replace(c, fold=replace(c.fold, embed_scale=1.0)),
    ("hunyuan", "behind"): lambda c: replace(c, norms_behind_rope=False),
    ("hunyuan", "alpha"): lambda c: replace(c, rope=replace(c.rope, theta=1e4)),
    ("olmo3", "ropes"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("smollm3", "no_rope"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("cohere2", "no_rope"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("cohere2", "parallel"): lambda c: replace(c, is_parallel=False),
    ("cohere2", "layer_norm"): lambda c: replace(c, layer_norm="none"),
    ("cohere2", "logit_scale"): lambda c: replace(c, fold=replace(c.fold, logit_scale=1.0)),
    ("cohere2", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("exaone4", "no_rope"): lambda c: replace(c, layers=_all(c, rope=None)),
    ("starcoder2", "activation"): lambda c: replace(c, activation=Activation("silu", False)),
    ("arcee", "activation"): lambda c: replace(c, activation=Activation("silu", False)),
    ("nemotron", "norm_offset"): lambda c: replace(c, fold=replace(c.fold, norm_offset=0.0)),
    ("nemotron", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("ministral3", "query_beta"): lambda c: replace(c, rope=replace(c.rope, query_beta=0.0)),
    ("mixtral", "renorm"): lambda c: _routed(c, renorm=None),
    ("qwen2_moe", "renorm"): lambda c: _routed(c, renorm=0.0),
    ("qwen3_moe", "top_k"): lambda c: _routed(c, top_k=2),
    ("glm4_moe", "sigmoid"): lambda c: _routed(c, score="softmax"),
    ("glm4_moe", "groups"): lambda c: _routed(c, num_groups=1),
    ("glm4_moe", "groups_by"): lambda c: _routed(c, groups_by="best"),
    ("glm4_moe", "factor"): lambda c: _routed(c, factor=1.0),
    ("minimax_m2", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("gpt_oss", "of_chosen"): lambda c: _routed(c, of_chosen=False),
    ("gpt_oss", "windows"): lambda c: replace(c, layers=_all(c, window=None)),
    ("gpt_oss", "activation"): lambda c: _experts(c, activation=Activation()),
    ("gpt_oss", "limit"): lambda c: _experts(c, activation=Activation("clamped_swiglu", True, 9.0)),
    ("deepseek_v3", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("deepseek_v3_yarn", "interleaved"): lambda c: replace(
        c, fold=replace(c.fold, interleaved=True)
    ),
    ("deepseek_v3_yarn", "mscale"): lambda c: replace(c, rope=replace(c.rope, mscale=0.5)),
    ("deepseek_v2", "groups_by"): lambda c: _routed(c, groups_by="best two"),
    ("deepseek_v2_greedy", "attention_scale"): lambda c: replace(c, attention_scale=20**-0.5),
    ("minicpm3", "residual_scale"): lambda c: replace(c, fold=replace(c.fold, residual_scale=1.0)),
    ("minicpm3", "logit_scale"): lambda c: replace(c, fold=replace(c.fold, logit_scale=1.0)),
    ("phi3_longrope", "factor"): lambda c: replace(c, rope=replace(c.rope, attention_factor=1.0)),
}


def _experts(config: DecoderConfig, **values: Any) -> DecoderConfig:
    """Other mixtures of experts."""
    layers = (
        replace(layer, experts=layer.experts and replace(layer.experts, **values))
        for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def _routed(config: DecoderConfig, **values: Any) -> DecoderConfig:
    """Another routing of experts."""
    spec = next(layer.experts for layer in config.layers if layer.experts is not None)
    return _experts(config, routing=spec.routing._replace(**values))


def _named(config: DecoderConfig, **values: Any) -> DecoderConfig:
    """Other names of experts' tensors."""
    spec = next(layer.experts for layer in config.layers if layer.experts is not None)
    return _experts(config, names=spec.names._replace(**values))


def _reading(config: DecoderConfig, other: int) -> tuple[LayerSpec, ...]:
    """Layers that share keys and values read those of another one of their kind."""
    return tuple(
        replace(layer, kv_of=other)
        if layer.kv_of is not None and layer.window == config.layers[other].window
        else layer
        for layer in config.layers
    )


def _all(config: DecoderConfig, **values: Any) -> tuple[LayerSpec, ...]:
    """The layers of a config, the same in all of them."""
    return tuple(replace(layer, **values) for layer in config.layers)


@pytest.mark.parametrize(("kind", "difference"), TAKEN_AWAY, ids="-".join)
def test_a_difference_taken_away_changes_the_logits(
    kind: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    model_type, ids = KINDS[kind][0], random_ids(100)
    declared = MODEL_FAMILIES[model_type]
    expected = _logits(folder, ids)

    def without(fields: Fields) -> Any:
        return TAKEN_AWAY[kind, difference](declared(fields))

    monkeypatch.setitem(MODEL_FAMILIES, model_type, without)
    off = (_logits(folder, ids) - expected).abs().max() / expected.std()
    assert off > 0.05


# What shows in the names or shapes of tensors, and the config without it.
NAMED: dict[tuple[str, str], Any] = {
    ("gemma2", "norms"): lambda c: replace(c, norms=NormNames()),
    ("olmo2", "whole"): lambda c: replace(c, head_norm="each"),
    ("starcoder2", "bias"): lambda c: replace(c, layer_norm="plain"),
    ("gemma3", "head_norm"): lambda c: replace(c, head_norm="none"),
    ("gemma4", "heads"): lambda c: replace(c, layers=_all(c, heads=None)),
    ("gemma4", "keys_as_values"): lambda c: replace(c, layers=_all(c, keys_as_values=False)),
    ("gemma4", "layer_factor"): lambda c: replace(c, layer_factor=None),
    ("gemma4_shared", "kv_of"): lambda c: replace(c, layers=_all(c, kv_of=None)),
    ("gemma4_shared", "width"): lambda c: replace(c, layers=_all(c, width=None)),
    ("gemma4_shared", "token_inputs"): lambda c: replace(c, token_input_size=0),
    ("gemma4_experts", "beside"): lambda c: _experts(c, beside=None),
    ("gemma4_experts", "factors"): lambda c: _named(c, factors=None),
    ("gemma4_experts", "stacked"): lambda c: _named(c, stacked="gpt-oss"),
    ("minimax_m2", "whole"): lambda c: replace(c, head_norm="each"),
    ("gpt_oss", "sinks"): lambda c: replace(c, has_sinks=False),
    ("deepseek_v3", "latent"): lambda c: replace(c, latent=None),
    ("deepseek_v3", "q_rank"): lambda c: replace(c, latent=c.latent._replace(q_rank=0)),
    ("glm4_moe", "choice_bias"): lambda c: _experts(c, names=ExpertNames()),
    ("qwen2_moe", "shared"): lambda c: _experts(c, shared_width=0),
    ("qwen2_moe", "dense"): lambda c: replace(c, layers=(c.layers[0],) * c.num_layers),
}


@pytest.mark.parametrize(("kind", "difference"), NAMED, ids="-".join)
def test_tensors_that_are_not_declared_are_refused(
    kind: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model_type = make_checkpoint(tmp_path, kind), KINDS[kind][0]
    declared = MODEL_FAMILIES[model_type]
    monkeypatch.setitem(
        MODEL_FAMILIES, model_type, lambda fields: NAMED[kind, difference](declared(fields))
    )
    with pytest.raises(ModelLoadError, match=r"tensors|has shape"):
        load_decoder(folder, impl="own")


@pytest.mark.parametrize("name", ["fused_qkv", "fused_gate_up"])
def test_fused_tensors_that_are_not_declared_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "phi3")
    declared = MODEL_FAMILIES["phi3"]

    def without(fields: Fields) -> Any:
        config = declared(fields)
        return replace(config, fold=replace(config.fold, **{name: False}))

    monkeypatch.setitem(MODEL_FAMILIES, "phi3", without)
    with pytest.raises(ModelLoadError, match="lacks tensors"):
        load_decoder(folder)


def _logits(folder: Path, ids: list[int]) -> torch.Tensor:
    driver = ModelDriver(load_decoder(folder, impl="own"))
    return driver.prefill(driver.add(ids), len(ids))


def test_longrope_ends_where_its_second_table_begins(tmp_path: Path) -> None:
    assert load_decoder(make_checkpoint(tmp_path, "phi3_longrope")).config.max_model_len == 256


def test_a_tied_output_is_scaled_apart_from_the_embedding(tmp_path: Path) -> None:
    """Both factors are rounded once, and the embedding that both come from stays as it is."""
    reference = make_reference("granite_tied").to(torch.bfloat16)
    decoder = load_decoder(save(reference, tmp_path))
    table = reference.model.embed_tokens.weight
    assert torch.equal(decoder.weights.embedding, table * 3.0)


def test_scaling_leaves_the_weight_itself_alone() -> None:
    weight = torch.ones(2, 2)
    assert torch.equal(scaled(weight, 2.0), weight + 1)
    assert torch.equal(weight, torch.ones(2, 2))
    assert Fold() == Fold(embed_scale=1.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turning", [4, 8])
def test_turning_halves_in_the_new_order_turns_what_the_family_turns(
    turning: int, interleaved: bool
) -> None:
    head = torch.arange(1.0, 9.0)
    angles = torch.arange(1.0, 1 + turning / 2)
    cos, sin = angles.cos(), angles.sin()
    expected = head.clone()
    part = head[:turning]
    first, second = (part[0::2], part[1::2]) if interleaved else part.chunk(2)
    turned = first * cos - second * sin, second * cos + first * sin
    expected[:turning] = torch.stack(turned, 1).flatten() if interleaved else torch.cat(turned)
    order = head_order(8, turning, interleaved=interleaved)
    pad = (0, 4 - turning // 2)
    cos, sin = torch.nn.functional.pad(cos, pad, value=1.0), torch.nn.functional.pad(sin, pad)
    first, second = head[order].chunk(2)
    found = torch.cat((first * cos - second * sin, second * cos + first * sin))
    torch.testing.assert_close(found, expected[order])
