"""Adapters against transformers' model with the adapter in its weights; and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.adapters.lora import LoraSettings, load_lora
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.lora import LoraWeights
from foretoken.core.ops.native import native_library
from foretoken.core.ops.row_extras import RowExtras
from support.adapters import ALL, FUSED, merged, write_adapter
from support.checkpoints import ModelDriver, make_reference, save
from support.greedy_streams import random_ids

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama_biased": {},
    "phi3_partial": {"targets": FUSED},
    "glm": {"targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")},
    "cohere2": {},
    "gemma2": {},
    "gemma4": {"targets": ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
    "granite": {},
    "starcoder2": {"targets": ("q_proj", "v_proj", "c_fc", "c_proj")},
    "qwen3_5": {"targets": (*ALL, "in_proj_qkv", "in_proj_z", "out_proj")},
    "olmo_hybrid": {"targets": (*ALL, "g_proj")},
    "lfm2": {"targets": ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "w1", "w2", "w3")},
    "minimax": {"targets": ("q_proj", "o_proj", "qkv_proj", "output_gate", "out_proj")},
    "qwen3_moe": {"targets": ("q_proj", "v_proj", "o_proj")},
}
BACKENDS = ["torch", *(["native"] if native_library() is not None else [])]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logits(decoder: Decoder, ids: list[int], adapter: LoraWeights | None) -> torch.Tensor:
    """Logits of all positions, in chunks of 5 and what is left."""
    driver = ModelDriver(decoder, page_size=16)
    driver.adapter = adapter
    sequence = driver.add(ids)
    return driver.prefill(sequence, 5, 6, len(ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind: str, backend: Any, tmp_path: Path) -> None:
    model = make_reference(kind)
    save(model, tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", model, **KINDS[kind])
    decoder = load_decoder(tmp_path / "base", backend=backend)
    loaded = load_lora(folder, decoder, max_rank=16)
    assert loaded.rank == 4
    ids = random_ids(23)
    with torch.no_grad():
        expected = merged(model, **KINDS[kind])(torch.tensor([ids])).logits[0]
        plain = model(torch.tensor([ids])).logits[0]
    found = logits(decoder, ids, loaded.weights)
    deviation = float(expected.std())
    assert float((expected - plain).abs().max()) > 0.1 * deviation
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * deviation)


# -- scales, names and what is refused -------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    model = make_reference("qwen3")
    save(model, folder)
    return model, load_decoder(folder)


SCALES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rslora": ({"use_rslora": True}, {"is_stabilised": True}),
    "rank pattern": ({"ranks": {"down_proj": 7}}, {"ranks": {"down_proj": 7}}),
    "alpha pattern": ({"alphas": {"q_proj": 1.5}}, {"alphas": {"q_proj": 1.5}}),
    "some targets": ({"targets": ("k_proj",)}, {"targets": ("k_proj",)}),
    "no prefix": ({"prefix": ""}, {}),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_and_patterns(kind: str, base: tuple[Any, Decoder], tmp_path: Path) -> None:
    model, decoder = base
    written, made = SCALES[kind]
    loaded = load_lora(write_adapter(tmp_path, model, **written), decoder, max_rank=16)
    ids = random_ids(9)
    with torch.no_grad():
        expected = merged(model, **made)(torch.tensor([ids])).logits[0]
    found = logits(decoder, ids, loaded.weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.std()))


def test_a_digest_follows_from_the_content(base: tuple[Any, Decoder], tmp_path: Path) -> None:
    model, decoder = base
    made = [
        load_lora(write_adapter(tmp_path / str(n), model, **options), decoder, max_rank=16).digest
        for n, options in enumerate([{}, {}, {"seed": 1}, {"alpha": 7.0}])
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora means DoRA"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save means fully"),
    "bias": ({"bias": "all"}, "bias must be none"),
    "lora bias": ({"lora_bias": True}, "lora_bias means biases of the B"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens means adapters"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters means"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices means trained"),
    "replication": ({"layer_replication": [[0, 1]]}, "layer_replication means layers"),
    "another kind": ({"peft_type": "IA3"}, "peft_type must be LORA"),
    "no rank": ({"r": 0}, "r must be at least 1"),
    "a pattern": ({"rank_pattern": {"(": 3}}, "rank_pattern has '\\(', but a key must be"),
    "a repeated group": ({"rank_pattern": {"(a+)+": 3}}, "rank_pattern has '\\(a\\+\\)\\+', but"),
    "nested groups": ({"rank_pattern": {"((a|b)|c)": 3}}, "rank_pattern has .*, but a key must"),
    "many groups": ({"alpha_pattern": {"(.|..)" * 30: 3}}, "alpha_pattern has .*, but a key must"),
    "many repeats": ({"alpha_pattern": {".*" * 30: 3}}, "alpha_pattern has .*, but a key must"),
    "a look back": ({"alpha_pattern": {"(q)\\1": 3}}, "alpha_pattern has .*, but a key must"),
    "a long key": ({"rank_pattern": {"a" * 257: 3}}, "rank_pattern must have at most 2048 keys"),
    "many keys": ({"rank_pattern": dict.fromkeys(map(str, range(2049)), 3)},
                  "rank_pattern must have at most 2048 keys"),
    "many choices": ({"rank_pattern": {f"a{n}.*": 3 for n in range(65)}},
                     "rank_pattern must have at most 2048 keys .* 64 keys with groups or repeats"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha must be a number above 0"),
    "an alpha of nan": ({"lora_alpha": float("nan")}, "lora_alpha must be a number above 0"),
    "a long alpha": ({"lora_alpha": 10**400}, "lora_alpha must be a number above 0"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha must be a number above 0"),
    "an infinite rank": ({"rank_pattern": {"q_proj": float("inf")}}, "rank_pattern must map"),
    "a rank of nan": ({"rank_pattern": {"q_proj": float("nan")}}, "rank_pattern must map"),
    "large numbers": (
        {"alpha": 1e9, "targets": ("q_proj",), "more":
         {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64),
          "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight":
          torch.full((100, 4), 1e38)}},
        "up_proj has values that are too large, once scaled, for float32",
    ),
    "a number": ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must map names to numbers"),
    "rank above the limit": ({"rank": 17}, "has rank 17, above --max-lora-rank 16"),
    "rank of another": ({"r": 5}, "but with rank 5 this model needs"),
    "embeddings": (
        {"more": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}},
        "is an update of an embedding",
    ),
    "magnitudes": (
        {"more": {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector":
                  torch.ones(4)}},
        "is a DoRA magnitude",
    ),
    "a whole matrix": (
        {"more": {"base_model.model.lm_head.weight": torch.ones(4, 4)}},
        "is not an A or B matrix",
    ),
    "the output": (
        {"more": {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}},
        "target lm_head is not supported|has no module lm_head",
    ),
    "another layer": (
        {"more": {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}},
        "target model.layers.7.mlp.up_proj is not supported",
    ),
    "a tower": (
        {"more": {"base_model.model.vision_tower.blocks.0.fc1.lora_A.weight": torch.ones(4, 4)}},
        "the text model has no module vision_tower.blocks.0.fc1",
    ),
    "half a pair": (
        {"targets": ("q_proj",), "more":
         {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}},
        "model.layers.0.mlp.up_proj lacks lora_B",
    ),
    "not finite": (
        {"targets": ("q_proj",), "more":
         {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight":
          torch.full((4, 64), torch.inf)}},
        "has values that are NaN or infinite",
    ),
    "integers": (
        {"targets": ("q_proj",), "more":
         {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight":
          torch.ones(4, 64, dtype=torch.int32)}},
        "is int32 \\[4, 64\\], but must be a matrix of floats",
    ),
    "nothing": ({"targets": ()}, "has no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_or_other_than_low_rank_updates_is_refused_by_name(
    kind: str, base: tuple[Any, Decoder], tmp_path: Path
) -> None:
    model, decoder = base
    options, reason = REFUSED[kind]
    folder = write_adapter(tmp_path, model, **options)
    with pytest.raises(ModelLoadError, match=reason):
        load_lora(folder, decoder, max_rank=16)


def test_other_files_are_refused(base: tuple[Any, Decoder], tmp_path: Path) -> None:
    model, decoder = base
    with pytest.raises(ModelLoadError, match=r"has no adapter_config\.json"):
        load_lora(tmp_path, decoder, max_rank=16)
    weights = write_adapter(tmp_path, model) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_lora(tmp_path, decoder, max_rank=16)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapter_model\.safetensors"):
        load_lora(tmp_path, decoder, max_rank=16)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.bin, a pickle"):
        load_lora(tmp_path, decoder, max_rank=16)


def test_a_pipe_in_place_of_the_settings_is_refused(
    base: tuple[Any, Decoder], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ModelLoadError, match=r"has no adapter_config\.json"):
        load_lora(tmp_path, base[1], max_rank=16)


def test_a_lack_of_memory_is_told_in_one_line(
    base: tuple[Any, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmany lines")

    model, decoder = base
    monkeypatch.setattr(decoder.ops, "pack_lora", fail)
    with pytest.raises(ModelLoadError, match=r"^not enough memory for the adapter in [^\n]*$"):
        load_lora(write_adapter(tmp_path, model), decoder, max_rank=16)


@pytest.mark.parametrize(
    ("key", "module", "is_found"),
    [
        ("q_proj", "model.layers.1.self_attn.q_proj", True),
        ("q_proj", "model.layers.1.self_attn.aq_proj", False),
        (r"^model\.layers\.1\.self_attn\.q_proj$", "model.layers.1.self_attn.q_proj", True),
        (r"layers\.(0|1)\.self_attn\.(?:q|k)_proj", "model.layers.1.self_attn.k_proj", True),
        (r"layers\.(0|1)\.self_attn\.(?:q|k)_proj", "model.layers.2.self_attn.k_proj", False),
        (r"layers\.\d+\.mlp\.up_proj", "model.layers.12.mlp.up_proj", True),
        (r"layers\.[0-3]\.mlp.up_proj", "model.layers.4.mlp.up_proj", False),
        ("q_proj|v_proj", "model.layers.0.self_attn.v_proj", True),
    ],
)
def test_keys_of_patterns_find_what_peft_finds(
    key: str, module: str, is_found: bool, tmp_path: Path
) -> None:
    config = {"r": 4, "lora_alpha": 8, "rank_pattern": {key: 7}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert (re.match(rf"(.*\.)?({key})$", module) is not None) is is_found
    assert LoraSettings(tmp_path).rank(module) == (7 if is_found else 4)


def test_an_adapter_of_another_base_is_refused(base: tuple[Any, Decoder], tmp_path: Path) -> None:
    _, decoder = base
    other = make_reference("qwen3", intermediate_size=104)
    with pytest.raises(ModelLoadError, match=r"gate_proj has A \[4, 64\] and B \[104, 4\]"):
        load_lora(write_adapter(tmp_path, other), decoder, max_rank=16)


def test_modules_of_transformers_take_no_adapter(tmp_path: Path) -> None:
    model = make_reference("qwen3")
    decoder = load_decoder(save(model, tmp_path / "base"), impl="transformers")
    with pytest.raises(ModelLoadError, match="need foretoken's own decoder"):
        load_lora(write_adapter(tmp_path / "adapter", model), decoder, max_rank=16)


def test_rows_without_an_adapter_keep_their_bits(base: tuple[Any, Decoder], tmp_path: Path) -> None:
    """Beside adapted rows, and with the adapter loaded, on every backend."""
    model, _ = base
    for backend in BACKENDS:
        decoder = load_decoder(save(model, tmp_path / backend), backend=backend)
        ids = random_ids(11)
        alone = logits(decoder, ids, None)
        folder = write_adapter(tmp_path / f"{backend}-adapter", model)
        weights = load_lora(folder, decoder, max_rank=16).weights
        driver = ModelDriver(decoder)
        first, second = driver.add(ids), driver.add(ids)
        segments = [
            Segment(ids, 0, each.pages, len(ids), extras=RowExtras(adapter=adapter))
            for each, adapter in ((first, weights), (second, None))
        ]
        batch = decoder.batch(segments, page_size=driver.page_size)
        found = decoder.forward(batch, driver.pool).logits
        assert torch.equal(found[len(ids) :], alone)
        assert not torch.equal(found[: len(ids)], alone)
