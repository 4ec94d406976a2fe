"""Each hostile value in each place of each body: refused or served in order, nothing lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fuzz.bodies import BODIES, Place, places, replaced
from fuzz.conftest import Effort
from fuzz.hostile import VALUES
from fuzz.inprocess import App
from fuzz.shapes import check_refusal

SERVED = (200, 400, 404, 413)
KINDS = ("free", "evictable", "pinned")  # of pages that no request holds
IDLE_SECONDS = 10.0


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_served_as_they_are(app: App, path: str):
    for body in BODIES[path]:
        response = app.post(path, body)
        assert response.status_code == 200, response.text


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_a_hostile_value_is_refused_or_served_and_harms_nobody(app: App, effort: Effort, path: str):
    before = healthy(app)
    for place, text, content in _inputs(path, effort):
        response = app.ask("POST", path, content)
        assert_in_order(response, f"--fuzz-seed {effort.seed}: {place} = {text[:200]}")
    assert healthy(app) == before
    assert_nothing_lost(app)


def _inputs(path: str, effort: Effort) -> Iterator[tuple[Place, str, bytes]]:
    """Some values for each place; all of them where that many are asked for."""
    rng = random.Random(f"{effort.seed} {path}")
    for body in BODIES[path]:
        for place in places(body):
            for text in rng.sample(VALUES, min(effort.examples, len(VALUES))):
                yield place, text, replaced(body, place, text)


def healthy(app: App) -> list[Any]:
    """Ask an honest request; return its choices."""
    body = {"prompt": "def add(a, b):", "max_tokens": 12, "seed": 3, "logprobs": 1}
    response = app.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def assert_in_order(response: httpx.Response, what: str) -> None:
    """Served or refused, as a client can understand."""
    is_late = response.status_code == 503 and "deadline" in response.text
    assert response.status_code in SERVED or is_late, f"{what}\n{response.text[:500]}"
    if response.status_code != 200:
        check_refusal(response)


def assert_nothing_lost(app: App) -> None:
    """Wait until every page is free, can be had, or is pinned as was asked for."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:  # what was refused midway is aborted between two steps
        told = app.cache()
        if sum(told[f"{kind}_pages"] for kind in KINDS) == told["total_pages"]:
            return
        assert time.monotonic() < deadline, told
