"""The composition root: the only place that names concrete proposers, models and pools."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.admission import SchedulerLimits
from ..core.config import EngineConfig, parse_size
from ..core.engine import Engine
from ..core.errors import InvalidRequest, ModelLoadError
from ..core.kv_pool import KVPool, bytes_per_page
from ..core.model.decoder import Decoder
from ..core.model.loader import load_decoder
from ..core.proposer import Proposer
from ..core.runner import ModelRunner
from ..core.scheduler import Scheduler
from ..core.speculation import FixedDepth
from ..draft.first_of import FirstOf
from ..draft.lm import LmProposer
from ..draft.ngram import NgramProposer
from ..radix_cache import PrefixCache

logger = logging.getLogger(__name__)
BUILTIN = Path(__file__).resolve().parent.parent / "draft" / "builtin"
BUILTIN_NAME = "foretoken-builtin"
AUTO_DEPTH = 2  # draft tokens a step: more lose at temperature 1 in batches of 8 (measured)
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
    folder = BUILTIN / "target" if model is None else find_folder(model)
    target = _load(folder, config)
    drafts = _load_drafts(config, folder, target, is_builtin=model is None)
    num_pages = _num_pages(config, [target, *drafts.values()])
    pools = [
        decoder.make_pool(num_pages, page_size=config.page_size)
        for decoder in (target, *drafts.values())
    ]
    proposer = _proposer(config, drafts, pools[1:], is_builtin=model is None)
    scheduler = Scheduler(
        PrefixCache(num_pages, config.page_size),
        _limits(config, target, proposer),
        FixedDepth(_depth(config) if proposer is not None else 0),
    )
    runner = ModelRunner(target, pools[0], proposer)
    return Built(
        engine=Engine(scheduler, runner, on_thread_start=_thread_setter(config.threads)),
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


def _thread_setter(threads: int | None) -> Callable[[], None]:
    """Torch keeps its thread count per thread: the model thread must set its own.

    By default one core is left to the event loop: two threads on two cores were slower than one.
    """
    count = threads or max(1, len(os.sched_getaffinity(0)) - 1)
    return lambda: torch.set_num_threads(count)


def _load(folder: Path, config: EngineConfig) -> Decoder:
    return load_decoder(
        folder,
        dtype=config.dtype,
        device="cpu",
        load_format=config.load_format,
        exact=config.exact,
    )


# -- drafts -------------------------------------------------------------------------------------


def _sources(config: EngineConfig, *, is_builtin: bool) -> list[str]:
    """The comma list, with auto resolved: look-up, then the built-in pair's own draft model."""
    if config.draft == "none" or config.speculation in ("off", 0):
        return []
    if config.draft == "auto":
        return ["ngram", str(BUILTIN / "draft")] if is_builtin else ["ngram"]
    sources = [source.strip() for source in config.draft.split(",")]
    for source in sources:
        if source in ("radix", "suffix", "auto", "none", "") or source.startswith("oracle:"):
            raise InvalidRequest(f"draft: '{source}' is not supported yet here", param="draft")
    return sources


def _load_drafts(
    config: EngineConfig, folder: Path, target: Decoder, *, is_builtin: bool
) -> dict[str, Decoder]:
    paths = [s for s in _sources(config, is_builtin=is_builtin) if s != "ngram"]
    return {path: _load_draft(find_folder(path), folder, target, config) for path in paths}


def _load_draft(
    folder: Path, target_folder: Path, target: Decoder, config: EngineConfig
) -> Decoder:
    draft = _load(folder, config)
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise ModelLoadError(f"{folder}: a draft of {ours} tokens for a target of {theirs}")
    if _vocabulary(folder) != _vocabulary(target_folder):
        raise ModelLoadError(f"{folder}: the draft's tokenizer differs from the target's")
    return draft


def _vocabulary(folder: Path) -> object:
    """Token text to id, or None where there is no tokenizer file to compare."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")


def _proposer(
    config: EngineConfig,
    drafts: dict[str, Decoder],
    pools: Sequence[KVPool],
    *,
    is_builtin: bool,
) -> Proposer | None:
    pool_of = dict(zip(drafts, pools, strict=True))
    proposers: list[Proposer] = [
        NgramProposer() if source == "ngram" else LmProposer(drafts[source], pool_of[source])
        for source in _sources(config, is_builtin=is_builtin)
    ]
    if len(proposers) < 2:
        return proposers[0] if proposers else None
    return FirstOf(proposers)


def _limits(config: EngineConfig, target: Decoder, proposer: Proposer | None) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_queued=config.max_queued,
        max_model_len=_model_len(config, target),
        vocab_size=target.config.vocab_size,
        depth_cap=64 if proposer is not None else 0,
    )


def _depth(config: EngineConfig) -> int:
    return config.speculation if isinstance(config.speculation, int) else AUTO_DEPTH


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
    per_page = sum(_bytes_per_page(decoder, config.page_size) for decoder in decoders)
    longest = _model_len(config, decoders[0])
    if config.kv_memory is None:
        useful = config.max_running * -(-longest // config.page_size)
        return max(1, min(useful, _default_budget() // per_page))
    num_pages = parse_size(config.kv_memory) // per_page
    if num_pages < 1:
        raise InvalidRequest(f"kv_memory holds no page of {per_page} bytes", param="kv_memory")
    return num_pages


def _bytes_per_page(decoder: Decoder, page_size: int) -> int:
    return bytes_per_page(
        num_layers=decoder.config.num_layers,
        num_kv_heads=decoder.config.num_kv_heads,
        head_dim=decoder.config.head_dim,
        page_size=page_size,
        dtype=decoder.dtype,
    )


def _default_budget() -> int:
    """Bytes: a quarter of the memory that is free now, 2 GiB at most."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(DEFAULT_KV_BYTES, free // 4)
