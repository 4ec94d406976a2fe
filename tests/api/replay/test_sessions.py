"""`foretoken replay` of sessions that a server has recorded: as they were, and with changes."""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretoken.api.certify.recorder import load_redact, redacted
from foretoken.api.certify.records import Asked, RecordedRequest
from foretoken.api.cli.commands import main
from foretoken.api.replay import player
from foretoken.api.replay.player import Player
from foretoken.core.errors import InvalidRequest
from support.image_folders import write_image_folder
from support.server_process import running

CITIES = ["Rome", "Oslo", "Bern", "Lima"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FLAGS = ["--threads", "1", "--max-model-len", "2048"]
Run = Callable[..., tuple[int, str, str]]


def post(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def chat(url: str) -> None:
    """Two calls, each with its result, then words; with a session's id."""
    messages = [{"role": "system", "content": "Help."}, {"role": "user", "content": "weather?"}]
    for number, choice in enumerate(["required", "none"] * 2):
        body = {"messages": messages, "tools": [TOOL], "tool_choice": choice, "max_tokens": 48}
        body["seed"] = number  # with another one, a changed prompt may get the same short answer
        answer = post(f"{url}/v1/chat/completions", body, **{"x-session-id": "chat"})
        message = answer["choices"][0]["message"]
        messages.append(message)
        if choice == "required":
            (call,) = message["tool_calls"]
            result = f"sunny {number}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        else:
            messages.append({"role": "user", "content": f"and tomorrow, {number}?"})


def anthropic(url: str) -> None:
    """The same in Anthropic's form, without an id of the session."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
    tool = {"name": "weather", "input_schema": SCHEMA}
    for choice in ("any", "none"):
        body = {"messages": messages, "system": "Help.", "max_tokens": 48, "tools": [tool]}
        body |= {"tool_choice": {"type": choice}, "cache_salt": "anthropic"}
        content = post(f"{url}/v1/messages", body)["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [each["id"] for each in content if each["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "fog"} for id in calls]
        messages.append({"role": "user", "content": results or "and tomorrow?"})


def responses(url: str) -> None:
    """The same in OpenAI's Responses, each continued by the id of the one before."""
    previous, given = None, [{"role": "user", "content": "weather?"}]
    tool = {"type": "function", **FUNCTION}
    for choice in ("required", "none", "none"):
        body = {"input": given, "tools": [tool], "tool_choice": choice, "max_output_tokens": 48}
        body |= {"previous_response_id": previous, "prompt_cache_key": "responses"}
        answer = post(f"{url}/v1/responses", body)
        previous = answer["id"]
        calls = [each["call_id"] for each in answer["output"] if each["type"] == "function_call"]
        given = [
            {"type": "function_call_output", "call_id": id, "output": "rain"} for id in calls
        ] or [{"role": "user", "content": "and tomorrow?"}]


def ollama(url: str) -> None:
    """Words alone, in Ollama's form."""
    messages = [{"role": "user", "content": "a poem"}]
    for _ in range(2):
        options = {"num_predict": 16, "cache_salt": "ollama"}
        body = {"messages": messages, "stream": False, "options": options}
        messages.append(post(f"{url}/api/chat", body)["message"])
        messages.append({"role": "user", "content": "another one"})


def gemini(url: str) -> None:
    """A call with its result, then words, in Gemini's form."""
    contents: list[dict[str, Any]] = [{"parts": [{"text": "weather?"}]}]
    tools = [{"functionDeclarations": [{"name": "weather", "parameters": SCHEMA}]}]
    for mode, method in (("ANY", "generateContent"), ("NONE", "streamGenerateContent?alt=sse")):
        config = {"functionCallingConfig": {"mode": mode}}
        body = {"contents": contents, "tools": tools, "toolConfig": config, "cacheSalt": "gemini"}
        body |= {"generationConfig": {"maxOutputTokens": 48}}
        path = f"{url}/v1beta/models/foretoken-builtin:{method}"
        if mode == "NONE":
            data = json.dumps(body).encode()
            request = urllib.request.Request(path, data, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=60).read()
            break
        content = post(path, body)["candidates"][0]["content"]
        call = content["parts"][0]["functionCall"]
        result = {"name": call["name"], "id": call["id"], "response": {"result": "mist"}}
        contents += [content, {"role": "user", "parts": [{"functionResponse": result}]}]


def completion(url: str) -> None:
    body = {"prompt": "def f(", "max_tokens": 8, "cache_salt": "completion"}
    post(f"{url}/v1/completions", body, **{"x-session-id": "completion"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of all sessions."""
    folder = tmp_path_factory.mktemp("records")
    with running(["--record-requests", str(folder), "--no-ui", *FLAGS]) as server:
        for session in (chat, anthropic, responses, ollama, gemini, completion):
            session(server.url)
        assert server.stop() == 0
    return folder


@pytest.fixture
def replay(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; gives its status and what it prints."""

    def run(name: str, *flags: str, requests: Path | None = folder) -> tuple[int, str, str]:
        place = [] if requests is None else ["--requests", str(requests)]
        status = main(["replay", name, *place, "--threads", "1", *flags])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def records(folder: Path) -> list[dict[str, Any]]:
    texts = [file.read_text() for file in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def of_path(folder: Path, path: str) -> list[dict[str, Any]]:
    found = [each for each in records(folder) if each["asked"]["path"].startswith(path)]
    return sorted(found, key=lambda each: each["asked"]["at"])


def generated(out: str) -> int:
    found = re.search(r"([\d,]+) generated", out)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("/v1/chat/completions", 4), ("/v1/messages", 2), ("/v1/responses", 3), ("/api/chat", 2),
        ("/v1/completions", 1), ("/v1beta/", 2),
    ],
)  # fmt: skip
def test_all_turns_of_a_session_are_equal_and_none_is_generated(
    path: str, count: int, folder: Path, replay: Run
) -> None:
    last = of_path(folder, path)[-1]
    status, out, _ = replay(last["id"], "--session")
    assert status == 0, out
    assert f"{count} of {count} turns equal" in out
    assert generated(out) == 0


def test_a_file_of_one_session_and_the_id_of_a_session_name_it(folder: Path, replay: Run) -> None:
    file = next(each for each in folder.glob("*.jsonl") if "/v1/messages" in each.read_text())
    assert "2 of 2 turns equal" in replay(str(file), requests=None)[1]
    assert "3 of 3 turns equal" in replay("responses")[1]


def test_turns_before_a_changed_message_are_verified_and_those_behind_it_generated(
    replay: Run, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    change = "messages[3].content=<script>alert(1)</script>"
    status, out, _ = replay("chat", "--change", change, "--html", str(page))
    assert status == 0, out
    first, second = (re.search(rf"turn {n}: (.*?) \(", out) for n in (1, 2))
    assert first is not None
    assert first[1] == "equal"
    assert second is not None
    assert second[1].startswith("another answer from token")
    assert "1 turn before the change verified" in out
    assert generated(out) > 0
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<mark>" in text
    assert "default-src 'none'" in text
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_changed_turn_is_what_the_server_gives_for_the_changed_body(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    second, page = of_path(folder, "/v1/chat/completions")[1], tmp_path / "page.html"
    body = second["asked"]["body"]
    body["messages"][3]["content"] = "snow and ice"
    with running(["--no-ui", *FLAGS]) as server:
        own = post(f"{server.url}/v1/chat/completions", {**body, "seed": second["seed"]})
    replay("chat", "--change", "messages[3].content=snow and ice", "--html", str(page))
    shown = html.unescape(re.sub("<[^>]+>", "", page.read_text("utf-8")))
    assert own["choices"][0]["message"]["content"] in shown


def tool_of(city: str) -> str:
    schema = {**SCHEMA, "properties": {"city": {"enum": [city]}}}
    return json.dumps({"type": "function", "function": {"name": "weather", "parameters": schema}})


def city_of(folder: Path) -> str:
    """The city of the session's first call."""
    second = of_path(folder, "/v1/chat/completions")[1]
    call = second["asked"]["body"]["messages"][2]["tool_calls"][0]
    return str(json.loads(call["function"]["arguments"])["city"])


def test_another_call_ends_the_replay_without_a_tool(folder: Path, replay: Run) -> None:
    other = next(each for each in CITIES if each != city_of(folder))
    status, out, _ = replay("chat", "--change", f"tools[0]:={tool_of(other)}")
    assert status == 1
    assert f'the recording has no result for weather({{"city": "{other}"}})' in out
    assert "changed call" in out
    assert "turn 2" not in out


def test_another_model_replaces_the_answers_even_if_the_recorded_model_is_not_here(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    """Without the recorded tokenizer no text is compared, which does not make answers equal."""
    other = next(each for each in CITIES if each != city_of(folder))
    name = records(folder)[0]["model"]
    for file in folder.glob("*.jsonl"):
        moved = file.read_text().replace(json.dumps(name), json.dumps("/absent/model"))
        (tmp_path / file.name).write_text(moved)
    flags = ["--model", name, "--change", f"tools[0]:={tool_of(other)}"]
    status, out, _ = replay("chat", *flags, requests=tmp_path)
    assert status == 1, out
    assert f'the recording has no result for weather({{"city": "{other}"}})' in out
    assert "turn 2" not in out


def test_a_model_with_another_tokenizer_is_compared_by_its_text(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    """Its answers are no drafts of the recorded tokens, and token ids in a body are named."""
    write_image_folder(other := tmp_path / "other")
    (record,) = of_path(folder, "/v1/completions")
    status, out, _ = replay("completion", "--model", str(other))
    assert status == 0, out
    assert re.search(r"turn 1: another answer from token \d+ on \(\d+ tokens, 0 of them rec", out)
    assert "token ids" not in out
    record["asked"]["body"] |= {"prompt": [5, 6], "logit_bias": {"7": 1}}
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps(record) + "\n")
    status, out, _ = replay(str(file), "--model", str(other), requests=None)
    assert status == 0, out
    assert "token ids of the recorded model are used as they are: logit_bias, prompt" in out


def test_a_turn_that_is_refused_is_no_success(replay: Run) -> None:
    status, out, _ = replay("chat", "--change", "turns[2].tools:=5")
    assert status == 1
    assert "ended: turn 2 was refused: " in out


def test_a_page_of_one_answer_has_only_this_answer(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    second, page = of_path(folder, "/v1/chat/completions")[1], tmp_path / "page.html"
    status, out, _ = replay(second["id"], "--html", str(page))
    assert status == 0
    assert "1 of 1 turns equal" in out
    assert "turn 2: equal" in out
    assert page.read_text("utf-8").count("<section") == 1


def test_an_answer_without_a_body_is_not_changed_in_silence(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    record = msgspec.convert(records(folder)[0], RecordedRequest)
    record.asked = None
    file = tmp_path / "old.jsonl"
    file.write_bytes(msgspec.json.encode(record))
    status, _, err = replay(record.id, "--sampling", "temperature=0", requests=file)
    assert status == 2
    assert "can be verified, but not changed" in err


def test_another_call_is_asked_of_the_tool(folder: Path, replay: Run, tmp_path: Path) -> None:
    other, log = next(each for each in CITIES if each != city_of(folder)), tmp_path / "log"
    program = tmp_path / "tool.py"
    program.write_text(
        "import json, sys\n"
        "call = json.loads(sys.stdin.read())\n"
        f"open({str(log)!r}, 'a').write(json.dumps(call) + '\\n')\n"
        "print('sleet in', call['arguments']['city'])\n"
    )
    tools = ["--tools", f"{sys.executable} {program}"]
    status, out, _ = replay("chat", "--change", f"tools[0]:={tool_of(other)}", *tools)
    assert status == 0, out
    assert "result of the tool" in out
    assert "turn 4" in out
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["name"], each["arguments"]) for each in calls] == [
        ("weather", {"city": other})
    ] * 2
    program.write_text("raise SystemExit(3)")
    status, out, _ = replay("chat", "--change", f"tools[0]:={tool_of(other)}", *tools)
    assert status == 1
    assert "exited with status 3" in out
    program.write_text("import time; time.sleep(600)")
    tools += ["--tool-seconds", "1"]
    status, out, _ = replay("chat", "--change", f"tools[0]:={tool_of(other)}", *tools)
    assert status == 1
    assert "did not end within 1 s (--tool-seconds)" in out


def test_results_of_equal_calls_are_the_recorded_or_the_changed_ones(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    """Another prompt; the first call stays the same, for its tool leaves no other."""
    page, city = tmp_path / "page.html", city_of(folder)
    flags = ["--change", f"turns[1].tools[0]:={tool_of(city)}", "--tool-result", "1=hail"]
    status, out, _ = replay("chat", *flags, "--html", str(page))
    assert status == 0, out
    assert f'call weather({{"city": "{city}"}})' in out
    assert "result of the tool" not in out
    assert "result 1 = hail" in page.read_text("utf-8")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat", "/v1beta/"])
def test_sessions_of_other_apis_are_changed(path: str, folder: Path, replay: Run) -> None:
    last = of_path(folder, path)[-1]
    status, out, _ = replay(last["id"], "--sampling", "temperature=0", "--tools", "echo sleet")
    assert status == 0, out
    count = len(of_path(folder, path))
    assert f"turn {count}: " in out
    assert "was refused" not in out


def test_a_changed_result_of_gemini_changes_the_turn_behind_it(folder: Path, replay: Run) -> None:
    name = of_path(folder, "/v1beta/")[-1]["id"]
    status, out, _ = replay(name, "--session", "--tool-result", "1=a poem, def f(x)")
    assert status == 0, out
    assert "1 turn before the change verified; 1 turn after it" in out
    change = "contents[2].parts[0].functionResponse.response.result=a poem, def f(x)"
    assert replay(name, "--session", "--change", change)[1].count("verified; 1 turn") == 1


def test_a_completion_is_changed_to_what_the_server_gives(
    folder: Path, replay: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, (recorded,) = tmp_path / "page.html", of_path(folder, "/v1/completions")
    status, out, _ = replay("completion", "--change", "prompt=class A", "--html", str(page))
    assert status == 0, out
    with running(["--no-ui", *FLAGS]) as server:
        body = {**recorded["asked"]["body"], "prompt": "class A", "seed": recorded["seed"]}
        text = post(f"{server.url}/v1/completions", body)["choices"][0]["text"]
    assert text in html.unescape(re.sub("<[^>]+>", "", page.read_text("utf-8")))
    status, _, err = replay("completion", "--system", str(page))
    assert (status, err) == (2, "foretoken replay: --system: completions have no system prompt\n")
    status, _, err = replay("completion", "--change", 'prompt:=["a", "b"]')
    assert (status, "several prompts" in err) == (2, True)
    status, out, err = replay("completion", "--change", 'prompt:=["class A"]')
    assert status == 0, out + err


@pytest.mark.parametrize(
    ("version", "named"), [(1, None), (2, "version 2"), ("2", "Expected `int")]
)
def test_a_record_of_a_newer_version_is_refused(
    version: Any, named: str | None, folder: Path, replay: Run, tmp_path: Path
) -> None:
    (record,) = of_path(folder, "/v1/completions")
    assert record["v"] == 1
    file = tmp_path / "newer.jsonl"
    newer = record | {"v": version} | ({} if named is None else {"tokens": {"other": "form"}})
    file.write_text(json.dumps(newer))
    for words in ((str(file), "--session"), (record["id"], "--requests", str(file))):
        status, out, err = replay(*words, requests=None)
        if named is None:
            assert status == 0, out + err
        else:
            assert (status, named in err) == (1, True), err
            assert err.count("\n") == 1


@pytest.mark.parametrize("params", [{"temprature": 1}, {"logit_bias": {"x": 1}}, {"top_p": 7}])
@pytest.mark.parametrize("name", [["--session"], []])
def test_a_record_with_invalid_parameters_is_named(
    params: Any, name: list[str], folder: Path, replay: Run, tmp_path: Path
) -> None:
    (record,) = of_path(folder, "/v1/completions")
    file = tmp_path / "wrong.jsonl"
    file.write_text(json.dumps(record | {"params": params}) + "\n")
    status, _, err = replay(record["id"], *name, requests=file)
    assert status == 1
    assert f"{record['id']} was recorded with invalid parameters: " in err


def test_responses_that_continue_by_id_are_verified_up_to_the_change(replay: Run) -> None:
    status, out, _ = replay("responses", "--change", "turns[3].input[0].content=a poem, def f(x)")
    assert status == 0, out
    assert "2 turns before the change verified" in out


def test_a_new_turn_continues_by_id_what_the_first_turn_said(
    folder: Path, replay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn names no response, but the turns after it do, and so must new ones."""
    first, second = of_path(folder, "/v1/responses")[1:]
    first["asked"]["body"]["previous_response_id"] = None
    file = tmp_path / "cut.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (first, second)))
    monkeypatch.setattr(player, "MOST_NEW", 2)
    sent, submit = list[Any](), Player._submit

    async def watched(self: Player, path: str, body: Any, *rest: Any) -> Any:
        whole = await submit(self, path, body, *rest)
        sent.append((body.get("previous_response_id"), whole["id"]))
        return whole

    monkeypatch.setattr(Player, "_submit", watched)
    flags = ["--change", "turns[1].tool_choice=required", "--tools", "echo sleet"]
    status, out, _ = replay(str(file), *flags, requests=None)
    assert status == 1
    assert "still makes calls after 2 turns" in out
    ids = [None, *(own for _, own in sent)]
    assert [previous for previous, _ in sent] == ids[:-1]


def test_another_system_prompt_is_used_in_every_turn(replay: Run, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("def weather(city):")
    status, out, _ = replay("chat", "--system", str(file), "--tools", "echo sleet")
    assert status == 0, out
    assert "0 turns before the change verified; 4 turns after it" in out
    status, _, err = replay("chat", "--system", str(tmp_path / "none"))
    assert status == 2
    assert "No such file" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--change", "messages[70].content=x"], "turn 4, messages has 8 entries, so messages[70]"),
        (["--change", "messages[1].name.x=y"], "messages[1] has no name"),
        (["--change", "messages[1]..content=x"], "'..content' is neither .NAME nor [INDEX]"),
        (["--change", "[1].content=x"], "does not begin with a name"),
        (["--change", "turns[9].messages[1].content=x"], "has turns 1 to 4"),
        (["--change", "messages[1].content:=x"], "not JSON"),
        (["--change", "max_tokens:=NaN"], "not JSON"),
        (["--change", f"messages[1].content:={'[' * 5_000}"], "not JSON"),
        (["--change", "messages[-1].content=x"], "'[-1].content' is neither .NAME nor [INDEX]"),
        (["--change", "messages:=5"], "messages must be a list of objects"),
        (["--change", "messages[0]=x"], "messages must be a list of objects"),
        (["--change", "messages[1].content=\udcff"], "turn 1: a changed text is not valid Unicode"),
        (["--change", "messages[1].content"], "PATH=TEXT"),
        (["--sampling", "temprature=0"], "names are temperature"),
        (["--sampling", "temperature=warm"], "'warm' is not a number"),
        (["--sampling", "temperature=-1"], "temperature"),
        (["--tool-result", "9=x"], "has 2 results of tools"),
        (["--tools", "'open"], "No closing quotation"),
    ],
)
def test_a_change_that_names_nothing_is_refused(
    flags: list[str], said: str, replay: Run, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    status, _, err = replay("chat", *flags, "--html", str(page))
    assert status == 2
    assert said in err
    assert err.count("\n") == 1
    assert not page.exists()


def test_a_torn_file_is_named_with_its_line(folder: Path, replay: Run, tmp_path: Path) -> None:
    file = next(each for each in folder.glob("*.jsonl") if "/v1/messages" in each.read_text())
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(file.read_bytes()[:-100])
    status, _, err = replay(str(torn), requests=None)
    assert status == 1
    assert "torn.jsonl, line 2: not a recorded request" in err
    assert "the file ends inside the line" in err


def test_a_recording_of_another_model_is_named(folder: Path, replay: Run, tmp_path: Path) -> None:
    name = Path(records(folder)[0]["model"])
    other = tmp_path / "other"
    shutil.copytree(name, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"x": 1}))
    status, _, err = replay("chat", str(other))
    assert status == 1
    assert f"{other} is another model than the recorded {name}" in err
    status, out, _ = replay("chat", "--model", str(other), "--tools", "echo sleet")
    assert status == 0
    assert "4 turns after it" in out


def test_sessions_that_are_not_there_are_named(folder: Path, replay: Run, tmp_path: Path) -> None:
    status, _, err = replay("none")
    assert status == 2
    assert "has no session and no request none" in err
    status, _, err = replay("none", requests=None)
    assert status == 2
    assert "--requests is required" in err
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(b"".join(each.read_bytes() for each in sorted(folder.glob("*.jsonl"))))
    status, _, err = replay(str(whole), requests=None)
    assert status == 2
    assert "has 6 sessions" in err
    assert "chat (4 turns)" in err


def test_a_redacted_turn_is_generated_but_not_compared(
    folder: Path, replay: Run, tmp_path: Path
) -> None:
    def hide(text: str) -> str:
        return text.replace("weather?", "secret")

    kept = []
    for each in of_path(folder, "/v1/messages"):
        record = msgspec.convert(each, RecordedRequest)
        kept.append(redacted(record, hide, lambda ids: "weather?" if len(ids) > 100 else "words"))
    assert [each.tokens or each.prompt for each in kept] == [[], []]
    assert "weather?" not in str(kept)
    file = tmp_path / "redacted.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in kept))
    status, out, _ = replay(str(file), requests=None)
    assert status == 0
    assert "0 of 2 turns equal" in out
    assert "turn 1 was redacted: the recording has no tokens to verify" in out
    status, out, _ = replay(
        str(file), "--sampling", "temperature=0", "--tools", "echo sleet", requests=None
    )
    assert status == 0, out
    assert out.count("nothing recorded to compare with") == 2


def test_texts_that_a_redaction_leaves_alone_are_recorded_as_they_are(folder: Path) -> None:
    record = msgspec.convert(records(folder)[0], RecordedRequest)
    assert redacted(record, str, lambda ids: "") == record


def test_a_redaction_leaves_no_text_outside_the_messages() -> None:
    """Names of sessions, stop strings, names in arguments, and texts that are only in params."""
    body = {"messages": [{"content": "x", "tool_calls": [{"input": {"a secret": "a secret"}}]}]}
    asked = Asked(http="h", session="a secret", path="/v1/messages", body=body)
    given = {"stop": ["a secret"], "logit_bias": {7: 1.0}, "temperature": 0.5}
    record = RecordedRequest(
        id="a", model="m", prompt=[1], params=given, seed=1, stop_reason="a secret", asked=asked
    )

    def hide(text: str) -> str:
        return text.replace("secret", "-")

    found = redacted(record, hide, lambda ids: "words")
    assert "secret" not in str(found)
    assert (found.prompt, found.params) == ([], {"temperature": 0.5})
    found = redacted(msgspec.structs.replace(record, asked=None, stop_reason=None), hide, str)
    assert "secret" not in str(found)
    assert found.prompt == []


def test_a_redaction_that_only_finds_its_text_in_the_prompt_drops_the_body() -> None:
    body = {"messages": [{"content": [{"text": "sec"}, {"text": "ret"}]}]}
    asked = Asked(http="h", path="/v1/chat/completions", body=body)
    record = RecordedRequest(id="a", model="m", prompt=[1], params={}, seed=1, asked=asked)
    found = redacted(
        record, lambda t: t.replace("secret", "-"), lambda ids: "secret" if ids else ""
    )
    assert found.asked is not None
    assert (found.prompt, found.asked.body) == ([], None)


@pytest.mark.parametrize("name", ["none.such:f", "json", "json:none", "json:__name__"])
def test_a_redaction_that_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="--record-redact"):
        load_redact(name)
