"""Sampled conversations: every token of earlier turns is cached, whatever drafts and finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken import LLM, SamplingParams

ASKED = ["Write a story about a fox.", "Go on.", "What then?", "Why?", "And the bear?", "The end?"]
SAMPLED = SamplingParams(temperature=0.7, max_tokens=48)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", kv_tokens=16_384) as found:
        yield found


def talk(llm: LLM, params: SamplingParams) -> list[tuple[list[int], list[int]]]:
    """Hold a conversation; the tokens of each prompt and answer."""
    messages: list[dict[str, Any]] = []
    turns = []
    for seed, text in enumerate(ASKED):
        messages.append({"role": "user", "content": text})
        out = llm.chat(messages, replace(params, seed=seed))
        messages.append(out.message)
        turns.append((out.prompt_token_ids, out.token_ids))
    return turns


def test_all_tokens_of_earlier_turns_are_cached_but_a_page(llm):
    page, messages, known = llm._llm.page_size, [], 0
    for seed, text in enumerate(ASKED):
        messages.append({"role": "user", "content": text})
        out = llm.chat(messages, replace(SAMPLED, seed=seed, cache_salt="turns"))
        assert out.usage.cached_tokens > known - page
        assert out.usage.spliced_tokens == sum(len(each.get("token_ids", ())) for each in messages)
        messages.append(out.message)
        # The last token that was served is the only one whose KV is not computed.
        known = len(out.prompt_token_ids) + len(out.token_ids) - 1


def test_a_conversation_of_ids_is_the_same_with_drafts_and_without_cold_and_cached(llm):
    first = talk(llm, replace(SAMPLED, cache_salt="a"))
    assert talk(llm, replace(SAMPLED, cache_salt="a")) == first, "cached"
    assert talk(llm, replace(SAMPLED, cache_salt="b", speculation="off")) == first
    assert talk(llm, replace(SAMPLED, cache_salt="c", speculation=4)) == first


def test_some_of_these_answers_have_other_tokens_than_their_text(llm):
    """Else the tests above would show nothing."""
    tokenizer = llm._llm.tokenizer
    answers = [ids for _, ids in talk(llm, replace(SAMPLED, temperature=1.0, cache_salt="d"))]
    assert any(tokenizer.encode_word(tokenizer.decode(ids)) != ids for ids in answers)


def test_an_answer_that_comes_back_as_text_is_named_with_its_first_other_token(llm):
    tokenizer, ask = llm._llm.tokenizer, {"role": "user", "content": ASKED[0]}
    params = replace(SAMPLED, temperature=1.0, cache_salt="e")
    for seed in range(32):
        out = llm.chat([ask], replace(params, seed=seed), request_id=f"first-{seed}")
        ids, own = out.message["token_ids"], tokenizer.encode_word(out.text)
        if ids != own:
            break
    same = next(at for at, pair in enumerate(zip(ids, own, strict=False)) if len({*pair}) > 1)
    talk = [ask, {"role": "assistant", "content": out.text}, {"role": "user", "content": "x " * 99}]
    llm.chat(talk, params, request_id="again")
    found = llm._llm.explain("again")
    assert found is not None
    assert (found.cause, found.compared_with) == ("reencoded", out.request_id)
    assert found.first_token is not None
    assert found.first_token.position == len(out.prompt_token_ids) + same
    assert (found.first_token.before_id, found.first_token.now_id) == (ids[same], own[same])
    assert found.first_token.before == tokenizer.decode([ids[same]])
