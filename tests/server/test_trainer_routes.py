"""Calls of TRL 1.16's client in server mode, as recorded from it, and answers in their forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.api.build.model_files import BUILTIN
from support.plain_http import get, opened, post
from support.server_process import running

FLAGS = ["--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1"]
PROMPTS = [[40, 41, 42, 43], [40, 41]]
SAMPLING: dict[str, Any] = {
    "n": 3, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "min_p": 0.0, "max_tokens": 5, "logprobs": 2,
}  # fmt: skip
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(
        [*FLAGS, "--max-n", "64", "--allow-weight-updates"], model=str(BUILTIN / "target")
    ) as server:
        yield server.url


def number(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def complete(url: str, **body: Any) -> list[dict[str, Any]]:
    found = post(url, "/v1/completions", body)
    assert found.status == 200, found.content
    choices: list[dict[str, Any]] = found.json["choices"]
    return choices


def test_generate_has_ids_in_place_of_texts(url: str) -> None:
    choices = complete(url, prompt=PROMPTS, **SAMPLING, **IDS)
    assert [each["prompt_token_ids"] for each in choices[::3]] == PROMPTS
    assert len(choices) == 6
    for choice in choices:
        logprobs = choice["logprobs"]
        assert [number(each) for each in logprobs["tokens"]] == choice["token_ids"]
        for name, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[name] == value
            assert all(each.startswith("token_id:") for each in top)


def test_ids_are_named_in_streams_and_in_chats(url: str) -> None:
    streamed = post(
        url, "/v1/completions", {"prompt": PROMPTS[0], "stream": True, **SAMPLING, **IDS}
    )
    assert streamed.status == 200
    assert b'"token_id:' in streamed.content
    sampling = SAMPLING | {"logprobs": True, "top_logprobs": 2}
    body = {"messages": [{"role": "user", "content": "hello"}], **sampling, **IDS}
    choice = post(url, "/v1/chat/completions", body).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert [number(each["token"]) for each in content] == choice["token_ids"]
    assert all(number(top["token"]) >= 0 for each in content for top in each["top_logprobs"])


def test_sequences_are_scored_by_rank_and_as_plain_numbers(url: str) -> None:
    asked = {"prompt": PROMPTS, "max_tokens": 1, "temperature": 1.0}
    ranked = complete(url, **asked, prompt_logprobs=3)
    plain = complete(url, **asked | {"max_tokens": 0}, prompt_token_logprobs=True)
    assert [each["text"] for each in plain] == ["", ""]
    for prompt, first, second in zip(PROMPTS, ranked, plain, strict=True):
        positions, values = first["prompt_logprobs"], second["prompt_token_logprobs"]
        assert positions[0] is values[0] is None
        assert len(positions) == len(values) == len(prompt)
        for token_id, position, value in zip(prompt[1:], positions[1:], values[1:], strict=True):
            assert position[str(token_id)]["logprob"] == value
            assert {1, 2, 3} <= {each["rank"] for each in position.values()}
        assert first["logprobs"] is second["logprobs"] is None
        assert "prompt_logprobs" not in second


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_token_logprobs": True, "echo": True}, "prompt_token_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ],
)
def test_bad_fields_are_named(url: str, more: dict[str, Any], param: str) -> None:
    found = post(url, "/v1/completions", {"prompt": PROMPTS, "max_tokens": 1, **more})
    assert (found.status, found.error["param"]) == (400, param)


def test_the_server_says_that_it_takes_weights(url: str) -> None:
    config = get(url, "/server_info?config_format=json").json["vllm_config"]
    assert config["weight_transfer_config"] is not None
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert "vllm_config" not in get(url, "/server_info").json


def test_groups_of_gpus_are_refused(url: str) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2}
    found = post(url, "/init_weight_transfer_engine", {"init_info": info | {"packed": True}})
    assert (found.status, found.error["code"]) == (400, "nccl_not_supported")
    assert post(url, "/init_weight_transfer_engine", {}).error["param"] == "init_info"
    names = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "packed": True}
    refused = post(url, "/update_weights", {"update_info": names})
    assert refused.status == 400
    assert "names" in refused.error["message"]


def test_other_calls_of_the_client_have_their_replies(url: str) -> None:
    assert get(url, "/health").status == 200
    assert get(url, "/v1/models").json["data"][0]["id"]
    assert get(url, "/get_world_size").json == {"world_size": 1}
    assert post(url, "/reset_prefix_cache", {}).status == 200
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert post(url, "/v1/chat/completions/render", body).json["token_ids"]


def test_the_fields_and_the_route_need_the_option() -> None:
    with running(FLAGS, model=str(BUILTIN / "target")) as server:
        assert post(server.url, "/init_weight_transfer_engine", {"init_info": {}}).status == 404
        body = {"prompt": PROMPTS, "prompt_logprobs": 1}
        assert post(server.url, "/v1/completions", body).error["param"] == "prompt_logprobs"
        info = get(server.url, "/server_info?config_format=json").json
        assert info["vllm_config"]["weight_transfer_config"] is None


# -- token ids in and out -----------------------------------------------------------------------

GENERATE = "/inference/v1/generate"


def generate(url: str, sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"token_ids": PROMPTS[0], "sampling_params": sampling, **more}
    found = post(url, GENERATE, body)
    assert found.status == 200, found.content
    answer: dict[str, Any] = found.json
    return answer


def test_token_ids_are_those_of_a_text_completion(url: str) -> None:
    seeded = SAMPLING | {"seed": 7}
    answer = generate(url, {**seeded, "output_kind": 2}, request_id="trl-1")
    expected = complete(url, prompt=PROMPTS[0], **seeded, **IDS)
    assert answer["request_id"] == "trl-1"
    assert [each["token_ids"] for each in answer["choices"]] == [
        each["token_ids"] for each in expected
    ]
    for choice, other in zip(answer["choices"], expected, strict=True):
        content = choice["logprobs"]["content"]
        assert [number(each["token"]) for each in content] == choice["token_ids"]
        assert [each["logprob"] for each in content] == other["logprobs"]["token_logprobs"]
    assert answer["weight_version"] == answer["weight_versions"][0]["spans"][0]["version"]


def test_a_stream_of_token_ids_has_the_tokens_of_a_whole_answer(url: str) -> None:
    seeded = SAMPLING | {"seed": 7}
    whole = generate(url, seeded)
    found = post(
        url,
        GENERATE,
        {
            "token_ids": PROMPTS[0],
            "sampling_params": seeded,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    lines = [line for line in found.content.decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        for choice in event["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert [tokens[index] for index in range(3)] == [each["token_ids"] for each in whole["choices"]]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-1]["weight_versions"] == whole["weight_versions"]


def test_a_group_has_64_choices_and_prompts_are_scored_without_tokens(url: str) -> None:
    answer = generate(url, {"n": 64, "max_tokens": 2, "temperature": 1.0})
    assert [each["index"] for each in answer["choices"]] == list(range(64))
    scored = generate(url, {"max_tokens": 0, "prompt_token_logprobs": True})
    (plain,) = complete(url, prompt=PROMPTS[0], max_tokens=0, prompt_token_logprobs=True)
    assert scored["prompt_token_logprobs"] == plain["prompt_token_logprobs"]
    assert scored["choices"][0]["token_ids"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"sampling_params": {"n": 65}}, "sampling_params.n"),
        ({"sampling_params": {"stop": "x" * 20_000}}, "sampling_params.stop"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": None}, "sampling_params"),
    ],
)
def test_bad_bodies_of_token_ids_are_named(url: str, body: dict[str, Any], param: str) -> None:
    found = post(url, GENERATE, {"token_ids": [40], "sampling_params": {}} | body)
    assert (found.status, found.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", GENERATE])
def test_a_pause_ends_answers_with_the_reason_abort(url: str, path: str) -> None:
    """An answer may be ended before its first token, which is no error."""
    sampling = {"max_tokens": 400, "ignore_eos": True}
    bodies = {
        "/v1/completions": {"prompt": PROMPTS[0], **sampling},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **sampling},
        GENERATE: {"token_ids": PROMPTS[0], "sampling_params": sampling},
    }
    with opened(url, "POST", path, {**bodies[path], "stream": True}) as stream:
        stream.readline()
        assert post(url, "/pause?mode=abort", {}).status == 200
        rest = stream.read().decode()
    post(url, "/resume", {})
    assert '"finish_reason":"abort"' in rest
    assert '"stop_reason":"pause"' in rest


def test_a_format_of_the_config_that_does_not_exist_is_refused(url: str) -> None:
    refused = get(url, "/server_info?config_format=yaml")
    assert (refused.status, refused.error["param"]) == (400, "config_format")
