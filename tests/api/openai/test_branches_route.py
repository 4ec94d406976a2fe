"""POST /v1/branches over the fake engine: its shapes, its streams, its refusals."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foretoken import ForetokenError
from foretoken.api.openai.branches import BranchReply
from foretoken.api.openai.completions import TextReply

SYSTEM = {"role": "system", "content": "Answer."}


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def fork(http: httpx.Client, *branches: dict[str, Any], **fields: Any) -> httpx.Response:
    if "prompt" not in fields and "messages" not in fields:
        fields["messages"] = [SYSTEM]
    return http.post("/v1/branches", json={"branches": list(branches), **fields})


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_each_branch_is_a_choice_with_its_own_usage(http, say, engine):
    say("well")
    body = fork(http, user("a"), user("bcd")).json()
    assert body["object"] == "branches"
    assert body["id"].startswith("branches-")
    assert "choices" not in body
    first, second = body["branches"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["message"] == {"role": "assistant", "content": "well", "refusal": None}
    assert first["finish_reason"] == "stop"
    total = body["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert total[name] == first["usage"][name] + second["usage"][name]
    assert first["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]


def test_every_branch_begins_with_what_all_share(http, engine, tokenizer):
    fork(http, user("a"), user("b"), max_tokens=1)
    texts = [tokenizer.decode(r.tokens[: r.prompt_len], skip_special_tokens=False)
             for r in engine.requests]  # fmt: skip
    for text, said in zip(texts, "ab", strict=True):
        assert text.startswith("<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n" + said)


def test_a_branch_may_sample_otherwise_than_the_body_says(http, engine):
    hot = {**user("b"), "temperature": 0.5, "seed": 4, "max_tokens": 2}
    body = fork(http, user("a"), hot, temperature=0, seed=3, max_tokens=1).json()
    params = [request.sampling.params for request in engine.requests]
    assert [p.temperature for p in params] == [0, 0.5]
    assert [p.seed for p in params] == [3, 4]
    assert [b["usage"]["completion_tokens"] for b in body["branches"]] == [1, 2]


@pytest.mark.parametrize(("prompt", "ends"), [("ab", ["c", None]), ([65, 66], [[67], None])])
def test_a_text_or_token_ids_are_continued(http, engine, tokenizer, prompt, ends):
    branches = [{} if end is None else {"prompt": end} for end in ends]
    body = fork(http, *branches, prompt=prompt, max_tokens=1).json()
    assert len(body["branches"]) == 2
    longer, shorter = (list(r.tokens[: r.prompt_len]) for r in engine.requests)
    if isinstance(prompt, str):
        assert tokenizer.decode(longer) == "abc"
        assert tokenizer.decode(shorter) == "ab"
    else:
        assert (longer, shorter) == ([65, 66, 67], [65, 66])


def test_the_beginning_alone_may_be_branched_by_seed(http, engine):
    fork(http, {"seed": 1}, {"seed": 2}, max_tokens=1)
    assert engine.requests[0].tokens[:5] == engine.requests[1].tokens[:5]
    assert [request.sampling.seed for request in engine.requests] == [1, 2]


def test_a_stream_brings_chat_chunks_with_the_branches_index(http, say, engine):
    say("well then")
    answer = fork(http, user("a"), user("b"), stream=True, stream_options={"include_usage": True})
    *chunks, last = events(answer)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == "well then"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(engine.answers(None))


def test_a_reader_who_leaves_aborts_every_branch(http, engine):
    engine.by_hand = True
    body = {"messages": [SYSTEM], "branches": [user("a"), user("b")], "stream": True}
    with http.stream("POST", "/v1/branches", json=body) as answer:
        assert answer.status_code == 200
        assert engine.submitted.acquire(timeout=20)
        assert engine.submitted.acquire(timeout=20)
    assert engine.was_aborted.acquire(timeout=20)
    assert engine.was_aborted.acquire(timeout=20)


def test_when_one_branch_is_refused_none_runs_on(http, engine):
    engine.by_hand = True
    long = user("x" * 4000)
    answer = fork(http, user("a"), long)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert engine.was_aborted.acquire(timeout=20)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"branches": []}, "branches"),
        ({"branches": [{"seeed": 1}]}, "branches[0].seeed"),
        ({"branches": [{"prompt": "x"}]}, "branches[0].prompt"),
        ({"branches": [{"max_tokens": 0}]}, "branches[0].max_tokens"),
        ({"branches": [{}], "n": 2}, "n"),
        ({"branches": [{}], "prompt": "x"}, "prompt"),
        ({"branches": [{}], "messages": None}, "prompt"),
        ({"branches": [{"prompt": [1]}], "messages": None, "prompt": "x"}, "branches[0].prompt"),
        ({"branches": [{"messages": []}], "messages": None, "prompt": "x"}, "branches[0].messages"),
        ({"branches": [{"temperature": -1}]}, "branches[0].temperature"),
        ({"branches": [{}], "temperature": -1}, "temperature"),
        ({"branches": [{}] * 65}, "branches"),
    ],
)
def test_a_body_that_cannot_be_branched_is_a_400_that_names_the_field(http, fields, param):
    body = {"messages": [SYSTEM], **fields}
    if body["messages"] is None:
        del body["messages"]
    answer = http.post("/v1/branches", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_a_404(http):
    assert fork(http, user("a"), model="other").status_code == 404


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": "a("},
        {"typical_p": 0.5},
        {"suffix": "x"},
        {"best_of": 5},
        {"truncate_prompt_tokens": 4},
        {"skip_special_tokens": False},
        {"echo": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_a_completion_refuses_a_branch_of_one_refuses_too(http, engine, field):
    answer = http.post("/v1/branches", json={"prompt": "Hi", "branches": [{}], **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(field))
    assert engine.requests == []


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("own", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_a_branch_stands_above_the_bodys_by_either_name(http, engine, field, own):
    body = fork(http, user("a"), {**user("a"), own: 1}, **{field: 3}).json()
    assert [branch["usage"]["completion_tokens"] for branch in body["branches"]] == [3, 1]


def test_special_tokens_are_added_to_a_text_as_the_body_says(http, server, engine):
    asked = []
    encode = server.llm.tokenizer.encode

    async def watch(text, **options):
        asked.append(options)
        return await encode(text, **options)

    server.llm.tokenizer.encode = watch
    try:
        fork(http, {}, prompt="Hi", add_special_tokens=False, max_tokens=1)
    finally:
        del server.llm.tokenizer.encode
    assert asked == [{"add_special_tokens": False}]


IMAGE = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}


@pytest.mark.parametrize(
    ("branch", "place"),
    [
        ({"messages": [SYSTEM, IMAGE]}, "branches[1].messages[1].content[1]"),
        ({"top_p": 7.0}, "branches[1].top_p"),
        ({"stop": [""]}, "branches[1].stop[0]"),
        (user("x" * 4000), "branches[1].messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_place_in_the_branch(http, branch, place):
    answer = fork(http, user("a"), branch, messages=[SYSTEM, user("b")["messages"][0]])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, place)
    if "too long" not in error["message"]:
        assert place in error["message"]


def test_an_error_in_the_beginning_names_the_body(http):
    answer = fork(http, user("a"), messages=[SYSTEM, IMAGE])
    assert answer.json()["error"]["param"] == "messages[1].content[1]"


def test_each_branch_is_told_why_it_missed_the_cache(http):
    body = fork(http, user("a"), user("bcd"), max_tokens=1, explain_cache=True).json()
    told = [branch["usage"]["cache_explanation"] for branch in body["branches"]]
    usages = [branch["usage"] for branch in body["branches"]]
    assert [each["prompt_tokens"] for each in told] == [u["prompt_tokens"] for u in usages]
    assert body["usage"]["cache_explanations"] == told
    options = {"stream": True, "stream_options": {"include_usage": True}, "explain_cache": True}
    *_, last = events(fork(http, user("a"), user("bcd"), max_tokens=1, **options))
    assert len(last["usage"]["cache_explanations"]) == 2
    plain = fork(http, user("a"), max_tokens=1).json()
    assert "cache_explanation" not in json.dumps(plain)


class Told:
    """An answer, or a branch, that ends when it is told."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.is_closed = failure, False

    async def collect(self):
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("kind", [TextReply, BranchReply])
def test_a_prompt_or_branch_that_fails_is_noticed_while_others_run(kind):
    parts = [Told(), Told(ForetokenError("broken"))]
    writer = SimpleNamespace(forget=Told.close, whole=list)
    if kind is TextReply:
        reply = TextReply(writer, parts)
    else:
        reply = BranchReply(writer)
        reply.answers = parts

    async def read():
        async with asyncio.timeout(10):
            try:
                await reply.whole()
            finally:
                reply.close()

    with pytest.raises(ForetokenError, match="broken"):
        asyncio.run(read())
    assert all(part.is_closed for part in parts)
