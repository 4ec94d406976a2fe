"""The tests that docs/reliability.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/reliability.md").read_text()


def test_each_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 20
    missing = [
        (file, name)
        for file, name in named
        if not (path := TESTS / file).is_file() or f"def {name}(" not in path.read_text()
    ]
    assert missing == []
