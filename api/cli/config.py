"""Values of settings, in order of precedence: flags, environment variables, a file, defaults."""

from __future__ import annotations

import argparse
import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.options.settings import Setting, setting, settings_of
from ..serving.limits import Limits
from ..serving.settings import FrontOptions, Joining, Listen, ObservingOptions, Settings
from ..types.sampling_params import SamplingParams
from .flags import TWO_MODELS, Parser, nearest

T = TypeVar("T")
logger = logging.getLogger(__name__)
PREFIX = "FORETOKEN_"
READ_ELSEWHERE = ("bf16_products", "cache", "cluster_key", "native_variant", "url")
"""Variables, without prefix, that other code reads."""
# values of FORETOKEN_PORT that Kubernetes sets for a Service named foretoken
KUBERNETES = ("tcp://", "udp://", "sctp://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The model and the settings file of a command line."""

    model: str | None = setting(
        None,
        "folder in Hugging Face layout, GGUF file, hub id or smollm2; default: smollm2",
        "MODEL",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model (main)", "REVISION")
    offline: bool = setting(False, "use only cached hub models, without network access")
    config: str | None = setting(
        None,
        "TOML file with settings named like the flags; flags and FORETOKEN_<FLAG> "
        "variables override it",
        "FILE",
        is_basic=True,
    )


SERVE = (Chosen, Listen, Settings, FrontOptions, EngineConfig, ObservingOptions, Limits)
REPLICA = (Chosen, Joining, EngineConfig)
TERMINAL = (Chosen, EngineConfig, SamplingParams)
SAMPLING_FLAGS = tuple(settings_of(SamplingParams))


def add_model(parser: Parser) -> None:
    """Add the positional argument MODEL. If it is absent, the value of --model is kept."""
    model = settings_of(Chosen)["model"]
    parser.set_defaults(model=None)
    parser.add_argument(
        "model",
        metavar=model.metavar,
        nargs="?",
        help=model.help,
        default=argparse.SUPPRESS,
        action=_Place,
    )


class _Place(argparse.Action):
    """Stores the positional MODEL, which must equal the value of --model if both are given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - part of argparse's interface
    ) -> None:
        if namespace.model not in (None, values):
            parser.error(TWO_MODELS)
        namespace.model = namespace.place = values


class Given:
    """The settings given to one command by flags, environment variables and a file.

    `make` reads only the settings of its dataclass; values for other commands are ignored.
    """

    def __init__(self, parsed: argparse.Namespace, kinds: Iterable[type]) -> None:
        """Read the settings file. Raises `InvalidRequest` if it is unreadable or has an unknown
        key.

        Every command accepts a file with all settings of ``serve``.
        """
        self._parsed = parsed
        self._known = {n: each for k in (*SERVE, *kinds) for n, each in settings_of(k).items()}
        self._path: str | None = None
        self._file: Mapping[str, Any] = {}
        self._sources: dict[str, str] = {}  # source of values that are not from flags
        self._path = self._value(self._known.pop("config"))
        self._file = {} if self._path is None else self._read_file(self._path)

    def options(self, kind: type) -> dict[str, Any]:
        """Return the given settings of a dataclass by field name."""
        found = ((each.field, self._value(each)) for each in settings_of(kind).values())
        return {field: value for field, value in found if value is not None}

    def make(self, kind: type[T], **more: Any) -> T:  # noqa: ANN401 - fields that are no settings
        """Return the dataclass with the given values.

        Raises `InvalidRequest`, which names the variable or the file of a wrong value.
        """
        options = self.options(kind)  # raises errors that already name the source
        try:
            return kind(**options, **more)
        except InvalidRequest as error:
            source = self._sources.get(error.param or "")
            if source is None:
                raise
            raise InvalidRequest(f"{source}: {error}", param=error.param) from None

    def warn_of_unknown_variables(self) -> None:
        """Log environment variables that begin with `PREFIX` but are no settings.

        They may be misspelt settings.
        """
        known = [*self._known, "config", *READ_ELSEWHERE]
        names = sorted(name for name in os.environ if name.startswith(PREFIX))
        unknown = [
            f"{name}{nearest(name, map(_variable, known))}"
            for name in names
            if name.removeprefix(PREFIX).lower() not in known or _is_kubernetes(name)
        ]
        if unknown:
            logger.warning("ignoring unknown environment variables: %s", ", ".join(unknown))

    def _value(self, each: Setting) -> Any:  # noqa: ANN401 - of any setting
        """Return a setting's value from the first source that has one, or None."""
        flag, variable = getattr(self._parsed, each.name, None), _variable(each.name)
        if flag is not None:
            return tuple(flag) if each.is_list else flag
        if variable in os.environ and not _is_kubernetes(variable):
            self._sources[each.name] = variable
            return _converted(each.read, os.environ[variable], variable, each)
        if each.name in self._file:
            self._sources[each.name] = str(self._path)
            key = f"{self._path}: {each.name.replace('_', '-')}"
            return _converted(each.convert, self._file[each.name], key, each)
        return None

    def _read_file(self, path: str) -> Mapping[str, Any]:
        """Return the values in a TOML file by setting. Raises `InvalidRequest`."""
        try:
            values = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", param="config") from None
        except ValueError as error:  # invalid TOML or invalid UTF-8
            raise InvalidRequest(f"{path}: {error}", param="config") from None
        found: dict[str, Any] = {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name not in self._known:
                near = nearest(key, (each.replace("_", "-") for each in self._known))
                raise InvalidRequest(f"{path}: unknown key {key}{near}", param="config")
            if name in found:
                raise InvalidRequest(f"{path}: duplicate key {key}", param="config")
            found[name] = value
        return found


def given_options(
    parsed: argparse.Namespace, kinds: Iterable[type]
) -> tuple[str | None, dict[str, Any]]:
    """Return the model and the engine's options, for a command without other settings."""
    given = Given(parsed, kinds)
    given.warn_of_unknown_variables()
    return model_options(given)


def model_options(given: Given) -> tuple[str | None, dict[str, Any]]:
    """Return the model and the engine's options. They are checked before slow imports."""
    from ..build.hub import at_revision, go_offline

    given.make(EngineConfig)
    chosen = given.make(Chosen)
    if chosen.offline:
        go_offline()
    return at_revision(chosen.model, chosen.revision), given.options(EngineConfig)


def with_adapter(params: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters with the adapter of ``--lora``.

    Raises `InvalidRequest` for several adapters.
    """
    names = [*EngineConfig(lora=options.get("lora", ())).lora_folders]
    if len(names) > 1:
        raise InvalidRequest("--lora: run and chat support a single adapter", param="lora")
    return replace(params, lora=names[0]) if names else params


def _converted(
    convert: Callable[[Any], Any],
    value: Any,  # noqa: ANN401 - value from a file
    source: str,
    each: Setting,
) -> Any:  # noqa: ANN401 - of any setting
    try:
        return convert(value)
    except ValueError as error:
        raise InvalidRequest(f"{source} {error}", param=each.name) from None


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _is_kubernetes(variable: str) -> bool:
    """Whether Kubernetes has set this variable, for a Service named foretoken."""
    return variable == _variable("port") and os.environ[variable].startswith(KUBERNETES)
