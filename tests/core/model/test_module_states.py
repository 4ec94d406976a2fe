"""Recurrent models of transformers' modules: the tokens that transformers generates."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.fallback import selective_scan
from foretoken.core.model.fallback.startup_test import startup_test
from foretoken.core.model.fallback.states import ModuleStatePool, PagedCache
from foretoken.core.model.fallback.transformers_decoder import TransformersDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.report import inspect_model
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.native import native_library
from foretoken.core.ops.row_extras import RowExtras, SegmentState
from support.checkpoints import ModelDriver, save
from support.greedy_streams import generate, greedy, random_ids
from support.tiny_models import RECURRENT, VOCAB, save_tiny, tiny_config, tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def load(folder: Path, **options: Any) -> TransformersDecoder:
    decoder = load_decoder(folder, impl="transformers", **options)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


def prompts(*lens: int) -> list[list[int]]:
    """Prompts of these lengths, and three that begin alike: two go on from the state of another."""
    shared = random_ids(40, seed=1, vocab_size=VOCAB)
    found = [random_ids(n, seed=n, vocab_size=VOCAB) for n in lens]
    return [*found, *[[*shared, *random_ids(n, seed=n, vocab_size=VOCAB)] for n in (9, 20, 5)]]


def check(reference: Any, decoder: TransformersDecoder, *lens: int) -> None:
    """Greedy tokens are those of `generate`: in chunks, behind states, with drafts that fail."""
    expected = [generate(reference, prompt) for prompt in prompts(*lens)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert greedy(decoder, prompts(*lens), expected, page_size=16) == expected


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_modules_say_what_generate_says(model_type: str, tmp_path: Path) -> None:
    """Chunks of prompts, decoding rows and drafts that fail over page ends share passes."""
    reference = tiny_model(model_type)
    decoder = load(save(reference, tmp_path))
    assert decoder.states
    assert decoder.takes_chunks
    assert not decoder.exact
    check(reference, decoder, 1, 17)


@pytest.mark.parametrize("model_type", ["jamba", "kimi_linear", "mamba2"])
def test_native_kernels_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    reference = tiny_model(model_type)
    check(reference, load(save(reference, tmp_path), backend="native"), 300)


def test_a_scan_that_begins_with_zeros_is_found_and_rows_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan is transformers', before another is put in its place."""
    reference = tiny_model("jamba")
    space = sys.modules[type(reference).__module__]
    scan = space.mamba_selective_scan
    monkeypatch.setattr(space, "mamba_selective_scan", getattr(scan, "__wrapped__", scan))
    monkeypatch.setattr(selective_scan, "_NAME", "another")
    decoder = load(save(reference, tmp_path))
    assert not decoder.takes_chunks
    check(reference, decoder)


def test_logits_over_300_positions_are_those_of_transformers(tmp_path: Path) -> None:
    """Chunks of 37, 1, 8, 154 and 100 rows: page ends within chunks and at their ends."""
    reference = tiny_model("zamba2")
    ids = random_ids(300, vocab_size=VOCAB)
    driver = ModelDriver(load(save(reference, tmp_path)))
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    found = driver.prefill(driver.add(ids), 37, 38, 46, 200, 300)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_half_precision_and_packed_weights_load_and_decode(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder = save_tiny(tmp_path, "jamba")
    ids = random_ids(40, seed=3, vocab_size=VOCAB)
    found = []
    for options in ({}, {"quantize": "int8"}, {"dtype": "bfloat16"}):
        driver = ModelDriver(load(folder, backend="native", **options))
        found.append(driver.prefill(driver.add(ids), 20, 40))
    for other in found[1:]:
        off = (found[0] - other).abs().median() / found[0].std()
        assert 0 < off < 0.1


# -- where states stand ---------------------------------------------------------------------------


def made(tmp_path: Path) -> tuple[TransformersDecoder, ModelDriver, ModuleStatePool]:
    decoder = load(save_tiny(tmp_path, "mamba2"))
    driver = ModelDriver(decoder)
    assert isinstance(driver.states, ModuleStatePool)
    return decoder, driver, driver.states


def test_a_state_that_was_kept_is_where_another_sequence_goes_on(tmp_path: Path) -> None:
    """Kept in the midst of a chunk, at its end, and where the next one begins."""
    decoder, driver, states = made(tmp_path)
    ids = random_ids(80, vocab_size=VOCAB)
    whole = driver.prefill(driver.add(ids), 80)
    for position, start, stop in ((16, 0, 40), (48, 0, 48), (64, 0, 64), (32, 16, 40)):
        one, other = driver.add(ids), driver.add(ids)
        if start:
            driver.prefill(one, start)
        extras = RowExtras(state=SegmentState(one.state, one.state, stop, ((position, 23),)))
        rows = Segment(ids[start:stop], start, one.pages, 0, extras=extras)
        decoder.forward(decoder.batch([rows], page_size=16), driver.pool)
        assert int(states.at[23]) == position
        assert int(states.at[one.state]) == (stop - 1) // 16 * 16
        states.copy_slot(23, other.state)
        shared = array("q", [*one.pages[: position // 16], *other.pages[position // 16 :]])
        extras = RowExtras(state=SegmentState(other.state, other.state, 80))
        rows = Segment(ids[position:], position, shared, 80 - position, extras=extras)
        found = decoder.forward(decoder.batch([rows], page_size=16), driver.pool)
        torch.testing.assert_close(found.logits, whole[position:], atol=1e-3, rtol=0)


def test_rows_that_no_state_stands_before_are_refused(tmp_path: Path) -> None:
    decoder, driver, _ = made(tmp_path)
    sequence = driver.add(random_ids(40, vocab_size=VOCAB))
    driver.prefill(sequence, 20)
    sequence.num_computed = 21
    with pytest.raises(ValueError, match=r"slot 0 is at 16 and cannot be advanced to position 21"):
        driver.step([(sequence, sequence.tokens[21:30], 1)])
    plain = Segment([5, 6], 0, array("q", [0]), 1)
    with pytest.raises(ValueError, match="recurrent states in the pool and in each segment"):
        decoder.forward(decoder.batch([plain], page_size=16), driver.pool)


def test_a_decoding_step_that_failed_can_be_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, driver, _ = made(tmp_path)
    ids = random_ids(40, vocab_size=VOCAB)
    whole = driver.prefill(driver.add(ids), 40)
    sequence = driver.add(ids)
    driver.prefill(sequence, 30)
    layer = decoder.model.backbone.layers[1]
    compute = layer.forward

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a layer fails")

    for position in range(30, 40):
        step = [(sequence, ids[position : position + 1], 1)]
        monkeypatch.setattr(layer, "forward", fails)
        with pytest.raises(RuntimeError, match="a layer fails"):
            driver.step(step)
        monkeypatch.setattr(layer, "forward", compute)
        for _ in range(2):  # what failed behind the pass is computed again, too
            (logits,) = driver.step(step)
            torch.testing.assert_close(logits[0], whole[position], atol=1e-3, rtol=0)
        sequence.num_computed += 1


# -- what is learnt at the start ------------------------------------------------------------------


def test_a_model_that_keeps_more_than_its_states_is_refused_at_startup(tmp_path: Path) -> None:
    class Remembers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.state + x.mean().nan_to_num() * 30  # states of NaN are tried
            return x + self.state

    decoder = load(save_tiny(tmp_path, "mamba2"))
    decoder.model.backbone.norm_f = Remembers()
    with pytest.raises(
        ModelLoadError, match="depends on more than the states in transformers' cache"
    ):
        startup_test(decoder)


def test_a_model_that_does_not_read_its_states_is_refused_at_startup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(save_tiny(tmp_path, "mamba2"))
    monkeypatch.setattr(PagedCache, "get_conv_state", lambda *_, **__: None)
    monkeypatch.setattr(PagedCache, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ModelLoadError, match="does not read the states"):
        startup_test(decoder)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv"])
def test_states_outside_of_the_cache_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"'{model_type}' is not supported: its layers keep"):
        load(tmp_path, load_format="random")


def test_the_report_has_the_bytes_of_a_state(tmp_path: Path) -> None:
    """A layer has 128 channels with 8 numbers and 4 inputs, each of 4 bytes."""
    report = inspect_model(save_tiny(tmp_path, "mamba"))
    assert (report.path, report.state_bytes) == ("transformers", 2 * 128 * (8 + 4) * 4)
    assert report.max_model_len == 32_768
