"""Chat templates: jinja2 templates of a model that render a conversation as text.

A template is a program that shares memory and time with all requests. jinja2's sandbox restricts
what it can access, and limits ranges to 100,000 items. This module limits its output, the results
of sums, products and powers, and its run time, which is checked at calls, attribute reads and
writes. Results of ``~`` and of filters such as ``center`` are not limited: the author of a template
is trusted that far.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ...core.config import TEMPLATE_KWARGS, EngineConfig
from ...core.errors import ForetokenError, InvalidRequest

SECONDS = 5.0  # time limit for one conversation
# time limit for a short conversation on the event loop; then it restarts in a thread
INLINE_SECONDS = 0.005
INLINE_CHARS = 2_048  # maximum length of a text that is tokenized on the event loop
MAX_CAUSE_CHARS = 300  # maximum length of a template's error message
MESSAGE_CHARS = 64  # rendering a message takes about as long as rendering this many characters
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of reasoning in templates
MARK = "THE_FINAL_MESSAGE_ENDS_HERE "  # the space at its end shows whether a template trims text
TEMPLATE_FILE = "<template>"  # jinja2's name for a template without a file
NULL = object()  # a field that templates see as null; with None the field is absent
NO_TOOLS: list[Mapping[str, Any]] = []
NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
RESERVED = frozenset(
    {"messages", "conversation", "conversations", "tools", "documents", "chat_template", "self"}
) | frozenset(  # options of transformers that are not variables of templates
    {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "kwargs"}
)  # fmt: skip
_SCALARS = frozenset({str, int, float, bool, type(None)})


class TemplateRefusal(InvalidRequest):
    """Raised if a chat template fails on a conversation.

    ``index``: index of the message at which it failed; ``call``: index of the tool call in that
    message; each is None if unknown. ``cause``: the error of the template or of jinja2.
    """

    def __init__(self, cause: str, index: int | None = None, call: int | None = None) -> None:
        self.cause, self.index, self.call = cause, index, call
        self.name(None if index is None else f"messages[{index}]")

    def name(self, path: str | None) -> None:
        """Set the path of the message in the request's body."""
        if path is not None and self.call is not None:
            path = f"{path}.tool_calls[{self.call}]"
        where = "these messages" if path is None else path
        message = f"the chat template rejects {where}: {self.cause}"
        super().__init__(message, param="messages")


class TooLong(Exception):  # noqa: N818
    """Raised if a template's text, list or number would be too long."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"{num_chars} characters")
        self.num_chars = num_chars


class Budget:
    """The limits of one rendering: its characters, and its seconds from now on.

    If a limit is exceeded, `TooLong` or TimeoutError is raised inside the template.
    """

    def __init__(self, most_chars: int, seconds: float) -> None:
        self.most_chars = most_chars
        self.ends_at = time.monotonic() + seconds

    def end(self) -> None:
        """Stop the rendering, whose result is no longer needed."""
        self.ends_at = 0.0

    def check_time(self) -> None:
        """Raise TimeoutError if the time limit is exceeded."""
        if time.monotonic() > self.ends_at:
            raise TimeoutError

    def check(self, num_chars: int) -> None:
        """Raise `TooLong` or TimeoutError if the limit on characters or time is exceeded."""
        if num_chars > self.most_chars:
            raise TooLong(num_chars)
        self.check_time()


UNBOUNDED = Budget(2**62, float("inf"))
BUDGET: ContextVar[Budget] = ContextVar("budget", default=UNBOUNDED)


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, if it has one.

    ``own``: a template that replaces the tokenizer's.
    """

    def __init__(self, hf: Any) -> None:  # noqa: ANN401 - transformers is untyped
        self._hf = hf
        self.own = ""

    @property
    def text(self) -> str:
        """The text of the chat template; "" if the model has none."""
        template = self.own or getattr(self._hf, "chat_template", None) or ""
        if isinstance(template, str):
            return template
        # If a model has several named templates, transformers uses this one for tools.
        return str(template.get("tool_use", template.get("default", "")))

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], budget: Budget
    ) -> str:
        """Return the text of a conversation, as transformers' ``apply_chat_template`` renders it.

        Raises `TemplateRefusal`, `InvalidRequest`, `TooLong` and TimeoutError.
        """
        token = BUDGET.set(budget)
        try:
            opens = not options.get("continue_final_message", False)
            return self._completed(messages, {"add_generation_prompt": opens, **options})
        except RecursionError:  # avoid a traceback as long as the nesting is deep
            param = find_too_deep(messages, options)
            raise InvalidRequest(f"{param} are nested too deeply", param=param) from None
        finally:
            BUDGET.reset(token)

    def _completed(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> str:
        """Return the rendered text.

        Some templates fail if optional values are missing. After a failure, rendering is therefore
        repeated with empty values for missing tools or fields of tools.
        """
        talk = [_message(each) for each in messages]
        try:
            return self._render(talk, dict(options))
        except (RecursionError, TooLong, TimeoutError, ForetokenError):
            raise
        except Exception as error:
            tools = completed(options["tools"]) if options.get("tools") else NO_TOOLS
            may_pass = isinstance(error, UndefinedError | TypeError)
            if not may_pass or tools is None or tools is options.get("tools"):
                raise refusal(error, talk) from error
        return self._completed(messages, {**options, "tools": tools})

    def _render(self, talk: list[dict[str, Any]], options: dict[str, Any]) -> str:
        text, field = self.text, options.pop("continue_final_message", False)
        given = {"tools": None, "documents": None, **self.special_tokens, **_plain(options)}
        if not field:
            return str(_compiled(text).render(messages=talk, **given))
        if given["add_generation_prompt"]:
            raise ValueError("continue_final_message cannot be combined with add_generation_prompt")
        marked = dict(talk[-1])
        final = _mark(marked, field if isinstance(field, str) else "content", text)
        written = str(_compiled(text).render(messages=[*talk[:-1], marked], **given))
        end = written.rfind(MARK.strip())
        if end < 0 or final.strip() not in written:
            raise ValueError("continue_final_message: the template leaves the final message out")
        return written[:end] if written.startswith(MARK, end) else written[:end].rstrip()

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in a template, such as eos_token."""
        return {name: str(each) for name, each in self._hf.special_tokens_map.items()}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it.

    Null fields are removed. Reasoning is given under several names, since templates differ.
    """
    known = {
        name: value if type(value) is str else None if value is NULL else _plain(value)
        for name, value in message.items()
        if value is not None
    }
    for name in REASONING:
        if name in known:
            reasoning = known[name]
            if reasoning is None:
                break
            return {"thinking": reasoning, **known, "reasoning_content": reasoning}
    return known


def _plain(value: Any) -> Any:  # noqa: ANN401 - values of JSON
    """Return a copy of a value in plain JSON types.

    Through methods of other types, a template could escape the sandbox.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (dict, Mapping)):  # `isinstance` with an abstract class is slow
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _mark(message: dict[str, Any], field: str, template: str) -> str:
    """Append `MARK` to the text of a message to be continued, and return the text without it.

    ``field``: the field to continue. Raises ValueError if there is no such text or the template
    does not read the field.
    """
    fields = [field]
    if field in REASONING:
        fields = [each for each in REASONING if message.get(each) == message.get(field)]
    given = message.get(field)
    if given is None or not any(each in template for each in fields):
        raise ValueError(f"continue_final_message: there is no {field} to continue")
    if isinstance(given, list):
        for part in reversed(given):
            if isinstance(part, dict) and "text" in part:
                text = str(part["text"])
                part["text"] = text + MARK
                return text
        raise ValueError("continue_final_message: the final message has no text")
    for each in fields:
        message[each] = f"{given}{MARK}"
    return str(given)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits on text and time."""

    intercepted_binops = frozenset({"+", "*", "**"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Return the text of a template, a block or a macro."""
        return bounded_text(pieces)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - values of a template
        """Return an attribute. Raises TimeoutError if the time limit is exceeded."""
        BUDGET.get().check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - values of a template
        """Return an item. Raises TimeoutError if the time limit is exceeded."""
        if time.monotonic() > BUDGET.get().ends_at:
            raise TimeoutError
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - values of a template
        """Call a function of the template. Raises TimeoutError if the time limit is exceeded."""
        BUDGET.get().check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - values of a template
        """Return the result of an operator. Raises `TooLong` if the result would be too long."""
        budget = BUDGET.get()
        if operator == "+" and type(left) is str and type(right) is str:  # the most common one
            joined = left + right if len(left) + len(right) <= budget.most_chars else ""
            if joined and time.monotonic() <= budget.ends_at:
                return joined
        budget.check(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


class Generation(Extension):
    """``{% generation %}``, which marks text for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's name

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block, and return it as a block with its own scope."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class Names(Namespace):
    """The ``namespace`` of templates, without access to Python's attributes."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as a dict's
        given = dict(*args, **kwargs)
        for name in given:
            _check_name(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dicts:
    """The function ``dict`` of templates, which has none of the attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as a dict's
        return dict(*args, **kwargs)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name}")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    template = _environment().from_string(text)
    template.globals = dict(template.globals)  # a ChainMap would be searched at every rendering
    return template


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Return the environment with the functions and filters that transformers provides."""
    made = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    made.globals |= {"dict": Dicts(), "namespace": Names}
    return made


def bounded_text(pieces: Iterable[str]) -> str:
    """Return the joined pieces of text. Raises `TooLong` or TimeoutError."""
    kept: list[str] = []
    budget, num_chars = BUDGET.get(), 0
    for piece in pieces:
        num_chars += len(piece)
        if time.monotonic() > budget.ends_at:
            raise TimeoutError
        if num_chars > budget.most_chars:
            kept.clear()
        elif piece:
            kept += (piece,)
    budget.check(num_chars)
    return "".join(kept)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _size(operator: str, left: object, right: object) -> int:
    """Return the size of an operation's result in characters, entries, or bits of a number."""
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        return len(left) + len(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if operator == "**":
            return bits * right if bits > 1 else 1
        return bits + right.bit_length()
    if isinstance(left, Sized) and isinstance(right, int):
        return len(left) * right
    if isinstance(left, int) and isinstance(right, Sized):
        return len(right) * left
    return 0


def completed(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Return the tools with missing descriptions and parameters added; None if all are complete."""
    whole: list[Mapping[str, Any]] = [
        {**tool, "function": _completed_function(tool["function"])} for tool in tools
    ]
    return None if whole == list(tools) else whole


def _completed_function(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters")
    parameters = {**NO_PARAMETERS, **(given if isinstance(given, Mapping) else {})}
    return {"description": "", **function, "parameters": parameters}


def check_messages(messages: object) -> None:
    """Raise `InvalidRequest` unless the messages are a list of objects."""
    if type(messages) is list and {*map(type, messages)} <= {dict}:
        return
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str | bytes)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise InvalidRequest("messages must be objects with role and content", param="messages")


def count_chars(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """Return the approximate length of a conversation; counting stops beyond `INLINE_CHARS`."""
    total = MESSAGE_CHARS * len(messages)
    left: list[Any] = [*messages, options]
    for value in left:  # it grows meanwhile
        kind = type(value)  # `isinstance` with an abstract class is slow
        total += len(value) if kind is str else 1
        if total > INLINE_CHARS:
            break
        if kind in _SCALARS:
            continue
        if kind is dict or isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, str):
            total += len(value)
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            left += value
    return total


def find_too_deep(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Return the field that is nested too deeply for a template."""
    given = {"messages": messages, "tools": options.get("tools", ())}
    given["chat_template_kwargs"] = {name: options[name] for name in options if name != "tools"}
    return max(given, key=lambda name: _depth(given[name]))


def _depth(value: object) -> int:
    """Return the nesting depth of a value."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def check_options(options: Mapping[str, Any], param: str = "chat_template_kwargs") -> None:
    """Raise `InvalidRequest` if an option of a template has a reserved name."""
    for name in options:
        if name in RESERVED:
            raise InvalidRequest(f"{param} must not contain {name}", param=param)


def template_of(config: EngineConfig) -> tuple[str, Mapping[str, Any]]:
    """Return the chat template that the options name, and the default values of its variables.

    The template is "" for the model's own. Raises `InvalidRequest` for an unreadable file, invalid
    jinja and a reserved name.
    """
    text = "" if config.chat_template is None else read_template(config.chat_template)
    options = config.default_chat_template_kwargs or {}
    assert not isinstance(options, str)  # the check of the options has parsed the JSON
    check_options(options, TEMPLATE_KWARGS)
    return text, options


def read_template(path: str) -> str:
    """Return the text of a template file. Raises `InvalidRequest` if it is unreadable or
    invalid.
    """
    try:
        text = Path(path).read_text("utf-8")
        _compiled(text)
        problem = "" if text.strip() else "the file is empty"
    except OSError as error:
        problem = error.strerror or str(error)
    except TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
    except (ValueError, RecursionError) as error:  # invalid UTF-8, or nested too deeply
        problem = str(error)
    if problem:
        raise InvalidRequest(f"chat_template: {path}: {problem}", param="chat_template")
    return text


def refusal(error: Exception, talk: Sequence[Mapping[str, Any]]) -> TemplateRefusal:
    """Return the error for the caller, with its cause and the message at which the template failed.

    The message is found in the template's stack frames, whose variables refer to it.
    """
    places: dict[int, tuple[int, int | None]] = {
        id(message): (index, None) for index, message in enumerate(talk)
    }
    for index, message in enumerate(talk):
        for number, call in enumerate(_calls(message)):
            places[id(call)] = index, number
            if isinstance(function := call.get("function"), dict):
                places[id(function)] = index, number
    found: tuple[int | None, int | None] = (None, None)
    trace, is_inside = error.__traceback__, False
    while trace is not None:
        is_inside |= trace.tb_frame.f_code.co_filename == TEMPLATE_FILE
        held = [places[id(each)] for each in trace.tb_frame.f_locals.values() if id(each) in places]
        # The latest message is taken, since other variables may refer to earlier messages.
        found = max(held, key=lambda place: (place[1] is not None, place[0]), default=found)
        trace = trace.tb_next
    return TemplateRefusal(_cause(error, is_inside=is_inside), *found)


def _cause(error: Exception, *, is_inside: bool) -> str:
    """Return the message of an error; for one raised outside of a template, only its type."""
    if type(error) in (TemplateError, UndefinedError, ValueError):
        return str(error)[:MAX_CAUSE_CHARS]
    kind = type(error).__name__
    return f"{kind}: {error}"[:MAX_CAUSE_CHARS] if is_inside else kind


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
