"""Speculation as a caller of the SDK sees it, with the built-in pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken import LLM, Completion, InvalidRequest, SamplingParams
from foretoken.bench.common.oracle import oracles

PROMPT = "def quicksort(items):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, Completion]]:
    with LLM("builtin", speculation="off") as llm:
        yield {"greedy": llm.generate(PROMPT, GREEDY), "sampled": llm.generate(PROMPT, SAMPLED)}


def params(base: SamplingParams, **changes: object) -> SamplingParams:
    fields = {"temperature": base.temperature, "max_tokens": base.max_tokens, "seed": base.seed}
    return SamplingParams(**{**fields, **changes})  # type: ignore[arg-type]


def test_off_proposes_nothing_whatever_the_request_says(plain: dict[str, Completion]) -> None:
    with LLM("builtin", speculation="off") as llm:
        said = llm.generate(PROMPT, params(GREEDY, speculation=8))
    assert said.token_ids == plain["greedy"].token_ids
    assert (said.usage.proposed_tokens, said.usage.verify_steps) == (0, 40)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_controller_changes_no_token_and_a_retry_takes_few_steps(
    plain: dict[str, Completion], kind: str
) -> None:
    """The retry has a fixed depth: whether the controller drafts depends on what steps cost."""
    asked = GREEDY if kind == "greedy" else SAMPLED
    with LLM("builtin") as llm:
        first = llm.generate(PROMPT, asked)
        again = llm.generate(PROMPT, params(asked, speculation=8))
    assert first.token_ids == again.token_ids == plain[kind].token_ids
    assert again.usage.verify_steps < 20
    usage = again.usage
    assert sum(usage.accepted_by_source.values()) == usage.accepted_tokens
    assert sum(usage.steps_by_accepted.values()) == usage.verify_steps
    assert sum(n * steps for n, steps in usage.steps_by_accepted.items()) == usage.accepted_tokens


def test_another_salt_gets_no_draft_from_the_tree(plain: dict[str, Completion]) -> None:
    with LLM("builtin", draft="radix", speculation=8) as llm:
        llm.generate(PROMPT, params(GREEDY, cache_salt="a"))
        other = llm.generate(PROMPT, params(GREEDY, cache_salt="b"))
        same = llm.generate(PROMPT, params(GREEDY, cache_salt="a"))
    assert (other.usage.proposed_tokens, other.usage.verify_steps) == (0, 40)
    assert same.usage.accepted_by_source["radix"] > 20
    assert other.token_ids == same.token_ids == plain["greedy"].token_ids


def test_an_oracle_is_labelled_as_one(plain: dict[str, Completion]) -> None:
    with oracles(0.9) as (oracle,), LLM("builtin", draft=oracle, speculation=8) as llm:
        llm.generate(PROMPT, GREEDY)
        replayed = llm.generate(PROMPT, GREEDY)
    assert replayed.token_ids == plain["greedy"].token_ids
    assert set(replayed.usage.accepted_by_source) == {"oracle:0.9 (simulated)"}
    assert replayed.usage.verify_steps < 25


def test_a_prediction_is_drafted_and_counted(plain: dict[str, Completion]) -> None:
    known = plain["greedy"].text
    with LLM("builtin", draft="ngram", speculation=8) as llm:
        said = llm.generate(PROMPT, params(GREEDY, prediction=known))
        wrong = llm.generate(PROMPT, params(GREEDY, prediction="nothing of the kind " * 9))
    assert said.token_ids == wrong.token_ids == plain["greedy"].token_ids
    assert said.usage.accepted_by_source["prediction"] > 10
    assert wrong.usage.accepted_by_source.get("prediction", 0) < 5


@pytest.mark.parametrize("speculation", ["auto", 6])
def test_the_prefix_hit_rate_is_that_of_plain_decoding(speculation: str | int) -> None:
    prompts = [f"# shared header of every file\nimport os\n\ndef f{i}():\n" for i in range(6)]
    hits = {}
    for setting in ("off", speculation):
        with LLM("builtin", speculation=setting, kv_tokens=512, page_size=4) as llm:
            said = [llm.generate(prompt, GREEDY) for prompt in prompts * 2]
        hits[setting] = [each.usage.cached_tokens for each in said]
    assert hits[speculation] == hits["off"]
    assert sum(hits["off"]) > 0


@pytest.mark.parametrize("draft", ["auto,auto", "radix,radix", "radix,,suffix"])
def test_a_bad_draft_is_refused_by_name(draft: str) -> None:
    with pytest.raises(InvalidRequest) as refused, LLM("builtin", draft=draft) as llm:
        llm.generate(PROMPT, GREEDY)
    assert refused.value.param == "draft"
