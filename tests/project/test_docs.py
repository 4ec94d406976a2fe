"""Pages of docs: reference as in the code, short pages for users, links that lead somewhere."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

import foretoken
from support.reference_pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOMS = ("core", "draft", "radix_cache", "api", "tests", "bench", "docs")
USERS = ("Home", "Start", "Terminal", "Serve", "Models", "Clients", "Speed", "Scale")
LONGEST_PAGE = 1_500  # words
MOST_WORDS = 45_000  # of all pages for users, as `wc -w` counts them
LONGEST_README = 120  # lines


def menu() -> dict[str, list[str]]:
    """The pages of each section of the site's menu."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    sections = re.findall(r"^  - (\w+):(.*(?:\n {6}.*)*)", text, re.MULTILINE)
    return {title: re.findall(r"[\w/-]+\.md", pages) for title, pages in sections}


def num_words(page: Path) -> int:
    """Words of a page; bars and rules of tables are none."""
    return sum(bool(re.search(r"\w", each)) for each in page.read_text("utf-8").split())


def test_a_page_for_users_is_short_and_so_are_all_of_them_together() -> None:
    words = {name: num_words(DOCS / name) for section in USERS for name in menu()[section]}
    assert len(words) > 50
    assert {name: num for name, num in words.items() if num > LONGEST_PAGE} == {}
    assert sum(len((DOCS / name).read_text("utf-8").split()) for name in words) <= MOST_WORDS


def test_the_readme_fits_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= LONGEST_README


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (DOCS / name).read_text("utf-8")
    assert written == PAGES[name](), "run: PYTHONPATH=tests python -m support.reference_pages"


def test_the_reference_has_every_command_route_and_name_of_the_package() -> None:
    flags, http, sdk = ((DOCS / name).read_text("utf-8") for name in PAGES)
    assert {"replica", "run", "certify", "launch", "selftest"} <= set(
        re.findall(r"^## foretoken ([\w-]+)$", flags, re.MULTILINE)
    )
    assert "`--cors-origin" in flags  # a flag that --help leaves out
    assert {"POST /v1/chat/completions", "POST /v1/load_lora_adapter"} <= set(
        re.findall(r"^### ([A-Z]+ \S+)$", http, re.MULTILINE)
    )
    described = set(re.findall(r"^## (\w+)$|^\| `(\w+)` \|", sdk, re.MULTILINE))
    names = {name for pair in described for name in pair}
    assert set(foretoken.__all__) - {"__version__"} <= names


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@functools.cache
def ignored() -> frozenset[str]:
    """Files that a clone lacks because git ignores them; none where there is no git."""
    listed = ("git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *ROOMS)
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    return frozenset(found.stdout.split("\n"))


def broken_links(page: Path) -> list[str]:
    """Links to files and headings that a clone of the project does not have."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        is_page = linked.suffix == ".md" and linked.exists()
        path = Path(os.path.relpath(linked, ROOT)).as_posix()
        missing = not linked.exists() or path in ignored()
        if missing or (anchor and is_page and anchor not in headings(linked)):
            broken.append(target)
    return broken


def test_every_page_is_in_the_sites_menu():
    listed = {name for names in menu().values() for name in names}
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_link_of_the_docs_leads_somewhere():
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "tests/README.md"))]
    assert {page.name: found for page in pages if (found := broken_links(page))} == {}


NAMED_FILE = re.compile(r"`((?:core|draft|radix_cache|api|bench|tests)/[\w./]*\.(?:py|c|h|toml))`")
NAME_AND_FILE = re.compile(
    r"`([A-Za-z_]\w+)(?:\(\))?`\s+\(`((?:core|draft|radix_cache|api|bench|tests)/[\w./]*\.py)`\)"
)


def page_id(page: Path) -> str:
    """Return the path of a page below docs, by which its tests are named."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=page_id)
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
