"""Text models of multimodal and of base checkpoints: the tokens that the whole model generates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.families.registry import TEXT_FAMILIES
from foretoken.core.model.formats.nested import text_names
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model
from foretoken.core.model.report import inspect_model
from support.checkpoints import make_reference, save
from support.greedy_streams import generate, greedy, random_ids
from support.multimodal import MULTIMODAL, SPECIAL, multimodal_model
from support.tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def prompts() -> list[list[int]]:
    """Two of them share a prefix of several pages; windows of 12 tokens are left behind."""
    shared = random_ids(21, seed=1, vocab_size=SPECIAL)
    return [
        [*shared, *random_ids(9, seed=2, vocab_size=SPECIAL)],
        [*shared, *random_ids(4, seed=3, vocab_size=SPECIAL)],
        random_ids(5, seed=4, vocab_size=SPECIAL),
    ]


def says_what_generate_says(decoder: Decoder, reference: Any) -> bool:
    expected = [generate(reference, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    page_size = 16 if decoder.states else 4
    return greedy(decoder, prompts(), expected, page_size=page_size) == expected


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_the_own_decoder_says_what_the_whole_model_says(model_type: str, tmp_path: Path) -> None:
    reference = multimodal_model(model_type)
    folder = save(reference, tmp_path)
    decoder = load_decoder(folder, impl="own")
    assert says_what_generate_says(decoder, reference)
    report = inspect_model(folder)
    assert (report.path, report.problem) == ("own", None)
    text = reference.config.get_text_config(decoder=True)
    assert report.model_type == decoder.config.model_type == text.model_type


def test_every_family_of_text_models_is_tested() -> None:
    made = (transformers.CONFIG_MAPPING[each]().get_text_config() for each in MULTIMODAL)
    assert set(TEXT_FAMILIES) <= {text.model_type for text in made}


@pytest.mark.parametrize("model_type", ["gemma3", "smolvlm"])
def test_modules_of_transformers_serve_the_text_too(model_type: str, tmp_path: Path) -> None:
    reference = multimodal_model(model_type)
    decoder = load_decoder(save(reference, tmp_path), impl="transformers")
    assert decoder.path == "transformers"
    assert says_what_generate_says(decoder, reference)


def test_experts_are_read_as_the_hub_stacks_them_and_as_transformers_saves_them(
    tmp_path: Path,
) -> None:
    reference = multimodal_model("qwen3_vl_moe", moe_intermediate_size=24)
    folder = save(reference, tmp_path)

    def as_on_the_hub(tensors: Tensors) -> Tensors:
        turned = {n: t.mT.contiguous() for n, t in tensors.items() if ".experts." in n}
        assert {t.shape for t in turned.values()} == {(8, 64, 48), (8, 24, 64)}
        return tensors | turned

    edit_tensors(folder, as_on_the_hub)
    assert says_what_generate_says(load_decoder(folder), reference)


def test_the_flat_config_of_qwen2_vl_is_read(tmp_path: Path) -> None:
    """The hub has the text's fields beside the vision's, and RoPE of the kind "mrope"."""
    reference = multimodal_model("qwen2_vl")
    folder = save(reference, tmp_path)

    def flat(config: dict[str, Any]) -> dict[str, Any]:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        return text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}

    edit_config(folder, flat)
    assert says_what_generate_says(load_decoder(folder), reference)


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_thinker_of_an_omni_model_is_served_and_what_speaks_is_left_out(
    name: str, tmp_path: Path
) -> None:
    reference = multimodal_model(f"{name}_thinker")
    folder = save(reference, tmp_path)
    more = {"talker.model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4)}
    edit_tensors(folder, lambda t: {f"thinker.{n}": each for n, each in t.items()} | more)
    edit_config(folder, lambda thinker: {"model_type": name, "thinker_config": thinker})
    assert says_what_generate_says(load_decoder(folder, impl="own"), reference)


def test_a_base_model_without_an_output_matrix_has_its_embedding_for_one(tmp_path: Path) -> None:
    """Models of embeddings are saved without a prefix of names, under a config that says untied."""
    reference = make_reference("qwen3", vocab_size=VOCAB)
    folder = save(reference.model, tmp_path)
    assert "embed_tokens.weight" in load_file(folder / WEIGHTS)
    assert not reference.config.tie_word_embeddings
    reference.lm_head.weight = reference.model.embed_tokens.weight
    decoder = load_decoder(folder)
    assert decoder.config.tie_embeddings
    assert says_what_generate_says(decoder, reference)


# -- the output matrix ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["own", "transformers"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_files_decide_whether_the_output_is_tied_where_configs_differ(
    stored: bool, outer: bool, impl: Any, tmp_path: Path
) -> None:
    reference = multimodal_model("gemma3", tied=not stored)
    folder = save(reference, tmp_path)
    is_stored = any("lm_head" in name for name in load_file(folder / WEIGHTS))
    assert is_stored == stored

    def differing(config: dict[str, Any]) -> dict[str, Any]:
        text = config["text_config"] | {"tie_word_embeddings": not outer}
        return config | {"text_config": text, "tie_word_embeddings": outer}

    edit_config(folder, differing)
    assert says_what_generate_says(load_decoder(folder, impl=impl), reference)


def test_a_stored_output_matrix_wins_over_a_config_that_says_tied(tmp_path: Path) -> None:
    reference = make_reference("qwen3", vocab_size=VOCAB)
    folder = save(reference, tmp_path)
    edit_config(folder, lambda config: config | {"tie_word_embeddings": True})
    decoder = load_decoder(folder)
    assert not decoder.config.tie_embeddings
    assert says_what_generate_says(decoder, reference)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.equal(
        reference.lm_head.weight
    )


def test_an_output_matrix_with_the_embeddings_values_takes_no_room_of_its_own(
    tmp_path: Path,
) -> None:
    reference = make_reference("qwen3", tie_word_embeddings=True)
    folder = save(reference, tmp_path)
    count = inspect_model(folder).num_parameters
    same = {"lm_head.weight": load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone()}
    edit_tensors(folder, lambda tensors: tensors | same)
    assert open_model(folder).config.tie_embeddings
    assert inspect_model(folder).num_parameters == count


# -- refusals -------------------------------------------------------------------------------------


def test_a_tensor_of_the_text_that_nothing_reads_is_refused_and_one_of_a_tower_is_not(
    tmp_path: Path,
) -> None:
    folder = save(multimodal_model("qwen3_vl"), tmp_path)
    edit_tensors(folder, lambda t: t | {"model.visual.more.weight": torch.zeros(4)})
    assert inspect_model(folder).problem is None
    edit_tensors(folder, lambda t: t | {"model.language_model.more.weight": torch.zeros(4)})
    message = r"has unexpected tensors: model\.more\.weight$"
    with pytest.raises(ModelLoadError, match=message):
        load_decoder(folder)
    assert inspect_model(folder).problem == f"{folder} has unexpected tensors: model.more.weight"


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_text_model_under_a_name_that_is_not_known_is_refused(impl: Any, tmp_path: Path) -> None:
    folder = save(multimodal_model("gemma3"), tmp_path)
    edit_tensors(folder, lambda t: {n.replace("language_model", "text"): x for n, x in t.items()})
    with pytest.raises(ModelLoadError, match=r"lacks tensors: lm_head\.weight, model\.embed_tok"):
        load_decoder(folder, impl=impl)


def test_names_of_other_models_are_left_out() -> None:
    assert text_names(["model.visual.a", "model.language_model.b", "lm_head.weight"]) == {
        "model.b": "model.language_model.b",
        "lm_head.weight": "lm_head.weight",
    }
    assert text_names(["visual.a", "model.b"]) == {"model.b": "model.b"}
    assert text_names(["language_model.b", "vision_model.c"]) == {"model.b": "language_model.b"}
