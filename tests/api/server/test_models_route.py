"""GET /v1/models for clients of OpenAI's, vLLM's and Anthropic's API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretoken import InvalidRequest
from foretoken.api.server.routes.protocol import Model, SamplingValues, model_page

ANTHROPIC = {"anthropic-version": "2023-06-01"}
NAMES = ["a", "b", "c", "d"]


def model(name: str) -> Model:
    return Model(
        id=name, created=0, root="a", max_model_len=1, exact=True, model_path="own", drafters=[],
        display_name=name, created_at="", tool_parser="none", default_sampling_origin="",
        default_sampling_params=SamplingValues(
            temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1
        ),
    )  # fmt: skip


MODELS = [model(name) for name in NAMES]


def test_each_entry_has_what_clients_of_three_apis_read(serve: Any) -> None:
    server = serve(served_names=("a", "b"))
    listed = httpx.get(f"{server.url}/v1/models").json()
    for entry, name in zip(listed["data"], ("a", "b"), strict=True):
        assert (entry["id"], entry["object"], entry["owned_by"]) == (name, "model", "foretoken")
        assert (entry["root"], entry["parent"], entry["max_model_len"] > 0) == ("a", None, True)
        assert (entry["type"], entry["display_name"]) == ("model", name)
        assert entry["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "a", "b")
    page = httpx.get(f"{server.url}/v1/models?limit=1&after_id=a", headers=ANTHROPIC).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (["b"], False)


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, NAMES, False),
        ({"limit": "2"}, ["a", "b"], True),
        ({"limit": "4"}, NAMES, False),
        ({"after_id": "b"}, ["c", "d"], False),
        ({"after_id": "a", "limit": "2"}, ["b", "c"], True),
        ({"after_id": "d"}, [], False),
        ({"before_id": "d", "limit": "2"}, ["b", "c"], True),
        ({"before_id": "c"}, ["a", "b"], False),
    ],
)
def test_pages(query: dict[str, str], names: list[str], has_more: bool) -> None:
    page = model_page(MODELS, query)
    assert [each.id for each in page.data] == names
    assert page.has_more == has_more
    ends = (names[0], names[-1]) if names else (None, None)
    assert (page.first_id, page.last_id) == ends


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "x"}, {"limit": "1001"}, {"limit": "-1"}, {"after_id": "z"},
     {"before_id": ""}],
)  # fmt: skip
def test_pages_that_are_none(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model_page(MODELS, query)
    assert caught.value.param == next(iter(query))


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/models?limit=0", "/v1/nothing"])
def test_errors_have_the_form_of_the_callers_api(serve: Any, path: str) -> None:
    server = serve()
    answer = httpx.get(f"{server.url}{path}", headers=ANTHROPIC)
    assert answer.status_code in (400, 404)
    body = answer.json()
    kind = "not_found_error" if answer.status_code == 404 else "invalid_request_error"
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == answer.headers["request-id"]
    other = httpx.get(f"{server.url}{path}").json()
    assert set(other) == {"error"}
    assert {"message", "type", "param", "code"} == set(other["error"])


def test_a_missing_key_has_the_form_of_the_callers_api(serve: Any) -> None:
    url = f"{serve(api_keys=('k',)).url}/v1/models"
    answer = httpx.get(url, headers=ANTHROPIC)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(url).json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(url, headers=ANTHROPIC | {"x-api-key": "k"}).status_code == 200
