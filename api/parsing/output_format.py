"""Syntax: a model's format of thoughts and calls, with its parsers and grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import InvalidRequest, shown
from ..structured.grammar_text import lark_text
from .families import FAMILIES, family_of, reader_of
from .family import Family
from .formats.generic import GENERIC
from .formats.kimi_k3 import KIMI_K3_THINK
from .grammars import Lark
from .output_parser import OutputParser, PlainParser, ReaderParser
from .reasoning import (
    APERTUS_THINK,
    COHERE_THINK,
    GEMMA_THINK,
    KIMI_THINK,
    MINIMAX_M3_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    Thinking,
    ThinkingState,
    thinking_parser,
)

if TYPE_CHECKING:
    from ..types.results import Tool, ToolChoice
    from ..types.sampling_params import SamplingParams

MAX_TOOLS = 1024
THINKING = {
    "think": THINK, "mistral": MISTRAL_THINK, "gemma4": GEMMA_THINK, "cohere": COHERE_THINK,
    "kimi": KIMI_THINK, "seed": SEED_THINK, "apertus": APERTUS_THINK,
    "minimax-m3": MINIMAX_M3_THINK, "kimi-k3": KIMI_K3_THINK,
}  # fmt: skip
TOOL_PARSERS = ("auto", "none", *FAMILIES)
REASONING_PARSERS = ("auto", "none", *THINKING)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Syntax:
    """The format of one model's answers, chosen once when the model is loaded."""

    tool_parser: str  # one of `FAMILIES`, "response-template" or "none"
    thinking: Thinking | None
    family: Family | None = field(repr=False)
    template: str = field(repr=False)
    vocab: Mapping[str, int] = field(repr=False)
    special: Mapping[str, int] = field(repr=False)

    @classmethod
    def choose(
        cls,
        template: str,
        vocab: Mapping[str, int],
        special_ids: frozenset[int] = frozenset(),
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        response_template: object = None,
    ) -> Syntax:
        """Choose parsers by the model's chat template (its text; "" without one), or by name.

        ``vocab``: token to id, added tokens included (`Tokenizer.vocab`); ``special_ids``: the
        tokens that ordinary text does not show. ``response_template``: the model's own description
        of its answers, which is used if it is usable and no parser is named. Raises `ValueError`
        for an unknown name.
        """
        if tool_parser not in TOOL_PARSERS or reasoning_parser not in REASONING_PARSERS:
            raise ValueError(
                f"unknown tool parser {tool_parser} or reasoning parser {reasoning_parser}"
            )
        special = {name: each for name, each in vocab.items() if each in special_ids}
        if response_template is not None and (tool_parser, reasoning_parser) == ("auto", "auto"):
            from .response_template.family import RESPONSE_TEMPLATE, template_format

            known = FAMILIES.get(family_of(template))
            other = None if known is FAMILIES[GENERIC] else known
            if (found := template_format(response_template, special, other)) is not None:
                return cls(
                    RESPONSE_TEMPLATE, found.thinking, found.family, template, vocab, special
                )
        if tool_parser == "auto":
            tool_parser = family_of(template)
        is_auto = reasoning_parser == "auto"
        if is_auto:
            reasoning_parser = _reasoning_parser(template, vocab)
        family = FAMILIES.get(tool_parser)
        thinking = THINKING.get(reasoning_parser)
        if family is not None and (family.reads_thoughts or is_auto):
            # None if the family's reader separates thoughts
            thinking = None if family.reads_thoughts else family.thinking or thinking
        return cls(tool_parser, thinking, family, template, vocab, special)

    @property
    def has_tools(self) -> bool:
        """Whether the model has a known format for tool calls."""
        return self.family is not None

    @property
    def thought_marks(self) -> Thinking | None:
        """The delimiters around a thought, whichever reader separates it."""
        family = self.family
        own = family.thinking if family is not None and family.reads_thoughts else None
        return self.thinking or own

    def parser(
        self, *, tools: Sequence[Tool] = (), prompt_tail: str = "", has_form: bool = False
    ) -> OutputParser:
        """Return a new parser of one answer.

        ``tools``: tools that may be called, empty if the choice is "none". ``prompt_tail``: the end
        of the rendered prompt with its special tokens (about 64 characters), which may have opened
        a thought. ``has_form``: the request has structured output, so that JSON without delimiters
        is content.
        """
        parser: OutputParser = PlainParser()
        if self.family is not None and (tools or self._is_always_read):
            reader = reader_of(self.family, tools, has_form=has_form, prompt_tail=prompt_tail)
            parser = ReaderParser(reader)
        if self._reads_thoughts:
            return parser
        if self.thinking is None:
            return parser
        return thinking_parser(self.thinking, self.thinking.state(prompt_tail), parser)

    def shown_ids(self, *, tools: bool) -> frozenset[int]:
        """Return the ids of the special tokens that the text must contain for the parser.

        ``tools``: whether any tool may be called.
        """
        are_read = tools or self._is_always_read
        marks = self.family.marks if self.family is not None and are_read else ()
        if self.thinking is not None:
            marks = (*marks, self.thinking.begin, self.thinking.end)
        return frozenset(self.special[mark] for mark in marks if mark in self.special)

    def constrain(
        self,
        params: SamplingParams,
        *,
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        prompt_tail: str = "",
    ) -> str | None:
        """Return a grammar for the whole answer, in llguidance's dialect of Lark, or None.

        The grammar covers reasoning, tool calls, and the structured output of ``params``. It
        replaces their fields for structured output: ``replace(params, grammar=text,
        json_schema=None, regex=None, choice=None)``. None: ``params`` can be used unchanged. Raises
        `InvalidRequest` for invalid tools or an invalid choice; schemas are checked when the
        grammar is compiled.
        """
        if not tools and params.structured_field is None:
            return None
        lark = Lark(self.vocab, () if self.family is None else self.family.marks)
        structured = body = lark.structured_output(params)
        around = None if self.family is None else self.family.around
        if tools and choice is not None and choice.mode != "none":
            check_tools(tools, choice)
            body = self._answer(lark, structured, tools, choice)
        if body is not None and body == structured and around is not None:
            body = lark.rule("form_around", around(lark, body))
        state = self._state(prompt_tail)
        if body is None or (body == structured and state is ThinkingState.CLOSED):
            return None
        if self.thinking is None or state is ThinkingState.CLOSED:
            return lark.text(body)
        special = self.shown_ids(tools=True)  # delimiters of calls inside a thought are part of it
        return lark.text(_with_thought(lark, self.thinking, body, state, special))

    @property
    def _reads_thoughts(self) -> bool:
        return self.family is not None and self.family.reads_thoughts

    @property
    def _is_always_read(self) -> bool:
        return self.family is not None and (self.family.reads_thoughts or self.family.reads_all)

    def _state(self, prompt_tail: str) -> ThinkingState:
        return self.thinking.state(prompt_tail) if self.thinking else ThinkingState.CLOSED

    def _answer(
        self, lark: Lark, structured: str | None, tools: Sequence[Tool], choice: ToolChoice
    ) -> str | None:
        """Return the rule for the text after the thought, or None for free text.

        Raises `InvalidRequest` if the model has no known format for calls.
        """
        if self.family is None:
            raise InvalidRequest(
                "tools are not supported: the model's chat template has no known format for "
                "them; name one with --tool-parser",
                param="tools",
            )
        grammar = self.family.grammar(self.template, self.vocab)
        tools = [tool for tool in tools if _may_be_called(tool, choice)]
        if choice.mode == "required":
            return grammar.calls(lark, tools, parallel=not choice.is_single)
        if structured is not None:
            if self.family.around is not None:
                structured = self.family.around(lark, structured)
            return f"{structured} | {grammar.calls(lark, tools, parallel=not choice.is_single)}"
        if any(tool.strict for tool in tools):
            return grammar.mixed(lark, tools, parallel=not choice.is_single)
        return None


def _may_be_called(tool: Tool, choice: ToolChoice) -> bool:
    is_allowed = choice.allowed is None or tool.name in choice.allowed
    return is_allowed and (choice.mode != "required" or choice.name in (None, tool.name))


def _with_thought(
    lark: Lark, marks: Thinking, body: str, state: ThinkingState, special: frozenset[int]
) -> str:
    """Return a rule for an answer after a thought, which is optional unless it is open already.

    ``special``: special tokens that the thought may contain.
    """
    answer = lark.rule("answer", body)
    thought = lark.up_to(marks.end, "thought", through=special)
    after = lark.rule("behind", f"{thought} {lark.breaks()} {answer}")
    if state is ThinkingState.OPEN:
        return after
    opened = lark.lazily(marks.begin, "open")
    if marks.label:
        opened = f"{opened} {lark_text(marks.label)}"
    return f"{answer} | {opened} {after}"


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise `InvalidRequest`, which names the parameter, for invalid tools or an invalid choice."""
    if not tools and choice.mode != "required" and choice.allowed is None:
        return
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools must have at most {MAX_TOOLS} entries, not {len(tools)}", param="tools"
        )
    for tool in tools:
        _check_tool(tool)
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise InvalidRequest("tools must have different names", param="tools")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    for name in {choice.name} - {None} | (choice.allowed or set()):
        if name not in names:
            raise InvalidRequest(
                f"tool_choice: {name} is not one of the tools", param="tool_choice"
            )
    if choice.allowed is not None and not choice.allowed:
        raise InvalidRequest(
            "tool_choice.allowed_tools must list at least one tool", param="tool_choice"
        )


def _check_tool(tool: Tool) -> None:
    if not _TOOL_NAME.fullmatch(tool.name):
        message = f"tools: the name {shown(tool.name)} must be 1 to 128 letters, digits, _ and -"
        raise InvalidRequest(message, param="tools")
    schema = tool.parameters or {}
    properties = schema.get("properties", {})
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        message = f"tools: the parameters of {tool.name} must be a JSON schema of type object"
        raise InvalidRequest(message, param="tools")


def _reasoning_parser(template: str, vocab: Mapping[str, int]) -> str:
    for name, marks in THINKING.items():
        if marks.end in template or (marks.begin in vocab and marks.end in vocab):
            return name
    return "none"
