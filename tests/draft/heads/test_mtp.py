"""MTP layers: their logits are those of transformers, wherever a checkpoint has them."""

from __future__ import annotations

import re
import shutil
from array import array
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.description.config import MTP_BESIDE_MODEL
from foretoken.core.model.drafting.mtp import count_mtp_layers, load_mtp_layer
from foretoken.core.model.families.experts import glm4_moe
from foretoken.core.model.families.registry import MODEL_FAMILIES
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.native import native_library
from foretoken.draft.heads import mtp
from foretoken.draft.heads.common.head_kv import Written
from foretoken.draft.heads.common.proposer import DraftStart, Query
from foretoken.draft.heads.mtp import MtpProposer, frequent_ids, load_mtp, with_rough_output
from support.gguf_files import write_gguf
from support.mtp_checkpoints import (
    BEHIND,
    NUM_LAYERS,
    SHARED,
    MtpReference,
    add_tensors,
    drop_tensor,
    rename_tensors,
    save_copied,
    save_mtp,
    tensors_of,
)
from support.native_variants import BACKENDS, slow
from support.quick_interpreter import quicken
from support.recorded_drafts import Recorded, prompt_of, serve
from support.tiny_models import VOCAB

PAGE_SIZE, NUM_PAGES = 4, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_mtp(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> MtpReference:
    return MtpReference(folder)


def load(folder: Path, backend: str) -> OwnDecoder:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    if backend == "triton":  # under its interpreter
        pytest.importorskip("triton")
        quicken()
    found = load_decoder(folder, backend=backend, device="cpu", dtype="float32")  # type: ignore[arg-type]
    assert isinstance(found, OwnDecoder)
    return found


class Levels:
    """The layer's logits behind a text and behind each token of a chain, level by level."""

    def __init__(self, folder: Path, target: OwnDecoder) -> None:
        joined = load_mtp(folder, target, keeps_packed=False)
        pool = joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
        pool.data.fill_(float("nan"))
        proposer = joined.proposer(pool)
        assert isinstance(proposer, MtpProposer)
        self.proposer, self.target = proposer, target
        self.draft_ids = proposer.head.draft_ids

    @torch.inference_mode()
    def of(self, token_ids: list[int], drafted: list[int]) -> list[Tensor]:
        last, pages = len(token_ids) - 1, array("q", reversed(range(NUM_PAGES)))
        features = self._write(token_ids[:-1], pages)
        sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=last + 1)
        scheduled = ScheduledRequest(
            request_id="a", tokens=array("q", token_ids), start=last, stop=last + 1,
            page_ids=pages, sampling=sampling, draft_plan=DraftPlan(max_draft=len(drafted) + 1),
        )  # fmt: skip
        drafting = self.proposer.begin([DraftStart(scheduled, 1, features[-1])], 1)
        found, slots = [], list[int]()
        for level, token_id in enumerate([token_ids[-1], *drafted]):
            if level:
                at = last + level
                slots.append(pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
            query = Query(0, level, level - 1 if not level else 0, token_id, tuple(slots))
            found.append(drafting.score([query], None).logits[0])
        return found

    def _write(self, token_ids: list[int], pages: array[int]) -> Tensor:
        num_pages = -(-len(token_ids) // PAGE_SIZE)
        pool = self.target.make_pool(num_pages, page_size=PAGE_SIZE)
        segment = Segment(array("q", token_ids), 0, array("q", range(num_pages)), 0)
        batch = self.target.batch([segment], page_size=PAGE_SIZE)
        taps = self.target.forward(batch, pool, Wanted(taps=self.proposer.taps)).taps
        assert taps is not None
        positions = np.arange(len(token_ids))
        slots = np.asarray(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        written = Written(
            taps[: len(token_ids)], torch.tensor(token_ids), positions, slots,
            np.zeros(1, dtype=np.int64), np.array([len(token_ids)]), [None],
        )  # fmt: skip
        return self.proposer.write_head_kv(written)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", [*BACKENDS, *slow("triton")])
def test_the_logits_of_each_level_are_those_of_transformers(
    folder: Path, reference: MtpReference, backend: str
) -> None:
    levels = Levels(folder, load(folder, backend))
    for length in (2, 9, 30):
        drafted = [5, 7, 11]
        found = levels.of(prompt_of(length), drafted)
        expected = reference.levels(prompt_of(length), drafted)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_keeps_latents_is_that_of_transformers(tmp_path: Path, backend: str) -> None:
    folder = save_mtp(tmp_path, "deepseek_v3")
    expected = MtpReference(folder).levels(prompt_of(9), [5, 7])
    for ours, theirs in zip(
        Levels(folder, load(folder, backend)).of(prompt_of(9), [5, 7]), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_large_output_is_rounded_to_four_bits_and_a_small_one_is_not(folder: Path) -> None:
    target = load(folder, "native")
    layer = load_mtp_layer(folder, target, keeps_packed=False)
    assert with_rough_output(layer) is layer
    rough = with_rough_output(layer, least_bytes=1)
    before, after = (each.decoder.weights.lm_head for each in (layer, rough))
    assert after.weight.nbytes < before.weight.nbytes / 4
    assert rough.num_bytes == layer.num_bytes + after.weight.nbytes
    hidden = torch.randn(32, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    exact, near = (target.ops.logits(hidden, each) for each in (before, after))
    assert 0.0 < (near - exact).abs().max() < 0.2 * exact.abs().max()
    assert (near.argmax(-1) == exact.argmax(-1)).float().mean() > 0.8
    again = with_rough_output(rough, least_bytes=1)
    assert again is rough, "4 bits are not rounded again"


def test_torch_rounds_no_output(folder: Path) -> None:
    layer = load_mtp_layer(folder, load(folder, "torch"), keeps_packed=False)
    assert with_rough_output(layer, least_bytes=1) is layer


def same_levels(folder: Path, target: OwnDecoder, expected: list[Tensor]) -> None:
    for ours, theirs in zip(Levels(folder, target).of(prompt_of(9), [5, 7]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_layer_in_a_gguf_file_is_the_same(tmp_path: Path) -> None:
    folder = save_mtp(tmp_path, n_group=1)
    expected = Levels(folder, load(folder, "torch")).of(prompt_of(9), [5, 7])
    file = write_gguf(folder, tmp_path / "model.gguf")
    same_levels(file, load(file, "torch"), expected)


def test_a_layer_beside_the_model_is_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that Qwen's checkpoints give it; a family declares them and nothing more."""
    expected = Levels(folder, load(folder, "torch")).of(prompt_of(9), [5, 7])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for copied in SHARED:
        drop_tensor(tmp_path, BEHIND + copied)
    rename_tensors(
        tmp_path,
        {
            f"{BEHIND}enorm.": "mtp.pre_fc_norm_embedding.",
            f"{BEHIND}hnorm.": "mtp.pre_fc_norm_hidden.",
            f"{BEHIND}eh_proj.": "mtp.fc.",
            f"{BEHIND}shared_head.norm.": "mtp.norm.",
            BEHIND: "mtp.layers.0.",
        },
    )
    monkeypatch.setitem(
        MODEL_FAMILIES, "glm4_moe", lambda fields: replace(glm4_moe(fields), mtp=MTP_BESIDE_MODEL)
    )
    same_levels(tmp_path, load(tmp_path, "torch"), expected)


def test_of_a_large_vocabulary_the_frequent_ids_alone_are_drafted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folder, "torch")
    whole = Levels(folder, target).of(prompt_of(9), [5, 7])
    monkeypatch.setattr(mtp, "NUM_DRAFT_IDS", 40)
    monkeypatch.setattr(mtp, "NUM_LAST_IDS", 10)
    levels = Levels(folder, target)
    ids = torch.tensor([*range(30), *range(VOCAB - 10, VOCAB)])
    assert torch.equal(levels.draft_ids, ids)
    for ours, theirs in zip(levels.of(prompt_of(9), [5, 7]), whole, strict=True):
        torch.testing.assert_close(ours, theirs[ids], atol=1e-5, rtol=1e-5)


def test_a_small_vocabulary_is_drafted_whole(folder: Path) -> None:
    target = load(folder, "torch")
    assert Levels(folder, target).draft_ids is None
    assert frequent_ids(replace(target.config, vocab_size=65536)) is None
    assert len(frequent_ids(replace(target.config, vocab_size=65537))) == 32768


@pytest.mark.parametrize("number", [0, 1])
def test_layers_are_counted_and_the_first_one_must_be_whole(
    folder: Path, tmp_path: Path, number: int
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    second = {
        name.replace(BEHIND, f"model.layers.{NUM_LAYERS + 1}."): tensor
        for name, tensor in tensors_of(folder).items()
        if name.startswith(BEHIND)
    }
    add_tensors(tmp_path, second)
    assert count_mtp_layers(*open_model(tmp_path)) == 2
    drop_tensor(tmp_path, f"model.layers.{NUM_LAYERS + number}.eh_proj.weight")
    if number:  # the others are not read
        assert count_mtp_layers(*open_model(tmp_path)) == 2
        return
    with pytest.raises(ModelLoadError, match=rf"lacks tensors: {re.escape(BEHIND)}eh_proj.weight$"):
        count_mtp_layers(*open_model(tmp_path))


def test_a_layer_of_another_shape_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    add_tensors(tmp_path, {f"{BEHIND}hnorm.weight": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"hnorm\.weight has shape \[3\], .*implies \[64\]"):
        count_mtp_layers(*open_model(tmp_path))


# -- the engine without its loop ------------------------------------------------------------------


def run(
    target: OwnDecoder, proposer: Recorded | None, temperature: float, num_requests: int
) -> list[Request]:
    pool = target.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    return serve(target, pool, proposer, temperature, num_requests)


def recorded(folder: Path, target: OwnDecoder) -> Recorded:
    joined = load_mtp(folder, target, keeps_packed=False)
    pool = joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    pool.data.fill_(float("nan"))
    return Recorded(joined.proposer(pool))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_drafts_of_the_layer_change_no_token(
    folder: Path, temperature: float, num_requests: int
) -> None:
    target = load(folder, "native" if native_library() is not None else "torch")
    proposer = recorded(folder, target)
    plain = run(target, None, temperature, num_requests)
    drafted = run(target, proposer, temperature, num_requests)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert sum(each.usage.proposed_tokens for each in drafted) > 10 * num_requests


def test_a_copy_of_the_last_layer_is_accepted_as_often_as_it_is_right(tmp_path: Path) -> None:
    """The layer of transformers drafts the same chains, and their right tokens are counted."""
    folder = save_copied(tmp_path)
    target, reference = load(folder, "torch"), MtpReference(folder)
    proposer = recorded(folder, target)
    requests = run(target, proposer, 0.0, 5)
    texts = [list(each.tokens) for each in requests]
    num_right = 0
    for before, draft in proposer.found:
        drafted: list[int] = []
        for _ in draft:
            drafted.append(int(reference.levels(before, drafted)[-1].argmax()))
        assert draft == drafted
        text = next(text for text in texts if text[: len(before)] == before)
        pairs = zip(draft, text[len(before) :], strict=False)
        num_right += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert num_right == sum(each.usage.accepted_tokens for each in requests) > 0
