"""RecordedRequest: everything that determines the tokens of an answer, in one line of JSON.

`foretoken replay` computes the answer again from the record and the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError, InvalidRequest
from ...core.interface.request import Request
from ...core.interface.sampling import RECOMMENDED
from ..types.sampling_params import SamplingParams

VERSION = 1  # version of new records; records of newer versions are refused
NO_EFFECT = ("n", "seed", "speculation", "prediction", "cache_salt", "priority", "deadline")
"""Fields that change no token of a single answer, or that the record has elsewhere."""
OPTIONS = (
    "dtype", "quantize", "exact", "backend", "kv_cache_dtype", "model_impl", "load_format",
    "max_model_len",
)  # fmt: skip
"""Options of the engine that may change a token."""


class Asked(Struct, kw_only=True, omit_defaults=True):
    """The HTTP request that an answer belongs to.

    - ``http``: an id that all answers of one HTTP request share. ``part``: number of the answer
      among them, in the order in which they began.
    - ``at``: time at which the request arrived, in seconds since 1970.
    - ``session``: the session's id, from ``x-session-id`` or ``prompt_cache_key``; "" without one.
    - ``path`` and ``body``: what the client sent. Only the first answer that was written has the
      body.
    """

    http: str
    part: int = 0
    at: float = 0.0
    session: str = ""
    path: str = ""
    body: dict[str, Any] | None = None


class RecordedRequest(Struct, kw_only=True, omit_defaults=True):
    """One answer: its prompt, parameters and seed, and the tokens that were served.

    ``params``: fields of `SamplingParams` that differ from the defaults. ``options``: options of
    `EngineConfig` that may change a token (`OPTIONS`). ``closes``: whether structured output had to
    be complete within ``max_tokens``. ``shown``: special tokens that can match stop strings.
    ``kernels``: names of the kernels; equal kernels give equal bits. ``mark``: the model's
    `identity.model_mark`. ``serving``: settings of the server that change prompts. ``seconds``:
    duration of the answer. ``redacted``: the answer's text after a redaction, which removes the
    prompt and the tokens; None without one. ``v``: the version of the record's form; 0 in old
    records, which do not have it.
    """

    id: str
    model: str
    prompt: list[int]
    params: dict[str, Any]
    seed: int
    tokens: list[int] = []
    finish_reason: str = ""
    stop_reason: int | str | None = None
    closes: bool = False
    shown: list[int] = []
    options: dict[str, Any] = {}
    kernels: str = ""
    foretoken: str = ""
    exact: bool = True
    asked: Asked | None = None
    mark: str = ""
    serving: dict[str, Any] = {}
    seconds: float = 0.0
    redacted: str | None = None
    v: int = 0

    @property
    def sampling(self) -> SamplingParams:
        """The parameters with the seed. Raises `ForetokenError`, which names the record."""
        given = dict(self.params)
        try:
            if (bias := given.get("logit_bias")) is not None:
                given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            return SamplingParams(**given, seed=self.seed)
        except (TypeError, ValueError, AttributeError) as error:  # with `InvalidRequest`
            message = f"{self.id} was recorded with invalid parameters: {error}"
            raise ForetokenError(message) from None


class _Version(Struct):
    v: int = 0


def read_record(line: bytes) -> RecordedRequest:
    """Return the record in a line. Raises `msgspec.DecodeError`, also for a newer version."""
    version = msgspec.json.decode(line, type=_Version).v
    if not 0 <= version <= VERSION:
        raise msgspec.ValidationError(
            f"it has version {version}, and this foretoken reads versions up to {VERSION}: use the "
            "foretoken that wrote it, or a newer one"
        )
    return msgspec.json.decode(line, type=RecordedRequest)


def plain_params(params: Any) -> dict[str, Any]:  # noqa: ANN401 - of any request
    """Return the fields that determine tokens, as JSON values.

    Fields whose default depends on the model (`RECOMMENDED`) are always included.
    """
    found: dict[str, Any] = {}
    for each in fields(params):
        value = getattr(params, each.name)
        if each.name in NO_EFFECT:
            continue
        if each.name in RECOMMENDED:  # another server may have another default for the field
            found[each.name] = value + 0  # makes a subclass of a number a plain one
        elif value != each.default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found


def record_of(request: Request, **about: Any) -> RecordedRequest:  # noqa: ANN401 - its fields
    """Return the record of a request that has ended.

    ``about``: fields of the record that describe the model and the end of the answer.
    """
    sampling, prompt_len = request.sampling, request.prompt_len
    return RecordedRequest(
        id=request.request_id,
        prompt=request.tokens[:prompt_len].tolist(),
        params=plain_params(sampling.params),
        seed=sampling.seed,
        tokens=request.tokens[prompt_len:].tolist(),
        closes=getattr(sampling.constraint, "limit", None) is not None,
        seconds=round(request.usage.total_time, 3),
        shown=sorted(request.shown_ids),
        v=VERSION,
        **about,
    )


def engine_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an engine that are in `OPTIONS` and have a value."""
    return {name: settings[name] for name in OPTIONS if settings.get(name) is not None}


def kernels_of(settings: Mapping[str, Any]) -> str:
    """Return the name of an engine's backend, with the variant of native kernels."""
    ops = str(settings.get("ops", "")).removesuffix("Ops").lower()
    if ops != "native":
        return ops
    from ...core.ops.native import native_library

    library = native_library()
    return ops if library is None else f"{ops} {library.variant}"


def find_record(request_id: str, place: Path) -> RecordedRequest:
    """Return the latest record with this id in a file or in a folder's ``*.jsonl`` files.

    Raises `InvalidRequest` if no record has the id, `ForetokenError` for an unreadable file.
    """
    found = None
    try:
        for line in _lines(place):
            if request_id.encode() in line:
                record = read_record(line)
                found = record if record.id == request_id else found
    except OSError as error:
        raise ForetokenError(f"{place}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetokenError(
            f"{place} has a line that is not a recorded request: {error}"
        ) from None
    if found is None:
        message = f"{place} has no record of request {request_id} (see serve --record-requests DIR)"
        raise InvalidRequest(message, param="id")
    return found


def files_in(place: Path) -> list[Path]:
    """Return the files of records in a folder, or the file itself."""
    return sorted(place.glob("*.jsonl")) if place.is_dir() else [place]


def _lines(place: Path) -> Iterator[bytes]:
    for file in files_in(place):
        with file.open("rb") as opened:
            yield from opened
