"""Verification finds exactly the answers of the model, whatever decides their tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken import LLM, AsyncLLM, Choice, InvalidRequest, SamplingParams
from foretoken.api.structured.grammar_text import json_rule
from support.image_folders import image_part, picture, text_part, write_image_folder
from support.lora_models import AdaptedModel

OPTIONS = {"kv_tokens": 8192, "max_model_len": 512, "threads": 1}
PROMPT = "def fibonacci(n):\n"
CHAT = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "a loop"}]
OTHER_SYSTEM = [{"role": "system", "content": "You write C."}, CHAT[1]]
FORM = {
    "type": "object",
    "properties": {"size": {"type": "integer", "maximum": 99}, "kind": {"enum": ["a", "bc"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
LONG: dict[str, object] = {"max_tokens": 80, "ignore_eos": True}
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0, **LONG},
    "sampled": {"seed": 1, **LONG},
    "cuts": {"seed": 2, "temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.01, **LONG},
    "penalties": {
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        **LONG,
    },
    "bias": {"seed": 4, "logit_bias": {300: 4.0, 206: -5.0}, **LONG},
    "allowed": {"seed": 5, "allowed_token_ids": list(range(200, 900)), **LONG},
    "bans": {"seed": 6, "bad_words": ["self", "def"], **LONG},
    "min_tokens": {"seed": 7, "min_tokens": 30, "max_tokens": 60},
    "stop": {"seed": 8, "stop": ["e", ":"], "min_tokens": 9, "max_tokens": 80},
    "stop_ids": {"seed": 9, "stop_token_ids": list(range(250, 300)), "min_tokens": 8},
    "schema": {"seed": 10, "json_schema": FORM, "max_tokens": 60},
    "closed": {"seed": 11, "json_schema": {"type": "object"}, "max_tokens": 24},
    "regex": {"seed": 12, "regex": r"[a-f]{3,9}-\d{2,40}", "max_tokens": 60},
    "choice": {"seed": 13, "choice": ["yes, certainly", "no"], "max_tokens": 20},
    "grammar": {"seed": 14, "grammar": f"start: /[a-z]{{2,9}}/ {json_rule(FORM)}"},
    "length": {"seed": 15, "max_tokens": 1, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers() -> dict[str, Choice]:
    """The answer of each kind, in one batch of an engine with drafts."""
    params = [SamplingParams(**kind) for kind in KINDS.values()]  # type: ignore[arg-type]
    with LLM("builtin", draft="radix,suffix", **OPTIONS) as other:
        found = other.generate([PROMPT] * len(params), params)
    return dict(zip(KINDS, (each.choices[0] for each in found), strict=True))


kinds = pytest.mark.parametrize("kind", KINDS)


def params_of(kind: str, **changed: object) -> SamplingParams:
    return SamplingParams(**{**KINDS[kind], **changed})  # type: ignore[arg-type]


@kinds
def test_the_answer_of_another_batch_is_verified(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    choice = answers[kind]
    found = llm.verify(PROMPT, choice, params_of(kind))
    assert (found.verified, found.different_tokens, found.first_difference) == (True, 0, None)
    assert found.checked_tokens == len(choice.token_ids)
    assert found.token_ids == choice.token_ids
    assert found.finish_reason == choice.finish_reason
    assert found.exact
    assert found.usage.completion_tokens == 0


@kinds
def test_the_text_of_an_answer_is_verified(llm: LLM, answers: dict[str, Choice], kind: str) -> None:
    choice = answers[kind]
    reason = choice.finish_reason
    found = llm.verify(PROMPT, choice.text, params_of(kind), finish_reason=reason)
    assert (found.verified, found.finish_reason) == (True, reason), found.first_difference
    assert found.token_ids == choice.token_ids


@kinds
def test_one_other_token_is_found_at_its_position(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    ids = list(answers[kind].token_ids)
    position = len(ids) // 2
    ids[position] += 1
    found = llm.verify(PROMPT, ids, params_of(kind))
    assert not found.verified
    assert found.different_tokens >= 1
    assert position < found.checked_tokens <= len(ids)
    difference = found.first_difference
    assert difference is not None
    assert difference.position == position
    assert difference.given is not None
    assert difference.own is not None
    assert (difference.given.id, difference.own.id) == (ids[position], ids[position] - 1)
    assert difference.own.logprob is not None
    # Either a parameter excludes the token, or the model's own token has the higher score.
    assert (difference.margin is None) == (difference.excluded_by is not None)
    assert difference.margin is None or difference.margin >= 0


def test_the_log_probability_is_the_one_that_the_answer_reports(llm: LLM) -> None:
    params = params_of("penalties", logprobs=0)
    choice = llm.generate(PROMPT, params).choices[0]
    ids = [*choice.token_ids[:20], 7]
    difference = llm.verify(PROMPT, ids, params).first_difference
    assert difference is not None
    assert difference.own is not None
    assert choice.logprobs is not None
    # The engine reports the log-probabilities of a comparison in float32.
    assert difference.own.logprob == pytest.approx(choice.logprobs[20].logprob, rel=1e-6)


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("greedy", "length")])
def test_an_answer_with_another_seed_differs(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    other = llm.generate(PROMPT, params_of(kind, seed=777)).choices[0]
    same = other.token_ids == answers[kind].token_ids
    found = llm.verify(PROMPT, answers[kind], params_of(kind, seed=777))
    assert found.verified is same
    if found.first_difference is not None:
        pairs = zip(other.token_ids, answers[kind].token_ids, strict=False)
        first = next(at for at, (own, given) in enumerate(pairs) if own != given)
        assert found.first_difference.position == first


def test_another_temperature_and_other_penalties_differ(
    llm: LLM, answers: dict[str, Choice]
) -> None:
    for kind, changed in (
        ("sampled", {"temperature": 0.4}),
        ("greedy", {"repetition_penalty": 1.3}),
        ("bias", {"logit_bias": None}),
    ):
        own = llm.generate(PROMPT, params_of(kind, **changed)).token_ids
        pairs = zip(own, answers[kind].token_ids, strict=False)
        first = next(at for at, (mine, given) in enumerate(pairs) if mine != given)
        found = llm.verify(PROMPT, answers[kind], params_of(kind, **changed))
        assert found.first_difference is not None
        assert found.first_difference.position == first, kind


EXCLUDED = [
    ("top_k", {"temperature": 1, "top_k": 1}),
    ("top_p", {"temperature": 1, "top_p": 0.01}),
    ("min_p", {"temperature": 1, "min_p": 0.99}),
    ("allowed_token_ids", {"allowed_token_ids": list(range(300, 400))}),
    ("regex", {"regex": "[a-c]+"}),
]


@pytest.mark.parametrize(("name", "fields"), EXCLUDED)
def test_the_parameter_that_excludes_a_token_is_named(
    llm: LLM, name: str, fields: dict[str, object]
) -> None:
    params = SamplingParams(seed=5, max_tokens=9, **fields)  # type: ignore[arg-type]
    own = llm.generate(PROMPT, params).token_ids
    given = [*own[:2], 803 if own[2] != 803 else 804]
    difference = llm.verify(PROMPT, given, params).first_difference
    assert difference is not None
    assert (difference.position, difference.excluded_by) == (2, name)
    assert difference.margin is None


def test_how_an_answer_ends_is_compared(llm: LLM, answers: dict[str, Choice]) -> None:
    choice, params = answers["sampled"], params_of("sampled")
    ids = choice.token_ids
    part = llm.verify(PROMPT, ids[:40], params)
    assert (part.verified, part.finish_reason, part.checked_tokens) == (True, None, 40)
    ended = llm.verify(PROMPT, ids[:40], params, finish_reason="stop")
    assert ended.first_difference is not None
    assert (ended.first_difference.position, ended.first_difference.given) == (40, None)
    assert ended.first_difference.own is not None
    assert ended.first_difference.own.id == ids[40]
    longer = llm.verify(PROMPT, [*ids, 5], params)
    assert longer.first_difference is not None
    assert (longer.first_difference.position, longer.first_difference.own) == (80, None)
    assert longer.finish_reason == "length"
    other = llm.verify(PROMPT, ids, params, finish_reason="stop")
    assert (other.verified, other.finish_reason) == (False, "length")


def test_the_text_after_the_end_of_an_answer_is_a_difference(
    llm: LLM, answers: dict[str, Choice]
) -> None:
    for kind in ("sampled", "schema"):  # the end by the limit, and by a stop token
        choice = answers[kind]
        found = llm.verify(PROMPT, f"{choice.text}\x07", params_of(kind))
        assert found.first_difference is not None
        assert found.first_difference.given is not None
        assert found.first_difference.given.text == "\x07"
        num_tokens = len(choice.token_ids) - (choice.finish_reason == "stop")
        assert found.first_difference.position == num_tokens
        assert found.finish_reason == choice.finish_reason


def test_a_stop_token_may_be_left_out(llm: LLM, answers: dict[str, Choice]) -> None:
    choice = answers["schema"]
    assert choice.finish_reason == "stop"
    found = llm.verify(PROMPT, choice.token_ids[:-1], params_of("schema"), finish_reason="stop")
    assert (found.verified, found.finish_reason) == (True, "stop")


@pytest.mark.parametrize("kind", ["sampled", "greedy", "stop"])
def test_the_last_token_may_not_be_left_out(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    choice, params = answers[kind], params_of(kind)
    *rest, last = choice.token_ids
    text = llm._llm.tokenizer.decode(rest)
    cases = [rest] if kind == "stop" else [rest, text]
    for answer in cases:
        found = llm.verify(PROMPT, answer, params, finish_reason=choice.finish_reason)
        assert (found.verified, found.finish_reason) == (False, None)
        assert (found.checked_tokens, found.different_tokens) == (len(rest), 1)
        difference = found.first_difference
        assert difference is not None
        assert (difference.position, difference.given) == (len(rest), None)
        assert difference.own is not None
        assert difference.own.id == last
        assert llm.verify(PROMPT, answer, params).verified


def test_a_text_that_goes_on_after_the_context_is_refused() -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    with LLM("builtin", **{**OPTIONS, "max_model_len": 48}) as llm:  # type: ignore[arg-type]
        choice = llm.generate(PROMPT, params).choices[0]
        assert llm.verify(PROMPT, choice.text, params, finish_reason="length").verified
        with pytest.raises(InvalidRequest, match="goes on after the context of 48") as refused:
            llm.verify(PROMPT, f"{choice.text} and more", params)
    assert refused.value.param == "answer.text"


def test_each_choice_of_n_has_its_own_seed(llm: LLM) -> None:
    params = SamplingParams(seed=4, n=3, max_tokens=30, ignore_eos=True)
    choices = llm.generate(PROMPT, params).choices
    for choice in choices:
        assert llm.verify(PROMPT, choice, params).verified
    assert not llm.verify(PROMPT, choices[1].token_ids, params, index=2).verified


def test_a_conversation_is_verified_by_ids_and_by_content(llm: LLM) -> None:
    params = SamplingParams(seed=6, temperature=2, max_tokens=40, stop=["\n\n\n"])
    choice = llm.chat(CHAT, params).choices[0]
    assert llm.verify(CHAT, choice, params).verified
    reason = choice.finish_reason
    assert llm.verify(CHAT, choice.text, params, finish_reason=reason).verified
    assert not llm.verify(OTHER_SYSTEM, choice, params).verified
    wrong = choice.text[:10] + "\x07" + choice.text[11:]
    found = llm.verify(CHAT, wrong, params, finish_reason=reason)
    assert found.first_difference is not None
    decode, position = llm._llm.tokenizer.decode, found.first_difference.position
    assert len(decode(choice.token_ids[:position])) <= 10
    assert len(decode(choice.token_ids[: position + 1])) > 10


def test_a_forced_call_is_verified(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": FORM}}
    params = SamplingParams(seed=7, max_tokens=80)
    options: dict[str, object] = {"tools": [tool], "tool_choice": "required"}
    try:
        choice = llm.chat(CHAT, params, **options).choices[0]  # type: ignore[arg-type]
    except InvalidRequest as error:
        pytest.skip(str(error))
    assert choice.tool_calls
    found = llm.verify(CHAT, choice, params, **options)  # type: ignore[arg-type]
    assert (found.verified, found.finish_reason) == (True, "tool_calls")


def test_verification_writes_nothing_into_the_cache() -> None:
    params = params_of("sampled")
    with LLM("builtin", **OPTIONS) as llm:
        choice = llm.generate(PROMPT * 8, params).choices[0]
    with LLM("builtin", **OPTIONS) as llm:
        llm.generate(PROMPT * 8, SamplingParams(prompt_only=True))
        before = llm.generate(PROMPT * 8, SamplingParams(prompt_only=True)).usage.cached_tokens
        found = llm.verify(PROMPT * 8, choice, params)
        assert found.verified
        assert found.usage.cached_tokens > 0
        wrong = [*choice.token_ids[:50], 9]
        assert not llm.verify(PROMPT * 8, wrong, params).verified
        ids = llm.generate(PROMPT * 8, SamplingParams(prompt_only=True)).prompt_token_ids
        whole = llm.generate([*ids, *choice.token_ids], SamplingParams(prompt_only=True))
        assert whole.usage.cached_tokens <= before + llm._llm.page_size


@pytest.mark.parametrize("draft", ["none", "radix,suffix", "self"])
def test_a_step_compares_as_many_tokens_as_it_has_rows(draft: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM("builtin", draft=draft, max_batch_tokens=128, **OPTIONS) as llm:
        choice = llm.generate(PROMPT, dataclasses.replace(params, speculation="off")).choices[0]
        prompt = llm.generate(PROMPT, SamplingParams(prompt_only=True)).prompt_token_ids
        num_rows = len(prompt) + 400
        for answer in (choice, choice.text):
            found = llm.verify(PROMPT, answer, params, finish_reason="length")
            assert found.verified
            assert found.usage.verify_steps <= -(-num_rows // 64)


def forced_tokens(llm: LLM, prompt: list[int], ids: list[int], params: SamplingParams) -> list[int]:
    """Return the token that the model gives after each beginning of ``ids``, and after all."""
    return [
        llm.generate([*prompt, *ids[:at]], dataclasses.replace(params, max_tokens=1)).token_ids[0]
        for at in range(len(ids) + 1)
    ]


def test_the_comparison_continues_after_a_difference(llm: LLM, answers: dict[str, Choice]) -> None:
    """Greedy tokens after the recorded tokens are those of a prompt that ends with them."""
    params = params_of("greedy")
    prompt = llm.generate(PROMPT, SamplingParams(prompt_only=True)).prompt_token_ids
    ids = list(answers["greedy"].token_ids[:24])
    ids[3], ids[11] = 803, 900
    own = forced_tokens(llm, prompt, ids, params)
    found = llm.verify(PROMPT, ids, params)
    assert found.token_ids == own[:-1]
    assert found.checked_tokens == len(ids)
    differing = [at for at, token_id in enumerate(ids) if own[at] != token_id]
    assert found.different_tokens == len(differing)
    assert found.first_difference is not None
    assert found.first_difference.position == differing[0] == 3


def test_nothing_is_compared_after_a_token_that_a_form_excludes(
    llm: LLM, answers: dict[str, Choice]
) -> None:
    ids = list(answers["regex"].token_ids)
    wrong = [*ids[:2], 803, *ids[3:]]
    found = llm.verify(PROMPT, wrong, params_of("regex"))
    assert (found.checked_tokens, found.different_tokens) == (3, 1)
    assert found.first_difference is not None
    assert (found.first_difference.position, found.first_difference.excluded_by) == (2, "regex")


@pytest.mark.parametrize("kind", ["schema", "closed", "regex", "choice", "grammar"])
def test_tokens_after_the_end_of_a_form_are_a_difference(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    choice = answers[kind]
    assert choice.finish_reason == "stop"
    found = llm.verify(PROMPT, [*choice.token_ids, *[803] * 70], params_of(kind))
    assert (found.verified, found.finish_reason) == (False, "stop")
    assert found.checked_tokens == len(choice.token_ids)
    difference = found.first_difference
    assert difference is not None
    assert difference.position == len(choice.token_ids)
    assert difference.given is not None
    assert (difference.given.id, difference.own) == (803, None)


@kinds
def test_the_rest_of_an_answer_is_verified_alone(
    llm: LLM, answers: dict[str, Choice], kind: str
) -> None:
    choice = answers[kind]
    start = len(choice.token_ids) // 2
    found = llm.verify(PROMPT, choice, params_of(kind), checked_from=start)
    assert (found.verified, found.checked_from) == (True, start)
    assert found.token_ids == choice.token_ids[start:]
    assert found.finish_reason == choice.finish_reason


def test_verifications_run_together_with_answers(answers: dict[str, Choice]) -> None:
    async def body() -> None:
        async with AsyncLLM("builtin", max_running=4, **OPTIONS) as llm:  # some wait
            verdicts = [llm.verify(PROMPT, answers[kind], params_of(kind)) for kind in KINDS]
            texts = [llm.generate(PROMPT, params_of(kind)) for kind in KINDS]
            found = await asyncio.gather(*verdicts, *texts)
        half = len(KINDS)
        assert all(each.verified for each in found[:half])  # type: ignore[union-attr]
        own = [each.token_ids for each in found[half:]]
        assert own == [answers[kind].token_ids for kind in KINDS]

    asyncio.run(body())


def test_a_preempted_verification_is_right(answers: dict[str, Choice]) -> None:
    """The answers that run before it take its pages: they grow, and it computes few rows a step."""
    options = {**OPTIONS, "kv_tokens": 512, "max_model_len": 448, "max_batch_tokens": 8}
    params = SamplingParams(seed=1, max_tokens=300, ignore_eos=True)
    schema = params_of("schema")
    with LLM("builtin", **{**OPTIONS, "kv_tokens": 4096}) as llm:
        choice = llm.generate(PROMPT, params).choices[0]

    async def body() -> None:
        async with AsyncLLM("builtin", **options) as llm:
            others = [
                asyncio.create_task(llm.generate(PROMPT, dataclasses.replace(params, seed=i)))
                for i in range(5)
            ]
            await asyncio.sleep(0)  # the others arrive before it
            found = await asyncio.gather(
                llm.verify(PROMPT, choice, params), llm.verify(PROMPT, answers["schema"], schema)
            )
            assert [each.verified for each in found] == [True, True]
            assert llm.engine.scheduler.num_preemptions > 0  # type: ignore[attr-defined]
            for each in others:
                each.cancel()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("answer", "fields", "param"),
    [
        ([], {}, "answer.token_ids"),
        ([10**6], {}, "answer.token_ids"),
        ([-1], {}, "answer.token_ids"),
        (["a"], {}, "answer.token_ids"),
        ([5] * 600, {}, "answer.token_ids"),
        ([5] * 510, {}, "answer.token_ids"),  # too long together with the prompt
        ("", {}, "answer.text"),
        ([5], {"index": 1}, "index"),
        ([5], {"index": -1}, "index"),
        ([5], {"finish_reason": "content_filter"}, "finish_reason"),
        ([5], {"finish_reason": 5}, "finish_reason"),
        ("a", {"finish_reason": "tool_calls"}, "answer.text"),
        ([5], {"tools": []}, "tools"),
    ],
)
def test_bad_answers_name_their_field(
    llm: LLM, answer: object, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.verify(PROMPT, answer, SamplingParams(temperature=0), **fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_parameters_that_allow_no_token_are_the_callers_error(
    llm: LLM, answers: dict[str, Choice]
) -> None:
    wrong = list(answers["regex"].token_ids)
    wrong[1] = 803
    with pytest.raises(InvalidRequest, match="allow no token after the answer's first 3 tokens"):
        llm.verify(PROMPT, wrong, params_of("regex"), checked_from=3)
    tokenizer = llm._llm.tokenizer
    token, text = next(
        (each, text)
        for each in range(300, 900)
        if (text := tokenizer.decode([each])).isalpha()
        and tokenizer.encode_word(text * 2) == [each, each]
    )
    banned = SamplingParams(
        temperature=0, max_tokens=9, allowed_token_ids=[token], bad_words=[text * 2]
    )
    with pytest.raises(InvalidRequest):
        llm.generate(PROMPT, banned)
    with pytest.raises(InvalidRequest, match="allow no token"):
        llm.verify(PROMPT, [token], banned, finish_reason="stop")


def test_a_seed_is_required(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.verify(PROMPT, [5], SamplingParams(temperature=1))
    assert refused.value.param == "seed"


def test_an_adapter_counts(tmp_path: Path) -> None:
    adapted = AdaptedModel(tmp_path)
    lora = {name: adapted.path(name) for name in ("sql", "poems")}
    params = SamplingParams(seed=2, max_tokens=16, ignore_eos=True)
    with LLM(adapted.base, lora=lora, page_size=4, kv_tokens=4096, threads=1) as llm:
        choice = llm.generate("bears sleep", params, lora="sql").choices[0]
        assert llm.verify("bears sleep", choice, params, lora="sql").verified
        found = llm.verify("bears sleep", choice, params, lora="poems")
        own = llm.generate("bears sleep", params, lora="poems").token_ids
        first = next(
            at
            for at, each in enumerate(zip(own, choice.token_ids, strict=True))
            if len({*each}) > 1
        )
        assert found.first_difference is not None
        assert found.first_difference.position == first
        assert found.first_difference.margin is not None


def test_an_image_counts(tmp_path: Path) -> None:
    write_image_folder(tmp_path, "smolvlm")
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    first, second = (
        [{"role": "user", "content": [text_part("what is"), image_part(picture(each))]}]
        for each in (1, 2)
    )
    with LLM(tmp_path, page_size=4, kv_tokens=4096, threads=1) as llm:
        choice = llm.chat(first, params).choices[0]
        assert llm.verify(first, choice, params).verified
        wrong = [*choice.token_ids[:5], choice.token_ids[5] + 1]
        difference = llm.verify(first, wrong, params).first_difference
        assert difference is not None
        assert difference.position == 5
        assert difference.margin is not None
        own = llm.chat(second, params).choices[0]
        found = llm.verify(second, choice, params)
        assert found.verified == (own.token_ids == choice.token_ids)
