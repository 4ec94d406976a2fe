"""Eviction inside a sequence: packed pages say what masks over the full cache say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.execution.packing.policies import KeepWindow, pack_kv
from foretoken.core.interface.extras import packing
from foretoken.core.interface.plan import ScheduledExtras, ScheduledRequest
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.draft.sources.prediction import PredictionSource
from support.checkpoints import make_checkpoint
from support.equality_harness import Perfect
from support.native_variants import BACKENDS
from support.packing_harness import (
    ANSWER_LEN,
    BUDGET,
    EVERY,
    PAGE_SIZE,
    PROMPT_LEN,
    STOP,
    Twice,
    masked_logits,
    prompt,
    request,
    same,
    serve,
)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EVERY", EVERY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("evict"), "qwen3")


@pytest.fixture(scope="module", params=BACKENDS)
def decoder(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return load_decoder(folder, dtype="float32", backend=request.param)


def test_packed_pages_are_masks_over_the_full_cache(decoder: Decoder, folder: Path) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    said = [*prompt(1), *outcome.tokens["a"]]
    expected = masked_logits(folder, said)
    rows = outcome.logits["a"]
    assert sorted(rows) == list(range(PROMPT_LEN, STOP))
    for stop, row in rows.items():
        torch.testing.assert_close(row, expected[stop - 1], atol=1e-4, rtol=0)
        assert row.argmax() == expected[stop - 1].argmax()
    whole = masked_logits(folder, said, budget=10_000)
    first = PROMPT_LEN + BUDGET + EVERY
    torch.testing.assert_close(rows[first], whole[first - 1], atol=1e-4, rtol=0)
    assert not torch.allclose(rows[first + 1], whole[first], atol=1e-3), "nothing was left out"


def test_pages_stay_within_prompt_budget_and_one_interval(decoder: Decoder) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    bound = -(-(PROMPT_LEN + BUDGET + EVERY) // PAGE_SIZE)
    assert outcome.most_pages["a"] == bound
    num_packed_away = (ANSWER_LEN - 1 - BUDGET) // EVERY * EVERY
    assert outcome.scheduler.num_packed_away_tokens == num_packed_away > 0
    cache = outcome.scheduler.cache
    assert cache.num_free_pages + PROMPT_LEN // PAGE_SIZE == cache.num_total_pages


def test_steps_of_one_token_and_drafts_give_the_same_bits(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    guess = array("q", plain.tokens["a"])
    for wrong in (0, 7):  # every seventh guess is wrong
        for at in range(wrong - 1, len(guess), wrong) if wrong else ():
            guess[at] = 5
        drafted = serve(decoder, request("a", prompt(1), prediction=guess), drafter="prediction")
        same(plain, drafted)
        assert drafted.scheduler.cache.num_total_pages == 400
    assert PredictionSource.name == "prediction"


def test_a_proposer_stops_where_kv_was_evicted(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    asked = list[int]()

    class Noting(Perfect):
        def propose(self, rows: Sequence[Any]) -> Any:
            asked.extend(len(row.tokens) for row in rows)
            return super().propose(rows)

    whole = {"a": plain.tokens["a"]}
    drafted = serve(decoder, request("a", prompt(1)), drafter="fixed+lm", proposer=Noting(whole))
    same(plain, drafted)
    assert asked
    assert max(asked) <= PROMPT_LEN + BUDGET + EVERY


def test_chunks_and_preemptions_give_the_same_bits(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    for size in (7, 64):  # tokens of a step: of a chunk that must not cross a packing, too
        broken = serve(
            decoder, request("a", prompt(1)), preempt_at=(10, 30, 45, 60, 90), max_batch_tokens=size
        )
        assert broken.scheduler.num_preemptions == 5
        same(plain, broken)
    outcome = serve(
        decoder,
        *(
            request(name, prompt(seed), answer_len=ANSWER_LEN)
            for name, seed in zip("bcda", (2, 3, 4, 1), strict=True)
        ),
        num_pages=40,  # two fit
        max_batch_tokens=7,
    )
    assert outcome.scheduler.num_preemptions > 0
    same(plain, outcome)


def test_neighbours_are_unharmed_and_short_answers_unchanged(decoder: Decoder) -> None:
    """Requests whose answers stay below the budget have the bits that they have without one."""
    short = [request(f"s{seed}", prompt(seed, 30), answer_len=BUDGET + EVERY) for seed in (5, 6)]
    without = serve(decoder, *short, budget=0)
    again = [request(f"s{seed}", prompt(seed, 30), answer_len=BUDGET + EVERY) for seed in (5, 6)]
    beside = serve(decoder, request("a", prompt(1)), *again)
    for name in ("s5", "s6"):
        same(without, beside, name)
    same(serve(decoder, request("a", prompt(1))), beside)


def test_nothing_behind_the_prompt_is_published_once_it_was_packed(decoder: Decoder) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    cache = outcome.scheduler.cache
    said = array("q", [*prompt(1), *outcome.tokens["a"], 4])
    assert cache.match_len(said) == PROMPT_LEN // PAGE_SIZE * PAGE_SIZE
    short = serve(decoder, request("a", prompt(1), answer_len=BUDGET))
    said = array("q", [*prompt(1), *short.tokens["a"], 4])
    whole = (PROMPT_LEN + BUDGET - 1) // PAGE_SIZE * PAGE_SIZE
    assert short.scheduler.cache.match_len(said) == whole, "an answer that lost nothing is kept"


def test_a_prompt_that_is_shared_stays_as_it_was(decoder: Decoder) -> None:
    shared = prompt(9, 48)
    outcome = serve(decoder, request("a", shared), request("b", [*shared, 7, 8]))
    assert outcome.tokens["a"] == serve(decoder, request("a", shared)).tokens["a"]
    assert outcome.tokens["b"] == serve(decoder, request("b", [*shared, 7, 8])).tokens["b"]
    assert outcome.scheduler.cache.num_hits > 0


def test_pages_that_a_preempted_answer_gave_to_the_cache_are_never_packed(decoder: Decoder) -> None:
    """Before the first packing they are whole and may be shared; it goes on with its own."""
    first = request("a", prompt(1))
    answer = serve(decoder, request("a", prompt(1))).tokens["a"]
    follower = [*prompt(1), *answer[:29]]
    alone = serve(decoder, request("b", follower))
    beside = serve(decoder, first, preempt_at=[30], later=[request("b", follower)])
    assert first.usage.evicted_tokens == beside.scheduler.num_packed_away_tokens // 2 > 0
    cached = beside.scheduler.cache.num_hits
    assert cached >= len(follower) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    same(alone, beside, "b")


def test_a_step_that_is_run_again_packs_once(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    again = serve(decoder, request("a", prompt(1)), runner=Twice)
    same(plain, again)


def test_a_packing_that_ended_half_way_fails_its_request_alone() -> None:
    """To pack what is left would read what is not there."""
    pack = packing.KvPack(0, 40, 16, is_begun=True)
    row = ScheduledRequest(
        request_id="a",
        tokens=array("q"),
        start=40,
        stop=41,
        page_ids=array("q"),
        sampling=request("a", [1]).sampling,
        extras=ScheduledExtras(num_packed_away=16, pack=pack),
    )
    with pytest.raises(RuntimeError, match="half way"):
        pack_kv(KeepWindow(), None, row)  # type: ignore[arg-type]
