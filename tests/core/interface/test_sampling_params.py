"""The core's sampling parameters concern token ids and logits alone."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.sampling import TokenSamplingParams

CORE = Path(__file__).resolve().parents[3] / "core"


def test_every_parameter_is_read_by_the_core() -> None:
    """A parameter that the core does not read belongs to the API."""
    here = CORE / "interface" / "sampling_params.py"
    code = "".join(path.read_text("utf-8") for path in CORE.rglob("*.py") if path != here)
    unread = [each.name for each in fields(TokenSamplingParams) if f".{each.name}" not in code]
    assert not unread


@pytest.mark.parametrize("name", ["stop", "regex", "grammar", "choice", "prediction"])
def test_text_is_not_among_them(name: str) -> None:
    with pytest.raises(TypeError):
        TokenSamplingParams(**{name: "text"})


def test_bad_values_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        TokenSamplingParams(min_tokens=3, max_tokens=2)
    assert caught.value.param == "min_tokens"
