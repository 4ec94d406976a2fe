"""Writes the reference pages of docs: ``PYTHONPATH=tests python -m support.reference_pages``.

docs/flags.md lists the flags of each command, docs/http.md the routes and their fields, docs/sdk.md
the classes of the package. A test compares the pages with the code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from foretoken.api.cli.commands import _parser
from foretoken.api.cli.flags import Parser, help_of
from foretoken.api.server.app import routes
from foretoken.api.server.routes.openapi import describe
from foretoken.api.serving.serving_context import Service
from foretoken.api.serving.settings import Settings
from foretoken.core.config import EngineConfig
from foretoken.core.options.settings import settings_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
WRITTEN = "`PYTHONPATH=tests python -m support.reference_pages` writes this page from the code."
WIDEST = 99  # characters of a signature on one line
OWN = ("positional arguments", "options")  # groups that each command has for itself


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [[*heads], ["---" for _ in heads], *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# -- flags ----------------------------------------------------------------------------------------

FLAGS = f"""# Flags

All flags of each command, as `--help-all` prints them; the default is in brackets. Each flag of
`serve`, `replica`, `run` and `chat` is also a variable and a key of a file:
[configuration](server.md#configuration).

{WRITTEN}
"""


def flags_page() -> str:
    """Return the page of flags: each command, then the groups of flags that several share."""
    (commands,) = [each.choices for each in _parser()._actions if each.dest == "command"]
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, command in commands.items():
        for group in _groups(command):
            users[group].append(name)
    shared = {
        group: names for group, names in users.items() if len(names) > 1 and group[0] not in OWN
    }
    sections = [_command_section(name, command, shared) for name, command in commands.items()]
    groups = [
        f"### {title}\n\nOf {', '.join(f'`{name}`' for name in names)}.\n\n{rows}"
        for (title, rows), names in shared.items()
    ]
    return "\n\n".join((FLAGS.strip(), *sections, "## Groups of flags", *groups)) + "\n"


def _command_section(name: str, command: Parser, shared: Collection[tuple[str, str]]) -> str:
    """Return the synopsis of a command, its own flags, and links to groups that others have too."""
    lines = [f"## foretoken {name}", f"    {' '.join(command.format_usage()[7:].split())}"]
    groups = [*_groups(command)]
    for title, rows in (each for each in groups if each not in shared):
        lines.append(rows if title in OWN else f"**{title}**\n\n{rows}")
    links = [
        f"[{title}](#{title.lower().replace(' ', '-')})"
        for title, rows in groups
        if (title, rows) in shared
    ]
    if links:
        lines.append(f"And these groups: {', '.join(links)}.")
    return "\n\n".join(lines)


def _groups(command: Parser) -> Iterator[tuple[str, str]]:
    """Yield the title and the table of each group of a command's arguments that has any."""
    for group in command._action_groups:
        actions = [each for each in group._group_actions if each.dest not in ("help", "help_all")]
        if actions:
            heads = ("argument" if group.title == "positional arguments" else "flag", "meaning")
            yield str(group.title), table(heads, map(_action_row, actions))


def _action_row(action: Any) -> tuple[str, str]:
    value = action.metavar or (
        action.dest.upper() if action.nargs != 0 and not action.const else ""
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    names = ", ".join(action.option_strings)
    name = (
        f"{names} {value}".strip()
        if action.option_strings and action.nargs != 0
        else names or value
    )
    if action.const is not None and action.option_strings:
        name = names
    return f"`{name}`", _help(action)


def _help(action: Any) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "foretoken"}
    return text.replace("<", "&lt;")


# -- routes ---------------------------------------------------------------------------------------

HTTP = f"""# HTTP fields

All routes of `foretoken serve` with the fields of their bodies and answers, made from
`/openapi.json` of a server with an admin key and `--allow-weight-updates`. A running server shows
the same at `GET /docs`, with an example of each. What routes are for: [routes](routes.md).

{WRITTEN}
"""


def openapi() -> dict[str, Any]:
    """Return `/openapi.json` of a server that has all routes; it needs no engine."""
    config = SimpleNamespace(allow_weight_updates=True)
    causes, ends = SimpleNamespace(counts={}), SimpleNamespace(listeners=[])
    engine: Any = SimpleNamespace(miss_causes=causes, session_ends=ends, config=config)
    service = Service(engine, Settings(admin_keys=("any",)))
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(describe(routes(service))))
    return found


def http_page() -> str:
    """Return the page of routes, statuses and types."""
    document = openapi()
    codes: dict[str, str] = {}
    sections = ["## Routes"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            sections.append(_route(f"{method.upper()} {path}", operation))
            codes |= {code: each["description"] for code, each in operation["responses"].items()}
    statuses = table(("status", "meaning"), sorted(codes.items()))
    types = [
        _type_section(name, schema)
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    parts = (HTTP.strip(), *sections, f"## Statuses\n\n{statuses}", "## Types", *types)
    return "\n\n".join(parts) + "\n"


def _route(title: str, operation: Mapping[str, Any]) -> str:
    lines = [f"### {title}", str(operation.get("summary", "")).replace("``", "`")]
    given = operation.get("parameters", ())
    if given:
        rows = ((f"`{each['name']}`", each["in"], type_of(each["schema"])) for each in given)
        lines.append(table(("parameter", "in", "type"), rows))
    if "requestBody" in operation:
        lines.append(f"Body: {_contents(operation['requestBody'])}")
    answer = _contents(operation["responses"]["200"])
    others = ", ".join(code for code in operation["responses"] if code != "200")
    lines.append(f"Answer: {answer or 'empty'}. Other statuses: {others or 'none'}.")
    return "\n\n".join(line for line in lines if line)


def _contents(part: Mapping[str, Any]) -> str:
    kinds = part.get("content", {})
    return "; ".join(
        f"{type_of(each.get('schema', {}))} (`{kind}`)" for kind, each in kinds.items()
    )


def _type_section(name: str, schema: Mapping[str, Any]) -> str:
    lines = [f"### {name}", str(schema.get("description", "")).replace("``", "`")]
    required = set(schema.get("required", ()))
    fields = schema.get("properties")
    if fields is None:
        lines.append(type_of(schema))
    elif fields:
        rows = (
            (f"`{each}`", type_of(of), "required" if each in required else _default(of))
            for each, of in fields.items()
        )
        lines.append(table(("field", "type", "default"), rows))
    return "\n\n".join(line for line in lines if line)


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema or schema["default"] is None:
        return ""
    return f"`{msgspec.json.encode(schema['default']).decode()}`"


def type_of(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema in words, with links to the types that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        anchor = re.sub(r"[^\w-]", "", name.lower())
        return f"[{name}](#{anchor})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [type_of(each) for each in schema[several]]
            return " or ".join(dict.fromkeys(each for each in kinds if each != "null")) or "null"
    if "enum" in schema:
        return ", ".join(f"`{msgspec.json.encode(each).decode()}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{msgspec.json.encode(schema['const']).decode()}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_of(schema.get('items') or {})}{_bounds(schema, 'Items')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_of(schema['additionalProperties'])}{_bounds(schema, 'Properties')}"
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if least is not None or "maximum" in schema:
        above = "above" if "exclusiveMinimum" in schema else "from"
        words = [kind, f"{above} {least}"] if least is not None else [kind]
        words += [f"to {schema['maximum']}"] if "maximum" in schema else []
        return " ".join(words)
    return f"{kind}{_bounds(schema, 'Length')}"


def _bounds(schema: Mapping[str, Any], of: str) -> str:
    least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
    if least is None and most is None:
        return ""
    words = [f"{least} or more" if least else "", f"at most {most}" if most is not None else ""]
    told = ", ".join(word for word in words if word)
    return f" ({told})" if told else ""


# -- SDK ------------------------------------------------------------------------------------------

SDK = f"""# Python SDK

The classes of the package, from their docstrings; `python -m pydoc foretoken.LLM` prints the same.
The [quickstart](quickstart.md#without-a-server) has a first program.

{WRITTEN}
"""

CLASSES = (
    "api.sdk.llm.LLM", "api.sdk.async_llm.AsyncLLM", "api.types.sampling_params.SamplingParams",
    "api.types.results.Completion", "api.types.results.Choice", "api.types.results.ToolCall",
    "api.types.results.TextDelta", "core.interface.request.Usage", "api.types.results.Embedding",
    "api.types.results.RankedDocument", "api.types.results.Decisions",
    "api.types.results.Decision", "api.types.verdict.Verdict", "api.types.verdict.Difference",
    "api.types.verdict.ComparedToken", "core.config.EngineConfig",
)  # fmt: skip
ERRORS = (
    "ForetokenError", "InvalidRequest", "PromptTooLong", "QueueFull", "DeadlineExceeded",
    "EngineDead", "Unavailable", "ModelLoadError",
)  # fmt: skip


def sdk_page() -> str:
    """Return the page of the package's classes and errors."""
    classes = [_class_section(_named(f"foretoken.{each}")) for each in CLASSES]
    rows = (
        (f"`{name}`", _bases(name), _words(_named(f"foretoken.core.errors.{name}")))
        for name in ERRORS
    )
    errors = f"## Errors\n\n{table(('error', 'is a', 'meaning'), rows)}"
    return "\n\n".join((SDK.strip(), *classes, errors)) + "\n"


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _bases(name: str) -> str:
    return ", ".join(
        f"`{each.__name__}`" for each in _named(f"foretoken.core.errors.{name}").__bases__
    )


def _words(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "").replace("``", "`")


def _class_section(kind: Any) -> str:
    lines = [f"## {kind.__name__}", _words(kind)]
    if kind is EngineConfig:
        rows = (
            (
                f"`{each.field}`",
                f"{each.metavar}" if not each.is_switch else "true or false",
                help_of(each),
            )
            for each in settings_of(kind).values()
        )
        return "\n\n".join((*lines, table(("option", "value", "meaning and default"), rows)))
    fields = [*_fields(kind)]
    if fields:
        lines.append(table(("field", "type", "default"), fields))
    else:
        lines.append(_code(_signature(kind.__name__, kind)))
    for name, member in _members(kind):
        heading = f"### {kind.__name__}.{name}"
        if isinstance(member, property | functools.cached_property):
            function = member.fget if isinstance(member, property) else member.func
            lines.append(f"{heading}\n\n{_words(function) or 'Property.'}")
        else:
            function = getattr(member, "__func__", member)
            lines.append(
                f"{heading}\n\n{_code(_signature(name, function))}\n\n{_words(function)}".rstrip()
            )
    return "\n\n".join(line for line in lines if line)


def _fields(kind: Any) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and default of each field of a dataclass or struct."""
    if hasattr(kind, "__struct_fields__"):
        for each in msgspec.structs.fields(kind):
            is_made = each.default_factory is not msgspec.NODEFAULT
            yield _field_row(
                kind, each.name, _shown(each.default, msgspec.NODEFAULT, is_made=is_made)
            )
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            is_made = field.default_factory is not dataclasses.MISSING
            yield _field_row(
                kind, field.name, _shown(field.default, dataclasses.MISSING, is_made=is_made)
            )


def _field_row(kind: Any, name: str, default: str) -> tuple[str, str, str]:
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        types |= inspect.get_annotations(base)
    return f"`{name}`", f"`{types[name]}`", default


def _shown(default: object, missing: object, *, is_made: bool) -> str:
    if is_made:
        return "empty"
    return "" if default is missing else f"`{default!r}`"


def _members(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and its own bases, in their order."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("foretoken"):
            continue
        for name, member in vars(base).items():
            kinds = property | functools.cached_property | classmethod
            is_shown = isinstance(member, kinds) or inspect.isfunction(member)
            if is_shown and not name.startswith("_") and name not in seen and _words(member):
                seen.add(name)
                yield name, member


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        each for each in signature.parameters.values() if each.name not in ("self", "cls")
    ]
    signature = signature.replace(parameters=parameters)
    text = f"{name}{signature}".replace("'", "")
    if len(text) <= WIDEST:
        return text
    inner = ",\n    ".join(_parameters(str(signature).replace("'", "")))
    end = str(signature).replace("'", "").rpartition(")")[2]
    return f"{name}(\n    {inner},\n){end}"


def _parameters(text: str) -> list[str]:
    """Return the parameters of a signature: the parts between commas outside of brackets."""
    body = text[1 : text.rindex(")")]
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(body):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append(body[begin:at].strip())
            begin = at + 1
    return [*found, body[begin:].strip()]


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


PAGES = {"flags.md": flags_page, "http.md": http_page, "sdk.md": sdk_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
