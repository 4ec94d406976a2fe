"""Numbers that stand in several texts are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clients.catalog import CLIENTS
from foretoken.api.parsing.families import FAMILIES
from foretoken.core.model.families.registry import MODEL_FAMILIES, TEXT_FAMILIES
from foretoken.core.model.formats.gguf_architectures import ARCHITECTURES
from support.tiny_models import RECURRENT, TYPES

ROOT = Path(__file__).resolve().parents[2]
OWN_TYPES = len({**MODEL_FAMILIES, **TEXT_FAMILIES})
RECIPES = len(re.findall(r"(?m)^## \d+\. ", (ROOT / "docs/cookbook.md").read_text("utf-8")))
WORDS = {"eleven": 11, "twelve": 12}

PLACES = [
    ("README.md", r"own decoder computes (\d+) model types", OWN_TYPES),
    ("README.md", r"GGUF of (\d+) architectures", len(ARCHITECTURES)),
    ("README.md", r"The tests run \[(\d+) clients\]", len(CLIENTS)),
    ("README.md", r"\[Tool calls and reasoning\]\(docs/tools.md\) in (\d+) formats", len(FAMILIES)),
    ("CHANGELOG.md", r"own decoder computes (\d+) model types", OWN_TYPES),
    ("CHANGELOG.md", r"safetensors, GGUF of (\d+) architectures", len(ARCHITECTURES)),
    ("docs/models.md", r"own decoder computes (\d+) model types", OWN_TYPES),
    ("docs/models.md", r"(\d+) model types are each tested", len(TYPES)),
    ("docs/models.md", r"(\d+) more types with recurrent layers", len(RECURRENT)),
    ("docs/recurrent.md", r"\[(\d+) more types\]", len(RECURRENT)),
    ("docs/models.md", r"\[(\d+) architectures\]", len(ARCHITECTURES)),
    ("docs/quickstart.md", r"(\w+) short recipes", RECIPES),
    ("docs/cookbook.md", r"(\w+) short recipes", RECIPES),
]


@pytest.mark.parametrize(("page", "pattern", "number"), PLACES)
def test_a_number_in_a_text_is_that_of_the_code(page: str, pattern: str, number: int) -> None:
    found = re.findall(pattern, " ".join((ROOT / page).read_text("utf-8").split()))
    assert len(found) == 1, found
    word = found[0].lower()
    assert (WORDS[word] if word in WORDS else int(word)) == number
