"""Recorded sessions of agents, sent again with the answers of this run in."""

from __future__ import annotations

import asyncio
import json
import lzma
from typing import Any

import pytest

from foretoken.bench import offline, serve
from foretoken.bench.load.http import Failure, Http
from foretoken.bench.load.recording import (
    Call,
    Request,
    Said,
    is_answer,
    read_recordings,
    steps,
    with_answers,
)
from foretoken.bench.load.replay import READERS, Heard, turn_of
from foretoken.bench.load.server import page_size
from support.server_process import running

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LS = {"name": "ls", "arguments": '{"path":"src"}'}
# A turn with text and a call, and its result, in each dialect.
SAID = {
    CHAT: [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "a", "type": "function", "function": LS}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x.py"},
    ],
    MESSAGES: [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "ls", "input": {"path": "src"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x.py"}],
        },
    ],
    RESPONSES: [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "a", **LS},
        {"type": "function_call_output", "call_id": "a", "output": "x.py"},
    ],
}


def session(path: str, *turns: list[dict[str, Any]]) -> list[Request]:
    """Requests of which each goes on from the one before."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Look at all of it."}]
    field = "input" if path == RESPONSES else "messages"
    found = [Request(path=path, body={field: list(items), "model": "m"})]
    for turn in turns:
        items += turn
        found.append(Request(path=path, body={field: list(items), "model": "m"}))
    return found


def replayed(path: str, said: Said) -> list[dict[str, Any]]:
    """The items of the second request, behind the first message of the user."""
    return with_answers(steps(session(path, SAID[path]))[1], {0: said})[1:]


# -- the chain ----------------------------------------------------------------------------------


def test_a_request_goes_on_from_the_longest_earlier_one_of_its_conversation() -> None:
    turn = SAID[CHAT]
    main = session(CHAT, turn, turn)
    other = Request(path=CHAT, body={"messages": [{"role": "user", "content": "A title?"}]})
    found = steps([main[0], other, main[1], main[2]])
    assert [each.parent for each in found] == [None, None, 0, 2]
    assert found[3].answers == {1: 0, 3: 2}
    assert [each.calls for each in found] == [True, False, True, False]


def test_marks_that_an_agent_moves_make_no_other_conversation() -> None:
    first, second = session(MESSAGES, SAID[MESSAGES])
    text = {"type": "text", "text": "Look."}
    marked = {**text, "cache_control": {"type": "ephemeral"}}
    first.body["messages"][0] = {"role": "user", "content": [marked]}
    second.body["messages"][0] = {"role": "user", "content": [text]}
    assert steps([first, second])[1].parent == 0


@pytest.mark.parametrize("path", SAID)
def test_what_the_recorded_answer_was_is_known(path: str) -> None:
    last = {"role": "assistant", "content": "Done."}
    found = steps(session(path, SAID[path], [last, {"role": "user", "content": "Thanks."}]))
    assert [each.calls for each in found] == [True, False, False]
    assert [each.parent for each in found] == [None, 0, 1]


# -- answers in the place of the recorded ones --------------------------------------------------


@pytest.mark.parametrize("path", SAID)
def test_the_answer_takes_the_place_of_the_recorded_one(path: str) -> None:
    said = Said("So be it.", [Call("new", "ls", '{"path":"src"}')])
    expected = json.dumps(SAID[path]).replace("I look.", "So be it.").replace('"a"', '"new"')
    assert replayed(path, said) == json.loads(expected)


def test_results_without_a_call_are_said_by_the_user() -> None:
    said = Said("No.")
    assert replayed(CHAT, said)[1] == {"role": "user", "content": "x.py"}
    (block,) = replayed(MESSAGES, said)[1]["content"]
    assert block == {"type": "text", "text": "x.py"}
    found = replayed(RESPONSES, said)[1]
    assert (found["role"], found["content"][0]["text"]) == ("user", "x.py")
    assert not any(item.get("type") == "function_call" for item in replayed(RESPONSES, said))


@pytest.mark.parametrize("path", SAID)
def test_each_call_gets_a_result(path: str) -> None:
    calls = [Call(name, "ls", "{}") for name in ("one", "two")]
    text = json.dumps([item for item in replayed(path, Said("", calls)) if not is_answer(item)])
    assert text.count("one") == text.count("two") == 1
    assert text.count("x.py") == 2


def test_the_agents_own_shape_of_a_text_stays() -> None:
    block = {"type": "text", "text": "I look."}
    turn = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on."}]
    found = with_answers(steps(session(CHAT, turn))[1], {0: Said("Yes.")})
    assert found[1]["content"] == [{"type": "text", "text": "Yes."}]
    assert found[2] == turn[1]


# -- what a server answers ----------------------------------------------------------------------

EVENTS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hi "}}]},
        {"choices": [{"delta": {"content": "you."}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": LS}]}}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 90,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 64, "spliced_tokens": 5},
            },
        },
    ],
    MESSAGES: [
        {"type": "message_start", "message": {"usage": {"input_tokens": 26, "output_tokens": 0,
            "cache_read_input_tokens": 64, "cache_creation_input_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0,
            "delta": {"type": "text_delta", "text": "Hi you."}},
        {"type": "content_block_start", "index": 1,
            "content_block": {"type": "tool_use", "id": "c", "name": "ls", "input": {}}},
        {"type": "content_block_delta", "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"path":"src"}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 7, "spliced_tokens": 5}},
        {"type": "message_stop"},
    ],
    RESPONSES: [
        {"type": "response.created", "response": {}},
        {"type": "response.output_text.delta", "delta": "Hi "},
        {"type": "response.output_text.delta", "delta": "you."},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
        {"type": "response.completed", "response": {
            "output": [
                {"type": "message", "content": [{"type": "output_text", "text": "Hi you."}]},
                {"type": "function_call", "call_id": "c", **LS},
            ],
            "usage": {"input_tokens": 90, "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 64, "spliced_tokens": 5}},
        }},
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", EVENTS)
def test_streams_are_read(path: str) -> None:
    heard = Heard(READERS[path])
    for at, event in enumerate(EVENTS[path]):
        heard.feed(float(at), f"data: {json.dumps(event)}\n\n".encode())
    assert heard.said == Said("Hi you.", [Call("c", "ls", '{"path":"src"}')])
    assert (heard.prompt_tokens, heard.cached_tokens) == (90, 64)
    assert (heard.spliced_tokens, heard.output_tokens) == (5, 7)
    assert len(heard.times) == 3
    with pytest.raises(Failure, match="error in the stream"):
        heard.feed(9.0, b'data: {"type": "error", "error": {"message": "no"}}\n\n')


def heard(prompt: int, cached: int, output: int) -> Heard:
    found = Heard(READERS[CHAT])
    found.sent, found.times = 1.0, [1.5, 1.6, 1.7]
    found.prompt_tokens, found.cached_tokens, found.output_tokens = prompt, cached, output
    return found


def test_what_could_be_hit_is_the_prompt_before_and_its_answer_but_for_the_last_token() -> None:
    first, second = steps(session(CHAT, SAID[CHAT]))
    before = turn_of(0, first, heard(100, 0, 20), None, 1)
    assert (before.possible_tokens, before.share) == (None, None)
    assert (before.ttft_ms, round(before.step_ms or 0.0)) == (500, 100)
    now = turn_of(1, second, heard(200, 119, 20), before, 1)
    assert (now.goes_on_from, now.possible_tokens, now.share) == (0, 119, 1.0)
    assert turn_of(1, second, heard(200, 112, 20), before, 1).share == 112 / 119
    assert turn_of(1, second, heard(90, 80, 20), before, 1).possible_tokens == 89


@pytest.mark.parametrize(("prompt", "possible"), [(200, 112), (113, 112), (112, 96)])
def test_what_could_be_hit_is_whole_pages(prompt: int, possible: int) -> None:
    first, second = steps(session(CHAT, SAID[CHAT]))
    before = turn_of(0, first, heard(100, 0, 20), None, 16)
    assert turn_of(1, second, heard(prompt, 96, 20), before, 16).possible_tokens == possible


@pytest.mark.parametrize("name", ["foretoken", "vllm"])
def test_the_size_of_a_page_is_read_from_the_metrics(server, name: str) -> None:
    async def found() -> int:
        http = Http(server.url)
        try:
            return await page_size(http)
        finally:
            http.close()

    server.kv_usage = f'{name}:cache_config_info{{a="1",block_size="32",num_gpu_blocks="8"}} 1.0'
    assert asyncio.run(found()) == 32
    server.kv_usage = "# of another server"
    assert asyncio.run(found()) == 1


# -- the command --------------------------------------------------------------------------------


def write(folder: Any, requests: list[Request], name: str = "agent.jsonl.xz") -> None:
    lines = "".join(json.dumps({"path": r.path, "body": r.body}) + "\n" for r in requests)
    (folder / name).write_bytes(lzma.compress(lines.encode()))


def test_a_session_is_sent_with_the_servers_own_answers(server, tmp_path) -> None:
    turn = [{"role": "assistant", "content": "Old."}, {"role": "user", "content": "Go on."}]
    write(tmp_path, session(CHAT, turn, turn))
    server.extra_usage = {"prompt_tokens_details": {"cached_tokens": 9}}
    out = tmp_path / "out.json"
    flags = ["--url", server.url, "--warmup", "1", "--output-len", "3", "--out", str(out)]
    assert serve.main(["agents", "--record", str(tmp_path), *flags]) == 0
    _, *bodies = server.bodies
    assert len(bodies) == 3
    said = [each["content"] for each in bodies[2]["messages"] if each["role"] == "assistant"]
    assert said == ["abc", "abc"]
    assert len({body["cache_salt"] for body in bodies}) == 1
    assert all("temperature" not in body for body in bodies)
    (found,) = json.loads(out.read_text("utf-8"))["servers"][server.url]
    turns = found["turns"]
    assert turns[0]["possible_tokens"] is turns[0]["share"] is None
    before = turns[0]["prompt_tokens"] + turns[0]["output_tokens"]
    assert turns[1]["possible_tokens"] == min(before, turns[1]["prompt_tokens"]) - 1
    hit = sum(min(9, turn["possible_tokens"]) for turn in turns[1:])
    assert found["share"] == hit / sum(turn["possible_tokens"] for turn in turns[1:])


def test_a_request_that_fails_ends_its_session_and_is_named(server, tmp_path, capsys) -> None:
    turn = [{"role": "assistant", "content": "Old."}, {"role": "user", "content": "Go on."}]
    write(tmp_path, session(CHAT, turn, turn))
    server.statuses = {1: 400}
    flags = ["--url", server.url, "--warmup", "0", "--out", str(tmp_path / "out.json")]
    assert serve.main(["agents", "--record", str(tmp_path), *flags]) == 1
    assert len(server.bodies) == 2
    printed = capsys.readouterr().out
    assert "request 2: HTTP 400" in printed
    assert "1 of 3" in printed


TOOL = {"name": "ls", "description": "List.", "parameters": {"type": "object",
    "properties": {"path": {"type": "string", "maxLength": 8}}, "required": ["path"]}}  # fmt: skip
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": TOOL},
    MESSAGES: {"name": "ls", "description": "List.", "input_schema": TOOL["parameters"]},
    RESPONSES: {"type": "function", **TOOL},
}


def test_sampled_answers_that_come_back_as_text_are_hit(tmp_path) -> None:
    for path, tool in TOOLS.items():
        requests = session(path, *[SAID[path]] * 4)
        for request in requests:
            request.body["tools"] = [tool]
        write(tmp_path, requests, f"{path.rpartition('/')[2]}.jsonl.xz")
    out = tmp_path / "out.json"
    flags = ["--record", str(tmp_path), "--out", str(out), "--temperature", "1"]
    with running() as server:
        assert serve.main(["agents", *flags, "--url", server.url]) == 0
        (found,) = json.loads(out.read_text("utf-8"))["servers"].values()
    assert [len(each["turns"]) for each in found] == [5, 5, 5]
    for each in found:
        for turn in each["turns"][1:]:
            assert turn["spliced_tokens"] > 0, each["name"]
            assert turn["share"] == 1, (each["name"], turn)


@pytest.mark.parametrize("text", ["", "{}", '{"path": "/v1/x", "body": {"messages": [1]}}'])
def test_what_is_no_recording_is_named(tmp_path, text: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text, "utf-8")
    with pytest.raises(SystemExit, match=r"--record: .*bad\.jsonl"):
        read_recordings(tmp_path)


def test_an_empty_folder_and_flags_that_it_cannot_have_are_refused(tmp_path) -> None:
    with pytest.raises(SystemExit, match="--record"):
        read_recordings(tmp_path)
    with pytest.raises(SystemExit, match="--record"):
        offline.main(["agents", "--record", str(tmp_path)])
    with pytest.raises(SystemExit) as raised:
        serve.main(["agents", "--record", str(tmp_path), "--request-rate", "1"])
    assert raised.value.code == 2
