"""Fields of other servers: each is used, changes nothing, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from msgspec import Struct

import foretoken
from foretoken import InvalidRequest
from foretoken.api.dialects import APIS
from foretoken.api.dialects.ollama.bodies import Options
from foretoken.api.dialects.openai.bodies import ChatRequest, CompletionRequest
from foretoken.api.dialects.openai.reading import read_chat
from foretoken.api.dialects.pooled.bodies import PooledRequest, ScoreRequest
from foretoken.api.dialects.responses.bodies import ResponsesRequest
from foretoken.api.serving.decoding import decoder
from foretoken.api.serving.errors import ApiError
from foretoken.api.serving.peers import RefusedFields
from foretoken.api.types.fields import marks_of

HI = [{"role": "user", "content": "hi"}]


class Route(NamedTuple):
    """A route: a valid body, and the object with its sampling fields."""

    path: str
    body: dict[str, Any]
    inside: str = ""

    def read(self, fields: dict[str, Any]) -> Any:
        """Decode the body with more fields, and return what has them."""
        body = self.body | ({self.inside: fields} if self.inside else fields)
        read = decode_of(self.path)(msgspec.json.encode(body))
        return getattr(read, self.inside) if self.inside else read

    def named(self, field: str) -> str:
        """The name of a field in an error."""
        return f"{self.inside}.{field}" if self.inside else field


@cache
def decode_of(path: str) -> Callable[[bytes], Struct]:
    """The decoder of a route."""
    [body] = [each.body for api in APIS for each in api.dialects if each.path == path]
    return decoder(body)


OPENAI = [
    Route("/v1/chat/completions", {"messages": HI}),
    Route("/v1/completions", {"prompt": "hi"}),
    Route("/v1/responses", {"input": "hi"}),
]
SAMPLED = [*OPENAI, Route("/v1/messages", {"messages": HI, "max_tokens": 3})]
OLLAMA = [
    Route("/api/chat", {"messages": HI}, "options"),
    Route("/api/generate", {"prompt": "hi"}, "options"),
]
POOLED = [
    Route("/v1/embeddings", {"input": "hi"}),
    Route("/v1/rerank", {"query": "hi", "documents": ["a"]}),
    Route("/v1/score", {"query": "hi", "documents": ["a"]}),
]
COUNT = Route("/v1/messages/count_tokens", {"messages": HI})
SAMPLERS: dict[str, tuple[object, tuple[object, ...]]] = {
    "typical_p": (0.9, (1, 1.0)), "tfs_z": (0.5, (1,)), "top_a": (0.1, (0,)),
    "top_n_sigma": (1.5, (-1, 0)), "xtc_probability": (0.5, (0, 0.0)), "mirostat": (2, (0,)),
    "dynatemp_range": (0.5, (0,)), "smoothing_factor": (0.2, (0,)), "dry_multiplier": (0.8, (0,)),
    "no_repeat_ngram_size": (3, (0,)), "guidance_scale": (1.5, (1,)), "num_beams": (4, (1,)),
    "use_beam_search": (True, (False,)), "length_penalty": (1.2, (1.0,)), "best_of": (2, (1,)),
    "early_stopping": (True, (False,)), "do_sample": (False, (True,)),
    "samplers": (["top_k", "min_p"], ([],)), "logits_processors": (["x"], ([],)),
    "custom_logit_processor": ("x", ("",)), "penalty_alpha": (0.6, (0,)), "min_keep": (4, (0, 1)),
    "epsilon_cutoff": (3, (0,)), "eta_cutoff": (3, (0,)), "watermarking": (True, (False,)),
}  # fmt: skip
"""Ways to sample: a value that is refused, and values that change nothing."""

OTHERS: dict[str, tuple[object, tuple[object, ...]]] = {
    "stop_regex": ("a+", ("", [])), "no_stop_trim": (True, (False,)),
    "include_stop_str_in_output": (True, (False,)), "skip_special_tokens": (False, (True,)),
    "structural_tag": ("{}", ("",)), "guided_whitespace_pattern": (" ", ("",)),
    "thinking_token_budget": (64, (-1,)), "thinking_budget": (64, (-1,)),
    "separate_reasoning": (False, (True,)), "include_reasoning": (False, (True,)),
    "reasoning_format": ("none", ("auto",)), "input_ids": ([1], ([],)),
    "sampling_params": ({"top_k": 1}, ({},)), "session_params": ({"id": "x"}, ({},)),
    "truncate_prompt_tokens": (5, (False,)), "chat_template": ("{{ x }}", ("",)),
    "documents": ([{"text": "x"}], ([],)), "lora_path": ("x", ("",)), "lora": ([{"id": 0}], ([],)),
    "prompt_logprobs": (0, (False,)), "logprob_token_ids": ([1], ([],)), "n_probs": (3, (0,)),
    "return_hidden_states": (True, (False,)), "return_meta_info": (True, (False,)),
    "return_tokens_as_token_ids": (True, (False,)), "vllm_xargs": ({"a": 1}, ({},)),
    "mm_processor_kwargs": ({"a": 1}, ({},)), "t_max_predict_ms": (100, (0, -1)),
    "functions": ([{}], ([],)), "function_call": ("auto", ("none",)), "audio": ({"voice": "x"}, ()),
    "repetition_detection": ({"max_pattern_size": 3}, ({},)), "suffix": ("x", ("",)),
}  # fmt: skip
HARMLESS: dict[str, object] = {
    "rid": "r", "request_id": "r", "user": "u", "session_id": "s", "store": True,
    "verbosity": "low", "service_tier": "auto", "safety_identifier": "s",
    "cache_prompt": True, "id_slot": 0, "n_keep": 4, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "dry_base": 1.75, "dry_allowed_length": 2, "xtc_threshold": 0.1, "dynatemp_exponent": 1.0,
    "num_ctx": 4096,
    "guided_decoding_backend": "xgrammar", "spaces_between_special_tokens": True,
    "timings_per_token": True, "stream_interval": 4, "something_new": {"a": [1]},
}  # fmt: skip


def refusal(route: Route, fields: dict[str, Any]) -> str | None:
    """The field that an error names."""
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        route.read(fields)
    return caught.value.param


@pytest.mark.parametrize("route", [*SAMPLED, *OLLAMA], ids=lambda route: route.path)
def test_ways_to_sample_that_are_missing_are_refused_unless_they_are_off(route: Route) -> None:
    for field, (refused, neutral) in SAMPLERS.items():
        if (route.path, field) == ("/v1/completions", "best_of"):
            continue  # it is used there
        assert refusal(route, {field: refused}) == route.named(field)
        for value in (None, *neutral):
            route.read({field: value})


@pytest.mark.parametrize("route", SAMPLED, ids=lambda route: route.path)
def test_other_fields_that_are_missing_are_refused_unless_they_ask_for_nothing(
    route: Route,
) -> None:
    for field, (refused, neutral) in OTHERS.items():
        assert refusal(route, {field: refused}) == field
        for value in (None, *neutral):
            route.read({field: value})


@pytest.mark.parametrize("route", [*SAMPLED, *OLLAMA, *POOLED, COUNT], ids=lambda route: route.path)
def test_every_mark_of_a_body_holds(route: Route) -> None:
    struct: Any = type(route.read({}))
    marks = marks_of(struct)
    assert {other.name for _, other in marks.same} <= set(struct.__struct_fields__)
    for field, mark in marks.refused:
        penalty = {"presence_penalty": 0.5} if mark.unless else {}
        assert refusal(route, {field: "no such value", **penalty}) == route.named(field)
        route.read({field: None})


@pytest.mark.parametrize("route", [*SAMPLED, *OLLAMA, *POOLED, COUNT], ids=lambda route: route.path)
def test_fields_that_change_no_answer_are_ignored(route: Route) -> None:
    for field, value in HARMLESS.items():
        route.read({field: value})


def test_the_documentation_names_every_field_that_is_refused_or_mapped() -> None:
    docs = Path(foretoken.__file__).parent / "docs"
    pages = {
        "request-fields.md": (
            RefusedFields,
            ChatRequest,
            CompletionRequest,
            ResponsesRequest,
            Options,
        ),
        "embeddings.md": (PooledRequest, ScoreRequest),
    }
    own = {"tools", "tool_choice", "background", "conversation", "prompt", "logprobs"}  # elsewhere
    for page, structs in pages.items():
        parts = (page, "migration.md", "request-fields.md")
        text = "".join((docs / name).read_text("utf-8") for name in parts)
        marks = [marks_of(struct) for struct in structs]
        names = {name for each in marks for name, _ in (*each.refused, *each.same)} - own
        assert {name for name in names if f"`{name}" not in text} == set()


def test_true_is_no_1_and_false_no_0() -> None:
    for field, value in (("typical_p", True), ("mirostat", False), ("use_beam_search", 0)):
        assert refusal(SAMPLED[0], {field: value}) == field


@pytest.mark.parametrize("route", [*SAMPLED, *OLLAMA], ids=lambda route: route.path)
def test_the_window_of_penalties_is_refused_where_there_is_a_penalty(route: Route) -> None:
    for penalty in ({"repeat_penalty": 1.1}, {"presence_penalty": 0.5}):
        assert refusal(route, {"repeat_last_n": 64, **penalty}) == route.named("repeat_last_n")
        route.read({"repeat_last_n": -1, **penalty})
    for penalty in ({}, {"repeat_penalty": 1.0, "frequency_penalty": 0}):
        route.read({"repeat_last_n": 64, **penalty})


SAME = {
    "repetition_penalty": {"repeat_penalty": 1.5},
    "min_tokens": {"min_new_tokens": 2},
    "seed": {"sampling_seed": 7, "random_seed": 7},
    "cache_salt": {"extra_key": "s"},
    "grammar": {"ebnf": 'root ::= "a"', "guided_grammar": 'root ::= "a"'},
    "json_schema": {"guided_json": {"type": "object"}},
    "regex": {"guided_regex": "a+"},
    "choice": {"guided_choice": ["a", "b"]},
}


@pytest.mark.parametrize("route", SAMPLED, ids=lambda route: route.path)
def test_other_names_mean_the_same_field(route: Route) -> None:
    for name, others in SAME.items():
        for other, value in others.items():
            assert getattr(route.read({other: value}), name) == value
            assert getattr(route.read({other: value, name: value}), name) == value
            assert getattr(route.read({other: None, name: value}), name) == value
    assert refusal(route, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}) == "repeat_penalty"
    assert refusal(route, {"ebnf": 5}) == "ebnf"


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route.path)
def test_other_names_of_the_length_and_of_stop_strings(route: Route) -> None:
    for other in ("max_new_tokens", "n_predict"):
        assert route.read({other: 5}).max_tokens == 5
    for endless in (-1, -2):
        assert route.read({"n_predict": endless}).max_tokens is None
    assert refusal(route, {"n_predict": -3}) == "n_predict"
    assert route.read({"stop_sequences": ["x"]}).stop == ["x"]
    completions, responses = OPENAI[1:]
    assert completions.read({"max_completion_tokens": 5}).max_tokens == 5
    assert responses.read({"max_completion_tokens": 5}).max_output_tokens == 5
    assert OPENAI[0].read({"max_output_tokens": 5}).max_tokens == 5
    assert SAMPLED[-1].read({"stop": "x"}).stop_sequences == "x"


@pytest.mark.parametrize("route", OLLAMA, ids=lambda route: route.path)
def test_other_names_of_options(route: Route) -> None:
    assert route.read({"n_predict": 5}).num_predict == 5
    assert route.read({"max_tokens": 5}).num_predict == 5
    assert route.read({"repetition_penalty": 1.5}).repeat_penalty == 1.5


WHOLE = ["max_tokens", "top_k", "seed", "min_tokens", "priority", "n_predict"]


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route.path)
def test_whole_floats_are_integers(route: Route) -> None:
    for field in WHOLE:
        value = getattr(route.read({field: 5.0}), field)
        assert (value, type(value)) == (5, int)
        assert refusal(route, {field: 5.5}) == field
        assert refusal(route, {field: "5"}) == field
    assert refusal(route, {"max_tokens": 1e300}) == "max_tokens"
    assert refusal(route, {"top_k": -7.0}) == "top_k"
    read = route.read({"stop_token_ids": [7.0, 8], "temperature": 1, "speculation": 2.0})
    assert (read.stop_token_ids, read.temperature, read.speculation) == ([7, 8], 1, 2)
    kept = route.read({"max_tokens": 5.0, "json_schema": {"const": 5.0}}).json_schema
    assert type(kept["const"]) is float, "what is no field stays as it was"


@pytest.mark.parametrize("route", OLLAMA, ids=lambda route: route.path)
def test_whole_floats_are_integers_in_options(route: Route) -> None:
    read = route.read({"num_predict": 5.0, "top_k": 40.0, "seed": 1.0})
    assert (read.num_predict, read.top_k, read.seed) == (5, 40, 1)
    assert refusal(route, {"num_predict": 5.5}) == "options.num_predict"


def test_whole_floats_are_token_ids_of_a_prompt() -> None:
    assert decode_of("/v1/completions")(b'{"prompt": [[5.0, 6], [7]]}').prompt == [[5, 6], [7]]
    with pytest.raises(ApiError) as caught:
        decode_of("/v1/completions")(b'{"prompt": [5.5]}')
    assert caught.value.param == "prompt[0]"


POOLED_FIELDS = {
    "truncate_prompt_tokens": (8, ()), "normalize": (False, (True,)), "messages": (HI, ()),
    "use_activation": (False, (True,)), "add_special_tokens": (False, (True,)),
    "truncate": ("END", ("NONE",)), "input_type": ("query", ()), "task": ("x", ()),
    "padding": ("max_length", ("do_not_pad",)), "lora_path": ("x", ("",)),
}  # fmt: skip


@pytest.mark.parametrize("route", POOLED, ids=lambda route: route.path)
def test_fields_of_vectors_and_scores(route: Route) -> None:
    for field, (refused, neutral) in POOLED_FIELDS.items():
        assert refusal(route, {field: refused}) == field
        for value in (None, *neutral):
            route.read({field: value})
    assert route.read({"extra_key": "s"}).cache_salt == "s"


def test_vllms_names_of_what_is_scored() -> None:
    read = decode_of("/v1/score")(b'{"queries": "a", "items": ["b"]}')
    assert (read.query, read.documents) == ("a", ["b"])
    read = decode_of("/v1/score")(b'{"data_1": "a", "data_2": ["b"]}')
    assert (read.text_1, read.text_2) == ("a", ["b"])


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
    ids=str,
)
def test_switches_of_thinking_reach_the_chat_template(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert read_chat(SAMPLED[0].read(fields)).template == options


def test_what_two_fields_say_of_the_form_of_an_answer_must_agree() -> None:
    chat, form = SAMPLED[0], {"type": "json_object"}
    read_chat(chat.read({"response_format": form, "json_schema": {"type": "object"}}))
    for fields in (
        {"response_format": form, "json_schema": {"type": "array"}},
        {"guided_json": {"type": "array"}, "structured_outputs": {"json": {"type": "object"}}},
    ):
        with pytest.raises(InvalidRequest, match="json_schema is given twice"):
            read_chat(chat.read(fields))


# -- over HTTP ------------------------------------------------------------------------------------


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


@pytest.mark.parametrize("route", SAMPLED, ids=lambda route: route.path)
def test_mapped_fields_reach_the_engine(server: Any, engine: Any, route: Route) -> None:
    fields = {
        "repeat_penalty": 1.5, "min_new_tokens": 1, "sampling_seed": 11, "extra_key": "s",
        "typical_p": 1.0, "top_k": 5.0,
    }  # fmt: skip
    assert post(server, route.path, route.body | fields | {"max_tokens": 3}).status_code == 200
    (request,) = engine.requests
    params = request.sampling.params
    assert (params.repetition_penalty, params.min_tokens, params.top_k) == (1.5, 1, 5)
    assert (request.sampling.seed, request.namespace) == (11, "s")


@pytest.mark.parametrize("route", SAMPLED[:3], ids=lambda route: route.path)
def test_errors_name_a_field_as_the_body_does(server: Any, route: Route) -> None:
    for fields, param in (
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_json": {"type": "x"}}, "guided_json"),
        ({"n_predict": 0}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
    ):
        if (route.path, param) == ("/v1/completions", "n_predict"):
            continue  # without tokens a prompt may be echoed
        error = post(server, route.path, route.body | fields).json()["error"]
        assert error["param"] == param
        assert param in error["message"]


def test_each_api_refuses_in_its_own_form(server: Any) -> None:
    answer = post(server, "/v1/messages", {"messages": HI, "max_tokens": 3, "mirostat": 1})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"]["message"].startswith("mirostat is not supported")
    answer = post(server, "/api/chat", {"messages": HI, "options": {"mirostat": 1}})
    assert answer.json() == {"error": "options.mirostat is not supported: send 0 or leave it out"}


def test_response_format_of_a_completion_is_followed(server: Any, engine: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 3, "response_format": {"type": "json_object"}}
    post(server, "/v1/completions", body)
    assert engine.requests[-1].sampling.constraint is not None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/generate"])
def test_as_many_stop_strings_as_are_sent(server: Any, say: Any, path: str) -> None:
    say("one two three")
    stop = [*(f"no such stop {number}" for number in range(300)), " three"]
    body = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    if path.startswith("/api"):
        answer = post(server, path, {**body, "stream": False, "options": {"stop": stop}}).json()
        assert (answer["response"], answer["done_reason"]) == ("one two", "stop")
        return
    (choice,) = post(server, path, {**body, "stop": stop}).json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", " three")
