"""`--record-requests` keeps what `foretoken replay` needs to compute an answer again."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import msgspec
import pytest

from foretoken import AsyncLLM
from foretoken.api.certify.records import RecordedRequest, find_record
from foretoken.api.certify.replay import replay_with
from foretoken.api.cli import commands
from foretoken.core.errors import ForetokenError, InvalidRequest
from support.server_process import running

BODIES = {
    "drawn": {"temperature": 1.0},
    "seeded": {"seed": 7, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    "two": {"n": 2, "temperature": 1.0},
    "schema": {"json_schema": {"type": "object", "additionalProperties": False}},
    "regex": {"regex": "[a-z]{3,20}"},
    "stop": {"stop": ["\n"], "temperature": 0},
    "bias": {"logit_bias": {"40": 5.0}, "bad_words": ["the"], "temperature": 1.0},
    "drafted": {"prediction": "def f(x):\n    return x", "speculation": 3, "cache_salt": "a"},
}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
CHAT = {  # its grammar is made of the tools, and is closed in time
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
    "tool_choice": "required",
    "max_tokens": 40,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """The folder of a server that has ended, and its answers by name of the body."""
    folder = tmp_path_factory.mktemp("requests") / "new"
    answers = {}
    with running(["--record-requests", str(folder), "--threads", "1", "--no-ui"]) as server:
        text = {"prompt": "def first(values):\n", "max_tokens": 12, "return_token_ids": True}
        for name, body in BODIES.items():
            answers[name] = post(f"{server.url}/v1/completions", text | body)
        answers["chat"] = post(f"{server.url}/v1/chat/completions", CHAT)
        assert server.stop() == 0
    return folder, answers


def post(url: str, body: dict) -> dict:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def test_all_kinds_of_recorded_requests_give_the_same_tokens_again(recorded):
    folder, answers = recorded
    ids = {name: [answer["id"]] for name, answer in answers.items()}
    ids["two"] = [f"{answers['two']['id']}-{index}" for index in (0, 1)]

    async def compute():
        async with AsyncLLM("builtin", threads=1, draft="none") as llm:
            for name, own_ids in ids.items():
                for choice, request_id in zip(answers[name]["choices"], own_ids, strict=True):
                    record = find_record(request_id, folder)
                    assert record.tokens == choice["token_ids"]
                    found = await replay_with(llm, record)
                    assert (found.position, found.tokens) == (None, record.tokens), name

    asyncio.run(compute())


def test_files_are_private_and_each_salt_has_its_own(recorded):
    folder, _ = recorded
    files = sorted(folder.glob("*.jsonl"))
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_command_prints_the_answer_and_its_verdict(recorded, capsys):
    folder, answers = recorded
    answer = answers["seeded"]
    assert commands.main(["replay", answer["id"], "--requests", str(folder), "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == answer["choices"][0]["text"] + "\n"
    assert "the same 12 tokens, finish reason length" in err


def test_the_id_of_several_choices_names_all_of_them(recorded, capsys):
    folder, answers = recorded
    name = answers["two"]["id"]
    assert commands.main(["replay", name, "--requests", str(folder), "--threads", "1"]) == 0
    assert "2 of 2 turns equal" in capsys.readouterr().out


@pytest.mark.parametrize(("exact", "code"), [(True, 1), (False, 3)])
def test_another_answer_is_a_difference_unless_the_bits_are_not_exact(
    exact, code, recorded, tmp_path, capsys
):
    folder, answers = recorded
    record = find_record(answers["seeded"]["id"], folder)
    record.tokens[5] += 1
    record.exact = exact
    file = tmp_path / "one.jsonl"
    file.write_bytes(msgspec.json.encode(record))
    assert commands.main(["replay", record.id, "--requests", str(file), "--threads", "1"]) == code
    assert "differ from token 5" in capsys.readouterr().err


def test_what_is_not_there_is_named(recorded, tmp_path, capsys):
    folder, _ = recorded
    with pytest.raises(InvalidRequest, match="no record of request cmpl-x"):
        find_record("cmpl-x", folder)
    with pytest.raises(ForetokenError, match="No such file"):
        find_record("cmpl-x", tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"id": "cmpl-x"')
    with pytest.raises(ForetokenError, match="not a recorded request"):
        find_record("cmpl-x", tmp_path / "bad.jsonl")
    assert commands.main(["replay", "cmpl-x", "--requests", str(folder)]) == 2
    assert "cmpl-x" in capsys.readouterr().err


def test_a_record_of_other_fields_is_read(tmp_path):
    record = RecordedRequest(
        id="a", model="builtin", prompt=[1], params={"logit_bias": {"3": 1.5}}, seed=2
    )
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode(record).replace(b"{", b'{"new":1,', 1))
    params = find_record("a", tmp_path).sampling
    assert (params.logit_bias, params.seed) == ({3: 1.5}, 2)
