"""The target in 4 bits drafts on the target's own pages: no token and no shared page changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.mixers.recurrent import RecurrentWeights
from foretoken.core.ops.native import native_library
from foretoken.draft.proposers.self_draft import self_draft_price
from support.checkpoints import make_checkpoint
from support.draft_trees import TreeDepth
from support.equality_harness import House, shuffled, tiny_house
from support.greedy_streams import random_ids
from support.tiny_pair import write_pair

KINDS = {
    "float32": ("float32", "native", "auto"),
    "bfloat16": ("bfloat16", "native", "auto"),
    "int8": ("bfloat16", "native", "int8"),
}


@pytest.fixture(scope="module", params=KINDS)
def house(request: pytest.FixtureRequest) -> House:
    return tiny_house(*KINDS[request.param])  # type: ignore[arg-type]


def accepted(house: House) -> int:
    return sum(request.usage.accepted_tokens for request in house.requests)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chains_change_no_token_though_what_they_wrote_is_void(
    house: House, page_size: int
) -> None:
    house.check(house.run(shuffled(page_size)[:20], "self", page_size=page_size))
    assert accepted(house) > 60


def test_trees_change_no_token_nor_does_a_prefix_that_drafting_requests_left(house: House) -> None:
    speculator = TreeDepth(10)
    order = shuffled(3)[:20]
    served = house.run(order, "self", speculator=speculator, max_batch_tokens=160, repeats=2)
    house.check(served)
    assert accepted(house) > 80
    assert any(request.usage.cached_tokens for request in house.requests)


def test_look_ups_and_the_self_draft_share_a_tree(house: House) -> None:
    house.check(house.run(shuffled(8), "auto+self", max_batch_tokens=160))
    sources = {s for r in house.requests for s in r.usage.accepted_by_source}
    assert sources > {"self"}


def test_where_pages_are_short_and_requests_are_preempted_no_token_changes(house: House) -> None:
    house.check(house.run(shuffled(5)[:12], "self", num_pages=60, max_batch_tokens=160))
    assert house.scheduler.num_preemptions > 0


def test_a_draft_that_fails_behind_its_passes_changes_no_token(house: House) -> None:
    house.check(house.run(shuffled(6)[:12], "failing self"))


def test_an_unrounded_copy_knows_every_token_at_any_temperature(house: House) -> None:
    house.check(house.run(shuffled(2)[:24], "unrounded self", depth=3, max_batch_tokens=160))
    for request in house.requests:
        usage = request.usage
        assert usage.proposed_tokens - usage.accepted_tokens <= 3, "those behind the end alone"
    assert accepted(house) > 150


def test_models_that_cannot_draft_for_themselves_are_refused_by_reason(tmp_path) -> None:
    folder = write_pair(tmp_path, vocab_size=256)[0]
    for options, error, reason in (
        ({"backend": "torch"}, ModelLoadError, "needs the native kernels"),
        ({"quantize": "int4"}, InvalidRequest, "weights of 8 bits or more"),
        ({"model_impl": "transformers"}, ModelLoadError, "computed by transformers"),
    ):
        with pytest.raises(error, match=reason):
            LLM(folder, draft="self", device="cpu", **options)  # type: ignore[arg-type]


def test_a_model_of_8_bits_drafts_for_itself_where_it_is_named(tmp_path) -> None:
    folder = write_pair(tmp_path, vocab_size=256)[0]
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(folder, draft="none", device="cpu", quantize="int8") as plain:
        expected = plain.generate([5, 9, 2], greedy)
    with LLM(folder, draft="self", speculation=3, device="cpu", quantize="int8") as drafting:
        found = drafting.generate([5, 9, 2], greedy)
    assert found.token_ids == expected.token_ids
    assert found.usage.accepted_by_source["self"] > 0


def test_a_copy_shares_what_is_small_and_is_a_third_of_the_rest(house: House) -> None:
    target, copy = house.target, rough_decoder(house.target)
    assert copy.weights.embedding is target.weights.embedding
    ours, theirs = (each.weights.layers[0].mixer.qkv.weight.nbytes for each in (target, copy))
    assert theirs < 0.4 * ours


def test_a_model_with_states_drafts_for_itself_and_its_passes_are_timed(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder = make_checkpoint(tmp_path, "qwen3_5")
    target = load_decoder(folder, backend="native")
    copy = rough_decoder(target)
    ours, theirs = (each.weights.layers[0].mixer for each in (target, copy))
    assert isinstance(ours, RecurrentWeights)
    assert isinstance(theirs, RecurrentWeights)
    assert theirs.gates is ours.gates, "what decays is not rounded"
    assert theirs.out is not ours.out
    pass_s, gain = self_draft_price(target, copy)
    assert pass_s > 0.0 < gain
    prompts = [random_ids(20 + 9 * index, index) for index in range(3)]
    sampled = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True, seed=3)
    answers = []
    for draft, speculation in (("none", "off"), ("self", 3), ("auto,self", "auto")):
        with LLM(folder, draft=draft, speculation=speculation, device="cpu") as llm:
            found = llm.generate(prompts, sampled)
        answers.append([each.token_ids for each in found])
        if draft == "self":
            assert sum(each.usage.accepted_by_source.get("self", 0) for each in found) > 10
    assert answers[0] == answers[1] == answers[2]
