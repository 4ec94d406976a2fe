"""EngineConfig: the options of an engine for `serve`, LLM and AsyncLLM, and their checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidRequest, shown
from .interface.extras.packing import LEAST_BUDGET
from .interface.kv_codec import KV_CODECS, KV_DTYPE_HELP, NATIVE, KvDtype
from .interface.request import MAX_TTL
from .interface.sampling import RECOMMENDED, TokenSamplingParams
from .options.checks import MAX_PORT, require, tcp_port
from .options.settings import SIZE, check_settings, parse_size, setting, settings_of

KEEP_POLICIES = ("window", "triattention")
FORM_OF_PACKING = "window:N or triattention:N"
REMOTE = "mooncake://HOST:PORT[?lend=SIZE]"
OVERRIDES = "override_generation_config"
TEMPLATE_KWARGS = "default_chat_template_kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of a step (tokens, requests), and the size of a KV page in tokens."""

    page_size: int
    max_batch_tokens: int
    max_running: int


# A step reads the weights once for all of its rows. On a GPU hundreds of rows cost little more than
# one, so steps are larger. A GPU's attention kernels load 32 keys at a time, so a page has 32.
_SIZES = {
    "cpu": Sizes(page_size=16, max_batch_tokens=256, max_running=64),
    "cuda": Sizes(page_size=32, max_batch_tokens=2048, max_running=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine: settings that each have a command-line flag and a help text.

    A field that is None gets a value that suits the model and the device.
    """

    draft: str = setting(
        "auto",
        "drafters to use: auto (those that suit the model), none, or a comma-separated list of "
        "auto, radix, suffix, ngram and one of: mtp (the checkpoint's layer for multi-token "
        "prediction), self (the model itself in 4 bits), PATH of a draft model, trained head or "
        "assistant",
        "SPEC",
        group="speculation",
        is_basic=True,
    )
    draft_vocab: Literal["same", "any"] = setting(
        "same",
        "vocabulary that a draft model may have: only the target's (same), or also another one, "
        "from which drafts are converted as text (any)",
        group="speculation",
    )
    speculation: Literal["auto", "off"] | int = setting(
        "auto",
        "number of draft tokens per request and step: chosen by cost and acceptance rate (auto), "
        "0 (off), or always K",
        "auto|off|K",
        is_basic=True,
    )
    exact: Literal["spec", "batch", "off"] = setting(
        "spec",
        "guarantee that logits are bitwise equal: with and without drafts (spec), also in any "
        "batch (batch), or no guarantee (off)",
        group="model",
    )
    backend: Literal["auto", "native", "triton", "torch"] = setting(
        "auto",
        "kernels to use; auto: native on the CPU, triton on cuda, torch if these are not available",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "device to run the model on; auto: cuda if available, else cpu", is_basic=True
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of weights and activations; auto: as in the checkpoint", is_basic=True
    )
    quantize: Literal["none", "int8", "int4"] = setting(
        "none", "quantization of the weights; int4 on the CPU only", is_basic=True
    )
    load_format: Literal["auto", "random"] = setting(
        "auto",
        "weights to use: the checkpoint's (auto), or random ones from a fixed seed (random), for "
        "tests of speed without a download",
    )
    model_impl: Literal["auto", "own", "transformers"] = setting(
        "auto",
        "implementation of the layers: foretoken's decoder (own), or transformers' modules with "
        "foretoken's KV pages and kernels (transformers); auto: own if it supports the model",
    )
    tp: int = setting(
        1,
        "number of tensor-parallel processes, each with a part of the attention heads, MLPs and KV",
        least=1,
    )
    threads: int | None = setting(
        None,
        "number of CPU threads for the model, in each process (all cores, divided by --tp; with "
        "the torch backend all but one)",
        least=1,
        most=1024,
        is_basic=True,
    )
    generation_config: Literal["model", "none"] = setting(
        "model",
        "sampling values for requests that leave them out: the model's recommended ones (model), "
        "or OpenAI's defaults (none)",
    )
    override_generation_config: str | Mapping[str, float] | None = setting(
        None,
        "sampling values that replace the model's recommended ones, as a JSON object with "
        "temperature, top_p, top_k, min_p and repetition_penalty; a request's values take "
        "precedence",
        "JSON",
    )
    chat_template: str | None = setting(
        None,
        "file with a Jinja chat template that replaces the model's",
        "FILE",
        group="conversations",
        is_basic=True,
    )
    default_chat_template_kwargs: str | Mapping[str, Any] | None = setting(
        None,
        "default variables of the chat template, as a JSON object; a request's "
        "chat_template_kwargs take precedence",
        "JSON",
    )
    special_tokens_in_text: bool = setting(
        False,
        "parse special tokens written in messages and tool definitions as tokens; by default they "
        "are plain text, so that content cannot forge a turn",
    )
    no_images: bool = setting(
        False, "reject images in prompts, and do not load the image tower", group="images"
    )
    max_images: int = setting(8, "maximum number of images per request", least=1)
    max_image_pixels: int = setting(
        4194304, "maximum number of pixels per image, checked before it is decoded", least=1
    )
    image_cache: str | int = setting(
        "256MiB",
        "size of each of two caches: decoded images, and outputs of the image tower; the latest "
        "entry is kept even if it alone exceeds the size",
        SIZE,
        least=1,
    )
    media_dir: str | None = setting(
        None,
        "folder from which requests may read images by file:// URL (default: none)",
        "DIR",
    )
    kv_cache_dtype: KvDtype = setting(  # noqa: RUF009 - an alias of a Literal is immutable, too
        "auto", KV_DTYPE_HELP, group="KV cache"
    )
    kv_memory: str | int | None = setting(
        None,
        "size of the KV pool, e.g. 4GiB (a quarter of free memory, at most 2GiB; on cuda 9/10 of "
        "free memory)",
        SIZE,
        least=1,
        is_basic=True,
    )
    kv_tokens: int | None = setting(
        None, "size of the KV pool in tokens, instead of --kv-memory", least=1
    )
    page_size: int | None = setting(
        None,
        "number of tokens per KV page; models with recurrent layers need 16, 32 or 64 (16; on "
        "cuda 32)",
        least=1,
    )
    state_memory: str | int | None = setting(
        None,
        "size of the pool of recurrent states, for models with recurrent layers (half of the KV "
        "memory)",
        SIZE,
        least=1,
    )
    state_interval: int | None = setting(
        None,
        "cache the recurrent state every TOKENS tokens of a prompt, so that later prompts with the "
        "same prefix can resume from it; 0: only at likely branch points (4096; the page size if a "
        "state is no larger than the KV of a page)",
        "TOKENS",
    )
    kv_host: str | int | None = setting(
        None,
        "keep up to SIZE of KV in host memory, for reuse after a GPU's pool evicts it; on a CPU, "
        "raise --kv-memory instead",
        SIZE,
        least=1,
    )
    kv_disk: str | None = setting(
        None,
        "keep up to SIZE of KV in files below DIR, for reuse after the pool evicts it and after a "
        "restart, e.g. /var/cache/kv:100GiB",
        "DIR:SIZE",
    )
    kv_remote: str | None = setting(
        None,
        "keep KV in a Mooncake Store that several servers share, given as mooncake://HOST:PORT of "
        "its master; append ?lend=SIZE to lend it memory of this machine; needs the extra mooncake",
        "URL",
    )
    kv_evict: str | None = setting(
        None,
        "limit the KV of long answers: keep the KV of the prompt and of N answer tokens (at least "
        "256), which are the latest (window) or those that later tokens are likely to attend to "
        "(triattention). Requests still share cached prompts. Changes answers of more than N + 128 "
        "tokens",
        "window:N|triattention:N",
    )
    kv_evict_stats: str | None = setting(
        None,
        "file written by foretoken calibrate; --kv-evict triattention:N requires it",
        "FILE",
    )
    kv_transfer: Literal["nixl"] | None = setting(
        None,
        "transport of KV from servers that compute prompts to servers that generate the answers, "
        "for requests with kv_transfer_params; needs the extra pd and FORETOKEN_CLUSTER_KEY "
        "(default: none)",
    )
    role: Literal["prefill", "decode", "both"] | None = setting(
        None,
        "role of a server with --kv-transfer: compute prompts for other servers (prefill), "
        "generate answers to prompts that others computed (decode), or both (default: both)",
    )
    kv_events: str | None = setting(
        None,
        "address on which to publish the pages that the cache adds and evicts, with their token "
        "ids, in the format of vLLM's KV events; needs the extra events (default: not published)",
        "tcp://HOST:PORT",
    )
    kv_events_replay: str | None = setting(
        None,
        "address on which subscribers can request KV events that they missed (the port after "
        "that of --kv-events)",
        "tcp://HOST:PORT",
    )
    kv_events_topic: str = setting(
        "",
        "topic of KV events: empty for vllm-router and Dynamo, kv@HOST:PORT@MODEL for llm-d's "
        "router",
        "TOPIC",
    )
    pin_quota: float = setting(
        0.25,
        "largest share of the KV pool that one cache_salt may pin, from 0 to 1",
        "SHARE",
        most=1,
    )
    session_ttl: float = setting(
        300.0,
        "pin the last turn of a session (x-session-id, prompt_cache_key) for at most S seconds, "
        "within --pin-quota; 0: do not pin it",
        "S",
        most=MAX_TTL,
    )
    cache_quota: float = setting(
        0.5,
        "share of the KV pool, from 0 to 1, above which pages of a cache_salt are evicted before "
        "those of others; 1: no such limit",
        "SHARE",
        most=1,
    )
    lora: tuple[str, ...] | Mapping[str, str] = setting(
        (),
        "LoRA adapter in a folder in PEFT's format, used by requests for the model NAME; "
        "repeatable",
        "NAME=PATH",
        group="adapters",
    )
    max_loras: int = setting(8, "maximum number of adapters in memory", most=1024)
    max_lora_rank: int = setting(64, "maximum rank of an adapter", least=1, most=1024)
    allow_weight_updates: bool = setting(
        False,
        "let a trainer pause the engine and replace the weights while it runs (/pause, "
        "/update_weights); each answer then reports its version of the weights",
        group="rollouts",
    )
    max_model_len: int | None = setting(
        None,
        "maximum number of tokens of prompt and answer together (the model's context length)",
        least=2,
        group="scheduling",
        is_basic=True,
    )
    max_batch_tokens: int | None = setting(
        None, "maximum number of tokens per step (256; on cuda 2048)", least=2
    )
    max_running: int | None = setting(
        None, "maximum number of running requests (64; on cuda 256)", least=1, is_basic=True
    )
    max_queued: int = setting(
        256, "maximum number of waiting requests; further ones are rejected with status 429"
    )
    max_slowdown: float = setting(
        2.0,
        "largest factor by which prefill chunks may lengthen the steps of decoding requests",
        least=1,
        most=inf,
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "auto",
        "launch each step before the tokens of the previous step are read; auto: on a GPU only; "
        "on: fail without a GPU",
    )
    aging_seconds: float = setting(
        10.0, "raise the priority of a waiting request by one every S seconds", "S", least=0.001
    )
    max_priority: int = setting(
        10, "limit of a request's priority, which must be from -N to N; 0: priorities are rejected"
    )
    step_timeout: float = setting(
        120.0,
        "exit if one step takes longer than S seconds; 0: no limit",
        "S",
        group="supervision",
    )
    ready_step_seconds: float = setting(
        10.0, "return 503 from /ready while a step takes longer than S seconds", "S"
    )
    dump_dir: str | None = setting(
        None, "folder for crash dumps (the system's temporary folder)", "DIR"
    )

    def __post_init__(self) -> None:
        """Check every option. Raises `InvalidRequest` naming a wrong one."""
        check_settings(self)
        _require(self.dump_dir != "", "dump_dir", "must not be empty")
        has_one_size = self.kv_memory is None or self.kv_tokens is None
        _require(has_one_size, "kv_tokens", "cannot be combined with kv_memory")
        if self.override_generation_config is not None:
            object.__setattr__(self, OVERRIDES, parse_overrides(self.override_generation_config))
        if self.default_chat_template_kwargs is not None:
            found = parse_object(TEMPLATE_KWARGS, self.default_chat_template_kwargs)
            object.__setattr__(self, TEMPLATE_KWARGS, found)
        object.__setattr__(self, "lora", _parse_adapters(self.lora))
        most = f"has {len(self.lora)} adapters, but max_loras is {self.max_loras}"
        _require(len(self.lora) <= self.max_loras, "lora", most)
        self.kv_disk_place()
        self.kv_remote_place()
        self.packing()
        _require(self.role is None or self.kv_transfer is not None, "role", "needs kv_transfer")
        self._check_events()
        self._check_supported()

    def kv_disk_place(self) -> tuple[Path, int] | None:
        """Return the folder and the most bytes that ``kv_disk`` names; None if it is not set.

        Raises `InvalidRequest` for a text that is not DIR:SIZE.
        """
        if self.kv_disk is None:
            return None
        folder, _, size = self.kv_disk.rpartition(":")
        _require(folder != "", "kv_disk", f"must be DIR:SIZE, not {shown(self.kv_disk)}")
        try:
            return Path(folder).expanduser(), parse_size(size)
        except ValueError as error:
            raise InvalidRequest(f"kv_disk: SIZE {error}", param="kv_disk") from None

    def packing(self) -> tuple[str, int] | None:
        """Return the policy and the token budget that ``kv_evict`` names; None if it is not set.

        Raises `InvalidRequest` for a text that is not POLICY:TOKENS.
        """
        if self.kv_evict is None:
            _require(self.kv_evict_stats is None, "kv_evict_stats", "needs kv_evict")
            return None
        policy, _, count = self.kv_evict.partition(":")
        is_number = count.isascii() and count.isdigit() and len(count) < 10
        known = policy in KEEP_POLICIES and is_number
        _require(known, "kv_evict", f"must be {FORM_OF_PACKING}, not {shown(self.kv_evict)}")
        enough = int(count) >= LEAST_BUDGET
        _require(enough, "kv_evict", f"must keep at least {LEAST_BUDGET} tokens, not {count}")
        has_stats = self.kv_evict_stats is not None
        wants_stats = policy == "triattention"
        _require(has_stats or not wants_stats, "kv_evict", "triattention needs kv_evict_stats")
        _require(wants_stats or not has_stats, "kv_evict_stats", "needs kv_evict triattention:N")
        return policy, int(count)

    @property
    def lora_folders(self) -> dict[str, Path]:
        """Folders of the LoRA adapters, by adapter name."""
        return {name: Path(path).expanduser() for name, path in dict(self.lora).items()}  # type: ignore[arg-type]

    @property
    def has_tiers(self) -> bool:
        """Whether KV is kept outside the pool."""
        kept = (self.kv_host, self.kv_disk, self.kv_remote) != (None, None, None)
        return kept or self.takes_kv

    @property
    def gives_kv(self) -> bool:
        """Whether other engines read the KV of prompts that this engine computes."""
        return self.kv_transfer is not None and self.role != "decode"

    @property
    def takes_kv(self) -> bool:
        """Whether this engine reads the KV of prompts from other engines."""
        return self.kv_transfer is not None and self.role != "prefill"

    def kv_remote_place(self) -> tuple[str, int, int] | None:
        """Return the host and port of the ``kv_remote`` master, and the bytes of memory lent to it.

        None if ``kv_remote`` is not set. Raises `InvalidRequest` for an address of another form.
        """
        if self.kv_remote is None:
            return None
        found = re.fullmatch(r"mooncake://([\w.-]+):(\d{1,5})(?:\?lend=(\w+))?", self.kv_remote)
        _require(found is not None, "kv_remote", f"must be {REMOTE}, not {shown(self.kv_remote)}")
        host, port, lent = found.groups() if found is not None else ("", "0", None)
        try:
            return host, int(port), 0 if lent is None else parse_size(lent)
        except ValueError as error:
            raise InvalidRequest(f"kv_remote: lend {error}", param="kv_remote") from None

    def _check_supported(self) -> None:
        on_cpu = self.device != "cuda" or self.backend != "native"
        require(on_cpu, "backend", "native runs on the CPU only; use triton or torch on cuda")
        self._check_quantize()
        self._check_tp()
        codec = KV_CODECS[self.kv_cache_dtype]
        has_kv = codec.native_code is not None or self.backend != "native"
        why = f"{codec.name} needs a GPU; the native backend supports {' and '.join(NATIVE)}"
        require(has_kv, "kv_cache_dtype", why)

    def _check_quantize(self) -> None:
        by_kernels = self.quantize != "int8" or self.backend != "torch"
        require(by_kernels, "quantize", "int8 needs the native or the triton backend, not torch")
        may_be_native = self.device != "cuda" and self.backend in ("auto", "native")
        by_native = self.quantize != "int4" or may_be_native
        require(by_native, "quantize", "int4 needs the native backend on the CPU")

    def _check_tp(self) -> None:
        """Raise `InvalidRequest` for options that tensor parallelism does not support."""
        if self.tp == 1:
            return
        on_cpu = self.device != "cuda" and self.backend != "triton"
        _require(on_cpu, "tp", "runs on the CPU only, without --device cuda or --backend triton")
        is_own = self.model_impl != "transformers"
        _require(is_own, "tp", "cannot be combined with model_impl transformers")
        _require(not self.lora, "tp", "cannot be combined with lora")
        _require(self.kv_evict is None, "tp", "cannot be combined with kv_evict")

    @property
    def events_addresses(self) -> tuple[str, str] | None:
        """Addresses of published and of replayed KV events; None if events are not published."""
        if self.kv_events is None:
            return None
        if self.kv_events_replay is not None:
            return self.kv_events, self.kv_events_replay
        host, _, port = self.kv_events.rpartition(":")
        return self.kv_events, f"{host}:{int(port) and int(port) + 1}"

    def _check_events(self) -> None:
        for name in ("kv_events_replay", "kv_events_topic"):
            _require(self.kv_events is not None or not getattr(self, name), name, "needs kv_events")
        if self.kv_events_replay is not None:
            tcp_port("kv_events_replay", self.kv_events_replay)
        if self.kv_events is not None:
            port = tcp_port("kv_events", self.kv_events)
            has_next = port < MAX_PORT or self.kv_events_replay is not None
            _require(has_next, "kv_events", "has the last port, so kv_events_replay must be set")

    def sizes(self, device: str) -> Sizes:
        """Return the configured sizes; a size that is not set gets the default of ``device``."""
        usual = _SIZES[device]
        return Sizes(
            page_size=self.page_size or usual.page_size,
            max_batch_tokens=self.max_batch_tokens or usual.max_batch_tokens,
            max_running=self.max_running or usual.max_running,
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(settings_of(cls))


def parse_overrides(given: str | Mapping[str, float] | None) -> dict[str, Any]:
    """Return sampling values by field, from a mapping or the text of a JSON object.

    Raises `InvalidRequest` naming the field if it is unknown or outside its bounds.
    """
    if given is None:
        return {}
    found = parse_object(OVERRIDES, given)
    if isinstance(top_k := found.get("top_k"), float) and top_k.is_integer():
        found = {**found, "top_k": int(top_k)}  # some files have it as a float
    for name in found:
        known = f"has no field {shown(name)}; its fields are {', '.join(RECOMMENDED)}"
        require(name in RECOMMENDED, OVERRIDES, known)
    try:
        TokenSamplingParams(**found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{OVERRIDES}: {error}", param=OVERRIDES) from None
    return found


def _parse_adapters(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the folder of each adapter by name.

    Raises `InvalidRequest` for an item that is not NAME=PATH, and for a repeated name.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else []
    for text in () if isinstance(given, Mapping) else given:
        name, _, path = text.partition("=")
        pairs.append((name, path))
    for name, path in pairs:
        fits = isinstance(path, str) and name != "" and path != ""
        _require(fits, "lora", "must be NAME=PATH")
    _require(len(dict(pairs)) == len(pairs), "lora", "has two adapters with the same name")
    return dict(pairs)


def parse_object(name: str, given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping, or the parsed text of a JSON object.

    Raises `InvalidRequest` naming the option.
    """
    found: object = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} must be JSON: {error}", param=name) from None
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{name} must be a JSON object, not {shown(found)}", param=name)
    return dict(found)


def format_size(num_bytes: int) -> str:
    """Format bytes with three digits and the largest unit that suits: 3.2 GiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {message}", param=param)
