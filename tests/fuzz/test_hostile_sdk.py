"""The Python API with hostile values: an `InvalidRequest` that names the field, or an answer."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken import LLM, DeadlineExceeded, ForetokenError, InvalidRequest, SamplingParams
from fuzz.conftest import Effort
from fuzz.hostile import GRAMMARS, REGEXES, SCHEMAS, TEXTS
from fuzz.inprocess import SMALL

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 17, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400,
    0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, 1j, b"x", "", "\ud800", [], [[]], [None],
    [-1], [4096], [2**63],
    [True], [0.5], ["x"], [""], ["x"] * 2000, [0] * 70_000, (), {}, {1: 1}, {"1": 1}, {-1: 1},
    {4096: 1}, {1: math.nan}, {1: "x"}, dict.fromkeys(range(2000), 1),
    object(), int, range(3), {1, 2},    iter([1]), *TEXTS, *REGEXES, *GRAMMARS, *SCHEMAS,
]  # fmt: skip
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("field", FIELDS)
def test_a_bad_parameter_is_named(llm: LLM, effort: Effort, field: str):
    before = llm.generate("def add", SamplingParams(max_tokens=8, temperature=0)).token_ids
    rng = random.Random(f"{effort.seed} {field}")
    for value in rng.sample(VALUES, min(effort.examples, len(VALUES))):
        error = _error(llm, "hi", **{"max_tokens": 2, field: value})
        is_late = field == "deadline" and isinstance(error, DeadlineExceeded)
        assert error is None or is_late or _names(error, field), (value, error)
    after = llm.generate("def add", SamplingParams(max_tokens=8, temperature=0)).token_ids
    assert after == before


def test_a_bad_prompt_is_named(llm: LLM):
    errors = [(prompt, _error(llm, prompt, max_tokens=1)) for prompt in VALUES]
    assert [each for each in errors if each[1] is not None and not _names(each[1], "prompt")] == []


def _error(llm: LLM, prompt: Any, **params: Any) -> ForetokenError | None:
    """The error of a request, None if it has none. An error that is not foretoken's is raised."""
    try:
        llm.generate(prompt, SamplingParams(**params))
    except ForetokenError as error:
        return error
    return None


def _names(error: ForetokenError, field: str) -> bool:
    return isinstance(error, InvalidRequest) and (error.param or "").startswith(field)
