"""The site's reference has what the code has, and what the docs link to is there."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import foretoken

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOMS = ("core", "draft", "radix_cache", "api", "tests", "bench", "docs")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_shows_all_flags_of_each_command(hooks, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert hooks.HELP in (DOCS / "flags.md").read_text("utf-8")
    sections = hooks.help_of_commands().split("## foretoken ")
    text = {each.partition("\n")[0]: each for each in sections}
    assert "--cors-origin" in text["serve"]  # a rare one
    assert {"replica", "run", "certify", "launch", "selftest"} <= text.keys()


def test_the_site_has_the_document_of_a_server(hooks):
    document = json.loads(hooks.openapi())
    assert {"/v1/chat/completions", "/v1/load_lora_adapter"} <= document["paths"].keys()
    assert "openapi.json" in (DOCS / "http.md").read_text("utf-8")


def test_the_site_describes_each_name_of_the_package():
    described = re.findall(r"^::: (foretoken\.[\w.]+)$", (DOCS / "sdk.md").read_text("utf-8"), re.M)
    names = {each.rpartition(".")[2] for each in described}
    assert set(foretoken.__all__) - {"__version__"} <= names
    for module, _, name in (each.rpartition(".") for each in described):
        assert hasattr(importlib.import_module(module), name)


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
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert menu == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


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
