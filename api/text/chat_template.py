"""A chat template: what it is given, how long and how deep that is, and what its errors say."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ...core.errors import InvalidRequest

SECONDS = 5.0  # for one conversation; then it is the template's fault
INLINE_CHARS = 2_048  # longer texts are tokenised in a thread
MESSAGE_CHARS = 64  # a message costs a template about as much as so much text


NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}


class TooLong(Exception):  # noqa: N818
    """A text of a template, or a list or a number, has more characters than it may."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"{num_chars} characters")
        self.num_chars = num_chars


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, which may have none."""

    def __init__(self, hf: Any) -> None:  # noqa: ANN401 - transformers is untyped
        from . import template_sandbox  # brings transformers and jinja2

        self._hf, self._bounded = hf, template_sandbox.bounded
        template_sandbox.install()
        self._import_all()

    def _import_all(self) -> None:
        """What rendering imports on first use: an interrupted import would leave a lock behind."""
        if hasattr(self._hf, "apply_chat_template"):
            talk = [{"role": "user", "content": ""}]
            self._hf.apply_chat_template(talk, chat_template="{{ messages }}", tokenize=False)

    @property
    def text(self) -> str:
        """The text of the chat template, "" without one."""
        template = getattr(self._hf, "chat_template", None) or ""
        if isinstance(template, Mapping):  # several by name; transformers takes this one for tools
            template = template.get("tool_use", template.get("default", ""))
        return str(template)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for one that is not for a request to choose."""
        for name in options:
            if name in self._reserved_options:
                message = f"chat_template_kwargs must not hold {name}"
                raise InvalidRequest(message, param="chat_template_kwargs")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        most_chars: int,
    ) -> str:
        """The text of a conversation; raises whatever the template raises, and `TooLong`.

        In a thread, where it may be interrupted: nothing here logs.
        """
        settings = {"add_generation_prompt": True, **options, "tokenize": False}
        try:
            with self._bounded(most_chars):
                return self._render(messages, settings)
        except RecursionError:  # its traceback would be as long as what is nested is deep
            param = deeper(messages, options)
            raise InvalidRequest(f"{param} are nested too deeply", param=param) from None

    def _render(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Some templates read what a tool need not have: they get it, empty, where they fail."""
        from jinja2 import UndefinedError

        try:
            return str(self._hf.apply_chat_template(list(messages), **settings))
        except (UndefinedError, TypeError):
            tools = completed(settings.get("tools") or ())
            if tools is None:
                raise
            whole = {**settings, "tools": tools}
            return str(self._hf.apply_chat_template(list(messages), **whole))

    @cached_property
    def _reserved_options(self) -> set[str]:
        names = set(inspect.signature(self._hf.apply_chat_template).parameters)
        free = {"add_generation_prompt", "continue_final_message"}
        return names - free | {"self", "messages", "conversations"}  # what names end up as inside


def completed(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The same tools, each with a description and with parameters; None if all have them."""
    whole: list[Mapping[str, Any]] = [
        {**tool, "function": {"description": "", "parameters": NO_PARAMETERS, **tool["function"]}}
        for tool in tools
    ]
    return None if whole == list(tools) else whole


def check_messages(messages: object) -> None:
    """Raise `InvalidRequest` for what is no list of objects."""
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str | bytes)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise InvalidRequest("messages must be objects with role and content", param="messages")


def count_chars(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """About how long a conversation is, counted no further than matters for where it is done."""
    total = MESSAGE_CHARS * len(messages)
    left: list[object] = [*messages, options]
    while left and total <= INLINE_CHARS:
        value = left.pop()
        total += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            left += value
    return total


def deeper(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """The field that a template cannot get to the end of."""
    given = {"messages": messages, "tools": options.get("tools", ())}
    given["chat_template_kwargs"] = {name: options[name] for name in options if name != "tools"}
    return max(given, key=lambda name: _depth(given[name]))


def _depth(value: object) -> int:
    """How deeply it is nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def template_error(error: Exception) -> str:
    """What a caller may read: what the template's author wrote, and which field is missing."""
    from jinja2 import TemplateError, UndefinedError

    if type(error) in (TemplateError, UndefinedError, ValueError):
        return f"the chat template refuses these messages: {error}"
    return "the chat template cannot render these messages"
