"""Every way in gives requests the model's own sampling for what they leave out."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.runtime.chat import ChatClient
from foretoken.api.server.prewarm import Warm, prewarm
from foretoken.api.types.sampling_params import NO_DEFAULTS, SamplingDefaults
from foretoken.core.interface.sampling import RECOMMENDED

TALK = [{"role": "user", "content": "hi"}]
PLAIN = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
OWN = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
}  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
}
every_route = pytest.mark.parametrize("path", ROUTES)


@pytest.fixture
def built(built):
    built.sampling_defaults = SamplingDefaults(**OWN)
    return built


@pytest.fixture
def used(engine):
    """The sampling of the last request that reached the engine."""

    def last():
        params = engine.requests[-1].sampling.params
        return {name: getattr(params, name) for name in RECOMMENDED}

    return last


def post(server, path, **fields):
    answer = httpx.post(f"{server.url}{path}", json={**ROUTES[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer


@every_route
@pytest.mark.parametrize("fields", [{}, {"temperature": None, "top_p": None}, {"stream": True}])
def test_a_request_that_gives_nothing_gets_the_models_values(server, used, path, fields):
    post(server, path, **fields)
    assert used() == OWN


@every_route
def test_a_value_of_the_request_goes_first_and_the_rest_is_the_models(server, used, path):
    post(server, path, temperature=1.0)
    assert used() == OWN | {"temperature": 1.0}
    post(server, path, top_p=1.0)
    assert used() == OWN | {"top_p": 1.0}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_values_of_the_request_that_are_the_defaults_are_kept(server, used, path):
    fields = PLAIN if path != "/v1/messages" else {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    post(server, path, **fields)
    assert used() == OWN | fields


@every_route
def test_a_model_without_values_has_those_of_openai(serve, built, used, path):
    built.sampling_defaults = NO_DEFAULTS
    post(serve(), path)
    assert used() == PLAIN


def test_all_choices_of_a_request_have_them(server, engine):
    post(server, "/v1/completions", n=3)
    assert [request.sampling.params.temperature for request in engine.requests] == [0.25] * 3


def test_a_structured_answer_has_them(server, used):
    post(server, "/v1/completions", regex="[a-z]+")
    assert used() == OWN


def test_strict_refuses_what_a_request_asks_and_not_what_the_model_has(serve, built, used):
    built.sampling_defaults = SamplingDefaults(temperature=1.5)
    server = serve(strict=True)
    post(server, "/v1/messages")
    assert used()["temperature"] == 1.5
    answer = httpx.post(
        f"{server.url}/v1/messages", json={**ROUTES["/v1/messages"], "temperature": 1.5}
    )
    assert answer.status_code == 400


@pytest.mark.parametrize(("fields", "expected"), [({}, (0.25, 0.5)), ({"top_p": 1}, (0.25, 1))])
def test_a_response_names_the_values_in_force(server, fields, expected):
    body = post(server, "/v1/responses", **fields).json()
    assert (body["temperature"], body["top_p"]) == expected


def test_a_response_of_a_model_without_values_names_the_defaults(serve, built):
    built.sampling_defaults = NO_DEFAULTS
    body = post(serve(), "/v1/responses").json()
    assert (body["temperature"], body["top_p"]) == (1.0, 1.0)


# -- the SDK and what the server does by itself --------------------------------------------------


def test_the_sdk_has_them_in_every_method(run, used):
    async def body(llm: AsyncLLM) -> None:
        short = SamplingParams(max_tokens=2)
        await llm.generate("hi", short)
        assert used() == OWN
        await llm.generate(["hi", "ho"], short)
        assert used() == OWN
        await llm.chat(TALK, short)
        assert used() == OWN
        async for _ in llm.stream("hi", short):
            assert used() == OWN
        async for _ in llm.stream_chat(TALK, short):
            assert used() == OWN
        await llm.generate("hi", SamplingParams(max_tokens=2, temperature=1.0, top_k=0))
        assert used() == OWN | {"temperature": 1.0, "top_k": 0}

    run(body)


def test_the_sdk_without_parameters_has_them(llm, used, say):
    say("hello")
    llm.generate("hi")
    assert used() == OWN


def test_prewarming_works_with_them(built, engine):
    async def body() -> None:
        async with AsyncLLM.from_built(built) as llm:
            await prewarm(llm, ChatClient(llm), [Warm(prompt="hi")])

    asyncio.run(body())
    assert engine.requests[-1].sampling.params.max_tokens == 0


# -- where they are shown ------------------------------------------------------------------------


def test_models_show_the_values_in_force(server):
    models = httpx.get(f"{server.url}/v1/models").json()
    assert models["data"][0]["default_sampling_params"] == OWN
    one = httpx.get(f"{server.url}/v1/models/tiny/model").json()
    assert one["default_sampling_params"] == OWN


def test_models_show_the_defaults_where_the_model_has_no_value(serve, built):
    built.sampling_defaults = SamplingDefaults(temperature=0)
    server = serve()
    shown = httpx.get(f"{server.url}/v1/models").json()["data"][0]["default_sampling_params"]
    assert shown == PLAIN | {"temperature": 0}


def test_server_info_shows_model_settings_and_limits(serve):
    server = serve(max_n=3, served_names=("shown",))
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["version"] == httpx.get(f"{server.url}/version").json()["version"]
    assert (info["model"], info["model_path"], info["exact"]) == ("shown", "own", True)
    assert info["max_model_len"] == 256
    assert info["default_sampling_params"] == OWN
    assert info["settings"]["kv_tokens"] == 4096
    assert (info["limits"]["max_n"], info["limits"]["max_stop_bytes"]) == (3, 16384)


def test_server_info_needs_a_key_and_names_neither_keys_nor_folders(serve):
    server = serve(api_keys=("secret-key",), admin_keys=("secret-admin",))
    url = f"{server.url}/server_info"
    assert httpx.get(url).status_code == 401
    answer = httpx.get(url, headers={"x-api-key": "secret-key"})
    assert answer.status_code == 200
    assert "secret" not in answer.text
    settings = answer.json()["settings"]
    assert settings["draft"] == "auto,head"
    assert "dump_dir" not in settings
    assert "/" not in json.dumps(settings)
