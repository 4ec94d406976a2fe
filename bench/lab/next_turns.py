"""Turns with and without idle prefill: `python -m foretoken.bench.lab.next_turns FOLDER`.

The folder has chat templates as published (``*.jinja``). For each one that is known here, two
conversations of several turns are held: a chat whose answers begin with a long thought, and an
agent whose answers are a thought and a call. The answers are given rather than generated: their
tokens are computed as the model's own would be. The table has means over the later turns: how many
tokens are new (the tokens of the message that was not known before), and how many were computed at
the turn's start, without and with idle prefill; and the time to the first token: median, minimum
and maximum. Both kinds alternate. `--thought 0` holds them without thoughts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...api.parsing.output_parser import OutputParser
from ...api.runtime.chat import ChatClient, ChoiceReader
from ...api.runtime.conversation.chat_input import ChatInput
from ...api.runtime.preprocess import PromptTokens
from ...api.runtime.turns.next_prompt import NextPrompt
from ...api.sdk.async_llm import AsyncLLM
from ...api.types.results import Choice, TextDelta, Tool, message_of
from ...api.types.sampling_params import SamplingParams
from ...core.errors import InvalidRequest
from ...core.interface.request import Request
from ..common.report import heading, read_options, table, write_json
from .servers import words

CALL = {"name": "read_file", "path": "notes.txt"}
ARGUMENTS = '{"path": "notes.txt"}'
SECONDS = 120.0  # for the idle work after a turn


@dataclass(frozen=True, slots=True)
class Form:
    """How a model writes its answer behind the generation prompt of its template."""

    thought: str  # with {thought}
    call: str


HERMES = '<tool_call>\n{"name": "read_file", "arguments": {"path": "notes.txt"}}\n</tool_call>'
FORMS = {
    "Qwen-Qwen3-0.6B": Form("<think>\n{thought}\n</think>\n\n", HERMES),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Form(
        "{thought}\n</think>\n\n",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "openai-gpt-oss-120b": Form(
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{ARGUMENTS}",
    ),
    "GLM-4.6": Form(
        "\n<think>{thought}</think>\n",
        "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>notes.txt</arg_value>\n"
        "</tool_call>",
    ),
    "Kimi-K2-Thinking": Form(
        "<think>{thought}</think>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "MiniMax-M2": Form(
        "{thought}\n</think>\n\n",
        '<minimax:tool_call>\n<invoke name="read_file">\n<parameter name="path">notes.txt'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
}
FINAL = {"openai-gpt-oss-120b": "<|channel|>final<|message|>"}  # before an answer's content
TOOL = Tool(
    name="read_file",
    description="Read a file.",
    parameters={"type": "object", "properties": {"path": {"type": "string"}}},
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of chat templates")
    parser.add_argument("--templates", nargs="*", default=list(FORMS), help="names (all known)")
    add_conversation(parser, thought=300, result=200)
    parser.add_argument("--rounds", type=int, default=2, help="conversations of each kind (2)")
    options = read_options(parser, argv)
    rows = []
    for name in options.templates:
        path = options.folder / f"{name}.jinja"
        if path.is_file():
            try:
                rows += asyncio.run(_template(name, path, options))
            except InvalidRequest as error:
                print(f"{name}: {error}")
    print(table(rows))
    if options.out:
        write_json(options.out, {**heading(), "rows": rows})


def add_conversation(parser: argparse.ArgumentParser, *, thought: int, result: int) -> None:
    """Add the arguments that describe the model and its conversations. Sizes are tokens."""
    parser.add_argument("--model", default="smollm2", help="folder or file of the model (smollm2)")
    for name, default, text in (
        ("turns", 4, "turns of a conversation"),
        ("thought", thought, "tokens of a thought"),
        ("result", result, "tokens of a new message"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")


async def _template(name: str, path: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the rows of one template: a chat and an agent."""
    rows: list[dict[str, object]] = []
    async with AsyncLLM(options.model, chat_template=str(path)) as llm:
        for is_agent in (False, True):
            found: dict[bool, list[Turn]] = {False: [], True: []}
            for index in range(2 * options.rounds):
                is_on = index % 2 == 1
                salt = f"{is_agent} {index}"
                talk = Talk(llm, name, options, is_agent=is_agent, is_on=is_on, salt=salt)
                found[is_on] += await talk.hold()
            row = _row(name, is_agent, found)
            print(row, flush=True)
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn: its new tokens, those computed at its start, and seconds to its token."""

    num_new: int
    num_computed: int
    seconds: float
    num_idle: int


def _row(name: str, is_agent: bool, found: dict[bool, list[Turn]]) -> dict[str, object]:
    off, on = found[False], found[True]
    return {
        "template": name,
        "conversation": "agent" if is_agent else "chat",
        "new": round(statistics.mean(turn.num_new for turn in on)),
        "computed, off": round(statistics.mean(turn.num_computed for turn in off)),
        "computed, on": round(statistics.mean(turn.num_computed for turn in on)),
        "first token, off, ms": _spread(off),
        "first token, on, ms": _spread(on),
        "idle tokens a turn": round(statistics.mean(turn.num_idle for turn in on)),
    }


def _spread(turns: Sequence[Turn]) -> str:
    """Return the median, the minimum and the maximum of the times, in milliseconds."""
    times = [1e3 * turn.seconds for turn in turns]
    return f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"


class Talk:
    """A conversation whose answers are given.

    ``pause``: seconds between an answer and the next message; None: until the idle work has ended.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        options: argparse.Namespace,
        *,
        is_agent: bool,
        is_on: bool,
        salt: str,
        pause: float | None = None,
    ) -> None:
        self._llm, self._options = llm, options
        self._form, self._final = FORMS[name], FINAL.get(name, "")
        self._client = ChatClient(llm, idle_prefill=is_on)
        self._is_agent, self._is_on, self._salt, self._pause = is_agent, is_on, salt, pause

    async def hold(self) -> list[Turn]:
        """Hold the conversation; return its turns after the first."""
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are helpful. " + words(50, 1)},
            {"role": "user", "content": words(self._options.result, 2)},
        ]
        turns: list[Turn] = []
        num_known = 0
        for index in range(self._options.turns):
            params = SamplingParams(max_tokens=1, temperature=0, cache_salt=self._salt)
            chat = ChatInput(
                messages=messages,
                params=params,
                tools=[TOOL] if self._is_agent else [],
                warms_next=self._is_on,
            )
            began = time.perf_counter()
            self._client.next_turns.arrived(chat)
            prompt = await self._client.render(chat)
            answer = await self._llm.open(prompt, params, cache=chat.cache)
            completion = await self._llm.finish(answer)
            seconds = time.perf_counter() - began
            usage = completion.usage
            idle = self._client.next_turns
            if index:
                num_computed = usage.prompt_tokens - usage.cached_tokens
                num_new = usage.prompt_tokens - num_known
                turns.append(Turn(num_new, num_computed, seconds, idle.num_tokens))
                idle.num_tokens = 0
            choice = await self._answer(chat, prompt, index)
            num_known = await self._idle(chat, choice, answer.request)
            messages = [*messages, _kept(choice), self._next(index, choice)]
        return turns

    async def _answer(self, chat: ChatInput, prompt: PromptTokens, index: int) -> Choice:
        """Compute the tokens of the given answer, and return it as it is read from its text."""
        thought = self._form.thought.format(thought=words(self._options.thought, 10 + index))
        is_call = self._is_agent
        text = thought + (self._form.call if is_call else self._final + words(40, 50 + index))
        tokenizer = self._llm.tokenizer
        ids = [*tokenizer.encode_word(text)]
        whole = PromptTokens([*prompt.token_ids, *ids])
        await self._llm.prewarm(whole.token_ids, cache_salt=self._salt)
        tail = tokenizer.decode([*prompt.token_ids][-64:], skip_special_tokens=False)
        parser: OutputParser = self._client.syntax.parser(
            tools=chat.callable_tools, prompt_tail=tail, has_form=False
        )
        reader = ChoiceReader(parser, chat.tool_choice)
        for part in (text[at : at + 20] for at in range(0, len(text), 20)):
            reader.read(TextDelta(text=part))
        reader.read(TextDelta(text="", token_ids=ids, finish_reason="stop"))
        choice = reader.choice
        choice.token_ids = [*ids, ids[-1]]
        return choice

    async def _idle(self, chat: ChatInput, choice: Choice, request: Request) -> int:
        """Let the idle work run, if it is on. Return how many tokens of the next prompt are known.

        The known tokens are those before the next message, in whole pages.
        """
        turn = NextPrompt(chat, choice, request)
        await turn.render(self._client.render, self._llm.page_size)
        if self._is_on:
            idle = self._client.next_turns
            before = sum(idle.ends.values())
            idle.after(chat, request)(choice)
            async with asyncio.timeout(SECONDS):
                while self._pause is None and sum(idle.ends.values()) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        await asyncio.sleep(self._pause or 0.0)
        return turn.num_wanted

    def _next(self, index: int, choice: Choice) -> dict[str, Any]:
        content = words(self._options.result, 100 + index)
        if choice.tool_calls:
            call_id = choice.tool_calls[0].id
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        return {"role": "user", "content": content}


def _kept(choice: Choice) -> dict[str, Any]:
    """Return the answer as most clients send it back, without its reasoning."""
    message = message_of(choice.text, "", choice.tool_calls)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = {"path": "notes.txt"}
    return message


if __name__ == "__main__":
    main()
