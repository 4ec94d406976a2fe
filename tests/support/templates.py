"""Chat templates of many kinds, with the habits of families of models, and what writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foretoken.api.parsing.output_format import Syntax
from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.runtime.conversation.conversation_tokens import ConversationTokens
from foretoken.api.runtime.conversation.shield import Shield
from foretoken.api.runtime.conversation.template_facts import TemplateFacts
from foretoken.api.runtime.conversation.template_writer import TemplateWriter
from foretoken.api.runtime.conversation.token_history import TokenHistory
from foretoken.api.runtime.conversation.tools import plain_call
from foretoken.api.runtime.preprocess import PromptTokens
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.results import Tool
from foretoken.api.types.sampling_params import SamplingParams

OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"


def refusing(condition: str, why: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{why}') }}}}{{% endif %}}"


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}" + OPEN


PLAIN = each(TURN + "<|im_end|>\n")
TRIMMED = each("<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n")
CALLING = TOOLS + each(TURN + CALLS + "<|im_end|>\n")
STRICT = TOOLS + each(
    refusing("m.role == 'system' and not loop.first", "System message must be at the beginning.")
    + (TURN + CALLS + "<|im_end|>\n")
)
DROPPING = TOOLS + (
    "{% set talk = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% for m in talk %}{% if m.role != 'system' %}"
    + (TURN + CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + OPEN)
)
HOISTING = (  # as DeepSeek's: all system texts come first, wherever they stand
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}" + TURN + "<|im_end|>\n{% endfor %}" + OPEN
)
ALTERNATING = each(  # as Gemma 2's
    refusing("m.role == 'system'", "System role not supported")
    + refusing("(m.role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate")
    + (TURN + "<|im_end|>\n")
)
COUNTING = TOOLS + (  # as Mistral's: messages with calls and results do not count
    "{% set n = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls and not (m.role == 'system' and loop.first) %}"
    + refusing("(m.role == 'user') != (n.at % 2 == 0)", "roles must alternate")
    + "{% set n.at = n.at + 1 %}{% endif %}"
    + (TURN + CALLS + "<|im_end|>\n{% endfor %}" + OPEN)
)
ITEMS = (
    TOOLS
    + each(  # as Qwen3-Coder's
        TURN + "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    )
)
TEXTS = (
    TOOLS
    + each(  # as Functionary's: arguments are joined to a text
        TURN + "{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ c.function.name + ' ' + c.function.arguments }}</tool_call>{% endfor %}<|im_end|>\n"
    )
)
EITHER = (
    TOOLS
    + each(  # as Qwen 3's: a text is written as it is
        TURN + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}</tool_call>{% endfor %}"
        "<|im_end|>\n"
    )
)
NULL_CONTENT = each(  # as DeepSeek R1's: only null content shows calls
    "{% if m.role == 'assistant' and m.content is none %}<|im_start|>assistant\n"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}\n{{ c.function.arguments }}"
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role != 'system' %}" + TURN + "<|im_end|>\n{% endif %}"
)
ONE_CALL = TOOLS + each(  # as Llama 3.1's
    refusing("m.tool_calls and m.tool_calls | length != 1", "single tool-calls at once!")
    + (TURN + CALLS + "<|im_end|>\n")
)
ANSWERING = TOOLS + each(  # as gpt-oss's: a result needs the call before it
    refusing(
        "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " and messages[loop.index0 - 1].role != 'tool'",
        "a result without a call",
    )
    + (TURN + CALLS + "<|im_end|>\n")
)
IN_PARTS = each(
    "<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
)
SPLITTING = each(  # as Qwen 3's: thoughts before the last answer go
    "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>\n"
)
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
KINDS = {
    name.lower(): value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and "messages" in value
}


class Written:
    """Conversations as a template writes them, with a history of answers."""

    def __init__(
        self,
        folder: Path,
        template: str,
        *,
        tool_parser: str = "auto",
        special_tokens_in_text: bool = False,
    ) -> None:
        self.tokenizer = Tokenizer.load(folder, max_model_len=4096)
        self.tokenizer.use_template(template, {})
        self.history = TokenHistory()
        vocab = self.tokenizer.vocab
        self.syntax = Syntax.choose(
            template, vocab, self.tokenizer.special_ids, tool_parser=tool_parser
        )
        self.renderer = ConversationTokens(
            self.tokenizer,
            self.syntax,
            vocab_size=len(vocab),
            end_ids=frozenset(self.tokenizer.special_ids),
            history=self.history,
        )
        config = SimpleNamespace(special_tokens_in_text=special_tokens_in_text)
        llm = SimpleNamespace(tokenizer=self.tokenizer, config=config, render_text=self._render)
        self.writer = TemplateWriter(llm, self.syntax, self.renderer.can_splice)  # type: ignore[arg-type]

    async def _render(self, messages: Any, options: Any, *, tools: Any, is_try: bool) -> str:
        return await self.tokenizer.render_chat(messages, options, tools=tools, is_try=is_try)

    def facts(self) -> TemplateFacts:
        return asyncio.run(self.writer.facts())

    def text(self, *messages: Mapping[str, Any], opens: bool = True) -> str:
        """Return the text of a conversation, by default with the opening of an answer."""
        chat = replace(conversation(messages), template={"add_generation_prompt": opens})
        return asyncio.run(self.writer.write(chat))

    def raw(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of messages that stay as they are."""
        return asyncio.run(self.tokenizer.render_chat(messages, {}))

    def prompt(self, *messages: Mapping[str, Any], tools: Sequence[Tool] = ()) -> PromptTokens:
        """The token ids of the prompt, as `ChatClient` makes them."""
        return asyncio.run(self._prompt(conversation(messages, tools)))

    async def _prompt(self, chat: ChatInput) -> PromptTokens:
        shield: Shield = await self.writer.shield(chat)

        async def write(chat: ChatInput) -> str:
            return await self.writer.write(chat, shield=shield)

        return await self.renderer.render(chat, write, shield)

    def close(self) -> None:
        self.tokenizer.close()


def conversation(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()) -> ChatInput:
    """Messages as routes hand them over."""
    read = [dict(message) for message in messages]
    for message in read:
        message["content"] = message.get("content") or ""
        if message.get("tool_calls"):
            message["tool_calls"] = [plain_call(call) for call in message["tool_calls"]]
    return ChatInput(messages=read, tools=tools, params=SamplingParams())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, *calls: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def call(name: str, arguments: object, call_id: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
