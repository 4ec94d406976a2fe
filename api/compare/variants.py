"""Variants: what A and B are, as a text of the command line says it.

A variant is a model (folder, file, hub id or name), the address of a server, or ``base``, followed
by settings ``key=value``, all separated by spaces as in a shell:

    base                                the base model as the flags say
    "temperature=0.2 system=terse.txt"  the base model with these settings
    "other.gguf quantize=none"          another model
    "http://127.0.0.1:8000 model=x"     a server
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.options.settings import Setting, settings_of
from ..serving.http_client import checked, without_credentials
from ..types.sampling_params import SamplingParams

BASE = "base"
NOT_OURS = ("seed", "lora")  # settings of a request or an engine that a variant has in another form
SAMPLING: Mapping[str, Setting] = {
    name: each for name, each in settings_of(SamplingParams).items() if name not in NOT_OURS
}
ENGINE: Mapping[str, Setting] = {
    name: each for name, each in settings_of(EngineConfig).items() if name not in NOT_OURS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the two things that are compared.

    ``model`` is None for the default model, or for the first model of a server. ``engine`` has
    options of `EngineConfig`, ``sampling`` fields of `SamplingParams`. ``system`` replaces the
    system message of each conversation, ``tools`` the tools of each task. ``lora`` is the folder of
    an adapter.
    """

    text: str = BASE
    model: str | None = None
    url: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    lora: str | None = None


def read_variant(text: str, base: Variant) -> Variant:
    """Return the variant that a text describes, with everything else as in ``base``.

    Files that it names are read. Raises `InvalidRequest`, which names the word.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:  # a quote without end
        raise InvalidRequest(f"{text!r} is not a variant: {error}", param="variant") from None
    if not words:
        raise InvalidRequest(
            "a variant must not be empty; base is the model itself", param="variant"
        )
    variant = replace(base, text=without_credentials(text))
    if "=" not in words[0] or "://" in words[0]:
        first = words.pop(0)
        if "://" in first:
            url = without_credentials(checked(first))
            variant = replace(variant, url=url, model=None, engine={}, lora=None)
        elif first != BASE:
            variant = replace(variant, model=first)
    for word in words:
        variant = _with(variant, word)
    return variant


def _with(variant: Variant, word: str) -> Variant:
    """Return the variant with a setting ``key=value``."""
    key, equals, value = word.partition("=")
    if not equals:
        problem = "must be KEY=VALUE; a model or an address comes first"
        raise InvalidRequest(f"{variant.text!r}: {word} {problem}", param="variant")
    name = key.replace("-", "_")
    if name == "model":
        return replace(variant, model=value)
    if name == "system":
        return replace(variant, system=_read(variant, key, value))
    if name == "tools":
        return replace(variant, tools=_tools(variant, value))
    if name in SAMPLING:
        given = {**variant.sampling, SAMPLING[name].field: _value(variant, SAMPLING[name], value)}
        return replace(variant, sampling=given)
    if name != "lora" and name not in ENGINE:
        raise InvalidRequest(f"{variant.text!r}: unknown setting {key}", param="variant")
    if variant.url is not None:
        problem = "is a setting of an engine, and a server has its own: start it with this setting"
        raise InvalidRequest(f"{variant.text!r}: {key} {problem}", param="variant")
    if name == "lora":
        return replace(variant, lora=value)
    engine = {**variant.engine, ENGINE[name].field: _value(variant, ENGINE[name], value)}
    return replace(variant, engine=engine)


def _value(variant: Variant, setting: Setting, text: str) -> Any:  # noqa: ANN401 - of any setting
    try:
        return setting.read(text)
    except ValueError as error:
        name = setting.name
        raise InvalidRequest(f"{variant.text!r}: {name} {error}", param="variant") from None


def _read(variant: Variant, key: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig").strip()
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError as error:
        why = str(error)
    raise InvalidRequest(f"{variant.text!r}: {key}: {path}: {why}", param="variant")


def _tools(variant: Variant, path: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(_read(variant, "tools", path), type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"tools: {path} is not a JSON list of tools: {error}"
        raise InvalidRequest(f"{variant.text!r}: {problem}", param="variant") from None
