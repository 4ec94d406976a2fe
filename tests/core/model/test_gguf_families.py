"""GGUF files of many families: the logits of transformers' own model of the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.formats.gguf_architectures import ALIASES, ARCHITECTURES, REFUSED
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.report import inspect_model
from foretoken.core.ops.mixers.latent import LatentWeights
from foretoken.core.ops.native import native_library
from foretoken.core.ops.weights import ExpertWeights
from support.checkpoints import ModelDriver, save
from support.gguf_files import ARCHS, DENSE, rounded, write_gguf
from support.greedy_streams import generate, greedy
from support.mtp_checkpoints import save_mtp
from support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [int(i) for i in torch.randint(3, 190, (40,), generator=torch.Generator().manual_seed(1))]
# Layers of both kinds where files have the kinds by rule; widths that 32 divides.
_BOTH = ["sliding_attention", "full_attention"]
_DELTA = {  # two key heads for six value heads, of which three read one
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 64,
}
_LATENT = {"qk_rope_head_dim": 16, "kv_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 32,
    "intermediate_size": 96,
}
_MAMBA = {  # of granitemoehybrid
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
    "time_step_min": 1e-30,  # transformers clamps dt, of prompts alone
    "n_group": 1,
    "routed_scaling_factor": 1.6,
}
_FALCON = {  # factors are powers of 2: weights are rounded alike with and without them
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "mamba_d_ssm": 96,
    "mamba_chunk_size": 16,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 1.0],
    "mlp_multipliers": [2.0, 0.5],
    "key_multiplier": 0.25,
    "lm_head_multiplier": 0.25,
    "embedding_multiplier": 4.0,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.25,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 0.25,
}
_NO_EXPERTS = {
    "granitemoehybrid": _MAMBA | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "nemotron_h": _NEMOTRON
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": _BOTH},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "cohere2": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "olmo3": {"layer_types": _BOTH},
    "exaone4": {"layer_types": _BOTH},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}
    | {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "starcoder2": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"norm_topk_prob": False, "use_sliding_window": False}
    | {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3}
    | {"attention_multiplier": 0.4, "logits_scaling": 2.0},
    "gpt_oss": {"intermediate_size": 64, "layer_types": _BOTH},
    "glm4_moe": {"n_group": 1, "use_qk_norm": True},
    "dots1": {"n_group": 1, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    "ministral3": {"sliding_window": None},
    "deepseek_v2": _LATENT | {"q_lora_rank": None},
    "deepseek_v3": _LATENT | {"rope_parameters": _YARN},
    "glm4_moe_lite": _LATENT | {"n_group": 1},
    "youtu": _LATENT,
    **dict.fromkeys(HYBRIDS, _DELTA),
    "granitemoehybrid": _MAMBA,
    "nemotron_h": _NEMOTRON,
    "falcon_h1": _FALCON,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "phi3": {
        "sliding_window": None,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.25 * i for i in range(8)],
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 256,
        },
        "original_max_position_embeddings": 256,
    },
}


def made(
    model_type: str, folder: Path, kind: GgmlType = GgmlType.F32, **shape: Any
) -> tuple[Any, Path]:
    """A model whose matrices were rounded as the file rounds them, and that file."""
    model = tiny_model(model_type, **(shape or SHAPES.get(model_type, {})))
    save(model, folder / "plain")
    file = write_gguf(folder / "plain", folder / "model.gguf", kind=kind)
    if kind is not GgmlType.F32:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.shape[-1] % 32 == 0:  # not of a convolution
                    parameter.copy_(rounded(parameter, kind))
    return model, file


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    driver = ModelDriver(load_decoder(path, **options), num_pages=8)
    return driver.prefill(driver.add(IDS), len(IDS))


def expected_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert float((found - expected).abs().max()) < tolerance * float(expected.std())


def tolerance_of(model_type: str) -> float:
    """Transformers' two forms of the delta rule differ by 3e-4 of such models' deviation."""
    return 6e-4 if model_type in HYBRIDS else 1e-4


@pytest.mark.parametrize("model_type", ARCHS)
def test_a_file_says_what_transformers_says(model_type: str, tmp_path: Path) -> None:
    model, file = made(model_type, tmp_path)
    check(logits_of(file), expected_of(model), tolerance_of(model_type))
    assert inspect_model(file).problem is None


@pytest.mark.parametrize("model_type", _NO_EXPERTS)
def test_a_file_of_a_hybrid_without_experts(model_type: str, tmp_path: Path) -> None:
    model, file = made(model_type, tmp_path, **_NO_EXPERTS[model_type])
    check(logits_of(file), expected_of(model))


def test_a_file_of_falcon_h1_with_a_norm_behind_its_gate(tmp_path: Path) -> None:
    shape = _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
    model, file = made("falcon_h1", tmp_path, **shape)
    check(logits_of(file), expected_of(model))


def test_a_file_of_falcon_h1_that_lost_the_scale_of_its_logits_is_refused(tmp_path: Path) -> None:
    model = tiny_model("falcon_h1", **_FALCON, tie_word_embeddings=True)
    save(model, tmp_path / "plain")
    file = write_gguf(tmp_path / "plain", tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"output\.weight is missing .* scale of the logits"):
        load_decoder(file)


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q5_1])
@pytest.mark.parametrize(
    "model_type",
    [
        *("granite", "olmo2", "qwen3", "smollm3", "qwen3_5_text", "qwen3_next", "lfm2"),
        *("granitemoehybrid", "nemotron_h", "falcon_h1"),
    ],
)
def test_a_quantised_file_says_what_its_dequantised_weights_say(
    model_type: str, kind: GgmlType, tmp_path: Path
) -> None:
    model, file = made(model_type, tmp_path, kind)
    check(logits_of(file, dtype="float32"), expected_of(model), tolerance_of(model_type))


def test_factors_of_a_family_reach_weights_that_stay_packed(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels here")
    _, file = made("granite", tmp_path, GgmlType.Q8_0)
    wide = logits_of(file, dtype="float32")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    found = logits_of(file, backend="native")
    assert (found - wide).norm() < 1.5 * (rounded - wide).norm()


EXPERT_KINDS = {"gpt_oss": 12, "qwen3_moe": 14, "mixtral": 5}  # of the C code, in that order
EXPERTS = {"gpt_oss": GgmlType.MXFP4, "qwen3_moe": GgmlType.Q4_0, "mixtral": GgmlType.Q8_0}


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_of_a_file_stay_packed_and_lose_nothing(model_type: str, tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels here")
    _, file = made(model_type, tmp_path, EXPERTS[model_type])
    mlp = load_decoder(file, backend="native").weights.layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    kinds = {w.struct.kind for expert in mlp.experts for w in (expert.gate_up, expert.down)}
    assert kinds == {EXPERT_KINDS[model_type]}
    wide = logits_of(file, dtype="float32")
    found = logits_of(file, backend="native")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    # by the median row: rounding may route a row to another expert, in either of them
    ours, theirs = ((each - wide).norm(dim=-1).median() for each in (found, rounded))
    assert ours < 1.5 * theirs


def test_matrices_of_latents_stay_packed_and_lose_nothing(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels here")
    _, file = made("deepseek_v2", tmp_path, GgmlType.Q8_0)
    mixer = load_decoder(file, backend="native").weights.layers[0].mixer
    assert isinstance(mixer, LatentWeights)
    assert {each.struct.kind for each in mixer.linears} == {5}
    wide = logits_of(file, dtype="float32")
    found = logits_of(file, backend="native")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    ours, theirs = ((each - wide).norm(dim=-1).median() for each in (found, rounded))
    assert ours < 1.5 * theirs


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt_oss",
        "qwen3_moe",
        "deepseek_v3",
        *HYBRIDS,
        "lfm2",
        "lfm2_moe",
        "granitemoehybrid",
        "nemotron_h",
        "falcon_h1",
    ],
)
def test_greedy_tokens_of_a_file_equal_generate(model_type: str, tmp_path: Path) -> None:
    model, file = made(model_type, tmp_path)
    prompts = [IDS[:7], IDS[5:30], IDS]
    expected = [generate(model, prompt) for prompt in prompts]
    decoder = load_decoder(file)
    page_size = 16 if decoder.states else 4
    assert greedy(decoder, prompts, expected, page_size=page_size) == expected


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0])
def test_a_file_of_gemma_4_with_experts_and_keys_as_values(kind: GgmlType, tmp_path: Path) -> None:
    shape = SHAPES["gemma4_text"] | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    shape |= {"use_double_wide_mlp": False, "enable_moe_block": True, "moe_intermediate_size": 32}
    shape |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    model, file = made("gemma4_text", tmp_path, kind, **shape)
    check(logits_of(file, dtype="float32"), expected_of(model))
    if kind is GgmlType.F32 or native_library() is None:
        return
    layer = load_decoder(file, backend="native").weights.layers[0]
    assert layer.extras is not None
    assert layer.extras.experts is not None
    experts = layer.extras.experts.experts.experts
    assert {each.struct.kind for mlp in experts for each in mlp.linears} == {5}  # stayed packed


def test_every_known_architecture_is_tested() -> None:
    assert {*ARCHS.values(), *DENSE.values()} == set(ARCHITECTURES)


def test_divided_frequencies_are_refused_where_modules_do_not_take_them(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    _, file = made("seed_oss", tmp_path)
    add = gguf.GGUFWriter.write_header_to_file

    def with_divisors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
        add(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        write_gguf(tmp_path / "plain", file)
    with pytest.raises(
        ModelLoadError, match=r"factors for each frequency.*use the model's safetensors"
    ):
        load_decoder(file)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("jamba", "recurrent"), ("rwkv7", "recurrent"), ("t5", "token by token"), ("bloom", "ALiBi")],
)
def test_what_cannot_be_served_is_refused_by_name(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    import gguf

    writer = gguf.GGUFWriter(file := tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refusal = rf"'{architecture}'.*{reason}.*serve it with llama.cpp"
    with pytest.raises(ModelLoadError, match=refusal):
        load_decoder(file)
    assert not set(REFUSED) & {*ARCHITECTURES, *ALIASES}


@pytest.mark.parametrize(
    ("name", "method", "value", "kind"),
    [
        ("causal", "add_bool", False, "bidirectional_attention"),
        ("sliding_window", "add_uint32", 64, "sliding_attention"),
    ],
)
def test_files_of_lfm2_with_other_attention_are_refused_by_its_kind(
    name: str, method: str, value: object, kind: str, tmp_path: Path
) -> None:
    made("lfm2", tmp_path)
    more = {f"lfm2__attention__{name}": (method, value)}
    file = write_gguf(tmp_path / "plain", tmp_path / "other.gguf", **more)
    with pytest.raises(ModelLoadError, match=f"layer_types has '{kind}', which is not one of"):
        load_decoder(file)


@pytest.mark.parametrize("alias", ALIASES)
def test_a_file_of_another_name_for_the_same_model_is_read(
    alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = next(name for name, own in ARCHS.items() if own == ALIASES[alias])
    _, file = made(model_type, tmp_path)
    expected = logits_of(file)
    monkeypatch.setitem(ARCHS, model_type, alias)
    assert torch.equal(logits_of(write_gguf(tmp_path / "plain", file)), expected)


def test_layers_that_predict_further_tokens_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_mtp(tmp_path / "plain", n_group=1)
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert torch.equal(logits_of(file), logits_of(folder))


def test_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    _, file = made("seed_oss", tmp_path)
    add = gguf.GGUFWriter.write_header_to_file

    def with_more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.surprise.weight", np.zeros((2, 32), np.float32))
        add(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_more)
        write_gguf(tmp_path / "plain", file)
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: blk\.0\.surprise\.weight"):
        load_decoder(file)
