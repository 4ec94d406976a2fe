"""Promises of docs/sdk.md about `LLM`, `Completion`, `Usage` and `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from foretoken import LLM, Completion, SamplingParams
from foretoken.api.build.model_files import BUILTIN

CONTEXT = 512
OPTIONS = {"kv_tokens": 4096, "max_model_len": CONTEXT, "max_queued": 8, "threads": 1}
PROMPT = "def fibonacci(n):\n"
LONG = "import collections\n\n\nclass Queue:\n    def __init__(self, items):\n" * 3
TARGET = BUILTIN / "target"
EOS = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
EOS = EOS[0] if isinstance(EOS, list) else EOS

VARIED = [
    {"temperature": 0},
    {"seed": 7},
    {"seed": 8, "temperature": 0.7, "top_p": 0.9},
    {"seed": 9, "top_k": 20, "min_p": 0.02},
    {"seed": 10, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"seed": 11, "logit_bias": {300: 3.0, 206: -5.0}, "min_tokens": 10},
    {"seed": 12, "allowed_token_ids": list(range(200, 900))},
    {"seed": 13, "stop": ["e", ":"], "bad_words": ["self"]},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **OPTIONS) as llm:
        yield llm


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **fields})


def varied(llm: LLM, **fields: object) -> list[list[int]]:
    params = [SamplingParams(**{"max_tokens": 12, **kind, **fields}) for kind in VARIED]
    return [out.token_ids for out in llm.generate([PROMPT] * len(params), params)]


@pytest.fixture(scope="module")
def base(llm: LLM) -> Completion:
    return llm.generate(PROMPT, greedy())


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return varied(llm, speculation="off")


def test_one_text_gives_one_completion(base: Completion) -> None:
    assert isinstance(base, Completion)
    assert base.request_id
    assert len(base.token_ids) == 16
    assert base.finish_reason == "length"
    assert base.stop_reason is None
    assert base.logprobs is None


def test_token_ids_give_what_their_text_gives(llm: LLM, base: Completion) -> None:
    out = llm.generate(base.prompt_token_ids, greedy())
    assert isinstance(out, Completion)
    assert (out.token_ids, out.text) == (base.token_ids, base.text)


def test_a_list_of_texts_and_ids_is_answered_in_order(llm: LLM, base: Completion) -> None:
    prompts = ["class A:", [5, 6, 7], PROMPT, "import "]
    outs = llm.generate(prompts, greedy())
    assert [type(out) for out in outs] == [Completion] * 4
    assert outs[1].prompt_token_ids == [5, 6, 7]
    assert outs[2].token_ids == base.token_ids
    assert [out.token_ids for out in outs] == [
        llm.generate(prompt, greedy()).token_ids for prompt in prompts
    ]
    assert len({out.request_id for out in outs}) == 4


def test_a_list_of_one_gives_a_list_and_an_empty_list_an_empty_one(llm: LLM) -> None:
    assert len(llm.generate([PROMPT], greedy(max_tokens=1))) == 1
    assert llm.generate([], greedy()) == []


def test_a_list_of_params_belongs_to_the_prompts_in_order(llm: LLM) -> None:
    outs = llm.generate([PROMPT] * 3, [greedy(max_tokens=count) for count in (3, 1, 5)])
    assert [len(out.token_ids) for out in outs] == [3, 1, 5]


def test_more_prompts_than_may_wait_are_still_answered(llm: LLM) -> None:
    outs = llm.generate([f"x_{i} = " for i in range(12)], greedy(max_tokens=1))
    assert [len(out.token_ids) for out in outs] == [1] * 12


def test_chat_answers_a_conversation(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "hi"}], greedy(max_tokens=4))
    assert isinstance(out, Completion)
    assert out.usage.prompt_tokens == len(out.prompt_token_ids)
    again = llm.generate(out.prompt_token_ids, greedy(max_tokens=4))
    assert again.token_ids == out.token_ids


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(
    llm: LLM, plain: list[list[int]]
) -> None:
    assert varied(llm, speculation="off") == plain
    alone = [
        llm.generate(PROMPT, SamplingParams(**{"max_tokens": 12, "speculation": "off", **kind}))
        for kind in VARIED
    ]
    assert [out.token_ids for out in alone] == plain


@pytest.mark.parametrize("speculation", ["auto", 0, 1, 6, None])
def test_tokens_do_not_depend_on_speculation(
    llm: LLM, plain: list[list[int]], speculation: object
) -> None:
    assert varied(llm, speculation=speculation) == plain


@pytest.mark.parametrize(
    "options",
    [{"draft": "none"}, {"draft": "ngram", "speculation": 3}, {"speculation": "off"}],
    ids=str,
)
def test_tokens_do_not_depend_on_the_draft(
    plain: list[list[int]], options: dict[str, object]
) -> None:
    with LLM("builtin", **OPTIONS, **options) as other:
        assert varied(other) == plain
        usage = other.generate(PROMPT, greedy()).usage
    if "ngram" not in options.values():
        assert (usage.proposed_tokens, usage.verify_steps) == (0, usage.completion_tokens)


def test_n_gives_choices_and_the_plain_attributes_are_those_of_the_first(llm: LLM) -> None:
    out = llm.generate(PROMPT, SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True))
    assert [choice.index for choice in out.choices] == [0, 1, 2]
    first = out.choices[0]
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (
        (first.text, first.token_ids, first.finish_reason, first.stop_reason)
    )
    assert out.usage.completion_tokens == 36
    assert out.usage.prompt_tokens == len(out.prompt_token_ids)
    assert len({tuple(choice.token_ids) for choice in out.choices}) > 1
    again = llm.generate(PROMPT, SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in out.choices]


def test_usage_adds_up(llm: LLM) -> None:
    for out in llm.generate([PROMPT] * 3, [greedy(), greedy(speculation="off"), greedy(seed=1)]):
        usage = out.usage
        assert usage.prompt_tokens == len(out.prompt_token_ids)
        assert usage.completion_tokens == len(out.token_ids)
        assert 0 <= usage.accepted_tokens <= usage.proposed_tokens
        assert sum(usage.accepted_by_source.values()) == usage.accepted_tokens
        bonus_cut_off = usage.accepted_tokens + usage.verify_steps - usage.completion_tokens
        assert bonus_cut_off in ((0,) if usage.proposed_tokens == 0 else (0, 1))
        assert 0 <= usage.queue_time <= usage.time_to_first_token <= usage.total_time


def test_logprobs_have_a_row_for_every_token(llm: LLM, base: Completion) -> None:
    out = llm.generate(PROMPT, greedy(logprobs=3))
    assert out.token_ids == base.token_ids
    assert [row.token_id for row in out.logprobs] == out.token_ids
    for row in out.logprobs:
        assert len(row.top) == 3
        assert (row.token_id, row.logprob) in row.top
        assert row.top[0][1] == row.logprob
        assert [lp for _, lp in row.top] == sorted((lp for _, lp in row.top), reverse=True)
        assert row.logprob <= 0


def test_logprobs_do_not_depend_on_speculation_nor_on_a_stop(llm: LLM) -> None:
    params = {"seed": 5, "max_tokens": 12, "logprobs": 2, "stop": ["e"]}
    outs = [llm.generate(PROMPT, SamplingParams(**params, speculation=s)) for s in ("off", 5)]
    assert outs[0].logprobs == outs[1].logprobs
    assert [len(out.logprobs) for out in outs] == [len(out.token_ids) for out in outs]


def test_prompt_logprobs_have_a_row_for_every_prompt_token_but_the_first(llm: LLM) -> None:
    for _ in range(2):  # the second time from the cache, if at all
        out = llm.generate(LONG, greedy(max_tokens=1, prompt_logprobs=1))
        assert out.prompt_logprobs[0] is None
        rows = out.prompt_logprobs[1:]
        assert [row.token_id for row in rows] == out.prompt_token_ids[1:]
        assert all(row.logprob <= 0 for row in rows)


def test_a_stop_token_id_ends_the_answer_and_is_the_reason(llm: LLM, base: Completion) -> None:
    stop = base.token_ids[6]
    at = base.token_ids.index(stop)
    out = llm.generate(PROMPT, greedy(stop_token_ids=[stop]))
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.token_ids == base.token_ids[: at + 1]
    assert out.usage.completion_tokens == at + 1
    assert base.text.startswith(out.text)


def test_the_end_token_ends_unless_ignored_and_not_before_min_tokens(llm: LLM) -> None:
    forced = {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "max_tokens": 8}
    ended = llm.generate(PROMPT, greedy(**forced))
    assert (ended.finish_reason, ended.text) == ("stop", "")
    later = llm.generate(PROMPT, greedy(**forced, min_tokens=5))
    assert later.finish_reason == "stop"
    assert len(later.token_ids) in (5, 6)
    ignored = llm.generate(PROMPT, greedy(**forced | {"ignore_eos": True}))
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 8)


def test_processors_change_what_they_name(llm: LLM, base: Completion) -> None:
    biased = llm.generate(PROMPT, greedy(logit_bias={base.token_ids[0]: -100.0}))
    assert biased.token_ids[0] != base.token_ids[0]
    allowed = llm.generate(PROMPT, greedy(allowed_token_ids=[300, 301]))
    assert set(allowed.token_ids) <= {300, 301}


def test_a_bad_word_is_not_said_where_it_would_be(llm: LLM) -> None:
    def text(token: int) -> str:
        return llm.generate(PROMPT, greedy(max_tokens=1, allowed_token_ids=[token])).text

    def is_word(token: int) -> bool:
        word = text(token)
        return word.isalpha() and llm.generate(word, greedy(max_tokens=1)).prompt_token_ids == [
            token
        ]

    word, other = next(token for token in range(300, 340) if is_word(token)), 299
    liked = {"allowed_token_ids": [word, other], "logit_bias": {word: 50.0}}
    assert set(llm.generate(PROMPT, greedy(**liked)).token_ids) == {word}
    banned = llm.generate(PROMPT, greedy(**liked, bad_words=[text(word)]))
    assert set(banned.token_ids) == {other}


def test_no_max_tokens_means_up_to_the_context(llm: LLM) -> None:
    prompt = [300 + i % 50 for i in range(CONTEXT - 10)]
    out = llm.generate(prompt, greedy(max_tokens=None))
    assert (out.finish_reason, len(prompt) + len(out.token_ids)) == ("length", CONTEXT)


def test_a_prompt_is_cached_once_computed_and_a_salt_isolates_it(llm: LLM) -> None:
    prompt = "# salted\n" + LONG
    first, second = (llm.generate(prompt, greedy(max_tokens=4)) for _ in range(2))
    assert first.usage.cached_tokens == 0
    assert 0 < second.usage.cached_tokens < second.usage.prompt_tokens
    salted = [llm.generate(prompt, greedy(max_tokens=4, cache_salt="a")) for _ in range(2)]
    assert salted[0].usage.cached_tokens == 0
    assert salted[1].usage.cached_tokens == second.usage.cached_tokens
    assert {tuple(out.token_ids) for out in (first, second, *salted)} == {tuple(first.token_ids)}


def test_identical_prompts_that_arrive_together_are_computed_once(llm: LLM) -> None:
    outs = llm.generate(["# together\n" + LONG] * 4, greedy(max_tokens=2))
    assert [out.usage.cached_tokens > 0 for out in outs] == [False, True, True, True]
