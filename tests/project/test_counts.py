"""Numbers of models, formats and clients that the texts name are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from clients.catalog import CLIENTS
from foretoken.core.model.families.registry import MODEL_FAMILIES, TEXT_FAMILIES
from foretoken.core.model.formats.gguf_architectures import ARCHITECTURES
from support.tiny_models import RECURRENT, TYPES

ROOT = Path(__file__).resolve().parents[2]
NUM_OWN = len({**MODEL_FAMILIES, **TEXT_FAMILIES})


def numbers(page: str, *patterns: str) -> list[int]:
    """The one number that each pattern finds in a page."""
    text = " ".join((ROOT / page).read_text("utf-8").split())
    found = [re.findall(pattern, text) for pattern in patterns]
    assert [len(each) for each in found] == [1] * len(patterns), found
    return [int(each[0]) for each in found]


def test_the_readme_counts_what_there_is() -> None:
    found = numbers(
        "README.md",
        r"own decoder computes (\d+) model types",
        r"GGUF of (\d+) architectures",
        r"The tests run \[(\d+) clients\]",
    )
    assert found == [NUM_OWN, len(ARCHITECTURES), len(CLIENTS)]


def test_the_page_of_models_counts_what_there_is() -> None:
    found = numbers(
        "docs/models.md",
        r"(\d+) model types are each tested",
        r"(\d+) of them are also in the table above",
        r"(\d+) more types have recurrent layers",
    )
    both = MODEL_FAMILIES.keys() & set(TYPES)
    assert found == [len(TYPES), len(both), len(RECURRENT)]


def test_the_changelog_counts_what_there_is() -> None:
    unreleased = (
        r"own decoder computes (\d+) model types",
        r"safetensors, GGUF of (\d+) architectures",
    )
    assert numbers("CHANGELOG.md", *unreleased) == [NUM_OWN, len(ARCHITECTURES)]
