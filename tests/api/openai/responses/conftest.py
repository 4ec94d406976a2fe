"""The real client on a real server over the fake engine, whose model thinks and calls."""

from __future__ import annotations

import shutil
from pathlib import Path

import openai
import pytest

from support.fake_engine import ends_of, make_built

TEMPLATE = (
    "{% if tools %}{{ tools | length }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip() }}\n</think>\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def folder(byte_level_folder, tmp_path_factory) -> Path:
    """The tiny tokenizer with a template that knows thoughts and calls."""
    folder = tmp_path_factory.mktemp("calls") / "model"
    shutil.copytree(byte_level_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def built(engine, folder, tokenizer):
    return make_built(engine, folder, *ends_of(tokenizer.vocab), vocab_size=len(tokenizer.vocab))


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def prompt_of(engine, tokenizer):
    """The text that the engine was given in its last request."""

    def prompt() -> str:
        request = engine.requests[-1]
        return tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)

    return prompt
