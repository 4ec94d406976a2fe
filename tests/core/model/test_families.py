"""Every family and every RoPE kind computes what transformers computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.description.fields import Fields
from foretoken.core.model.families.registry import MODEL_FAMILIES, parse_config
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from support.checkpoints import (
    KINDS,
    ORIGINAL_LEN,
    VOCAB_SIZE,
    ModelDriver,
    make_checkpoint,
    make_reference,
    save,
)
from support.greedy_streams import generate, greedy, random_ids
from support.known_models import KNOWN
from support.native_variants import BACKENDS
from support.quick_interpreter import quicken

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = random_ids(200)
_SHARED = random_ids(70, seed=1)
PROMPTS = [
    *[random_ids(n, seed=n) for n in (1, 9, 100)],
    [*_SHARED, *random_ids(20, seed=2)],
    [*_SHARED, *random_ids(45, seed=3)],
    _SHARED,
]


@dataclass
class Known:
    """A kind's reference, its checkpoint, and the reference's answers once they were asked for."""

    reference: Any
    folder: Path

    @cached_property
    def logits(self) -> Tensor:
        """Logits [200, vocab] of `IDS`."""
        with torch.no_grad():
            return self.reference(torch.tensor([IDS])).logits[0]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Greedy answers to `PROMPTS`, no two the same."""
        found = [generate(self.reference, prompt) for prompt in PROMPTS]
        assert len({tuple(each) for each in found}) == len(found)
        return found


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """All kinds; both backends are compared with the same answers."""
    made = {kind: make_reference(kind) for kind in KINDS}
    return {
        kind: Known(each, save(each, tmp_path_factory.mktemp(kind))) for kind, each in made.items()
    }


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(request: pytest.FixtureRequest, known: dict[str, Known]) -> dict[str, Decoder]:
    """A decoder of every kind."""
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return {kind: load_decoder(each.folder, backend=request.param) for kind, each in known.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_over_200_positions(
    kind: str, loaded: dict[str, Decoder], known: dict[str, Known]
) -> None:
    """Chunks of 37, 1, 8 and 154 rows, far beyond the original length of stretched RoPE."""
    assert len(IDS) > 3 * ORIGINAL_LEN
    driver = ModelDriver(loaded[kind])
    logits = driver.prefill(driver.add(IDS), 37, 38, 46, 200)
    assert logits.shape == (200, VOCAB_SIZE)
    # 1.1e-4 was seen with AVX2, of another order of sums than the reference has
    torch.testing.assert_close(logits, known[kind].logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_generate_in_ragged_batches(
    kind: str, loaded: dict[str, Decoder], known: dict[str, Known]
) -> None:
    """Prefill chunks, decode rows and verify rows share steps; two prompts share a prefix."""
    expected = known[kind].answers
    assert greedy(loaded[kind], PROMPTS, expected) == expected


def test_draft_rows_without_kv_of_rejected_tokens_do_not_leak(loaded: dict[str, Decoder]) -> None:
    """A rejected draft's KV is overwritten, not attended to."""
    decoder = loaded["qwen3"]
    ids = random_ids(40)
    driver = ModelDriver(decoder)
    clean, dirty = driver.add(ids), driver.add(ids)
    expected = driver.prefill(clean, 30, 40)[30:]
    driver.prefill(dirty, 30)
    driver.step([(dirty, [5, 6, 7, 8], 0)])
    assert torch.equal(driver.prefill(dirty, 40), expected)


def test_pages_shared_with_another_sequence_give_the_same_logits(
    loaded: dict[str, Decoder],
) -> None:
    decoder = loaded["mistral_window"]
    ids = random_ids(130)
    driver = ModelDriver(decoder)
    first = driver.add(ids)
    expected = driver.prefill(first, 130)
    second = driver.add(ids, prefix=first)
    assert second.num_computed == 128
    assert torch.equal(driver.prefill(second, 130), expected[128:])


def pieces_have_the_bits_of_the_whole(decoder: Decoder) -> None:
    """Chunks beside another request, a decoding row and a verified one among them."""
    ids, beside = random_ids(90, seed=7), random_ids(60, seed=8)
    driver = ModelDriver(decoder, page_size=4)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, loaded: dict[str, Decoder]) -> None:
    pieces_have_the_bits_of_the_whole(loaded[kind])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        "gemma4",
        "olmo3",
        "cohere2",
        "starcoder2",
        "gpt_oss",
        "glm4_moe",
        "glm4_moe_lite",
        "deepseek_v3_yarn",
    ],
)
def test_a_row_in_half_precision_has_the_same_bits_in_any_batch(
    kind: str, backend: str, tmp_path: Path
) -> None:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder = make_checkpoint(tmp_path, kind)
    pieces_have_the_bits_of_the_whole(load_decoder(folder, dtype="bfloat16", backend=backend))


@pytest.mark.slow
# Lanes of a tile that hold no row divide nothing by nothing; they are not stored.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",
        "olmo3",
        "cohere2",
        "starcoder2",
        "ministral3",
        "nemotron",
        "gpt_oss",
        "glm4_moe",
        "qwen2_moe",
    ],
)
def test_triton_kernels_compute_what_torch_computes(kind: str, tmp_path: Path) -> None:
    """Under the interpreter: one prompt in two chunks, of several windows."""
    pytest.importorskip("triton")
    quicken()
    shorter = {"sliding_window": 8} if "sliding_window" in KINDS[kind][1] else {}
    folder = make_checkpoint(tmp_path, kind, **shorter)
    ids, found = random_ids(19), []
    for backend in ("torch", "triton"):
        driver = ModelDriver(load_decoder(folder, backend=backend))
        found.append(driver.prefill(driver.add(ids), 17, 19))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_experts_are_quantised_and_routers_are_not(kind: str, tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder, ids, found = make_checkpoint(tmp_path, kind), random_ids(20, seed=3), []
    for quantize in ("none", "int8"):
        driver = ModelDriver(load_decoder(folder, backend="native", quantize=quantize))
        found.append(driver.prefill(driver.add(ids), 20))
    off = (found[0] - found[1]).abs().mean() / found[0].std()
    assert 0 < off < 0.1


def test_latents_are_kept_in_the_models_dtype_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    assert load_decoder(folder).bytes_per_page(page_size=1) == 3 * (32 + 8) * 4
    with pytest.raises(ModelLoadError, match="kv_cache_dtype int8 is not supported for deepseek"):
        load_decoder(folder, kv_dtype="int8")


def test_layers_behind_the_last_are_passed_over(tmp_path: Path) -> None:
    """GLM-4.5 comes with a layer that predicts one token more."""
    folder = make_checkpoint(tmp_path, "glm4_moe")
    file = folder / "model.safetensors"
    tensors = load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(4)}
    save_file(tensors, file, metadata={"format": "pt"})
    assert load_decoder(folder, impl="own").config.num_layers == 3


def test_the_text_of_a_multimodal_gemma_4_without_the_keys_that_nothing_reads(
    tmp_path: Path,
) -> None:
    reference = make_reference("gemma4_shared")
    config = transformers.Gemma4Config(
        text_config=reference.config.to_dict() | {"use_bidirectional_attention": "vision"},
        vision_config=None,
        audio_config=None,
    )
    whole = transformers.Gemma4ForConditionalGeneration(config)
    named = {n.replace("model.", "model.language_model.", 1) for n in reference.state_dict()}
    assert named <= set(whole.state_dict())
    values = zip(reference.state_dict(), reference.state_dict().values(), strict=True)
    whole.load_state_dict({n.replace("model.", "model.language_model.", 1): v for n, v in values})
    file = save(whole, tmp_path) / "model.safetensors"
    more = {"model.language_model.layers.4.self_attn.k_proj.weight": torch.zeros(4, 4)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    driver, ids = ModelDriver(load_decoder(tmp_path, impl="own")), random_ids(30)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    logits = driver.prefill(driver.add(ids), 30)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_scale_of_gemmas_embedding_is_rounded_as_its_weights_are(tmp_path: Path) -> None:
    reference = make_reference("gemma2", hidden_size=72).to(torch.bfloat16)
    decoder = load_decoder(save(reference, tmp_path))
    ids = torch.arange(9)
    with torch.no_grad():
        expected = reference.model.embed_tokens(ids)
    assert torch.equal(decoder.weights.embedding[ids], expected)


_LEAST = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 96,
    "moe_intermediate_size": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
# Configs in the spelling of older files: fields that they leave out, RoPE of layers with a window.
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    **{each: (each, {"num_local_experts": 8, "n_routed_experts": 8}) for each in MODEL_FAMILIES},
    "bamba": ("bamba", {"attn_layer_indices": [2]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"] * 4, "num_local_experts": 8},
    ),
    "nemotron_h": (
        "nemotron_h",
        {"hybrid_override_pattern": "M-M*ME*E", "n_routed_experts": 8},
    ),
    "ministral3": ("ministral3", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}}),
    "gemma3, scaled": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3, local": ("gemma3_text", {"rope_theta": 7e5, "rope_local_base_freq": 3e4}),
    "gemma3, pattern": ("gemma3_text", {"sliding_window_pattern": 3}),
    "gemma4_text": ("gemma4_text", {"vocab_size_per_layer_input": 500}),
    "gemma4, keys": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "global_head_dim": 64}
        | {"num_global_key_value_heads": 1},
    ),
    "gemma4, listed": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "per_layer_config": {"5": {"head_dim": 128}}},
    ),
    "gemma4, shared": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 500, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 64, "num_experts": 8, "moe_topk": [2] * 8}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"head_dim": 64, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "olmo3, scaled": ("olmo3", {"rope_scaling": _YARN, "rope_theta": 5e5}),
    "cohere2, pattern": ("cohere2", {"sliding_window_pattern": 3}),
    "exaone4, full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 8}),
    "smollm3, listed": ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1]}),
    "qwen2_moe, dense": ("qwen2_moe", {"num_experts": 8, "decoder_sparse_step": 2}),
    "minimax_m2, part": ("minimax_m2", {"num_local_experts": 8, "rotary_dim": 32, "head_dim": 64}),
    **{f"known: {name}": (config["model_type"], config) for name, config in KNOWN.items()},
}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("per_layer_config", {"per_layer_config": {"99": {"head_dim": 32}}}),
        ("num_kv_shared_layers", {"per_layer_config": {"7": {"head_dim": 32}}}),
    ],
)
def test_heads_by_layer_that_fit_no_layer_or_no_shared_keys_are_refused(
    field: str, config: dict[str, Any]
) -> None:
    values = {**_LEAST, "model_type": "gemma4_text", "vocab_size_per_layer_input": 500}
    values |= {"num_kv_shared_layers": 2, **config}
    with pytest.raises(ModelLoadError, match=field):
        parse_config(Fields(values, "config.json"))


@pytest.mark.parametrize("case", OLDER)
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(case: str) -> None:
    model_type, differences = OLDER[case]
    if model_type not in MODEL_FAMILIES:
        pytest.skip("no own decoder")
    values = {**_LEAST, **differences, "model_type": model_type}
    if model_type in ("phi3", "qwen2_moe"):  # what a config of theirs always has
        values |= {"pad_token_id": 0, "num_experts": 8}
    found = parse_config(Fields(values, "config.json"))
    whole = transformers.AutoConfig.for_model(**values).to_dict()
    expected = parse_config(Fields(whole, "config.json"))
    assert replace(found, eos_token_ids=()) == replace(expected, eos_token_ids=())
