"""docs/api.md is what the types say, and what the docs link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretoken.api.cli.reference import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


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


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path) -> list[str]:
    """Links to files and headings that are not there."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        is_page = linked.suffix == ".md" and linked.exists()
        if not linked.exists() or (anchor and is_page and anchor not in headings(linked)):
            broken.append(target)
    return broken


def test_every_page_is_in_the_sites_menu():
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert menu == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_link_of_the_docs_leads_somewhere():
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "tests/README.md"))]
    assert {page.name: found for page in pages if (found := broken_links(page))} == {}


NAMED_FILE = re.compile(r"`((?:core|draft|radix_cache|api|bench|tests)/[\w./]*\.(?:py|c|h|toml))`")
NAME_AND_FILE = re.compile(
    r"`([A-Za-z_]\w+)(?:\(\))?`\s+\(`((?:core|draft|radix_cache|api|bench|tests)/[\w./]*\.py)`\)"
)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there_and_have_what_it_finds_in_them(page: Path):
    text = page.read_text("utf-8")
    named = (name for name in NAMED_FILE.findall(text) if "NAME" not in name)
    assert [name for name in named if not (ROOT / name).exists()] == []
    missing = [
        (name, file)
        for name, file in NAME_AND_FILE.findall(text)
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text("utf-8"))
    ]
    assert missing == []
