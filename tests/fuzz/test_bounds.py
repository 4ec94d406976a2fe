"""Every bound that /openapi.json states for a number holds on both of its sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fuzz.inprocess import App

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}
LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
)
"""Names of the longest answer, of which a body has one."""


@pytest.mark.parametrize("path", BODIES)
def test_a_number_is_served_at_its_bounds_and_refused_beyond(app: App, path: str):
    document = app.ask("GET", "/openapi.json").json()
    num_bounds = 0
    for name, inside, outside in _bounds(document, path):
        body = BODIES[path] | _beside(path, name)
        if name in LENGTHS:
            body = {field: value for field, value in body.items() if field not in LENGTHS}
        served = app.post(path, body | {name: inside})
        is_late = name == "deadline_ms" and served.status_code == 503
        lacks_flag = name == "kv_budget" and "--kv-evict" in served.text
        assert served.status_code == 200 or is_late or lacks_flag, (name, inside, served.text)
        refused = app.post(path, body | {name: outside})
        assert refused.status_code == 400, (name, outside, refused.text)
        error = refused.json()["error"]
        assert name in (error.get("param") or error["message"])
        num_bounds += 1
    assert num_bounds > 20


def _beside(path: str, name: str) -> dict[str, Any]:
    """Return the other fields that a request must set for this field to be taken."""
    if name in ("min_tokens", "min_new_tokens"):
        return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2**31 - 1}
    if path == "/v1/completions" and name in ("max_tokens", "max_completion_tokens"):
        return {"echo": True}  # 0 wants one
    return {"logprobs": True} if name == "top_logprobs" and path != "/v1/responses" else {}


def _bounds(document: dict[str, Any], path: str) -> Iterator[tuple[str, float, float]]:
    """Field, a value at a bound, and the one next to it that is too much."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        for each in schema.get("anyOf", [schema]):
            step = 1 if each.get("type") == "integer" else 1e-6
            if "minimum" in each:
                yield field, each["minimum"], each["minimum"] - step
            if "maximum" in each:
                yield field, each["maximum"], each["maximum"] + step * max(1, abs(each["maximum"]))
