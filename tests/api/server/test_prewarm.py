"""``--prewarm FILE``: what a file may say, and what is computed of it before anybody asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import InvalidRequest
from foretoken.api.cli import commands
from foretoken.api.runtime.chat import ChatClient
from foretoken.api.server.prewarm import prewarm, read_prewarm
from foretoken.api.serving.serving_context import chat_client
from foretoken.api.serving.settings import Settings

TALK = {"messages": [{"role": "system", "content": "Be brief."}], "ttl": 60}
TEXT = {"prompt": "once", "cache_salt": "a"}


def write(folder: Path, text: str) -> str:
    path = folder / "prompts"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("join", [lambda a, b: f"{a}\n\n{b}\n", lambda a, b: f" [{a},\n{b}]"])
def test_a_list_and_a_line_each_are_the_same(tmp_path, join):
    warms = read_prewarm(write(tmp_path, join(json.dumps(TALK), json.dumps(TEXT))))
    assert [(w.prompt, w.cache_salt, w.ttl) for w in warms] == [
        (None, None, 60),
        ("once", "a", None),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ('{"prompt": "a", "tll": 5}', "tll"),
        ('{"prompt": "a", "ttl": 0}', "ttl"),
        ("{}", "prompt or messages"),
        ('{"prompt": "a", "messages": []}', "prompt or messages"),
        ("nonsense", "line 1"),
        ('[{"prompt": "a"}, 3]', "[1]"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(tmp_path, text, said):
    with pytest.raises(InvalidRequest) as caught:
        read_prewarm(write(tmp_path, text))
    assert said in str(caught.value)
    assert caught.value.param == "prewarm"


def test_a_missing_file_ends_the_command_before_a_model_is_loaded(tmp_path, capsys):
    missing = str(tmp_path / "none")
    assert commands.main(["serve", "--prewarm", missing]) == 2
    assert missing in capsys.readouterr().err


def test_prompts_are_computed_one_by_one_with_their_salt_and_pin(run, engine, tokenizer, tmp_path):
    warms = read_prewarm(write(tmp_path, f"{json.dumps(TALK)}\n{json.dumps(TEXT)}"))

    async def body(llm):
        await prewarm(llm, ChatClient(llm), warms)

    run(body)
    talk, text = engine.requests
    prompt = tokenizer.decode(talk.tokens[: talk.prompt_len], skip_special_tokens=False)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert [(pin.num_tokens > 10**6, pin.ttl) for pin in talk.cache.pins] == [(True, 60)]
    assert (text.namespace, text.cache.pins) == ("a", ())
    assert [request.sampling.params.max_tokens for request in engine.requests] == [0, 0]


def test_conversations_are_normalized_as_those_of_requests(run, engine, tokenizer, tmp_path):
    line = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c3;\n"
    talk = {"messages": [{"role": "system", "content": f"{line}Be brief."}]}
    warms = read_prewarm(write(tmp_path, json.dumps(talk)))

    async def body(llm):
        for mode in ("safe", "off"):
            await prewarm(llm, chat_client(llm, Settings(normalize=mode)), warms)

    run(body)
    safe, plain = (
        tokenizer.decode(each.tokens[: each.prompt_len], skip_special_tokens=False)
        for each in engine.requests
    )
    assert safe == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert line in plain


def test_a_warmed_prompt_is_told_as_an_answer_of_no_tokens(run, engine):
    async def body(llm):
        return await llm.prewarm("once upon a time", cache_salt="s", request_id="warm-1")

    usage = run(body)
    assert usage.prompt_tokens == engine.requests[0].prompt_len
    assert usage.completion_tokens == 0
    assert engine.requests[0].request_id == "warm-1"


def test_a_server_that_is_told_to_end_warms_no_more(run, engine, tmp_path):
    warms = read_prewarm(write(tmp_path, json.dumps(TEXT)))

    async def body(llm):
        await llm.close()
        return await prewarm(llm, ChatClient(llm), warms)

    assert run(body) == 0
    assert engine.requests == []
