"""Structured output is exact: valid always, and the same tokens whatever guesses or rides along."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from foretoken import LLM, Completion, ForetokenError, InvalidRequest, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.structured.grammar_text import json_rule
from foretoken.bench.common.oracle import oracles
from support.random_schemas import random_schema
from support.tiny_pair import write_pair

NUM_SCHEMAS = 100
CHECKED = jsonschema.FormatChecker(("uuid", "ipv4"))
RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "classification": {"enum": ["unremarkable", "extraordinary"]},
        "description": {"type": "string", "maxLength": 8},
    },
    "required": ["identifier", "classification", "description"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, object]] = {
    "schema": {"json_schema": RECORD},
    "object": {"json_schema": {"type": "object", "maxProperties": 2}},
    "regex": {"regex": r"[a-f]{3}-\d{2,4}"},
    "choice": {"choice": ["yes", "no", "may be", "may\nbe é"]},
    "lark": {"grammar": f'start: /[a-z]{{2,5}}/ ": " body\nbody: {json_rule(RECORD)}'},
    "gbnf": {"grammar": 'root ::= "x" item item "."\nitem ::= [a-c] [a-c] "," | "zz"'},
}
CUTS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 30},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2, "logprobs": 2},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """The tiny pair, with the built-in one's tokenizer."""
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=4096)
    for folder in folders:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUILTIN / "target" / name, folder / name)
    return folders


def make_llm(pair: tuple[Path, Path], draft: str | None, **options: object) -> LLM:
    target, model = pair
    options = {"dtype": "float32", "exact": "batch", "threads": 1, **options}
    if draft is None:
        return LLM(target, speculation="off", **options)
    return LLM(target, draft=draft.replace("lm", str(model)), **options)


def asked() -> list[SamplingParams]:
    """Every form with every way to sample."""
    return [
        SamplingParams(**{"max_tokens": 96, "seed": index, **form, **cut})  # type: ignore[arg-type]
        for index, (form, cut) in enumerate((f, c) for f in FORMS.values() for c in CUTS)
    ]


def prompts(params: list[SamplingParams]) -> list[str]:
    return [
        f"# A shared header of all requests.\nRecord {index}:\n" for index in range(len(params))
    ]


@pytest.fixture(scope="module")
def plain(pair) -> dict[int, Completion]:
    """Answers of each request alone, without drafts."""
    params = asked()
    with make_llm(pair, None, max_running=1) as llm:
        answers = llm.generate(prompts(params), params)
    return dict(enumerate(answers))


def check(text: str, params: SamplingParams) -> None:
    """Raise unless a complete answer has the form that was asked for."""
    if isinstance(params.json_schema, dict):
        jsonschema.validate(json.loads(text), params.json_schema, format_checker=CHECKED)
    elif params.regex is not None:
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", text)
    elif params.choice is not None:
        assert text in params.choice
    elif "root" in (params.grammar or ""):
        assert re.fullmatch(r"x([a-c]{2},|zz){2}\.", text)
    else:
        key, _, body = text.partition(": ")
        assert re.fullmatch("[a-z]{2,5}", key)
        jsonschema.validate(json.loads(body), RECORD)


def test_every_answer_that_ends_has_its_form(plain: dict[int, Completion]) -> None:
    params = asked()
    ended = [index for index, answer in plain.items() if answer.finish_reason == "stop"]
    assert len(ended) > 0.8 * len(params)
    for index in ended:
        check(plain[index].text, params[index])
    assert len({answer.text for answer in plain.values()}) > 0.7 * len(params)


SETTINGS: list[tuple[str | None, dict[str, object]]] = [
    (None, {"max_running": 8}),
    ("lm", {"speculation": 3}),
    ("auto", {"speculation": 5}),
    ("radix,suffix,lm", {"speculation": "auto", "max_running": 5}),
    ("oracle:0.6", {"speculation": 4, "page_size": 4}),
    ("radix,suffix,lm", {"speculation": 6, "kv_tokens": 144, "page_size": 4, "max_running": 8}),
]


@pytest.mark.parametrize(("draft", "options"), SETTINGS, ids=str)
def test_no_source_and_no_batch_changes_a_token(pair, plain, draft, options) -> None:
    params = asked()
    order = sorted(plain, key=lambda index: index * 7 % len(plain)) * 2  # a retry of each, too
    texts = prompts(params)
    with oracles(0.6), make_llm(pair, draft, **options) as llm:
        answers = llm.generate([texts[i] for i in order], [params[i] for i in order])
        num_preempted = llm._llm.engine.scheduler.num_preemptions
    for index, answer in zip(order, answers, strict=True):
        assert answer.token_ids == plain[index].token_ids, params[index]
        assert answer.finish_reason == plain[index].finish_reason
    assert num_preempted > 0 or "kv_tokens" not in options
    if draft is not None:
        check_forced(answers)


def check_forced(answers: list[Completion]) -> None:
    """Forced runs were drafted, and each of their tokens was accepted unless the answer ended."""
    proposed = sum(answer.usage.proposed_by_source.get("grammar", 0) for answer in answers)
    accepted = sum(answer.usage.accepted_by_source.get("grammar", 0) for answer in answers)
    assert accepted == proposed > 0


def test_forced_spans_alone_take_several_tokens_a_step(pair) -> None:
    params = [SamplingParams(json_schema=RECORD, max_tokens=96, seed=i) for i in range(8)]
    with make_llm(pair, "ngram", speculation=16) as llm:
        answers = llm.generate(prompts(params), params)
    check_forced(answers)
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    assert num_tokens > 2 * sum(answer.usage.verify_steps for answer in answers)


@pytest.mark.slow
def test_random_schemas_are_valid_and_equal_with_and_without_drafts(pair) -> None:
    params = [
        SamplingParams(json_schema=random_schema(i), max_tokens=300, seed=i, temperature=i % 3 / 2)
        for i in range(NUM_SCHEMAS)
    ]
    answers = {}
    for draft in (None, "radix,suffix,lm"):
        speculation = {} if draft is None else {"speculation": 6}
        with make_llm(pair, draft, max_running=32, **speculation) as llm:
            answers[draft] = llm.generate(prompts(params), params)
    for off, on, each in zip(*answers.values(), params, strict=True):
        assert (off.finish_reason, on.token_ids) == ("stop", off.token_ids), each.json_schema
        check(off.text, each)
    check_forced(answers["radix,suffix,lm"])


@pytest.fixture(scope="module")
def drafting(pair) -> Iterator[LLM]:
    with make_llm(pair, "radix,suffix,lm", speculation=5) as llm:
        yield llm


def test_choices_of_one_prompt_follow_the_grammar_each_by_itself(drafting: LLM) -> None:
    params = SamplingParams(json_schema=RECORD, n=4, seed=3, max_tokens=96)
    answer = drafting.generate("Things:\n", params)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), RECORD)


def test_a_complete_answer_ends_whatever_would_keep_it_going(drafting: LLM) -> None:
    params = SamplingParams(choice=["yes"], ignore_eos=True, min_tokens=20, max_tokens=30, seed=1)
    answer = drafting.generate("Well?\n", params)
    assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_min_tokens_holds_where_the_grammar_can_go_on(drafting: LLM) -> None:
    params = SamplingParams(regex="a*", min_tokens=12, max_tokens=60, logit_bias={2: 50.0}, seed=1)
    answer = drafting.generate("Well?\n", params)
    assert (answer.usage.completion_tokens, answer.finish_reason) == (13, "stop")


def test_max_tokens_and_stop_strings_still_cut(drafting: LLM) -> None:
    short = drafting.generate("x", SamplingParams(json_schema=RECORD, max_tokens=5, seed=1))
    assert (short.finish_reason, short.usage.completion_tokens) == ("length", 5)
    stopped = drafting.generate("x", SamplingParams(json_schema=RECORD, stop=["class"], seed=1))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "class")
    assert stopped.text.endswith(', "')


def test_what_bans_all_that_the_grammar_allows_fails_that_request_alone(drafting: LLM) -> None:
    params = SamplingParams(json_schema=RECORD, allowed_token_ids=[20, 21])
    with pytest.raises(ForetokenError, match="ban every token"):
        drafting.generate("x", params)
    assert drafting.generate("x", SamplingParams(choice=["yes"])).text == "yes"


def test_a_grammar_that_becomes_too_big_fails_that_request_alone(drafting: LLM) -> None:
    """The size is seen when the first tokens are tried, before the request is taken."""
    million = SamplingParams(grammar="start: a{100}\na: b{100}\nb: /x/{100}", seed=1)
    with pytest.raises(InvalidRequest, match=r"grammar: .*Too many items"):
        drafting.generate("x", million)
    assert drafting.generate("x", SamplingParams(choice=["yes"])).text == "yes"


@pytest.mark.parametrize("draft", ["auto", "lm"])
def test_forms_that_close_early_are_the_same_whatever_is_guessed(pair, draft):
    """The mask near the limit depends on the request's own place, not on steps or drafts."""
    forms = ({"type": "object"}, {"type": "array", "items": {"type": "string"}})
    params = [
        SamplingParams(
            json_schema=form, max_tokens=length, temperature=temperature, seed=index, n=2
        )
        for index, (form, length, temperature) in enumerate(
            (form, length, temperature)
            for form in forms
            for length in (12, 40)
            for temperature in (0.0, 1.0)
        )
    ]
    with make_llm(pair, None, max_running=1) as llm:
        expected = llm.generate(prompts(params), params)
    with make_llm(pair, draft) as llm:
        answers = llm.generate(prompts(params), params)
    for one, other in zip(expected, answers, strict=True):
        for first, second in zip(one.choices, other.choices, strict=True):
            assert first.token_ids == second.token_ids
            assert second.finish_reason == "stop"
            json.loads(second.text)
        assert one.usage.closed_early == other.usage.closed_early
    assert any(answer.usage.closed_early for answer in answers)
    with make_llm(pair, draft) as llm:
        cut = SamplingParams(json_schema=forms[1], max_tokens=12, seed=0, close_early=False)
        answer = llm.generate("x", cut)
    assert (answer.finish_reason, answer.usage.closed_early) == ("length", False)
