"""The composition root: the only place that names concrete proposers, models and pools."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...core.config import EngineConfig, Sizes, format_size
from ...core.engine.engine import Engine
from ...core.engine.model_thread import Supervision
from ...core.errors import InvalidRequest
from ...core.execution.model_runner import ModelRunner
from ...core.execution.proposer import Proposer
from ...core.execution.ranks import Ranks, TpDecoder
from ...core.execution.warm_up import warm_up
from ...core.interface.settings import parse_size
from ...core.interface.tiers import KVTiers
from ...core.interface.transfers import PageServer
from ...core.model.assistant import is_assistant
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.fields import UnsupportedConfig
from ...core.model.formats.checkpoint import OnRead
from ...core.model.loader import load_decoder
from ...core.model.lora import load_lora
from ...core.model.opening import open_model, read_config
from ...core.model.pooling import read_pooling
from ...core.model.report import weight_files
from ...core.model.shapes import LM_HEAD
from ...core.model.sharding import check_shards
from ...core.model.vision import Vision, load_vision
from ...core.ops.backends import choose_ops
from ...core.ops.base import Ops
from ...core.ops.batch import SamplingPlan, Taps, Wanted
from ...core.ops.device import choose_device, free_memory
from ...core.ops.host_memory import keep_freed_memory
from ...core.ops.kv_pool import KVPool
from ...core.ops.native.native_ops import NativeOps
from ...core.ops.parallel import Comm
from ...core.ops.state_pool import StatePool
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...draft.control.cost_model import CostModel
from ...draft.control.outcome import NUM_BEST
from ...draft.control.profiler import TriedProposer
from ...draft.heads.assistant import join_assistant
from ...draft.heads.joined import JoinedHead, load_head
from ...draft.heads.kinds import head_kind
from ...draft.heads.proposer import HeadProposer
from ...draft.proposers.lm_proposer import LmProposer
from ...draft.proposers.self_draft import SelfProposer
from ...draft.proposers.text_proposer import TextProposer
from ...radix_cache import PrefixCache, StateSlots
from ..text.token_text import TokenText
from .built import Built
from .drafts import (
    MTP,
    NAMED,
    SELF,
    DraftSpec,
    find_draft,
    has_mtp,
    keeps_packed,
    make_speculator,
    measure_costs,
    mtp_head,
    parse_draft,
    rough_copy,
    texts_between,
)
from .eviction import eviction_of
from .kv_events import events_of, keys_of, name_fingerprint
from .kv_pools import make_pools, model_len, out_of_memory_told
from .model_files import ModelSource, find_model
from .sampling_defaults import sampling_defaults

if TYPE_CHECKING:
    from ...core.tiers.events import KVEventPublisher
    from ...core.tiers.keys import PageKeys
    from ...core.tiers.transfer_params import TransferParams
    from .fingerprint import ModelDigests

logger = logging.getLogger(__name__)
STATE_INTERVAL = 4096  # tokens between states that are kept of a prompt, where they are large
LocalBuilt: TypeAlias = Built[Engine]
_Model: TypeAlias = tuple[Decoder, KVPool]


def build(
    model: str | os.PathLike[str] | None, config: EngineConfig, *, wants_keys: bool = False
) -> LocalBuilt:
    """Load a model and its drafters and build an engine; blocking.

    ``wants_keys``: digest the weights while they are loaded, and give cached pages keys, for
    `Built.fingerprint`, `Built.kernels` and `Built.keys`.

    Raises `ModelLoadError`, or `InvalidRequest` for an option that the model does not support.
    """
    keep_freed_memory()
    source = find_model(model)
    with events_of(config) as events, ExitStack() as undo:  # a port that is taken shows at once
        built = _build(source, config, events, undo, wants_keys=wants_keys)
        undo.pop_all()
        return built


def _build(
    source: ModelSource,
    config: EngineConfig,
    events: KVEventPublisher | None,
    undo: ExitStack,
    *,
    wants_keys: bool,
) -> LocalBuilt:
    logger.info("loading %s (%s)", source.name, format_size(weight_files(source.path)[1]))
    defaults = sampling_defaults(source, config)  # refused before weights are read
    pooling = read_pooling(source.path)
    spec = parse_draft(config, own_draft=source.draft)
    device = _choose_device(config)
    sizes = config.sizes(device.type)
    draft_path = None if spec.model in (None, *NAMED) else find_draft(spec.model)
    has_tiers = config.has_tiers
    if has_tiers:
        _kv_tiers().check_places(config)
    if config.kv_transfer is not None:
        _kv_transfer().check_secret()
    has_keys = wants_keys or has_tiers or config.kv_transfer is not None
    digests = _make_digests() if has_keys else None
    on_read = None if digests is None else digests.target
    target, ranks = _load_target(source.path, config, device, on_read)
    if ranks is not None:
        undo.callback(ranks.end, at_once=True)
    if target.states:
        _refuse_tiers(config)
    eviction = eviction_of(config, target)
    set_threads = _thread_setter(_threads(config), target.ops)
    set_threads()
    vision = _load_vision(source.path, config, target, digests)
    if spec.may_lack_model and config.load_format == "auto" and has_mtp(source.path, target):
        spec = replace(spec, model=MTP, may_lack_model=False)
    draft, no_self_draft = _load_draft(
        source.path, spec, draft_path, config, target, None if digests is None else digests.head
    )
    has_pool = not draft.reads_target if isinstance(draft, JoinedHead) else spec.model != SELF
    drafts = [draft] if draft is not None and has_pool else []
    texts = None
    if draft_path is not None and draft is not None and not isinstance(draft, JoinedHead):
        texts = texts_between(draft_path, draft, source.path, target, config)
    pool, *draft_pools = make_pools(target, drafts, config, sizes)
    _say_what_computes(target, drafts, pool)
    by_rejection = config.verify == "rejection"
    proposer, measured = _make_proposer(draft, pool, draft_pools, texts, independent=by_rejection)
    runner = ModelRunner(
        target, pool, proposer, rejection=by_rejection, vision=vision, eviction=eviction
    )
    overlaps = config.overlap == "on" or (config.overlap == "auto" and runner.is_async)
    speculator, costs = make_speculator(
        config, spec, target.config.vocab_size, overlaps=overlaps, proposer=proposer
    )
    cache = _prefix_cache(config, pool)
    head = draft if isinstance(draft, JoinedHead) and has_pool else None
    fingerprint = None if digests is None else digests.fingerprint(target, head, config, sizes)
    keys = _page_keys(cache, fingerprint, events, source.name)
    tiers = _make_tiers(cache, keys, pool, proposer, config, fingerprint)
    scheduler = Scheduler(cache, _limits(config, sizes, target, pool), speculator, tiers)
    server, transfers = _make_transfers(cache, keys, pool, proposer, config, fingerprint, scheduler)
    measures = not spec.is_empty and config.speculation == "auto"
    settings = _settings(config, sizes, target, pool) | {"max_model_len": scheduler.capacity}
    return Built(
        engine=Engine(
            scheduler,
            runner,
            on_thread_start=set_threads,
            warm_up=partial(
                _warm_up,
                (target, pool),
                measured,
                scheduler.limits,
                costs if measures else None,
                taps=() if proposer is None else proposer.taps,
            ),
            supervision=_supervision(config, settings),
            overlap=overlaps,
            companions=ranks,
            page_server=server,
        ),
        path=source.path,
        name=source.name,
        aliases=source.aliases,
        vocab_size=target.config.vocab_size,
        max_model_len=scheduler.capacity,
        eos_token_ids=frozenset(target.config.eos_token_ids),
        exact=target.exact,
        drafters=(*spec.sources, *([] if proposer is None else [proposer.source])),
        no_self_draft=no_self_draft,
        model_path=target.path,
        sampling_defaults=defaults,
        pooling=replace(pooling, dimensions=target.config.hidden_size),
        takes_images=vision is not None,
        settings=settings,
        fingerprint=fingerprint,
        kernels="" if digests is None else digests.kernels(target),
        keys=keys,
        set_openings=None if pool.states is None else scheduler.set_openings,
        load_adapter=None
        if config.tp > 1
        else partial(load_lora, decoder=target, max_rank=config.max_lora_rank),
        events=events,
        transfers=transfers,
    )


def _make_proposer(
    draft: Decoder | JoinedHead | None,
    pool: KVPool,
    draft_pools: Sequence[KVPool],
    texts: tuple[TokenText, TokenText] | None,
    *,
    independent: bool,
) -> tuple[Proposer | None, _Model | TriedProposer | None]:
    """The proposer of what drafts, and of what the passes have a price.

    ``draft_pools``: that of the draft; none if it drafts on the target's ``pool``. ``texts``: of
    the tokens of the target and of a draft model whose tokens are others.
    """
    if draft is None:
        return None, None
    own_pool = draft_pools[0] if draft_pools else pool
    if isinstance(draft, JoinedHead):
        head = draft.proposer(own_pool, independent=independent)
        return head, head
    if own_pool is pool:
        return SelfProposer(draft, pool), (draft, pool)
    if texts is not None:
        theirs, own = texts
        return TextProposer(draft, own_pool, target=theirs, own=own), (draft, own_pool)
    return LmProposer(draft, own_pool, independent=independent), (draft, own_pool)


def _page_keys(
    cache: PrefixCache, fingerprint: bytes | None, events: KVEventPublisher | None, model: str
) -> PageKeys | None:
    """Give cached pages keys, where there is a fingerprint or events are published."""
    if fingerprint is None and events is None:
        return None
    keys = keys_of(cache, fingerprint or name_fingerprint(model, cache.page_size))
    if events is not None:
        keys.add_observer(events)
    return keys


def _make_tiers(
    cache: PrefixCache,
    keys: PageKeys | None,
    pool: KVPool,
    proposer: Proposer | None,
    config: EngineConfig,
    fingerprint: bytes | None,
) -> KVTiers | None:
    """Make the tiers that are asked for."""
    if not config.has_tiers or keys is None or fingerprint is None:
        return None
    made: KVTiers = _kv_tiers().make_tiers(
        cache, keys, pool, proposer, config=config, fingerprint=fingerprint
    )
    return made


def _make_transfers(
    cache: PrefixCache,
    keys: PageKeys | None,
    pool: KVPool,
    proposer: Proposer | None,
    config: EngineConfig,
    fingerprint: bytes | None,
    scheduler: Scheduler,
) -> tuple[PageServer | None, TransferParams | None]:
    """Let other engines read the pool, and read what requests say of theirs, if that is asked."""
    if config.kv_transfer is None or keys is None or fingerprint is None:
        return None, None
    stored = () if proposer is None else proposer.stored
    server = _kv_transfer().make_server(cache, pool, stored) if config.gives_kv else None
    loads = scheduler.page_loads
    params = _kv_transfer().make_params(
        cache,
        keys,
        pool,
        stored,
        fingerprint=fingerprint,
        server=server,
        end_offer=loads.end_offer if config.takes_kv and loads is not None else None,
    )
    return server, params


def _kv_transfer() -> ModuleType:
    # Not at the top: nothing of NIXL is imported without it.
    from . import kv_transfer

    return kv_transfer


def _kv_tiers() -> ModuleType:
    # Not at the top: without a tier nothing of core/tiers is imported.
    from . import kv_tiers

    return kv_tiers


def _make_digests() -> ModelDigests:
    from .fingerprint import ModelDigests

    return ModelDigests()


def _choose_device(config: EngineConfig) -> torch.device:
    """The native kernels compute on the CPU: who names them need not name it, too."""
    is_native = config.device == "auto" and config.backend == "native"
    return choose_device("cpu" if is_native else config.device)


def _thread_setter(threads: int | None, ops: Ops) -> Callable[[], None]:
    """Build the function that sets the number of threads; the native kernels get every core.

    Their threads sleep as soon as they wait. OpenMP's spin, and take the event loop's core from it:
    torch leaves one to it (measured: two threads on two cores were slower than one, and with the
    native kernels 1.2 to 1.4 times faster).
    What is left to torch beside the native kernels is small, and has one thread: a second one would
    have to wait until the kernels' own one sleeps.
    """
    cores = len(os.sched_getaffinity(0))
    is_native = isinstance(ops, NativeOps)
    count = threads or (cores if is_native else max(1, cores - 1))

    def set_threads() -> None:
        ops.set_threads(count)
        if is_native:
            torch.set_num_threads(1)

    return set_threads


def _threads(config: EngineConfig) -> int | None:
    """Threads of a process that computes; several of them share the cores."""
    if config.tp == 1 or config.threads is not None:
        return config.threads
    return max(1, len(os.sched_getaffinity(0)) // config.tp)


def _load_target(
    path: Path, config: EngineConfig, device: torch.device, on_read: OnRead | None
) -> tuple[Decoder, Ranks | None]:
    """The target, and the processes that compute it with this one.

    Raises `InvalidRequest` for a model that they cannot share.
    """
    if config.tp == 1:
        return _load(path, config, device, on_read), None
    _check_shards(path, config.tp, device)
    ranks = Ranks(path, config.tp, _load_options(config, device), threads=_threads(config) or 1)
    try:
        part = _load(path, config, device, on_read, comm=ranks.comm)
        assert isinstance(part, OwnDecoder), "ranks share no other"
        ranks.wait_until_loaded()
    except BaseException:
        ranks.end(at_once=True)
        raise
    logger.info("%d processes compute the model", config.tp)
    return TpDecoder(part, ranks), ranks


def _check_shards(path: Path, size: int, device: torch.device) -> None:
    """Raise `InvalidRequest` for what ranks do not share, before any of them starts."""
    if device.type != "cpu":
        raise InvalidRequest("tp computes on the CPU only: add --device cpu", param="tp")
    try:
        check_shards(read_config(path), size)
    except UnsupportedConfig as reason:
        why = f"tp does not share out transformers' modules, which would compute this: {reason}"
        raise InvalidRequest(why, param="tp") from None


def _load_options(config: EngineConfig, device: torch.device) -> dict[str, str]:
    return {
        "dtype": config.dtype,
        "device": str(device),
        "load_format": config.load_format,
        "exact": config.exact,
        "backend": config.backend,
        "quantize": config.quantize,
        "kv_dtype": config.kv_cache_dtype,
        "impl": config.model_impl,
    }


def _load(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_read: OnRead | None = None,
    comm: Comm | None = None,
) -> Decoder:
    if config.load_format == "auto" and config.quantize == "none":
        _warn_of_short_memory(path, device)
    remedy = "use a smaller --dtype, or --quantize"
    options: dict[str, Any] = _load_options(config, device)
    with out_of_memory_told(f"while loading {path.name}", remedy):
        return load_decoder(path, **options, on_read=on_read, comm=comm)


def _load_vision(
    path: Path, config: EngineConfig, target: Decoder, digests: ModelDigests | None
) -> Vision | None:
    """The image tower, whose linears are not quantised; None where there are to be no images."""
    # Only ids are sent to the other ranks; what evicts counts positions as for text.
    if config.no_images or config.tp > 1 or config.kv_evict is not None:
        return None
    plain = target.ops
    if config.quantize != "none":
        plain = choose_ops(
            target.device, exact=config.exact, backend=config.backend, dtype=target.dtype
        )
    with out_of_memory_told(f"while loading the image tower of {path.name}", "use --no-images"):
        return load_vision(
            path,
            target,
            plain,
            cache_bytes=parse_size(config.image_cache),
            has_weights=config.load_format == "auto",
            on_read=None if digests is None else digests.target,
        )


def _warn_of_short_memory(path: Path, device: torch.device) -> None:
    """Log it where the weights' files alone are larger than the free memory.

    On a CPU the process is then killed while it loads, and can say no more.
    """
    num_bytes, free = weight_files(path)[1], free_memory(device)
    if num_bytes > free:
        logger.warning(
            "%s: the weights have %s, and %s of memory are free",
            path.name, format_size(num_bytes), format_size(free),
        )  # fmt: skip


def _load_draft(
    path: Path,
    spec: DraftSpec,
    found: Path | None,
    config: EngineConfig,
    target: Decoder,
    on_read: OnRead | None,
) -> tuple[Decoder | JoinedHead | None, str]:
    """The model that drafts, on the target's device; and why `auto` leaves out the self-draft.

    ``found``: where a draft model or head is. ``on_read`` is called with the tensors of a head, or
    of an MTP layer.
    """
    if spec.model == SELF:
        copy = rough_copy(target, spec)
        if not isinstance(copy, str):
            return copy, ""
        logger.info("auto drafts without '%s': it %s", SELF, copy)
        return None, copy
    if spec.model == MTP:
        return mtp_head(path, target, config, on_read), ""
    if found is None:
        return None, ""
    if is_assistant(found):
        if config.tp > 1:
            why = f"draft {found.name} reads the target's KV, of which --tp leaves a part here"
            raise InvalidRequest(why, param="draft")
        return join_assistant(found, target, keeps_packed=keeps_packed(config), on_read=on_read), ""
    if head_kind(found) is not None:
        return load_head(found, target, partial(_output_matrix, path), on_read), ""
    return _load(found, config, target.device), ""


def _output_matrix(path: Path) -> torch.Tensor:
    """The output layer of a checkpoint, [vocab, hidden]."""
    found = open_model(path).checkpoint.read(LM_HEAD)
    return found if isinstance(found, torch.Tensor) else found.dequantize()


def _say_what_computes(
    target: Decoder, drafts: Sequence[Decoder | JoinedHead], pool: KVPool
) -> None:
    models = [target, *(draft for draft in drafts if not isinstance(draft, JoinedHead))]
    names = [type(decoder.ops).__name__.removesuffix("Ops").lower() for decoder in models]
    by = " and ".join(dict.fromkeys(names))
    num_tokens = pool.num_pages * pool.page_size
    logger.info("%s kernels on %s, a KV pool of %d tokens", by, pool.data.device, num_tokens)


def _warm_up(
    target: _Model,
    draft: _Model | TriedProposer | None,
    limits: SchedulerLimits,
    costs: CostModel | None,
    *,
    taps: Taps = (),
) -> None:
    """Prepare the first request in the model thread: make a GPU ready, measure costs of steps.

    ``taps``: what the proposer observes of the target's passes.
    """
    chosen = 1 if costs is None else NUM_BEST  # tokens of each place that a draft's pass chooses
    remedy = "lower --kv-memory, --max-batch-tokens or --max-running"
    with out_of_memory_told("while preparing the first step", remedy):
        for decoder, pool in (target, draft) if isinstance(draft, tuple) else (target,):
            is_target = decoder is target[0]
            if decoder.device.type != "cpu":
                warm_up(
                    decoder,
                    pool,
                    max_len=limits.max_model_len,
                    num_tokens=limits.max_batch_tokens,
                    num_requests=limits.max_running,
                    wanted=Wanted(taps=taps) if is_target else Wanted(SamplingPlan((), (), chosen)),
                    num_best=0 if is_target else NUM_BEST,
                )
        if isinstance(draft, HeadProposer) and draft.device.type != "cpu":
            draft.warm_up(limits.max_model_len, chosen)
        if costs is not None:
            measure_costs(costs, target, draft)


def _settings(
    config: EngineConfig, sizes: Sizes, target: Decoder, pool: KVPool
) -> dict[str, object]:
    """The options by name, those left open as they were chosen."""
    chosen = {
        "device": str(target.device),
        "ops": type(target.ops).__name__,
        "kv_tokens": pool.num_pages * pool.page_size,
    }
    return asdict(config) | asdict(sizes) | chosen


def _supervision(config: EngineConfig, settings: Mapping[str, object]) -> Supervision:
    return Supervision(
        step_timeout=config.step_timeout,
        ready_step_seconds=config.ready_step_seconds,
        dump_dir=Path(config.dump_dir or tempfile.gettempdir()),
        about=settings,
    )


def _limits(config: EngineConfig, sizes: Sizes, target: Decoder, pool: KVPool) -> SchedulerLimits:
    """The limits of a step and of the queue: no more requests run than there are logs for."""
    num_logs = sizes.max_running if pool.states is None else pool.states.num_logs
    evicts = config.kv_eviction()
    return SchedulerLimits(
        max_batch_tokens=sizes.max_batch_tokens,
        max_slowdown=config.max_slowdown,
        max_running=min(sizes.max_running, num_logs),
        max_queued=config.max_queued,
        max_model_len=model_len(config, target),
        vocab_size=target.config.vocab_size,
        aging_seconds=config.aging_seconds,
        max_priority=config.max_priority,
        kv_budget=0 if evicts is None else evicts[1],
    )


def _prefix_cache(config: EngineConfig, pool: KVPool) -> PrefixCache:
    return PrefixCache(
        pool.num_pages,
        pool.page_size,
        pin_quota=config.pin_quota,
        session_ttl=config.session_ttl,
        cache_quota=config.cache_quota,
        states=None if pool.states is None else _state_slots(config, pool, pool.states),
    )


def _state_slots(config: EngineConfig, pool: KVPool, states: StatePool) -> StateSlots:
    """The ledger of a pool of recurrent states.

    By default states that are no larger than a page are kept at the end of each page of a prompt.
    """
    interval = config.state_interval
    if interval is None:
        is_small = states.bytes_per_slot * pool.num_pages <= pool.num_bytes
        interval = pool.page_size if is_small else STATE_INTERVAL
    logger.info(
        "%d slots for recurrent states, %s each; requests that run at a time: %d",
        states.num_slots, format_size(states.bytes_per_slot), states.num_logs,
    )  # fmt: skip
    return StateSlots(states.num_slots, states.num_logs, interval=interval)


def _refuse_tiers(config: EngineConfig) -> None:
    """Raise `InvalidRequest` for the tiers of a model with recurrent states."""
    names = ("kv_host", "kv_disk", "kv_remote", "kv_transfer")
    name = next((each for each in names if getattr(config, each)), None)
    if name is not None:
        message = f"{name} does not keep recurrent states, which this model has: leave it out"
        raise InvalidRequest(message, param=name)
