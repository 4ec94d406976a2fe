"""Generate docs/api.md from the types: ``python -m foretoken.api.cli.reference docs/api.md``."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import msgspec.structs

from ...core import errors
from ...core.config import EngineConfig
from ...core.interface.request import Usage
from ...core.interface.settings import settings_of
from ..sdk.async_llm import AsyncLLM
from ..sdk.llm import LLM
from ..server.app import _routes
from ..server.openapi import EVENTS, JSON, describe
from ..serving.serving_context import Service
from ..serving.settings import Joining, Settings
from ..types.results import Choice, Completion, TextDelta, ToolCall
from ..types.sampling_params import SamplingParams
from .config import SERVE
from .flags import help_of

HEAD = """# API reference

Made from the types by `python -m foretoken.api.cli.reference docs/api.md`; a test keeps it so. The
HTTP part for machines: `GET /openapi.json`. First steps are in [quickstart.md](quickstart.md).
"""
Schema = Mapping[str, Any]


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_python(), *_flags(), *_http()])


# -- Python -------------------------------------------------------------------------------------


def _python() -> Iterator[str]:
    yield "## Python\n"
    yield "`AsyncLLM` has the methods of `LLM` as coroutines and asynchronous iterators.\n"
    yield from _class(LLM)
    yield from _class(AsyncLLM, only=("start", "close"))
    for fields in (SamplingParams, Completion, Choice, ToolCall, TextDelta, Usage, EngineConfig):
        yield from _fields_table(fields)
    yield "### Errors\n"
    yield _code((inspect.getdoc(errors) or "").partition("\n\n")[2])


def _class(owner: type, only: tuple[str, ...] = ()) -> Iterator[str]:
    yield f"### {owner.__name__}\n\n{_doc(owner)}\n"
    for name, member in inspect.getmembers(owner):
        public = not name.startswith("_") and (not only or name in only)
        if public and inspect.isfunction(member):
            yield f"**`{_signature(member)}`**  \n{_doc(member)}\n"


def _signature(function: Any) -> str:  # noqa: ANN401 - a function
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = str(signature.replace(parameters=parameters)).replace("'", "")
    mark = "async " if inspect.iscoroutinefunction(function) else ""
    return f"{mark}{function.__name__}{shown}"


def _doc(thing: object) -> str:
    """The docstring as Markdown, whose marks for code are single."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


def _fields_table(owner: Any) -> Iterator[str]:  # noqa: ANN401 - a dataclass or a struct
    yield f"### {owner.__name__}\n\n{_doc(owner)}\n"
    settings = settings_of(owner) if owner is EngineConfig else {}  # named as its fields
    meaning = ["meaning"] if settings else []
    yield _row("field", "type", "default", *meaning)
    yield _row("---", "---", "---", *(["---"] * len(meaning)))
    for each in _fields(owner):
        type_name = each.type if isinstance(each.type, str) else owner.__annotations__[each.name]
        help = [settings[each.name].help] if settings else []
        yield _row(f"`{each.name}`", f"`{type_name}`", _default(each), *help)
    yield ""


def _fields(owner: Any) -> Sequence[Any]:  # noqa: ANN401 - a dataclass or a struct
    if dataclasses.is_dataclass(owner):
        return dataclasses.fields(owner)
    return msgspec.structs.fields(owner)


def _default(each: Any) -> str:  # noqa: ANN401 - a field of either
    if each.default not in (dataclasses.MISSING, msgspec.NODEFAULT):
        return f"`{each.default!r}`"
    if each.default_factory not in (dataclasses.MISSING, msgspec.NODEFAULT):
        return "empty"
    return ""


def _flags() -> Iterator[str]:
    yield "## Flags of `foretoken serve`\n"
    yield "Each is also a variable `FORETOKEN_<FLAG>` and a key of the file of `--config`: "
    yield "[configuration](server.md#configuration).\n"
    yield _row("flag", "meaning")
    yield _row("---", "---")
    for each in (each for kind in SERVE for each in settings_of(kind).values()):
        value = "" if each.is_switch else f" {each.metavar}"
        name = each.metavar if each.name == "model" else f"{each.flag}{value}"
        yield _row(f"`{name}`", help_of(each))
    yield ""
    yield "`foretoken replica` has the flags of the model, of the engine and of the log, and:\n"
    for each in settings_of(Joining).values():
        if each.name in ("front", "replicas"):
            yield f"- `{each.flag} {each.metavar}`: {help_of(each)}"
    yield ""


# -- HTTP ---------------------------------------------------------------------------------------


def _http() -> Iterator[str]:
    document = cast("Schema", msgspec.to_builtins(describe(_routes(_no_service()))))
    yield "## HTTP\n"
    yield _row("method", "path", "what", "body", "answer", "events")
    yield _row(*["---"] * 6)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield _operation(method.upper(), path, operation)
    yield ""
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from _schema(name, schema)


def _no_service() -> Service:
    """A stand-in for the service, to create the routes without an engine."""
    return Service(cast("Any", SimpleNamespace(causes={})), Settings(admin_keys=("any",)))


def _operation(method: str, path: str, operation: Schema) -> str:
    answers = operation["responses"]["200"]["content"]
    body = operation.get("requestBody", {}).get("content", {})
    columns = (_content(body, JSON), _content(answers, JSON), _content(answers, EVENTS))
    return _row(method, f"`{path}`", operation["summary"].replace("``", "`"), *columns)


def _content(content: Schema, media: str) -> str:
    return _kind(content[media]["schema"]) if media in content else ""


def _schema(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {_short(name)} (HTTP)\n"
    if "description" in schema:
        yield schema["description"].replace("``", "`") + "\n"
    if not schema.get("properties"):
        return
    yield _row("field", "type", "")
    yield _row("---", "---", "---")
    for field, kind in schema["properties"].items():
        yield _row(f"`{field}`", _kind(kind), "needed" if field in schema["required"] else "")
    yield ""


def _kind(schema: Schema) -> str:
    """A short description of a JSON schema."""
    if "$ref" in schema:
        name = _short(schema["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower().replace('.', '')}-http)"
    if "anyOf" in schema:
        return " or ".join(kind for each in schema["anyOf"] if (kind := _kind(each)) != "null")
    if "enum" in schema:
        return " or ".join(f'`"{value}"`' for value in schema["enum"] if value is not None)
    return _plain_kind(schema)


def _plain_kind(schema: Schema) -> str:
    kind = schema.get("type", "anything")
    if kind == "array" and "prefixItems" in schema:
        return "pair"
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{kind} from {low:g} to {high:g}"
    return str(kind)


def _short(name: str) -> str:
    """The name of a struct; of those that share one, with the module's."""
    parts = name.split(".")
    if len(parts) == 1:
        return name
    module = "openai" if parts[-3] == "api" else parts[-3]
    return f"{module}.{parts[-1]}"


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|") if "`" in cell else cell for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _code(text: str) -> str:
    return f"```text\n{textwrap.dedent(text).strip()}\n```\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), "utf-8")
