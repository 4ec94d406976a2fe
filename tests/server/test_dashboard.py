"""The live page: what it is served with, and what its events tell. In a browser: test_live_page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from foretoken.api.runtime.cache_diagnostics import CAUSES
from foretoken.api.server.routes.dashboard import MAX_STEPS, Dashboard, Watched
from foretoken.api.server.routes.pages import FOLDER
from foretoken.core.interface.request import Delta
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.draft.heads.assistant import AssistantHeadConfig
from foretoken.draft.heads.kinds import KINDS
from foretoken.draft.heads.mtp import MtpConfig
from foretoken.draft.proposers import lm_proposer, self_draft, text_proposer
from foretoken.draft.sources.grammar import GrammarSource
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.sources.prefix import PrefixSource
from support.server_process import running

SECRET = "xylophone"
ASKED = {"messages": [{"role": "user", "content": f"def {SECRET}("}], "max_tokens": 24}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(["--kv-tokens", "4096"]) as server:
        yield server.url


def watch(url: str, **headers: str) -> Iterator[dict[str, Any]]:
    with httpx.stream("GET", f"{url}/ui/events", headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def first_event(url: str, **headers: str) -> dict[str, Any]:
    return next(watch(url, **headers))


def test_the_page_loads_nothing_from_elsewhere_and_has_no_script_or_style_inside(url: str) -> None:
    answer = httpx.get(url)
    assert answer.text == (FOLDER / "index.html").read_text("utf-8")
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", answer.text)
    assert [each for each in links if not each.startswith(("ui/", "data:"))] == []
    assert not re.search(r"<style|<script[^>]*>[^<]|\bstyle=|\bon\w+=", answer.text)


def test_the_page_has_words_for_every_drafter_loss_and_part_of_a_step(url: str) -> None:
    module = httpx.get(f"{url}/ui/words.js").text
    words = json.loads(module.removeprefix("export const words = ").rstrip(";\n"))
    sources = {PrefixSource.name, PredictionSource.name, GrammarSource.name, "suffix", "ngram"}
    proposers = {lm_proposer.SOURCE, text_proposer.SOURCE, self_draft.SOURCE, *KINDS}
    assert words["drafters"].keys() == sources | proposers | {
        MtpConfig.kind,
        AssistantHeadConfig.kind,
    }
    assert words["parts"].keys() == first_event(url)["parts"].keys()
    assert words["losses"].keys() == {*CAUSES} - {"hit", "too_short", "first_seen"}


def test_the_events_count_and_hold_no_text(url: str) -> None:
    before = first_event(url)
    long = {"messages": [{"role": "user", "content": f"def {SECRET}(" * 16}], "max_tokens": 2}
    for body in (ASKED, long, long):  # the last one finds what the one before has left
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    now = first_event(url)
    while now["time"] == before["time"]:  # one snapshot serves all who watch for a while
        now = first_event(url)
    assert now["tokens"] - before["tokens"] >= 1
    assert now["prefix_queries"] > before["prefix_queries"]
    pages = now["pages"]
    assert sum(pages.values()) == 4096 // 16
    assert SECRET not in json.dumps(now)
    assert now["tree"]
    assert all(tokens % 16 == 0 for *_, tokens, _, _ in now["tree"])
    assert sum(hits for *_, hits in now["tree"]) > 0
    assert now["row"]["seconds"] >= 0
    assert now["row"]["tokens"] >= 0
    assert now["sampling"]["temperature"] == 1.0


def test_the_page_is_open_its_events_need_the_key_and_no_ui_has_neither() -> None:
    with running(["--kv-tokens", "1024", "--api-key", "k", "--admin-key", "a"]) as server:
        assert httpx.get(server.url).status_code == 200
        for key, status in (("", 401), ("k", 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.get(f"{server.url}/ui/events", headers=headers)
            assert answer.status_code == status
        assert first_event(server.url, authorization="Bearer a")["running"] == 0
    with running(["--kv-tokens", "1024", "--no-ui"]) as server:
        assert httpx.get(server.url).status_code == 404
        assert httpx.get(f"{server.url}/ui/events").status_code == 404


@pytest.mark.parametrize("speculation", ["off", 4])
def test_chunks_tell_who_drafted_each_token_if_asked(url: str, speculation: object) -> None:
    prompt = "x = 1\n" * 30
    body = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "temperature": 0,
        "stream": True, "token_sources": True, "speculation": speculation,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [piece for choice in choices for piece in choice.get("token_sources") or ()]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert "".join(piece for piece, *_ in pieces) == text
    accepted = chunks[-1]["usage"]["speculation"]["accepted_by_source"]
    named = [source for _, source, _ in pieces if source]
    assert set(named) <= set(accepted)
    assert len(named) == sum(accepted.values())
    counted = [source for _, source, _ in pieces if source is not None]
    assert len(counted) == chunks[-1]["usage"]["completion_tokens"]
    assert {channel for *_, channel in pieces} == {"content"}
    body.pop("token_sources")
    plain = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert "token_sources" not in plain.text


def step(*sources: str) -> Delta:
    return Delta(token_ids=[0] * len(sources), token_sources=[*sources])


def test_a_chunk_of_idle_time_is_a_step_of_its_own_without_a_front() -> None:
    num_chunks = 3
    watched = Watched(lambda: num_chunks)
    assert watched.since(0) == {}
    num_chunks = 5
    watched.observe_delta(cast("Any", SimpleNamespace()), step("suffix"), 0.0)
    assert watched.since(0) == {"latest_steps": [{"suffix": 1}, *[{"idle prefill": 1}] * 2]}
    assert watched.since(watched.num_steps) == {}


def test_the_engine_is_observed_while_somebody_watches_and_no_longer() -> None:
    observers: list[EngineObserver] = []
    engine = SimpleNamespace(metrics=SimpleNamespace(observers=observers))
    chat = SimpleNamespace(next_turns=SimpleNamespace(num_chunks=0))
    service: Any = SimpleNamespace(llm=SimpleNamespace(engine=engine), chat=chat)
    dashboard = Dashboard(service)
    one, two = dashboard.watch(), dashboard.watch()
    assert observers == [one]
    assert two is one
    dashboard.unwatch()
    assert observers == [one]
    dashboard.unwatch()
    assert observers == []


def test_the_steps_of_a_watched_engine_are_told_by_drafter() -> None:
    watched, request = Watched(), cast("Any", None)
    plan = output = cast("Any", None)
    for deltas in ([step("radix", ""), step("")], [step()], [step("lm", "lm", "")]):
        for delta in deltas:
            watched.observe_delta(request, delta, 0.0)
        watched.observe_step(plan, output, began=0.0, ended=0.0)
    assert watched.since(0) == {"latest_steps": [{"radix": 1, "": 2}, {"lm": 2, "": 1}]}
    assert watched.since(1) == {"latest_steps": [{"lm": 2, "": 1}]}
    assert watched.since(2) == {}
    for _ in range(2 * MAX_STEPS):
        watched.observe_delta(request, step(""), 0.0)
        watched.observe_step(plan, output, began=0.0, ended=0.0)
    assert watched.since(0) == {"latest_steps": [{"": 1}] * MAX_STEPS}


def test_the_steps_of_replicas_are_told_apart() -> None:
    watched, request = Watched(), cast("Any", None)
    for replica, delta in ((1, step("lm", "")), (2, step("")), (2, step()), (1, step(""))):
        watched.observe_delta(request, delta, 0.0)
        watched.observe_replica_step(replica)
    steps = [{"lm": 1, "": 1}, {"": 1}, {"": 1}]
    assert watched.since(0) == {"latest_steps": steps, "replicas": [1, 2, 1]}
    assert watched.since(2) == {"latest_steps": steps[2:], "replicas": [1]}
    for _ in range(2 * MAX_STEPS):
        watched.observe_delta(request, step(""), 0.0)
        watched.observe_replica_step(2)
    assert watched.since(3) == {"latest_steps": [{"": 1}] * MAX_STEPS, "replicas": [2] * MAX_STEPS}


def test_chunks_of_idle_time_have_no_replica() -> None:
    num_chunks = 0
    watched = Watched(lambda: num_chunks)
    num_chunks = 2
    assert len(watched.since(0)["latest_steps"]) == 2
    watched.observe_delta(cast("Any", None), step("lm"), 0.0)
    watched.observe_replica_step(1)
    assert watched.since(0) == {"latest_steps": [{"lm": 1}], "replicas": [1]}


def test_a_chunk_of_a_replica_is_a_step_of_its_own() -> None:
    num_chunks = 0
    watched = Watched(lambda: num_chunks)
    watched.observe_delta(cast("Any", None), step("lm"), 0.0)
    watched.observe_replica_step(1)
    watched.observe_idle_chunk(2)
    watched.observe_replica_step(2)
    num_chunks = 1
    steps = {"latest_steps": [{"lm": 1}, {"idle prefill": 1}], "replicas": [1, 2]}
    assert watched.since(0) == steps
    assert watched.since(watched.num_steps) == {}


def test_the_path_of_a_request_is_in_the_tree_however_large_that_is(url: str) -> None:
    events = watch(url)
    next(events)  # from now on
    sent = httpx.post(f"{url}/v1/chat/completions", json=ASKED | {"max_tokens": 60}, timeout=60)
    answer = sent.json()
    of_state = (event for event in events if "requests" in event and not event["running"])
    now = next(event for event in of_state if answer["id"] in str(event["requests"]))
    (mine,) = (each for each in now["requests"] if each["id"] == answer["id"])
    assert mine["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert mine["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    boxes = [now["tree"][box] for box in mine["boxes"]]
    assert [level for _, level, *_ in boxes] == [*range(len(boxes))]
    total = answer["usage"]["total_tokens"]
    assert total - 17 <= sum(tokens for *_, tokens, _, _ in boxes) <= total
