"""A real model whose steps overlap says what it says without, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foretoken import LLM, Completion, SamplingParams
from foretoken.core.engine import step_executor
from foretoken.core.interface.plan import StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")
STEADY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "temperature": 0.9},
    {"seed": 3, "top_k": 9, "min_p": 0.02, "min_tokens": 10},
    {"temperature": 0.0, "stop": ["e"], "min_tokens": 3},
    {"seed": 4, "logit_bias": {17: 3.0}, "ignore_eos": True},
]
READING: list[dict[str, Any]] = [
    {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"seed": 6, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.0, "bad_words": ["the"], "prompt_logprobs": 1},
    {"seed": 7, "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
]
PARAMS = [
    SamplingParams(max_tokens=40 - index, speculation="off", **each)
    for index, each in enumerate(STEADY)
] + [SamplingParams(max_tokens=12, **each) for each in (*STEADY, *READING)]
PROMPTS = [f"Record {index}: once upon a time there was" for index in range(len(PARAMS))]
OPTIONS = {"threads": 1, "max_model_len": 256, "kv_tokens": 4096}


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each plan that was made ahead."""
    found: list[int] = []
    make = step_executor.plan_next

    def counted(*args: Any) -> StepPlan | None:
        plan = make(*args)
        found.extend(() if plan is None else [len(plan.requests)])
        return plan

    monkeypatch.setattr(step_executor, "plan_next", counted)
    return found


def told(**options: Any) -> list[tuple[Any, ...]]:
    with LLM("builtin", **OPTIONS, **options) as llm:
        answers: Sequence[Completion] = llm.generate(PROMPTS, PARAMS)
    return [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
        for each in answers
    ]


@pytest.fixture(scope="module")
def plain() -> list[tuple[Any, ...]]:
    return told(speculation="off", overlap="off")


@pytest.mark.parametrize("max_running", [5, 16])
def test_steps_that_overlap_say_the_same(plain, num_ahead, max_running) -> None:
    assert told(speculation="off", overlap="on", max_running=max_running) == plain
    assert len(num_ahead) > 10
    assert max(num_ahead) > 2


def test_so_they_do_beside_drafts(plain, num_ahead) -> None:
    assert told(speculation="auto", overlap="on") == plain
    assert len(num_ahead) > 10, "of those that do not draft, when the others have ended"


def test_on_a_cpu_steps_do_not_overlap_unless_that_is_asked_for(plain, num_ahead) -> None:
    assert told(speculation="off") == plain
    assert not num_ahead
