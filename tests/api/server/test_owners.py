"""Secrets that one key must keep from another, and the memory that owners share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from foretoken.api.runtime.conversation.prompt_history import MAX_BYTES
from foretoken.api.types.shares import FAIR_SHARE, Shares

ALICE, BOB = "alice", "bob"
PUBLIC = "You are the support agent, polite to everyone. "
SECRET = "The password is hunter2."
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(params=[(ALICE, BOB), ()], ids=["keys", "keyless"])
def http(serve, say, request):
    say("ok")
    with httpx.Client(base_url=serve(api_keys=request.param).url, timeout=20) as client:
        yield client


@pytest.fixture
def ask(http) -> Ask:
    def send(key: str, system: str, **fields: Any) -> dict[str, Any]:
        talk = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
        body = {"messages": talk, "max_tokens": 1, "explain_cache": True, **fields}
        answer = http.post("/v1/chat/completions", json=body, headers=bearer(key))
        return answer.raise_for_status().json()

    return send


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def explain(http: httpx.Client, key: str, **query: str) -> httpx.Response:
    return http.get("/cache/explain", params=query, headers=bearer(key))


def told(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["usage"]["cache_explanation"]


def test_a_prompt_is_compared_with_those_of_its_own_key_alone(ask):
    mine = ask(ALICE, PUBLIC + SECRET)
    found = told(ask(BOB, PUBLIC + "?"))
    assert found["cause"] == "first_seen"
    assert (found["compared_with"], found["first_difference"]) == (None, None)
    assert told(ask(ALICE, PUBLIC + "?"))["compared_with"] == mine["id"]


def test_the_prompt_of_another_key_is_not_known(http, ask):
    mine, other = ask(ALICE, PUBLIC + SECRET), ask(BOB, PUBLIC)
    unknown = explain(http, BOB, response_id=mine["id"])
    assert unknown.status_code == 404
    assert explain(http, ALICE, response_id=mine["id"]).status_code == 200
    named = explain(http, BOB, response_id=other["id"], previous_id=mine["id"])
    assert named.status_code == 404
    assert named.json()["error"]["param"] == "previous_id"
    assert SECRET[:8] not in named.text


def test_another_salt_is_told_to_the_key_that_owns_both_and_to_no_other(http, ask):
    salted = ask(ALICE, PUBLIC, cache_salt="a")
    mine, other = ask(ALICE, PUBLIC, cache_salt="b"), ask(BOB, PUBLIC, cache_salt="b")
    query = {"previous_id": salted["id"], "cache_salt": "b"}
    own = explain(http, ALICE, response_id=mine["id"], **query)
    assert own.json()["cause"] == "other_salt"
    assert explain(http, BOB, response_id=other["id"], **query).status_code == 404


def test_a_diagnosis_in_the_clients_own_fields_knows_no_response_of_another_key(http, ask):
    mine = ask(ALICE, PUBLIC + SECRET)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "diagnostics": {"previous_message_id": mine["id"]},
    }
    found = http.post("/v1/messages", json=body, headers={"x-api-key": BOB}).json()["diagnostics"]
    assert found == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    body = {"input": "hi", "prompt_cache_options": {"comparison_response_id": mine["id"]}}
    found = http.post("/v1/responses", json=body, headers=bearer(BOB)).json()
    assert found["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_a_key_is_the_same_caller_in_either_header(http, ask):
    mine = ask(ALICE, PUBLIC)
    query = {"response_id": mine["id"]}
    assert http.get("/cache/explain", params=query, headers={"x-api-key": ALICE}).is_success


def test_a_caller_is_the_key_that_let_it_pass_and_not_another_that_it_offers(serve, say):
    say("ok")
    body = {"input": "hi", "store": True}
    with httpx.Client(base_url=serve(api_keys=(ALICE, BOB)).url, timeout=20) as http:
        both = {"x-api-key": BOB, "authorization": "Bearer whoever"}
        kept = http.post("/v1/responses", json=body, headers=both).json()["id"]
        assert http.get(f"/v1/responses/{kept}", headers=bearer(BOB)).is_success
        assert http.get(f"/v1/responses/{kept}", headers=bearer(ALICE)).status_code == 404


LONG = [
    ("/v1/chat/completions", "prompt_cache_key", 1024),
    ("/v1/chat/completions", "cache_salt", 1024),
    ("/v1/completions", "prompt_cache_key", 1024),
    ("/v1/messages", "prompt_cache_key", 1024),
    ("/v1/responses", "prompt_cache_key", 1024),
]


@pytest.mark.parametrize(("path", "name", "limit"), LONG)
def test_what_is_remembered_of_a_body_is_short(server, say, path, name, limit):
    say("ok")
    talk = [{"role": "user", "content": "hi"}]
    body = {"messages": talk, "max_tokens": 1}
    if path.endswith(("/completions", "/responses")) and "chat" not in path:
        body = {"input": "hi"} if "responses" in path else {"prompt": "hi"}
    good, bad = (
        httpx.post(server.url + path, json={**body, name: "k" * length})
        for length in (limit, limit + 1)
    )
    assert good.is_success
    assert bad.status_code == 400
    assert name in bad.text


def test_names_and_metadata_are_short(server, say):
    say("ok")
    talk = [{"role": "user", "content": "hi", "name": "n" * 257}]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": talk})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].name")
    bodies = [
        ({"a": "x" * 513}, "metadata"),
        ({"a" * 65: "x"}, "metadata"),
        ({f"{i}": "" for i in range(17)}, "metadata"),
    ]
    for metadata, param in bodies:
        body = {"input": "hi", "metadata": metadata}
        answer = httpx.post(f"{server.url}/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    metadata = {"a" * 64: "x" * 512}
    body = {"input": "hi", "metadata": metadata}
    assert httpx.post(f"{server.url}/v1/responses", json=body).json()["metadata"] == metadata


def test_all_that_is_remembered_of_a_prompt_is_counted(run):
    from foretoken.api.runtime.conversation.prompt_history import Part, PromptNote
    from foretoken.api.types.sampling_params import SamplingParams

    async def body(llm) -> list[int]:
        notes = [
            PromptNote(),
            PromptNote(cache_key="k" * 1000),
            PromptNote(model="m" * 1000),
            PromptNote(parts=[Part("p" * 1000, "", "messages")]),
        ]
        sizes = []
        for index, note in enumerate(notes):
            params = SamplingParams(max_tokens=1)
            await llm.finish(await llm.open("hi", params, request_id=f"r{index}", note=note))
            sizes.append(llm.prompts.find(f"r{index}").num_bytes)
        return sizes

    plain, *others = run(body)
    assert plain < MAX_BYTES
    assert all(size >= plain + 1000 for size in others)


# -- shares -------------------------------------------------------------------------------------


def fill(shares: Shares[str], owner: bytes, count: int, size: int) -> list[str]:
    """Add entries and drop what is too much; the keys that were dropped."""
    dropped = []
    for index in range(count):
        shares.add(owner, f"{owner.decode()}{index}", size)
        while (excess := shares.excess()) is not None:
            shares.remove(excess)
            dropped.append(excess)
    return dropped


def test_who_floods_a_memory_drives_out_none_but_its_own():
    shares: Shares[str] = Shares(1000)
    quarter = int(1000 * FAIR_SHARE)
    assert fill(shares, b"quiet", 1, quarter) == []
    dropped = fill(shares, b"loud", 100, 10)
    assert dropped == [f"loud{index}" for index in range(len(dropped))]
    assert shares.num_bytes == 1000


def test_many_small_entries_are_a_flood_too():
    shares: Shares[str] = Shares(10**6, max_entries=8)
    fill(shares, b"quiet", 2, 1)
    dropped = fill(shares, b"loud", 50, 1)
    assert len(dropped) == 44
    assert all(key.startswith("loud") for key in dropped)


def test_one_who_is_alone_has_all_of_it_and_makes_room_when_others_come():
    shares: Shares[str] = Shares(1000)
    assert fill(shares, b"a", 10, 100) == []
    assert fill(shares, b"b", 2, 100) == ["a0", "a1"]
    assert fill(shares, b"c", 1, 10**4) == ["c0"], "what fits nowhere drives nobody out"


def test_among_owners_who_keep_to_their_share_the_oldest_entry_goes():
    shares: Shares[str] = Shares(100)
    for owner in (b"a", b"b", b"c", b"d"):
        assert fill(shares, owner, 1, 20) == []
    shares.touch("a0")
    assert fill(shares, b"e", 1, 21) == ["b0"]
    assert shares.num_bytes == 81
