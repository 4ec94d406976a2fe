"""The colours of the live page: every drafter has one, and all can be told apart and be read."""

from __future__ import annotations

import re
from itertools import combinations, product

import pytest

from foretoken.api.server.routes.pages import FOLDER
from foretoken.draft.sources.names import DRAFTERS

CSS = (FOLDER / "page.css").read_text("utf-8")
COLOUR = r"light-dark\((#\w+), (#\w+)\)"
TINT = float(re.findall(r"var\(--by\) (\d+)%, transparent", CSS)[0]) / 100
SCHEMES = ("light", "dark")
Rgb = tuple[float, ...]
TEXT, SHAPE = 4.5, 3.0  # WCAG 2.2: 1.4.3 and 1.4.11


def rgb(colour: str) -> Rgb:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def luminance(colour: Rgb) -> float:
    parts = [each / 255 for each in colour]
    red, green, blue = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def tinted(ground: Rgb, colour: Rgb) -> Rgb:
    return tuple(TINT * a + (1 - TINT) * b for a, b in zip(colour, ground, strict=True))


def colours(scheme: str) -> dict[str, Rgb]:
    """The variables of the page."""
    found = re.findall(rf"^  --([\w-]+): {COLOUR};", CSS, re.MULTILINE)
    return {name: rgb(pair[SCHEMES.index(scheme)]) for name, *pair in found}


def drafters(scheme: str) -> list[tuple[Rgb, str]]:
    """Colour and pattern by number."""
    found = re.findall(rf"^\.by-(\d+) {{ --by: {COLOUR}; --pattern: (\w+); }}", CSS, re.MULTILINE)
    assert [int(number) for number, *_ in found] == [*range(1, len(found) + 1)]
    return [(rgb(pair[SCHEMES.index(scheme)]), pattern) for _, *pair, pattern in found]


def test_there_is_a_colour_for_every_drafter_that_the_server_names() -> None:
    assert len(drafters("light")) == len(DRAFTERS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read_on_every_ground_and_every_tint(scheme: str) -> None:
    page = colours(scheme)
    grounds = [page[name] for name in ("bg", "pane", "soft")]
    tints = [tinted(ground, by) for ground, (by, _) in product(grounds, drafters(scheme))]
    for name, ground in product(("ink", "dim"), [*grounds, *tints]):
        assert contrast(page[name], ground) >= TEXT, (name, ground)
    assert contrast(page["bad"], page["bad-soft"]) >= TEXT


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_bars_and_the_lines_under_drafted_tokens_can_be_seen(scheme: str) -> None:
    page = colours(scheme)
    for name in ("bg", "pane", "soft"):
        ground = page[name]
        assert contrast(page["edge"], ground) >= SHAPE, name
        for number, (by, _) in enumerate(drafters(scheme), start=1):
            assert contrast(by, ground) >= SHAPE, (name, number)
            assert contrast(by, tinted(ground, by)) >= SHAPE, (name, number)
    assert (
        "border: 1px solid var(--edge)" in re.findall(r"^input, textarea {([^}]*)}", CSS, re.M)[0]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafters_of_one_pattern_differ_in_colour(scheme: str) -> None:
    """By a fifth of the range of some primary, at least."""
    for (one, pattern), (other, same) in combinations(drafters(scheme), 2):
        if pattern == same:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) >= 51, (one, other)
