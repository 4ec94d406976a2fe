"""Real clients against a real server, each in a process and an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from clients.catalog import CLIENTS, Client, Urls, run_client
from clients.page import PAGE, pointing, row, servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def urls() -> Iterator[Urls]:
    with servers() as urls:
        yield urls


@pytest.mark.parametrize("client", CLIENTS, ids=[client.key for client in CLIENTS])
def test_a_client_works_unchanged_and_the_page_says_so(
    client: Client, request: pytest.FixtureRequest
) -> None:
    why_not = client.missing()
    if why_not and client.environment and "CI" in os.environ:
        pytest.fail(why_not)  # these are there wherever Python is
    if why_not:
        pytest.skip(why_not)
    outcome = run_client(client, request.getfixturevalue("urls"))
    assert outcome.versions, outcome.stderr
    assert outcome.failed == {}, outcome.stderr[-2_000:]
    text = PAGE.read_text()
    hint = "docs/clients.md is not what ran: PYTHONPATH=tests python -m clients.page writes it anew"
    assert row(outcome) in text, hint
    assert pointing(client).partition("```")[2] in text, hint
