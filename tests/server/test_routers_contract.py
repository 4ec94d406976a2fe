"""Promises to routers: the token ids of a request, the facts of the model, vLLM's metric names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.plain_http import get, metrics, post
from support.server_process import running

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
MODEL = "shown"
# With pages of one token a cache hit tells of each token whether it is the same.
OPTIONS = ["--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1", "--page-size", "1"]
OPTIONS += ["--metric-names", "vllm", "--served-model-name", MODEL]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {}}}}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
CALLED = [
    *HI,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
SYSTEM = [{"role": "developer", "content": "Be brief."}, *HI]
ONES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "def quicksort(items):\n"}),
    (TEXT, {"prompt": "def quicksort(items):\n", "add_special_tokens": False, "echo": True}),
    (TEXT, {"prompt": [5, 6, 7, 8, 9]}),
    (TEXT, {"prompt": [[5, 6, 7]], "n": 2, "stream": False}),
    (CHAT, {"messages": SYSTEM, "reasoning_effort": "low"}),
    (CHAT, {"messages": HI, "tools": CHAT_TOOLS}),
    (CHAT, {"messages": CALLED, "tools": CHAT_TOOLS, "tool_choice": "none"}),
    (CHAT, {"messages": HI, "response_format": FORMAT}),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "he"}],
            "continue_final_message": True, "add_generation_prompt": False}),
    (RESPONSES, {"input": "hi", "instructions": "Be brief.",
                 "tools": [{"type": "function", **TOOL}]}),
    (MESSAGES, {"messages": HI, "system": "Be brief.", "max_tokens": 1}),
]  # fmt: skip
VLLM = """
num_requests_running num_requests_waiting num_preemptions kv_cache_usage_perc cache_config_info
prefix_cache_queries prefix_cache_hits prompt_tokens generation_tokens request_success
request_prompt_tokens request_generation_tokens iteration_tokens_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos
"""
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(OPTIONS) as server:
        yield server.url


def answered(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = post(url, path, body)
    assert answer.status == 200, answer.content
    return answer.json


def rendered(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found = answered(url, f"{path}/render", body)
    return found if path == TEXT else [found]


def samples(url: str) -> Samples:
    """Every sample of /metrics, by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics(url)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def num_read(url: str, token_ids: Sequence[int], salt: str) -> int:
    """Tokens of a prompt that the cache of a salt has; the last one is always computed."""
    body = {"prompt": token_ids, "cache_salt": salt, "max_tokens": 1}
    usage = answered(url, TEXT, body)["usage"]
    assert usage["prompt_tokens"] == len(token_ids)
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize(("path", "body"), ONES)
def test_the_ids_of_a_request_are_those_that_its_route_computes(
    url: str, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    body = {**body, "cache_salt": request.node.name}
    (one,) = rendered(url, path, body)
    assert num_read(url, one["token_ids"], f"not {request.node.name}") == 0
    usage = answered(url, path, body)["usage"]
    num_tokens = sum(usage.get(name, 0) for name in ("prompt_tokens", "input_tokens"))
    assert num_tokens == len(one["token_ids"])
    assert num_read(url, one["token_ids"], body["cache_salt"]) == num_tokens - 1


def test_a_list_of_prompts_is_a_list_of_ids_in_its_order(url: str) -> None:
    texts = [answered(url, "/tokenize", {"prompt": text})["tokens"] for text in ("a = 1", "import")]
    found = rendered(url, TEXT, {"prompt": ["a = 1", "import"]})
    assert [each["token_ids"] for each in found] == texts
    found = rendered(url, TEXT, {"prompt": texts})
    assert [each["token_ids"] for each in found] == texts
    assert len({each["request_id"] for each in found}) == 2


def test_a_response_is_rendered_behind_the_one_that_it_continues(url: str) -> None:
    salt = {"cache_salt": "continued"}
    first = answered(url, RESPONSES, {"input": "hi", "max_output_tokens": 4, **salt})
    body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 1, **salt}
    (one,) = rendered(url, RESPONSES, body)
    assert len(one["token_ids"]) > first["usage"]["total_tokens"]
    assert answered(url, RESPONSES, body)["usage"]["input_tokens"] == len(one["token_ids"])
    assert num_read(url, one["token_ids"], "continued") == len(one["token_ids"]) - 1


def test_a_rendered_request_has_the_fields_of_vllm(url: str) -> None:
    options = {"include_usage": True}
    body = {
        "messages": HI, "model": MODEL, "stream": True, "stream_options": options, "seed": 4,
        "temperature": 0.5, "stop": ["x"], "cache_salt": "s", "priority": 3, "min_tokens": 2,
        "response_format": FORMAT,
    }  # fmt: skip
    (one,) = rendered(url, CHAT, body)
    assert one["request_id"].startswith("chatcmpl-")
    assert (one["model"], one["stream"], one["cache_salt"], one["priority"]) == (
        MODEL,
        True,
        "s",
        3,
    )
    assert one["stream_options"]["include_usage"] is True
    assert (one["features"], one["token_offsets"]) == (None, None)
    params = one["sampling_params"]
    expected = {"seed": 4, "temperature": 0.5, "stop": ["x"], "min_tokens": 2, "n": 1, "top_p": 1.0}
    assert expected.items() <= params.items()
    assert params["structured_outputs"] == {"json": SCHEMA}
    assert params["max_tokens"] == 512 - len(one["token_ids"]), "all that the context has room for"
    (short,) = rendered(url, TEXT, {"prompt": "x"})
    assert (short["sampling_params"]["max_tokens"], short["stream"]) == (16, False)
    assert (short["stream_options"], short["sampling_params"]["structured_outputs"]) == (None, None)
    assert short["request_id"].startswith("cmpl-")


def test_what_is_rendered_is_neither_computed_nor_stored(url: str) -> None:
    names = ("prompt_tokens_total", "prefix_cache_queries_total", "step_tokens_total")
    before = samples(url)
    for path, body in ONES:
        (one, *_) = rendered(url, path, body)
        query = f"/cache/explain?response_id={one['request_id']}"
        assert get(url, query).error["code"] == "response_not_found"
    (one,) = rendered(url, RESPONSES, {"input": "hi", "store": True})
    assert get(url, f"{RESPONSES}/{one['request_id']}").status == 404
    after = samples(url)
    for name in names:
        assert after[f"foretoken:{name}"] == before[f"foretoken:{name}"]


def test_what_no_route_could_answer_is_refused_as_there(url: str) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    block = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    long = "x = 1\n" * 3000
    for path, body in (
        (TEXT, {"prompt": long}), (TEXT, {"prompt": [[5], [10**6]]}), (TEXT, {"prompt": [5] * 512}),
        (CHAT, {"messages": image}), (CHAT, {"messages": HI, "model": "other"}),
        (CHAT, {"messages": HI, "tools": [*CHAT_TOOLS, *CHAT_TOOLS]}),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema",
         "json_schema": {"name": "s", "schema": {"type": "no such"}}}}),
        (CHAT, {"messages": HI, "n": 65}), (CHAT, {"messages": HI, "priority": 99}),
        (CHAT, {"messages": HI, "stop_token_ids": [10**6]}),
        (RESPONSES, {"input": long}), (RESPONSES, {"input": "hi", "background": True}),
        (RESPONSES, {"input": "hi", "previous_response_id": "resp_none"}),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": {
         "type": "no such"}}}}),
        (MESSAGES, {"messages": HI}), (MESSAGES, {"messages": block, "max_tokens": 1}),
        (MESSAGES, {"messages": HI, "system": long, "max_tokens": 1}),
    ):  # fmt: skip
        of_route, of_render = post(url, path, body), post(url, f"{path}/render", body)
        assert of_route.status >= 400, (path, body)
        assert of_render.status == of_route.status, (path, body)
        found, wanted = of_render.json["error"], of_route.json["error"]
        # Only the route says what a compaction would leave of a prompt that is too long.
        assert wanted.pop("message").startswith(found.pop("message"))
        assert found == wanted


def test_the_facts_of_the_model_are_those_of_its_cache_and_of_its_list(url: str) -> None:
    info, cache = get(url, "/model_info").json, get(url, "/cache").json
    assert (info["page_size"], info["total_pages"]) == (cache["page_size"], cache["total_pages"])
    assert (info["page_size"], info["total_pages"], info["max_model_len"]) == (1, 4096, 512)
    (listed,) = get(url, "/v1/models").json["data"]
    shared = ("max_model_len", "exact", "model_path", "drafters")
    assert {name: info[name] for name in shared} == {name: listed[name] for name in shared}
    assert (info["model"], info["names"], info["version"]) == (
        MODEL, [MODEL], get(url, "/version").json["version"],
    )  # fmt: skip
    assert (info["max_running"], info["max_queued"]) == (64, 256)
    assert max(info["eos_token_ids"]) < info["vocab_size"]
    server = get(url, "/server_info").json
    facts = set(info) & set(server)
    assert {"page_size", "total_pages", "fingerprint", "version", "model"} <= facts
    assert all(info[name] == server[name] for name in facts)


def test_metrics_have_the_names_of_vllm_beside_our_own(url: str) -> None:
    answered(url, TEXT, {"prompt": "abab abab abab abab", "max_tokens": 40, "temperature": 0})
    text = metrics(url)
    families = {each.name: each for each in text_string_to_metric_families(text)}
    theirs = {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")}
    assert theirs - {f"{name}_created" for name in theirs} == set(VLLM.split())
    found = samples(url)
    label = frozenset({("model_name", MODEL), ("engine", "0")})
    for name, own in ({name: name for name in theirs} | {
        "iteration_tokens_total": "step_num_tokens",
        "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    }).items():  # fmt: skip
        mine, other = families[f"foretoken:{own}"], families[f"vllm:{name}"]
        assert mine.type == other.type, name
        for sample in mine.samples:
            values = found[sample.name.replace(f"foretoken:{own}", f"vllm:{name}")]
            assert values[label | frozenset(sample.labels.items())] == sample.value
    assert found["vllm:prompt_tokens_total"][label] > 0
    (config,) = found["vllm:cache_config_info"]
    assert {("block_size", "1"), ("num_gpu_blocks", "4096")} <= config
