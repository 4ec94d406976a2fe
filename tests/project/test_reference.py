"""docs/api.md is what the types say, and what the docs link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretoken.api.cli.reference import reference

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_the_reference_is_up_to_date():
    written = (DOCS / "api.md").read_text("utf-8")
    assert written == reference(), "run: python -m foretoken.api.cli.reference docs/api.md"


def test_what_the_reference_names_can_be_found_in_it():
    text = reference()
    heads = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= heads
    for word in ("SamplingParams", "stream_chat", "/v1/chat/completions", "--cors-origin"):
        assert word in text


@pytest.mark.parametrize("name", ["quickstart.md", "cookbook.md", "migration.md", "api.md"])
def test_every_link_leads_somewhere(name):
    text = (DOCS / name).read_text("utf-8")
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (DOCS / target).exists(), target
