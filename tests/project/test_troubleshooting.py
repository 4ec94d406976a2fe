"""docs/troubleshooting.md: the errors that it explains are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
FOREIGN = {"address already in use", "events", "ray", "otel", "mooncake"}  # the system's; extras


def quoted() -> list[str]:
    """The words of messages in the first column of the tables, where it is one of messages."""
    found = []
    for section in re.split(r"(?m)^## ", PAGE)[1:]:
        if section.startswith("Answers"):
            continue
        rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
        found += [part for row in rows for part in re.findall(r"`([^`]+)`", row)]
    return [each for each in found if each not in FOREIGN]


def messages() -> str:
    """All source as one text, whose adjacent string literals are joined."""
    paths = [path for name in ("api", "core", "draft") for path in (ROOT / name).rglob("*.py")]
    whole = "\n".join(path.read_text("utf-8") for path in paths)
    return re.sub(r'"\s*\n\s*f?"', "", whole)


MESSAGES = messages()


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_is_explained_is_one_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("...")]
    assert [part for part in parts if part not in MESSAGES] == []


def test_codes_of_answers_are_those_of_the_code() -> None:
    section = PAGE.partition("## Answers")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| \d{3} `([a-z_]+)`", section, re.MULTILINE)
    assert len(codes) == 4
    assert [code for code in codes if f'"{code}"' not in MESSAGES] == []
