"""Families with recurrent states compute what transformers computes, however prompts are cut."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.description.fields import Fields, UnsupportedConfig
from foretoken.core.model.description.fold import ba_order, qkvz_order
from foretoken.core.model.families.registry import parse_config
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.report import inspect_model
from foretoken.core.ops.mixers.conv import ConvWeights
from foretoken.core.ops.mixers.recurrent import RecurrentShape, RecurrentWeights
from foretoken.core.ops.native import native_library
from support.checkpoints import (
    HYBRIDS,
    VOCAB_SIZE,
    ModelDriver,
    make_checkpoint,
    make_reference,
    save,
)
from support.float64_reference import Exact
from support.greedy_streams import generate, greedy, random_ids
from support.native_variants import BACKENDS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Decoder]]:
    """Reference and decoder of every family, from one set of checkpoints."""
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    pairs = {}
    for kind in HYBRIDS:
        reference = make_reference(kind)
        folder = save(reference, tmp_path_factory.mktemp(kind))
        pairs[kind] = (reference, load_decoder(folder, backend=request.param))
    return pairs


@cache
def exact_logits(kind: str, length: int) -> Exact:
    """Compute the logits of `random_ids` with transformers, once for all backends."""
    return Exact.of(make_reference(kind), random_ids(length))


def test_fused_matrices_are_cut_apart_as_transformers_cuts_their_outputs() -> None:
    config = transformers.AutoConfig.for_model(
        "qwen3_next",
        hidden_size=8,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    shape = RecurrentShape(2, 6, key_dim=3, value_dim=5, conv_len=4)
    qkvz, ba = torch.arange(12 + 60), torch.arange(12)
    layer = Qwen3NextGatedDeltaNet(config, 0)
    parts = layer.fix_query_key_value_ordering(qkvz.view(1, 1, -1), ba.view(1, 1, -1))
    assert torch.equal(qkvz_order(shape), torch.cat([part.flatten() for part in parts[:4]]))
    assert torch.equal(ba_order(shape), torch.cat([part.flatten() for part in parts[4:]]))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_logits_equal_transformers_over_300_positions(kind: str, loaded: dict) -> None:
    """Chunks of 37, 1, 8, 154 and 100 rows: page ends within chunks and at their ends."""
    driver = ModelDriver(loaded[kind][1])
    logits = driver.prefill(driver.add(random_ids(300)), 37, 38, 46, 200, 300)
    assert logits.shape == (300, VOCAB_SIZE)
    exact_logits(kind, 300).assert_near(logits)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_greedy_tokens_equal_generate_in_ragged_batches(kind: str, loaded: dict) -> None:
    """Prefill chunks, decode rows and verify rows share steps; drafts fail over page ends."""
    reference, decoder = loaded[kind]
    shared = random_ids(70, seed=1)
    prompts = [random_ids(n, seed=n) for n in (1, 9, 15, 16, 17, 100, 300)]
    prompts += [[*shared, *random_ids(20, seed=2)], [*shared, *random_ids(45, seed=3)], shared]
    expected = [generate(reference, prompt) for prompt in prompts]
    assert len({tuple(e) for e in expected}) == len(expected)
    assert greedy(decoder, prompts, expected, page_size=16) == expected


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, loaded: dict) -> None:
    """Chunks beside another request, a decoding row and a verified one among them."""
    decoder = loaded[kind][1]
    ids, beside = random_ids(90, seed=7), random_ids(60, seed=8)
    driver = ModelDriver(decoder)
    whole = driver.prefill(driver.add(ids), 90)
    again, other = driver.add(ids), driver.add(beside)
    found = []
    for stop in (33, 34, 38, 90):
        chunk = ids[again.num_computed : stop]
        rows = list(other.tokens[other.num_computed :][: stop // 6])
        logits, _ = driver.step([(again, chunk, len(chunk)), (other, rows, 1)])
        found.append(logits)
        again.num_computed = stop
        other.num_computed += len(rows)
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize(
    "kind", ["qwen3_5", "olmo_hybrid", "granite_hybrid", "nemotron_h", "lfm2_biased", "minimax"]
)
def test_a_sequence_resumed_from_a_state_has_the_bits_of_the_whole(kind: str, loaded: dict) -> None:
    _, decoder = loaded[kind]
    ids = random_ids(130)
    driver = ModelDriver(decoder)
    first = driver.add(ids)
    before = driver.prefill(first, 113)
    second = driver.add(ids, prefix=first)
    assert second.num_computed == 112
    expected = torch.cat((before[112:], driver.prefill(first, 130)))
    assert torch.equal(driver.prefill(second, 130), expected)


class _UnknownConv(ConvWeights):
    """A mixer that no backend knows; it is made up of their operations."""

    __slots__ = ()


def test_a_mixer_that_the_compiled_step_lacks_is_computed_by_single_operations(
    loaded: dict,
) -> None:
    decoder = loaded["lfm2"][1]
    layers = [
        replace(
            layer,
            mixer=_UnknownConv(
                **{each.name: getattr(layer.mixer, each.name) for each in fields(layer.mixer)}
            ),
        )
        if isinstance(layer.mixer, ConvWeights)
        else layer
        for layer in decoder.weights.layers
    ]
    unknown = replace(decoder.weights, layers=tuple(layers))
    assert decoder.ops.compile_forward(unknown) is None
    drivers = [
        ModelDriver(each) for each in (decoder, OwnDecoder(decoder.config, unknown, decoder.ops))
    ]
    ids = random_ids(60)
    known, found = (driver.prefill(driver.add(ids), 20, 60) for driver in drivers)
    assert torch.equal(found, known)


def nested(reference: Any, folder: Path, **more: Any) -> Path:
    """The checkpoint of a multimodal model with the text model of a reference."""
    config = transformers.Qwen3_5Config(
        text_config=reference.config.to_dict(),
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
        | {"out_hidden_size": reference.config.hidden_size},
        tie_word_embeddings=False,
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    values = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in reference.state_dict().items()
    }
    assert not whole.load_state_dict(values, strict=False).unexpected_keys
    return save(whole, folder)


def test_the_text_of_a_multimodal_checkpoint_without_what_predicts_further_tokens(
    tmp_path: Path,
) -> None:
    reference = make_reference("qwen3_5")
    folder = nested(reference, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(4)}, file, metadata={"format": "pt"})
    decoder, ids = load_decoder(folder), random_ids(40)
    assert decoder.config.model_type == "qwen3_5_text"
    driver = ModelDriver(decoder)
    exact_logits("qwen3_5", 40).assert_near(driver.prefill(driver.add(ids), 40))


@pytest.mark.parametrize(("kind", "num_layers"), [("qwen3_next", 4), ("nemotron_h", 7)])
def test_layers_that_predict_further_tokens_are_passed_over(
    kind: str, num_layers: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    file = folder / "model.safetensors"
    more = {"mtp.layers.0.mlp.gate.weight": torch.zeros(4)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    assert load_decoder(folder).config.num_layers == num_layers


# Names of hub checkpoints, and of those that later classes of transformers may write.
_SPELLINGS = {
    "granite_hybrid": {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
    },
    "nemotron_h": {"backbone.": "model."},
}


@pytest.mark.parametrize("kind", _SPELLINGS)
def test_tensors_of_either_spelling_are_read(kind: str, tmp_path: Path) -> None:
    folder, ids = make_checkpoint(tmp_path, kind), random_ids(20)
    driver = ModelDriver(load_decoder(folder))
    expected = driver.prefill(driver.add(ids), 20)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in _SPELLINGS[kind].items():
        assert any(old in name for name in tensors), old
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    driver = ModelDriver(load_decoder(folder))
    assert torch.equal(driver.prefill(driver.add(ids), 20), expected)


def test_experts_in_one_tensor_are_read_as_those_one_by_one(tmp_path: Path) -> None:
    """Checkpoints on the hub hold either: quantised ones have them one by one."""
    folder, ids = make_checkpoint(tmp_path, "qwen3_5_moe"), random_ids(40)
    driver = ModelDriver(load_decoder(folder))
    expected = driver.prefill(driver.add(ids), 40)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts."
        parts: dict[str, list[torch.Tensor]] = {
            name: [tensors.pop(f"{at}{number}.{name}_proj.weight") for number in range(8)]
            for name in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{at}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{at}down_proj"] = torch.stack(parts["down"])
    save_file(tensors, file, metadata={"format": "pt"})
    driver = ModelDriver(load_decoder(folder))
    assert torch.equal(driver.prefill(driver.add(ids), 40), expected)


@pytest.mark.parametrize(("kind", "more"), [("qwen3_5", ()), ("nemotron_h", ("conv_bias", "skip"))])
def test_what_decays_keeps_float32_in_half_precision(
    kind: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    wide = load_decoder(folder).weights.layers[0].mixer
    half = load_decoder(folder, dtype="bfloat16").weights.layers[0].mixer
    assert isinstance(wide, RecurrentWeights)
    assert isinstance(half, RecurrentWeights)
    for name in ("decay", "dt_bias", "conv", "norm", *more):
        assert torch.equal(getattr(half, name), getattr(wide, name)), name


_CONFIG = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GRANITE = {"layer_types": ["mamba", "attention"] * 4, "mamba_n_heads": 8}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _CONFIG,
    "granitemoehybrid": _CONFIG | _GRANITE,
    "bamba": _CONFIG | {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "falcon_h1": _CONFIG | {"mamba_n_heads": 8, "mamba_d_ssm": 96},
    "nemotron_h": _CONFIG | {"hybrid_override_pattern": "M-M*M-M*"},
    "lfm2": _CONFIG | {"layer_types": ["conv", "full_attention"] * 4},
    "minimax": _CONFIG,
}


@pytest.mark.parametrize(
    ("model_type", "differences", "message"),
    [
        (
            "qwen3_5_text",
            {"linear_num_value_heads": 10, "linear_num_key_heads": 4},
            "linear_num_value_heads is 10, not a multiple of linear_num_key_heads, 4",
        ),
        (
            "qwen3_5_text",
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim must be at least 2, not 1",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention", "mamba"] * 4},
            "layer_types has 'mamba', which is not one of full_attention, linear_attention",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention"]},
            "layer_types must be a list of 8",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"] * 8},
            "must have at least one full_attention",
        ),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3_5_text", {"rope_scaling": {"rope_type": "dynamic"}}, "has type 'dynamic'"),
        (
            "granitemoehybrid",
            {"mamba_n_groups": 3},
            "mamba_n_heads is 8, not a multiple of mamba_n_groups, 3",
        ),
        (
            "granitemoehybrid",
            {"mamba_d_head": 20},
            "mamba_n_heads is 8, but times mamba_d_head, 20, it must be "
            "mamba_expand times hidden_size, 128",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention", "hyena"]},
            "layer_types has 'hyena' for layer 2, which is not one of",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["attention"]},
            "1 layers, but num_hidden_layers is 8",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"] * 8},
            "must have at least one full_attention",
        ),
        ("granitemoehybrid", {"layer_types": None}, "must name the kind of each layer"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "mamba_d_conv must be at least 2, not 1"),
        (
            "granitemoehybrid",
            {"time_step_limit": [0.001, 0.1]},
            "time_step_limit must be from 0 to Infinity, not from 0.001 to 0.1",
        ),
        ("granitemoehybrid", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported"),
        (
            "bamba",
            {"attn_layer_indices": [1, 9]},
            "attn_layer_indices has 9, but the model has only 8 layers",
        ),
        ("bamba", {"attn_layer_indices": None}, "must have at least one full_attention"),
        (
            "falcon_h1",
            {"mamba_rms_norm": True},
            "mamba_norm_before_gate with mamba_rms_norm is not supported",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers must be 2 numbers"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias is not supported"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 100},
            "mamba_n_heads is 8, but times mamba_d_head, 12, it must be mamba_d_ssm, 100",
        ),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads is 128, not a multiple of n_groups, 3"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M-X"},
            "hybrid_override_pattern has 'X' for layer 2, which is not one of",
        ),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act 'gelu' is not supported"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "ME*-M-M*", "moe_latent_size": 8},
            "moe_latent_size is not supported",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "ME*-M-M*", "mlp_bias": True},
            "mlp_bias is not supported in a model with experts",
        ),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be at least 2, not 1"),
        (
            "lfm2",
            {"layer_types": ["conv", "mamba"] * 4},
            "layer_types has 'mamba', which is not one of full_attention, conv",
        ),
        ("lfm2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 8"),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [8]},
            "must have at least one full_attention",
        ),
        ("lfm2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act other than silu is not supported"),
        ("minimax", {"mlp_alpha_factor": 0}, "mlp_alpha_factor must be greater than 0"),
        (
            "minimax",
            {"layer_types": ["full_attention", "mamba"] * 4},
            "layer_types has 'mamba', which is not one of full_attention, linear_attention",
        ),
        (
            "minimax",
            {"layer_types": ["full_attention"]},
            "layer_types must be a list of 8",
        ),
        ("minimax", {"layer_types": ["linear_attention"] * 8}, "at least one full_attention"),
    ],
)
def test_configs_that_fit_no_layer_are_refused_with_their_numbers(
    model_type: str, differences: dict[str, Any], message: str
) -> None:
    values = _CONFIGS[model_type] | differences | {"model_type": model_type}
    with pytest.raises(ModelLoadError, match=message) as caught:
        parse_config(Fields(values, "config.json"))
    assert not isinstance(caught.value, UnsupportedConfig), "no other decoder may try"


@pytest.mark.parametrize(
    ("kind", "field", "name", "channels"),
    [
        ("qwen3_5", "linear_conv_kernel_dim", "conv1d", 160),
        ("nemotron_h", "conv_kernel", "conv1d", 224),
        ("lfm2_biased", "conv_L_cache", "conv.conv", 64),
        ("olmo_hybrid", "linear_conv_kernel_dim", "q_conv1d", 38),
    ],
)
def test_taps_that_the_tensors_do_not_have_are_refused(
    kind: str, field: str, name: str, channels: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 3}))
    message = (
        rf"{name}\.weight has shape \[{channels}, 1, 4\], "
        rf"but its config implies \[{channels}, 1, 3\]"
    )
    with pytest.raises(ModelLoadError, match=message):
        load_decoder(folder)
    assert name in (inspect_model(folder).problem or "")


@pytest.mark.parametrize(
    ("kind", "model_type"), [("qwen3_5", "qwen3_5_text"), ("bamba", "bamba"), ("lfm2", "lfm2")]
)
def test_modules_of_transformers_are_refused_by_name(
    kind: str, model_type: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    with pytest.raises(
        ModelLoadError, match=f"decoder supports the recurrent states of '{model_type}'"
    ):
        load_decoder(folder, impl="transformers")


def test_a_report_tells_the_state_of_a_sequence(tmp_path: Path) -> None:
    """One delta layer of 4 heads of 16 x 24, and three inputs of 160 channels; keys of one."""
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype="float32")
    report = inspect_model(folder)
    assert report.problem is None
    assert report.state_bytes == 3 * (4 * 16 * 24 + 3 * 160) * 4
    assert report.kv_bytes_per_token == 2 * 2 * 16 * 4
