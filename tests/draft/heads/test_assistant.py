"""Gemma 4's assistants: they draft what transformers drafts, on the target's own KV."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelLoadError
from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.drafting.assistant import UNSCORED, is_assistant, read_assistant
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.native import native_library
from foretoken.draft.heads.assistant import AssistantProposer, join_assistant
from foretoken.draft.heads.common.head_kv import Written
from foretoken.draft.heads.common.proposer import DraftStart, Query
from support.assistants import (
    CLUSTERED,
    CLUSTERED_VOCAB,
    LARGE,
    NUM_CENTROIDS,
    NUM_SCORED,
    SMALL,
    AssistantReference,
    save_assistant,
    save_target,
)
from support.native_variants import BACKENDS
from support.recorded_drafts import Recorded, prompt_of, serve

PAGE_SIZE, NUM_PAGES = 4, 40
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "small": ("gemma4_text", SMALL, CLUSTERED),
    "large": ("gemma4_text", LARGE, LARGE),
    "unified": ("gemma4_unified_text", {}, {"is_unified": True}),
}


def save_pair(name: str, folder: Path) -> tuple[Path, Path]:
    model_type, target, assistant = PAIRS[name]
    return (
        save_target(folder / "target", model_type, **target),
        save_assistant(folder / "assistant", **assistant),
    )


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return save_pair(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, backend: str) -> OwnDecoder:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    found = load_decoder(folder, backend=backend, device="cpu", dtype="float32")  # type: ignore[arg-type]
    assert isinstance(found, OwnDecoder)
    return found


def best_backend() -> str:
    return "native" if native_library() is not None else "torch"


def levels(
    pair: tuple[Path, Path],
    backend: str,
    token_ids: list[int],
    drafted: list[int],
    kv_dtype: KvDtype = "auto",
) -> list[Tensor]:
    """The assistant's logits behind a text, and behind each token of a chain."""
    target = load(pair[0], backend)
    pool = target.make_pool(NUM_PAGES, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    if kv_dtype == "auto":
        pool.data.fill_(float("nan"))
    proposer = join_assistant(pair[1], target, keeps_packed=False).proposer(pool)
    assert isinstance(proposer, AssistantProposer)
    last, pages = len(token_ids) - 1, array("q", reversed(range(NUM_PAGES)))
    before = array("q", token_ids[:-1])
    batch = target.batch([Segment(before, 0, pages, 0)], page_size=PAGE_SIZE)
    with torch.inference_mode():
        taps = target.forward(batch, pool, Wanted(taps=proposer.taps)).taps
        assert taps is not None
        void = np.zeros(last, dtype=np.int64)
        written = Written(
            taps[:last], torch.tensor(before), void, void, void[:1], np.array([last]), [None]
        )
        feature = proposer.write_head_kv(written)[-1]
        kept = pool.data.clone()
        sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=last + 1)
        scheduled = ScheduledRequest(
            request_id="a", tokens=array("q", token_ids), start=last, stop=last + 1,
            page_ids=pages, sampling=sampling, draft_plan=DraftPlan(max_draft=len(drafted) + 1),
        )  # fmt: skip
        drafting = proposer.begin([DraftStart(scheduled, 0, feature)], 1)
        found = [
            drafting.score([Query(0, level, 0 if level else -1, token_id)], None).logits[0]
            for level, token_id in enumerate([token_ids[-1], *drafted])
        ]
    assert torch.equal(pool.data.view(torch.uint8), kept.view(torch.uint8))  # nothing is written
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_assistant_computes_at_each_level_what_its_modules_compute(
    pair: tuple[Path, Path], backend: str
) -> None:
    """Texts within a window of the target's, and far beyond."""
    reference = AssistantReference(*pair)
    for length in (2, 7, 8, 9, 30):
        found = levels(pair, backend, prompt_of(length), [5, 7, 11])
        expected = reference.levels(prompt_of(length), [5, 7, 11])
        for ours, theirs in zip(found, expected, strict=True):
            scored = ours > UNSCORED
            assert torch.equal(scored, theirs > theirs.min()) or scored.all()
            torch.testing.assert_close(ours[scored], theirs[scored], atol=2e-4, rtol=2e-4)


def test_of_clusters_the_best_alone_are_scored(tmp_path: Path) -> None:
    (found,) = levels(save_pair("small", tmp_path), "torch", prompt_of(9), [])
    assert int((found > UNSCORED).sum()) == NUM_SCORED * CLUSTERED_VOCAB // NUM_CENTROIDS


def test_keys_and_values_of_int8_are_read_as_the_target_reads_them(tmp_path: Path) -> None:
    pair = save_pair("large", tmp_path)
    (wide,) = levels(pair, best_backend(), prompt_of(30), [])
    (found,) = levels(pair, best_backend(), prompt_of(30), [], "int8")
    assert 0 < float((found - wide).abs().max()) < 0.2 * float(wide.std())


def test_drafts_are_the_tokens_that_transformers_would_choose(pair: tuple[Path, Path]) -> None:
    """Prompts in chunks, behind hits of a prefix, beside requests that join."""
    target, reference = load(pair[0], best_backend()), AssistantReference(*pair)
    pool = target.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    pool.data.fill_(float("nan"))
    joined = join_assistant(pair[1], target, keeps_packed=False)
    assert joined.bytes_per_page(page_size=PAGE_SIZE) == 0
    proposer = Recorded(joined.proposer(pool))
    drafted = serve(target, pool, proposer, 0.0, 5)
    plain = serve(target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), None, 0.0, 5)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert any(each.usage.cached_tokens for each in drafted)
    assert len(proposer.found) > 40
    for before, draft in proposer.found[::3]:
        assert draft == reference.greedy(before, len(draft))


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("kv_tokens", [2048, 160])  # with few of them requests are preempted
def test_drafts_change_no_token(
    pair: tuple[Path, Path], temperature: float, kv_tokens: int
) -> None:
    shared = prompt_of(40)
    prompts = [[*shared, *prompt_of(5 + 7 * index)] for index in range(4)]
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True, seed=5)
    answers, usages = {}, {}
    for draft, speculation in (("none", "off"), (str(pair[1]), 4)):
        with LLM(
            pair[0], draft=draft, speculation=speculation, device="cpu", kv_tokens=kv_tokens,
            max_batch_tokens=48, page_size=PAGE_SIZE,
        ) as llm:  # fmt: skip
            found = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
        answers[speculation] = [each.token_ids for each in found]
        usages[speculation] = [each.usage for each in found]
    assert answers[4] == answers["off"]
    assert sum(usage.proposed_tokens for usage in usages[4]) > 100
    accepted = sum(usage.accepted_by_source.get("assistant", 0) for usage in usages[4])
    assert accepted > 10 or not temperature  # a random assistant knows the noise alone
    assert set().union(*(usage.accepted_by_source for usage in usages[4])) <= {"assistant"}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_it_drafts_beside_look_ups(tmp_path: Path, kv_cache_dtype: str) -> None:
    target, assistant = save_pair("small", tmp_path)
    params = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True, seed=2)
    answers, sources = [], set[str]()
    for draft, speculation in (("none", "off"), (f"auto,{assistant}", 4)):
        with LLM(
            target, draft=draft, speculation=speculation, device="cpu", kv_tokens=1024,
            kv_cache_dtype=kv_cache_dtype,
        ) as llm:  # fmt: skip
            found = llm.generate([prompt_of(20)] * 3, params)
        answers.append([each.token_ids for each in found])
        sources |= {source for each in found for source in each.usage.proposed_by_source}
    assert answers[0] == answers[1]
    assert "assistant" in sources


def edit(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_assistant_of_another_target_is_refused_by_numbers(tmp_path: Path) -> None:
    target, assistant = save_pair("small", tmp_path)
    config = open_model(target).config
    assert is_assistant(assistant)
    assert not is_assistant(target)
    read_assistant(assistant, config)
    for values, problem in (
        ({"backbone_hidden_size": 48}, r"backbone_hidden_size is 48, but .* hidden size is 64"),
        ({"num_centroids": 7}, r"num_centroids must divide the vocabulary of 208 tokens, not 7"),
        (
            {"centroid_intermediate_top_k": 17},
            r"centroid_intermediate_top_k is 17, but there are only 16",
        ),
    ):
        before = (assistant / "config.json").read_text()
        edit(assistant, **values)
        with pytest.raises(ModelLoadError, match=problem):
            read_assistant(assistant, config)
        (assistant / "config.json").write_text(before)
    for more, problem in (
        ({}, "vocab_size is 199, but the target has 208 tokens"),
        (
            {"num_key_value_heads": 1, "vocab_size": CLUSTERED_VOCAB},
            r"layer 0 reads 1 KV heads of 16 dim.*layer 2 of the target has 2 of 16",
        ),
    ):
        other = save_assistant(tmp_path / "other", **more)
        with pytest.raises(ModelLoadError, match=problem):
            read_assistant(other, config)


def test_an_assistant_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    target, assistant = save_pair("small", tmp_path)
    file = assistant / "model.safetensors"
    tensors = load_file(file)
    for name in ("pre_projection.weight", "masked_embedding.token_ordering"):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=f"lacks tensors: {name}"):
            LLM(target, draft=str(assistant), device="cpu")


def test_a_target_of_transformers_modules_has_none(tmp_path: Path) -> None:
    target, assistant = save_pair("large", tmp_path)
    with pytest.raises(ModelLoadError, match="own decoder, and gemma4_text is computed by"):
        LLM(target, draft=str(assistant), device="cpu", model_impl="transformers")
