"""``--chat-template FILE`` and ``--default-chat-template-kwargs``."""

from __future__ import annotations

import asyncio

import pytest

from foretoken import AsyncLLM, InvalidRequest
from foretoken.api.text.chat_template import read_template

TEMPLATE = "{% for m in messages %}[{{ m.content }}|{{ mood }}]{% endfor %}"
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    return path


def rendered(built, options=None, **config) -> str:
    async def render() -> str:
        llm = AsyncLLM(**config)
        llm._built = built
        async with llm:
            token_ids = await llm.render(TALK, options)
            assert llm.tokenizer.chat_template == (TEMPLATE if "chat_template" in config else given)
            return llm.tokenizer.decode(token_ids, skip_special_tokens=False)

    given = read_template(str(built.path / "chat_template.jinja"))
    return asyncio.run(render())


def test_the_file_replaces_the_template_of_the_model(built, file) -> None:
    assert rendered(built).startswith("<|im_start|>user\nhi")
    assert rendered(built, chat_template=str(file)) == "[hi|]"


def test_options_are_those_of_a_request_that_leaves_them_out(built, file) -> None:
    config = {"chat_template": str(file), "default_chat_template_kwargs": '{"mood": "calm"}'}
    assert rendered(built, **config) == "[hi|calm]"
    assert rendered(built, {"mood": "wild"}, **config) == "[hi|wild]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{% for m in messages %}", "line 1: Unexpected end of template"),
        (b"{{ x\n}} {% nonsense %}", "line 2: Encountered unknown tag 'nonsense'"),
        (b" \n", "the file is empty"),
        (b"\xff", "can't decode byte"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_template_is_refused_before_the_model_is_loaded(
    text, problem, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "bad.jinja"
    if text is not None:
        path.write_bytes(text)
    loaded: list[object] = []
    monkeypatch.setattr(
        "foretoken.api.runtime.engine_client._build", lambda *args: loaded.append(args)
    )
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(AsyncLLM("builtin", chat_template=str(path)).start())
    assert caught.value.param == "chat_template"
    assert str(caught.value).startswith(f"chat_template: {path}: ")
    assert problem in str(caught.value)
    assert loaded == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object, not a value of type list"),
        ({"messages": []}, "must not contain messages"),
    ],
    ids=str,
)
def test_options_of_another_form_are_refused(given, problem) -> None:
    async def start() -> None:
        await AsyncLLM("builtin", default_chat_template_kwargs=given).start()

    with pytest.raises(InvalidRequest, match=f"default_chat_template_kwargs.*{problem}"):
        asyncio.run(start())
