"""The composition root: the only place that names concrete proposers, models and pools."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.admission import SchedulerLimits
from ..core.config import EngineConfig, parse_size
from ..core.engine import Engine
from ..core.errors import InvalidRequest, ModelLoadError
from ..core.kv_pool import KVPool, bytes_per_page
from ..core.memory import keep_freed_memory
from ..core.model.decoder import Decoder
from ..core.model.loader import load_decoder
from ..core.ops import Ops
from ..core.ops.native_ops import NativeOps
from ..core.runner import ModelRunner
from ..core.scheduler import Scheduler
from ..core.watchdog import Supervision
from ..draft.lm import LmProposer
from ..radix_cache import PrefixCache
from .drafts import check_compatible, make_speculator, measure_costs, parse_draft

logger = logging.getLogger(__name__)
BUILTIN = Path(__file__).resolve().parent.parent / "draft" / "builtin"
BUILTIN_NAME = "foretoken-builtin"
DEFAULT_KV_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A ready engine and what the text side must know of its model."""

    engine: Engine
    folder: Path  # of the target: tokenizer, chat template
    name: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    eos_token_ids: frozenset[int]


def build(model: str | os.PathLike[str] | None, config: EngineConfig) -> Built:
    """Load a model and its drafts and put an engine round them; blocking.

    Raises `ModelLoadError`, or `InvalidRequest` for an option that does not suit the model.
    """
    keep_freed_memory()
    folder = BUILTIN / "target" if model is None else find_folder(model)
    spec = parse_draft(config, builtin_draft=str(BUILTIN / "draft") if model is None else None)
    target = _load(folder, config)
    draft = None if spec.model is None else _load_draft(spec.model, folder, target, config)
    num_pages = _num_pages(config, [each for each in (target, draft) if each is not None])
    pool = _make_pool(target, num_pages, config)
    pair = None if draft is None else (draft, _make_pool(draft, num_pages, config))
    speculator, costs = make_speculator(config, spec, target.config.vocab_size)
    scheduler = Scheduler(
        _prefix_cache(config, num_pages),
        _limits(config, target),
        speculator,
    )
    by_rejection = config.verify == "rejection"
    tau = 1.0 if model is None else None  # measured for the built-in pair; else tuned
    proposer = LmProposer(*pair, independent=by_rejection, tau=tau) if pair is not None else None
    runner = ModelRunner(target, pool, proposer, rejection=by_rejection)
    measures = not spec.is_empty and config.speculation == "auto"
    return Built(
        engine=Engine(
            scheduler,
            runner,
            on_thread_start=_thread_setter(config.threads, target.ops),
            warm_up=lambda: measure_costs(costs, (target, pool), pair) if measures else None,
            supervision=_supervision(config),
        ),
        folder=folder,
        name=BUILTIN_NAME if model is None else _name(model),
        vocab_size=target.config.vocab_size,
        max_model_len=scheduler.capacity,
        eos_token_ids=frozenset(target.config.eos_token_ids),
    )


def find_folder(model: str | os.PathLike[str]) -> Path:
    """The local folder of a model: a path, or a hub id, which is downloaded by that name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    looks_like_id = str(model).count("/") == 1 and not str(model).startswith((".", "/", "~"))
    if not looks_like_id:
        raise ModelLoadError(f"{model}: no such folder, and not a hub id of the form owner/name")
    return _download(str(model))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"{hub_id}: no such folder, and not found on the hub") from error


def _name(model: str | os.PathLike[str]) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else str(model)


def _thread_setter(threads: int | None, ops: Ops) -> Callable[[], None]:
    """By default every core for the native kernels: their threads sleep as soon as they wait.

    OpenMP's spin, and take the event loop's core from it: torch leaves one to it (measured: two
    threads on two cores were slower than one, and with the native kernels 1.2 to 1.4 times faster).
    """
    cores = len(os.sched_getaffinity(0))
    count = threads or (cores if isinstance(ops, NativeOps) else max(1, cores - 1))
    return lambda: ops.set_threads(count)


def _load(folder: Path, config: EngineConfig) -> Decoder:
    return load_decoder(
        folder,
        dtype=config.dtype,
        device="cpu",
        load_format=config.load_format,
        exact=config.exact,
        backend=config.backend,
        quantize=config.quantize,
    )


def _load_draft(model: str, target_folder: Path, target: Decoder, config: EngineConfig) -> Decoder:
    folder = find_folder(model)
    draft = _load(folder, config)
    check_compatible(folder, draft, target_folder, target)
    return draft


def _supervision(config: EngineConfig) -> Supervision:
    return Supervision(
        step_timeout=config.step_timeout,
        ready_step_seconds=config.ready_step_seconds,
        dump_dir=Path(config.dump_dir or tempfile.gettempdir()),
        about=asdict(config),
    )


def _limits(config: EngineConfig, target: Decoder) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_slowdown=config.max_slowdown,
        max_running=config.max_running,
        max_queued=config.max_queued,
        max_model_len=_model_len(config, target),
        vocab_size=target.config.vocab_size,
        aging_seconds=config.aging_seconds,
        max_priority=config.max_priority,
    )


def _prefix_cache(config: EngineConfig, num_pages: int) -> PrefixCache:
    return PrefixCache(
        num_pages, config.page_size, pin_quota=config.pin_quota, cache_quota=config.cache_quota
    )


def _model_len(config: EngineConfig, target: Decoder) -> int:
    longest = target.config.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        message = f"max_model_len {config.max_model_len} exceeds the model's {longest}"
        raise InvalidRequest(message, param="max_model_len")
    return config.max_model_len or longest


# -- KV pools -----------------------------------------------------------------------------------


def _num_pages(config: EngineConfig, decoders: Sequence[Decoder]) -> int:
    """Pages of all pools together that fit the budget; the same number in each."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // config.page_size)
    per_page = sum(_bytes_per_page(decoder, config) for decoder in decoders)
    longest = _model_len(config, decoders[0])
    if config.kv_memory is None:
        useful = config.max_running * -(-longest // config.page_size)
        return max(1, min(useful, _default_budget() // per_page))
    num_pages = parse_size(config.kv_memory) // per_page
    if num_pages < 1:
        raise InvalidRequest(f"kv_memory holds no page of {per_page} bytes", param="kv_memory")
    return num_pages


def _make_pool(decoder: Decoder, num_pages: int, config: EngineConfig) -> KVPool:
    """A draft model's pool is of the same kind: it never changes what is said, only how fast."""
    return decoder.make_pool(num_pages, page_size=config.page_size, kv_dtype=config.kv_cache_dtype)


def _bytes_per_page(decoder: Decoder, config: EngineConfig) -> int:
    return bytes_per_page(
        num_layers=decoder.config.num_layers,
        num_kv_heads=decoder.config.num_kv_heads,
        head_dim=decoder.config.head_dim,
        page_size=config.page_size,
        dtype=decoder.dtype,
        kv_dtype=config.kv_cache_dtype,
    )


def _default_budget() -> int:
    """Bytes: a quarter of the memory that is free now, 2 GiB at most."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(DEFAULT_KV_BYTES, free // 4)
