"""EngineConfig: the engine's options of `serve`, LLM and AsyncLLM, checked once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, get_args, get_type_hints

from .errors import InvalidRequest, shown
from .interface.sampling import RECOMMENDED, TokenSamplingParams
from .validation import (
    ENDLESS,
    check_bounds,
    check_integer,
    check_number,
    require,
    with_defaults,
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
OVERRIDES = "override_generation_config"
REJECTION_WANTS_DEPTH = (
    "rejection needs a fixed depth, --speculation K: a depth chosen by the drafts biases the "
    "output of rejection sampling"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a step holds at most, and the tokens of a KV page."""

    page_size: int
    max_batch_tokens: int
    max_running: int


# A step reads the weights once for all of its rows: on a GPU, where hundreds of them cost little
# more than one, steps are larger. Its attention takes 32 keys at a time, which lie in one page.
_SIZES = {
    "cpu": Sizes(page_size=16, max_batch_tokens=256, max_running=64),
    "cuda": Sizes(page_size=32, max_batch_tokens=2048, max_running=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options, with the names of the command line's flags.

    A field that is None gets a value that suits the model and the device.

    - ``draft``: auto, none, or a comma list of look-up sources (auto: radix and suffix) and the
      path of one draft model or trained head.
    - ``draft_temperature``: temperature of a draft model: the request's (same), or a multiple of it
      tuned by acceptance rates (tuned).
    - ``speculation``: auto, off, or a fixed number of draft tokens for each step.
    - ``verify``: coupled, or rejection sampling at a fixed depth, for comparison.
    - ``exact``: bitwise equality of logits: with and without drafts (spec), in any batch too
      (batch), or not guaranteed (off).
    - ``device``: auto is cuda where torch sees one, else cpu.
    - ``backend``: auto is native kernels on the CPU and Triton's on cuda, or torch where these are
      not available.
    - ``kv_cache_dtype``: auto is the model's; int8 and fp8 (e4m3, on a GPU) have a scale for each
      token and head.
    - ``kv_tokens`` or ``kv_memory`` ("4GiB"): size of the KV pool.
    - ``pin_quota``: share of the pool that one cache salt may pin; all may pin twice as much.
    - ``cache_quota``: share of the pool beyond which one cache salt's pages are evicted first; 1:
      never.
    - ``max_slowdown``: largest factor by which prompt chunks may lengthen the steps of running
      answers; a larger one brings first tokens sooner and slows running streams.
    - ``overlap``: launch a step before the tokens of the step before it are read, where each
      request only decodes; auto is on for a GPU.
    - ``aging_seconds``: seconds of waiting that count as one priority.
    - ``max_priority``: priorities of requests are from minus this to this; 0: none allowed.
    - ``step_timeout``: seconds after which the engine gives up a step and ends; 0: no limit.
    - ``ready_step_seconds``: seconds of a step beyond which the server is not ready.
    - ``dump_dir``: folder for crash dumps; None is the system's temporary folder.
    - ``model_impl``: own is foretoken's decoder, transformers is transformers' modules on its pages
      and kernels; auto is own for models that it supports.
    - ``generation_config``: temperature, top_p, top_k, min_p and repetition_penalty of requests
      that leave them out: the values that the model recommends (model), or OpenAI's (none).
    - ``override_generation_config``: values in place of the model's and of OpenAI's, as a mapping
      or the text of a JSON object.
    """

    draft: str = "auto"
    draft_temperature: Literal["same", "tuned"] = "same"
    speculation: Literal["auto", "off"] | int = "auto"
    verify: Literal["coupled", "rejection"] = "coupled"
    exact: Literal["spec", "batch", "off"] = "spec"
    backend: Literal["auto", "native", "triton", "torch"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantize: Literal["none", "int8", "int4"] = "none"
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    kv_memory: str | int | None = None
    kv_tokens: int | None = None
    page_size: int | None = None
    pin_quota: float = 0.25
    cache_quota: float = 0.5
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_slowdown: float = 2.0
    overlap: Literal["auto", "on", "off"] = "auto"
    max_running: int | None = None
    max_queued: int = 256
    aging_seconds: float = 10.0
    max_priority: int = 10
    threads: int | None = None
    step_timeout: float = 120.0
    ready_step_seconds: float = 10.0
    dump_dir: str | None = None
    load_format: Literal["auto", "random"] = "auto"
    model_impl: Literal["auto", "own", "transformers"] = "auto"
    generation_config: Literal["model", "none"] = "model"
    override_generation_config: str | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Check every option; a bad one raises `InvalidRequest` naming it."""
        for name, hint in get_type_hints(EngineConfig).items():
            self._check_choice(name, get_args(hint))
        check_bounds(self, BOUNDS)
        require(self.dump_dir != "", "dump_dir", "must not be empty")
        require(isinstance(self.draft, str), "draft", "must be a string")
        if self.speculation not in ("auto", "off"):
            check_integer("speculation", self.speculation, 0, ENDLESS)
        if self.kv_memory is not None:
            parse_size(self.kv_memory)
        if self.override_generation_config is not None:
            object.__setattr__(self, OVERRIDES, parse_overrides(self.override_generation_config))
        self._check_supported()

    def _check_choice(self, name: str, args: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if name != "speculation" and args and all(isinstance(a, str) for a in args):
            require(
                value in args,
                name,
                f"must be one of {', '.join(map(str, args))}, not {shown(value)}",
            )

    def _check_supported(self) -> None:
        # Rejection sampling is exact only if the depth does not follow from what was drafted.
        fixed = self.verify == "coupled" or self.speculation != "auto"
        require(fixed, "verify", REJECTION_WANTS_DEPTH)
        on_cpu = self.device != "cuda" or self.backend != "native"
        require(on_cpu, "backend", "native runs on the CPU only; use triton or torch on cuda")
        self._check_quantize()
        has_kv = self.kv_cache_dtype != "fp8" or self.backend != "native"
        require(has_kv, "kv_cache_dtype", "fp8 needs a GPU; the native backend supports int8")

    def _check_quantize(self) -> None:
        by_kernels = self.quantize != "int8" or self.backend != "torch"
        require(by_kernels, "quantize", "int8 needs the native or the triton backend, not torch")
        may_be_native = self.device != "cuda" and self.backend in ("auto", "native")
        by_native = self.quantize != "int4" or may_be_native
        require(by_native, "quantize", "int4 needs the native backend on the CPU")

    def sizes(self, device: str) -> Sizes:
        """What was asked for, and the rest as suits a device, cpu or cuda."""
        usual = _SIZES[device]
        return Sizes(
            page_size=self.page_size or usual.page_size,
            max_batch_tokens=self.max_batch_tokens or usual.max_batch_tokens,
            max_running=self.max_running or usual.max_running,
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options there are."""
        return tuple(f.name for f in fields(cls))


BOUNDS = with_defaults(
    EngineConfig,
    (
        ("kv_tokens", check_integer, 1, ENDLESS),
        ("page_size", check_integer, 1, ENDLESS),
        ("max_model_len", check_integer, 2, ENDLESS),
        ("max_batch_tokens", check_integer, 2, ENDLESS),
        ("max_running", check_integer, 1, ENDLESS),
        ("max_queued", check_integer, 0, ENDLESS),
        ("max_priority", check_integer, 0, ENDLESS),
        ("threads", check_integer, 1, ENDLESS),
        ("pin_quota", check_number, 0, 1),
        ("cache_quota", check_number, 0, 1),
        ("max_slowdown", check_number, 1, inf),
        ("aging_seconds", check_number, 0.001, ENDLESS),
        ("step_timeout", check_number, 0, ENDLESS),
        ("ready_step_seconds", check_number, 0, ENDLESS),
    ),
)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as 4GiB, 512MB or 1000000."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([KMG]I?)?B?\s*", str(text).upper())
    require(found is not None, "kv_memory", f"must be a size such as 4GiB, not {shown(text)}")
    assert found is not None  # for the type checker; _require raised otherwise
    size = int(float(found[1]) * _UNITS[found[2] or ""])
    require(size > 0, "kv_memory", f"must be above 0, not {shown(text)}")
    return size


def parse_overrides(given: str | Mapping[str, float] | None) -> dict[str, Any]:
    """Sampling values by field, from a mapping or the text of a JSON object.

    Raises `InvalidRequest` naming the field for one that is unknown or outside its bounds.
    """
    if given is None:
        return {}
    found: object = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{OVERRIDES} must be JSON: {error}", param=OVERRIDES) from None
    if not isinstance(found, Mapping):
        message = f"{OVERRIDES} must be a JSON object, not {shown(found)}"
        raise InvalidRequest(message, param=OVERRIDES)
    for name in found:
        known = f"has no field {shown(name)}; its fields are {', '.join(RECOMMENDED)}"
        require(name in RECOMMENDED, OVERRIDES, known)
    try:
        TokenSamplingParams(**found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{OVERRIDES}: {error}", param=OVERRIDES) from None
    return dict(found)


def format_size(num_bytes: int) -> str:
    """Format bytes with three digits and the largest unit that suits: 3.2 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
