"""Models of transformers' own modules on our pages: the tokens that transformers generates."""

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
from foretoken.core.model.fallback.transformers_decoder import TransformersDecoder
from foretoken.core.model.families.registry import MODEL_FAMILIES
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.report import inspect_model
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.native import native_library
from support.checkpoints import ModelDriver, make_checkpoint, save
from support.greedy_streams import generate, greedy, random_ids
from support.tiny_models import FEW, TYPES, VOCAB, save_tiny, tiny_config, tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def load(folder: Path, **options: Any) -> TransformersDecoder:
    decoder = load_decoder(folder, impl="transformers", **options)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


def prompts() -> list[list[int]]:
    """Two of them share a prefix of several pages; windows of 12 tokens are left behind."""
    shared = random_ids(21, seed=1, vocab_size=VOCAB)
    return [
        [*shared, *random_ids(9, seed=2, vocab_size=VOCAB)],
        [*shared, *random_ids(4, seed=3, vocab_size=VOCAB)],
        random_ids(5, seed=4, vocab_size=VOCAB),
    ]


@pytest.mark.parametrize("model_type", TYPES)
def test_modules_of_transformers_say_what_generate_says(model_type: str, tmp_path: Path) -> None:
    """Chunks, decoding rows and drafts that are sometimes wrong share passes and pages."""
    reference = tiny_model(model_type)
    decoder = load(save(reference, tmp_path))
    assert decoder.exact
    expected = [generate(reference, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert greedy(decoder, prompts(), expected) == expected


@pytest.mark.parametrize("model_type", FEW)
def test_native_kernels_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    reference = tiny_model(model_type)
    decoder = load(save(reference, tmp_path), backend="native")
    expected = [generate(reference, prompt) for prompt in prompts()]
    assert greedy(decoder, prompts(), expected) == expected


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "gemma4_text"])
def test_a_row_has_the_same_bits_in_any_batch(
    model_type: str, dtype: str, backend: str, tmp_path: Path
) -> None:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    decoder = load(save_tiny(tmp_path, model_type), dtype=dtype, backend=backend)
    assert decoder.exact
    ids = random_ids(40, seed=7, vocab_size=VOCAB)
    driver = ModelDriver(decoder, page_size=4)
    whole = driver.prefill(driver.add(ids), 40)
    again, other = driver.add(ids), driver.add(random_ids(30, seed=8, vocab_size=VOCAB))
    found = []
    for stop in (13, 14, 31, 40):
        chunk = ids[again.num_computed : stop]
        beside = list(other.tokens[other.num_computed :][: stop // 6])
        logits, _ = driver.step([(again, chunk, len(chunk)), (other, beside, 1)])
        found.append(logits)
        again.num_computed = stop
        other.num_computed += len(beside)
    assert torch.equal(torch.cat(found), whole)


def test_what_is_not_exact_is_found_at_startup(tmp_path: Path) -> None:
    """A linear that rounds a lone row otherwise than a row among many."""

    class Rounds(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (1 + 1e-6 * x.shape[1])

    from foretoken.core.model.fallback.startup_test import startup_test

    decoder = load(save_tiny(tmp_path, "qwen3"))
    assert startup_test(decoder)
    layer = decoder.model.model.layers[0].mlp
    layer.down_proj = Rounds(layer.down_proj)
    assert not startup_test(decoder)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused_at_startup(
    tmp_path: Path,
) -> None:
    class Remembers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.state + x.mean() * 30
            return x + self.state

    from foretoken.core.model.fallback.startup_test import startup_test

    decoder = load(save_tiny(tmp_path, "qwen3"))
    decoder.model.model.layers[0].mlp = Remembers()
    with pytest.raises(ModelLoadError, match="depends on more than keys and values"):
        startup_test(decoder)


def test_rounding_that_routes_a_row_to_another_expert_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretoken.core.model.fallback import startup_test

    by_transformers = startup_test._by_transformers
    wrong_rows = [4]

    def routed_otherwise(decoder: TransformersDecoder, ids: list[int]) -> torch.Tensor:
        logits = by_transformers(decoder, ids).clone()
        logits[wrong_rows] += 2 * logits.std()
        return logits

    monkeypatch.setattr(startup_test, "_by_transformers", routed_otherwise)
    decoder = load(save_tiny(tmp_path / "experts", "gpt_oss"))
    assert decoder.exact
    wrong_rows.extend(range(5, 12))  # most rows: the model keeps something that pages do not have
    with pytest.raises(ModelLoadError, match="depends on more than keys and values"):
        startup_test.startup_test(decoder)
    wrong_rows[:] = [4]
    with pytest.raises(ModelLoadError, match="depends on more than keys and values"):
        load(save_tiny(tmp_path / "dense", "qwen3"))


# -- which path -----------------------------------------------------------------------------------


def test_a_known_family_is_computed_by_its_own_decoder_unless_asked_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path)
    with caplog.at_level("INFO"):
        own = load_decoder(folder)
    assert (own.path, own.exact) == ("own", True)
    assert "qwen3: computed by foretoken's decoder" in caplog.text
    ids = random_ids(30)
    found = []
    for decoder in (own, load(folder)):
        driver = ModelDriver(decoder)
        found.append(driver.prefill(driver.add(ids), 17, 30))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def test_another_model_is_computed_by_transformers_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, "stablelm")
    with caplog.at_level("INFO"):
        decoder = load_decoder(folder)
    assert decoder.path == "transformers"
    assert "stablelm: computed by transformers' modules on foretoken's KV pages" in caplog.text
    with pytest.raises(ModelLoadError, match="'stablelm' is not supported"):
        load_decoder(folder, impl="own")


def test_a_variation_of_a_known_family_is_computed_by_transformers(tmp_path: Path) -> None:
    reference = tiny_model("qwen3", hidden_act="relu")
    decoder = load_decoder(save(reference, tmp_path))
    assert decoder.path == "transformers"
    expected = [generate(reference, prompt) for prompt in prompts()]
    assert greedy(decoder, prompts(), expected) == expected


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    tiny_config("stablelm").save_pretrained(tmp_path)
    decoder = load(tmp_path, load_format="random")
    driver = ModelDriver(decoder)
    logits = driver.prefill(driver.add([5, 6, 7]), 3)
    again = ModelDriver(load(tmp_path, load_format="random"))
    assert torch.equal(logits, again.prefill(again.add([5, 6, 7]), 3))


def test_int8_packs_all_but_the_routers(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder = save_tiny(tmp_path, "qwen3_moe")
    ids = random_ids(20, seed=3, vocab_size=VOCAB)
    found = []
    for quantize in ("none", "int8"):
        driver = ModelDriver(load(folder, backend="native", quantize=quantize))
        found.append(driver.prefill(driver.add(ids), 20))
    off = (found[0] - found[1]).abs().mean() / found[0].std()
    assert 0 < off < 0.1


# -- what the runner uses besides -----------------------------------------------------------------


def test_taps_are_those_of_the_own_decoder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    found = []
    for decoder in (load_decoder(folder), load(folder)):
        pool = decoder.make_pool(4, page_size=16)
        batch = decoder.batch([Segment([5, 6, 7, 8, 9], 0, [0], 1)], page_size=16)
        found.append(decoder.forward(batch, pool, Wanted(taps=(3, 0, 1))))
    own, other = found
    assert own.taps is not None
    assert own.taps.shape == other.taps.shape
    torch.testing.assert_close(own.taps, other.taps, atol=1e-4, rtol=0)
    torch.testing.assert_close(own.hidden, other.hidden, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="taps"):
        decoder.forward(batch, pool, Wanted(taps=(4,)))


def test_a_chunk_without_logits_computes_hidden_states_and_keys(tmp_path: Path) -> None:
    decoder = load(save_tiny(tmp_path, "gpt_oss"))
    driver = ModelDriver(decoder, page_size=4)
    ids = random_ids(20, seed=9, vocab_size=VOCAB)
    expected = driver.prefill(driver.add(ids), 20)[12:]
    stream = driver.add(ids)
    (nothing,) = driver.step([(stream, ids[:12], 0)])
    assert nothing.shape == (0, VOCAB)
    stream.num_computed = 12
    assert torch.equal(driver.prefill(stream, 20), expected)


def test_layers_of_several_shapes_share_pages(tmp_path: Path) -> None:
    """The slots of a page, copied, hold every layer of every shape."""
    decoder = load(save_tiny(tmp_path, "gemma4_text"))
    pool = decoder.make_pool(8, page_size=4)
    assert [part.head_dim for part in pool.parts] == [16, 32]
    assert pool.data[0].nbytes == decoder.bytes_per_page(page_size=4)
    ids = random_ids(8, seed=1, vocab_size=VOCAB)
    step = [Segment(ids[:7], 0, [2, 3], 1)]
    decoder.forward(decoder.batch(step, page_size=4), pool)
    slots = [range(page * 4, page * 4 + 4) for page in (2, 3, 6, 1)]
    pool.copy_slots([*slots[0], *slots[1]], [*slots[2], *slots[3]])
    pool.data[[2, 3]] = torch.nan
    last = decoder.batch([Segment(ids[7:], 7, [6, 1], 1)], page_size=4)
    fresh = decoder.make_pool(2, page_size=4)
    whole = decoder.batch([Segment(ids, 0, [0, 1], 1)], page_size=4)
    assert torch.equal(decoder.forward(last, pool).logits, decoder.forward(whole, fresh).logits)


@pytest.mark.parametrize("kv_dtype", ["int8"])
def test_scaled_pages_of_several_shapes(kv_dtype: Any, tmp_path: Path) -> None:
    decoder = load(save_tiny(tmp_path, "gemma4_text"))
    ids = random_ids(20, seed=1, vocab_size=VOCAB)
    found = []
    for kind in ("auto", kv_dtype):
        pool = decoder.make_pool(5, page_size=4, kv_dtype=kind)
        assert pool.data[0].nbytes == decoder.bytes_per_page(page_size=4, kv_dtype=kind)
        batch = decoder.batch([Segment(ids, 0, [4, 0, 1, 3, 2], 20)], page_size=4)
        found.append(decoder.forward(batch, pool).logits)
    assert 0 < (found[0] - found[1]).abs().mean() / found[0].std() < 0.1


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors must be found before any tensor is read."""

    def load(*_args: object, **_options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("qwen3", {"model_type": "nobodys"}, "nobodys"),
    "state": ("stablelm", {"model_type": "xlstm"}, "a state outside transformers' cache"),
    "indexer": ("stablelm", {"model_type": "deepseek_v32"}, "an indexer selects the keys"),
    "alibi": ("stablelm", {"model_type": "bloom"}, "ALiBi"),
    "dynamic": ("stablelm", DYNAMIC, "dynamic RoPE"),
    "encoder": ("stablelm", {"model_type": "t5"}, "is not supported"),
    "quantised": (
        "stablelm",
        {"quantization_config": {"quant_method": "aqlm"}},
        "use the unquantised",
    ),
    "no type": ("stablelm", {"model_type": None}, "model_type is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_served_is_refused_by_name(
    case: str, tmp_path: Path, no_weights: None
) -> None:
    model_type, changes, message = BAD[case]
    tiny_config(model_type).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_decoder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_attention_of_a_models_own_is_refused_before_weights_are_read(
    tmp_path: Path, no_weights: None
) -> None:
    tiny_config("falcon").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="use transformers' attention interface"):
        load_decoder(tmp_path)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


UP = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BAD_FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": (
        "stablelm",
        lambda f: edit_tensors(f, lambda t: t.pop(UP)),
        r"lacks tensors: model\.layers\.1\.mlp\.up_proj\.weight$",
    ),
    "misshaped": (
        "stablelm",
        lambda f: edit_tensors(f, lambda t: t.update({UP: torch.zeros(90, 64)})),
        r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[90, 64\], but its config implies "
        r"\[96, 64\]$",
    ),
    "unread": (
        "stablelm",
        lambda f: edit_tensors(f, lambda t: t.update({"model.adapter.weight": torch.zeros(4)})),
        r"has unexpected tensors: model\.adapter\.weight$",
    ),
    "a layer too many": (
        "stablelm",
        lambda f: edit_tensors(f, lambda t: t.update({UP.replace("1", "2"): torch.zeros(96, 64)})),
        r"has unexpected tensors: model\.layers\.2\.mlp\.up_proj\.weight$",
    ),
    "cut": ("stablelm", cut, "do not lie within the file"),
    "no weights": (
        "stablelm",
        lambda f: (f / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "pickles": (
        "stablelm",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin, a pickle",
    ),
    "an expert": (
        "deepseek_v3",
        lambda f: edit_tensors(f, lambda t: t.update({EXPERT: torch.zeros(31, 64)})),
        r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight has shape \[31, 64\], but its config "
        r"implies \[32, 64\]$",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_files_are_refused_before_weights_are_read_and_by_the_check_too(
    case: str, tmp_path: Path, no_weights: None
) -> None:
    model_type, damage, message = BAD_FILES[case]
    folder = save_tiny(tmp_path, model_type)
    assert inspect_model(folder).problem is None
    damage(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_decoder(folder, impl="transformers")
    assert str(folder) in str(caught.value)
    if model_type not in MODEL_FAMILIES:
        assert inspect_model(folder).problem == str(caught.value)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "stablelm")
    edit_tensors(folder, lambda t: t[UP].view(-1)[7].fill_(torch.nan))
    with pytest.raises(ModelLoadError, match=rf"{UP} has values that are NaN or infinite"):
        load_decoder(folder)


def test_logits_that_are_not_finite_are_called_so(tmp_path: Path) -> None:
    """Finite weights, too large for what is computed with them."""
    folder = save_tiny(tmp_path, "stablelm")
    edit_tensors(folder, lambda t: t[UP].mul_(1e38))
    with pytest.raises(ModelLoadError, match="its logits are NaN or infinite in torch"):
        load_decoder(folder)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    further = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    edit_tensors(folder, lambda t: t.update(further))
    assert load(folder).config.num_layers == 2
    assert inspect_model(folder).problem is None


def test_masks_and_positions_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "gpt_neox")
    old = {
        "gpt_neox.layers.0.attention.bias": torch.ones((1, 1, 8, 8), dtype=torch.uint8),
        "gpt_neox.layers.1.attention.bias": torch.ones((1, 1, 8, 8), dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(8),
        "gpt_neox.position_ids": torch.arange(8),
    }
    edit_tensors(folder, lambda t: t.update(old))
    assert load(folder).exact


def test_longrope_is_served_up_to_its_first_table(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
    folder = save_tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert load(folder).config.max_model_len == 64
