"""The cost of a request: as counted by hand, in every API, and only with prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.api.serving.prices import Prices
from foretoken.api.serving.settings import Settings
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.request import Usage
from support.given import listening

PRICES = {"input": 2.0, "cached": 0.5, "write": 3.0, "output": 8.0}
HI = [{"role": "user", "content": "hello there, hello world"}]
CONTENTS = [{"parts": [{"text": "hello there"}]}]
OPENAI = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 5},
    "/v1/completions": {"prompt": "hello there", "max_tokens": 5},
    "/v1/responses": {"input": "hello there", "max_output_tokens": 5},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
}
GEMINI = "/v1beta/models/tiny/model:generateContent"


def test_each_token_has_the_price_of_its_kind() -> None:
    usage = Usage(prompt_tokens=100, cached_tokens=60, cache_write_tokens=30, completion_tokens=7)
    cost = Prices(**PRICES).cost(usage)
    assert cost == pytest.approx((10 * 2 + 60 * 0.5 + 30 * 3 + 7 * 8) / 1e6)
    assert Prices(**PRICES).cost(usage, 0) == pytest.approx((40 * 2 + 60 * 0.5 + 7 * 8) / 1e6)


def test_cached_and_written_tokens_cost_as_much_as_others_by_default() -> None:
    assert Prices.read({"input": 2, "output": 8}) == Prices(input=2, cached=2, write=2, output=8)
    assert Prices.read('{"input": 2, "cached": 0, "output": 8}').cached == 0


def test_a_cost_has_no_noise_of_floats() -> None:
    prices = Prices.read({"input": 0.1, "output": 0.2})
    assert json.dumps(prices.cost(Usage(prompt_tokens=1, completion_tokens=1))) == "3e-07"


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"input": 1}, "output is missing"),
        ({"output": 1}, "input is missing"),
        ({"input": 1, "output": 1, "reads": 1}, "'reads'"),
        ({"input": -1, "output": 1}, "input must be a number from 0 to 1000000000, not -1"),
        ({"input": 10**400, "output": 1}, "input must be a number from 0 to 1000000000"),
        ({"input": 1, "output": 1e300}, "output must be a number from 0 to 1000000000"),
        ({"input": 1, "output": True}, "output must be a number"),
        ({"input": 1, "output": "1"}, "output must be a number"),
        ({"input": 1, "output": float("nan")}, "output must be a number"),
        ({"input": 1, "output": float("inf")}, "output must be a number"),
        ("[1]", "must be a JSON object"),
        ("{", "must be JSON"),
    ],
)
def test_a_wrong_table_is_refused_by_name(table: Any, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="prices") as caught:
        Settings(prices=table)
    assert wrong in str(caught.value)
    assert caught.value.param == "prices"


def test_prices_are_a_table_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.toml"
    path.write_text("[prices]\ninput = 2.5\ncached = 0.25\noutput = 10\n", "utf-8")
    given = listening("--config", str(path)).settings.prices
    assert given is not None
    assert Prices.read(given) == Prices(input=2.5, cached=0.25, write=2.5, output=10)
    path.write_text("[prices]\ninput = 2.5\n", "utf-8")
    with pytest.raises(InvalidRequest, match=r"foretoken\.toml: prices: output is missing"):
        listening("--config", str(path))


def usages(answer: httpx.Response) -> list[dict[str, Any]]:
    """Every usage in a body or in the events of a stream."""
    lines = [answer.text]
    if answer.headers["content-type"].startswith("text/event-stream"):
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        lines = [line for line in data if line != "[DONE]"]
    found = []
    for body in map(json.loads, lines):
        for part in (body, body.get("response") or {}, body.get("message") or {}):
            found += [part[name] for name in ("usage", "usageMetadata") if part.get(name)]
    return found


def cost_of(usage: dict[str, Any]) -> float:
    """The cost, from the counts that a client sees."""
    if "candidatesTokenCount" in usage:  # written tokens are not reported
        cached = usage["cachedContentTokenCount"]
        plain, written = usage["promptTokenCount"] - cached, 0
        generated = usage["candidatesTokenCount"]
    elif "cache_read_input_tokens" in usage:
        cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        plain, generated = usage["input_tokens"], usage["output_tokens"]
    else:
        name = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
        details = usage[f"{name}_details"]
        cached, written = details["cached_tokens"], details.get("cache_write_tokens", 0)
        plain = usage[name] - cached - written
        generated = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return (plain * 2 + cached * 0.5 + written * 3 + generated * 8) / 1e6


@pytest.mark.parametrize("path", [*OPENAI, GEMINI])
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_reports_the_cost_of_the_tokens_that_it_counts(
    serve: Any, path: str, stream: bool
) -> None:
    url = serve(prices=PRICES).url
    if path == GEMINI:
        body: dict[str, Any] = {"contents": CONTENTS}
        path = path.replace(":generate", ":streamGenerate") + "?alt=sse" if stream else path
    else:
        body = {**OPENAI[path], "stream": stream}
    if stream and path in ("/v1/chat/completions", "/v1/completions"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    found = usages(httpx.post(url + path, json=body).raise_for_status())
    priced = [each for each in found if "cost" in each]
    assert priced
    assert priced[-1] is found[-1], "the last usage is the whole one"
    assert priced[-1]["cost"] > 0
    for each in priced:
        assert each["cost"] == pytest.approx(cost_of(each))


@pytest.mark.parametrize("path", OPENAI)
def test_without_prices_there_is_no_cost(server: Any, path: str) -> None:
    answer = httpx.post(server.url + path, json=OPENAI[path]).raise_for_status()
    assert "cost" not in answer.json()["usage"]
