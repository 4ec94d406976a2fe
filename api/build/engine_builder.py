"""The composition root: builds an engine with its model, drafter, pools and cache."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from ...core.config import EngineConfig, Sizes, format_size
from ...core.engine.engine import Engine
from ...core.engine.model_thread import Supervision
from ...core.engine.rollouts.updatable_engine import UpdatableEngine
from ...core.execution.model_runner import ModelRunner
from ...core.execution.packing.policies import KeepPolicy
from ...core.execution.proposer import Proposer
from ...core.execution.ranks.ranks import Ranks
from ...core.execution.warm_up import warm_up
from ...core.model.adapters.lora import load_lora
from ...core.model.decoder import Decoder
from ...core.model.images.vision import Vision
from ...core.model.pooling import PoolingSpec, read_pooling
from ...core.model.report import weight_files
from ...core.ops.batch import SamplingPlan, Taps, Wanted
from ...core.ops.kv_pool import KVPool
from ...core.ops.machine.host_memory import keep_freed_memory
from ...core.sampling.sampler import DeviceSampler
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...core.startup import timed
from ...draft.control.outcome import NUM_BEST
from ..text.gguf_tokenizer import check_vocabulary
from ..types.sampling_params import SamplingDefaults
from .adapter_loader import OwnAdapters
from .built import Built
from .drafter import Drafter, load_drafter
from .drafts import find_draft, make_speculator, parse_draft
from .kv.events import events_of
from .kv.kept_kv import KeptKV, check_stores, page_keys, prefix_cache, refuse_tiers
from .kv.packing import keep_policy_of
from .kv.pools import make_pools, model_len, out_of_memory_hint
from .model_files import ModelSource, find_model
from .sampling_defaults import sampling_defaults
from .step_costs import KeptCosts
from .target import (
    device_of,
    load_images,
    load_model,
    load_target,
    num_threads,
    refuse_overlap,
    thread_setter,
)

if TYPE_CHECKING:
    from ...core.tiers.events import KVEventPublisher
    from ...core.tiers.transfer_params import TransferParams
    from .kv.fingerprint import ModelDigests
    from .updates.rollouts import Rollouts

logger = logging.getLogger(__name__)
LocalBuilt: TypeAlias = Built[Engine]


def build(
    model: str | os.PathLike[str] | None, config: EngineConfig, *, wants_keys: bool = False
) -> LocalBuilt:
    """Load a model and its drafters and build an engine. Blocks until the model is loaded.

    ``wants_keys``: also set `Built.fingerprint`, `Built.kernels` and `Built.keys`, for which the
    weights are hashed while they are loaded. Raises `ModelLoadError`, and `InvalidRequest` for an
    option that the model does not support.
    """
    keep_freed_memory()
    source = find_model(model)
    # reports a port in use before the slow loading
    with events_of(config) as events, ExitStack() as undo:
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
    models = _load_models(source, config, undo, wants_keys=wants_keys)
    target, drafter, sizes = models.target, models.drafter, models.sizes
    pool, *own_pools = make_pools(target, drafter.with_pool, config, sizes)
    proposer = drafter.make_proposer(pool, own_pools)
    _log_backend(target, proposer, pool)
    runner = ModelRunner(
        target,
        pool,
        proposer,
        vision=models.vision,
        keep_policy=models.keep_policy,
    )
    overlaps = config.overlap != "off" and runner.is_async
    speculator, costs = make_speculator(config, drafter.spec, overlaps=overlaps, proposer=proposer)
    kept = _keep_kv(models, pool, proposer, events, config, source.name)
    limits = _limits(config, sizes, target, pool, takes_images=models.vision is not None)
    scheduler = Scheduler(kept.cache, limits, speculator, kept.make_tiers())
    server, transfers = kept.make_transfers(scheduler)
    settings = _settings(config, sizes, target, pool) | {"max_model_len": scheduler.capacity}
    is_priced = not drafter.spec.is_empty and config.speculation == "auto"
    kept_costs = KeptCosts(costs) if is_priced else None
    make_engine = UpdatableEngine if config.allow_weight_updates else Engine
    engine = make_engine(
        scheduler,
        runner,
        on_thread_start=models.set_threads,
        warm_up=partial(
            _warm_up,
            (target, pool),
            proposer,
            scheduler.limits,
            kept_costs,
            threads=num_threads(config, target.ops),
        ),
        supervision=_supervision(config, settings),
        overlap=overlaps,
        companions=models.ranks,
        page_server=server,
    )
    if kept_costs is not None:
        weakref.finalize(engine, kept_costs.keep)
    parts = _Parts(engine, scheduler, models, kept, settings, events, transfers)
    return _built(parts, source, config)


class _Models(NamedTuple):
    """Everything that is read from files, before the pools are allocated."""

    target: Decoder
    ranks: Ranks | None
    keep_policy: KeepPolicy | None
    vision: Vision | None
    drafter: Drafter
    digests: ModelDigests | None
    set_threads: Callable[[], None]
    sizes: Sizes
    sampling_defaults: SamplingDefaults
    pooling: PoolingSpec


def _load_models(
    source: ModelSource, config: EngineConfig, undo: ExitStack, *, wants_keys: bool
) -> _Models:
    """Check the options, then load the target, its image tower and its drafter."""
    logger.info("loading %s (%s)", source.name, format_size(weight_files(source.path)[1]))
    check_vocabulary(source.path)  # fail before reading the weights
    defaults = sampling_defaults(source, config)
    pooling = read_pooling(source.path)
    spec = parse_draft(config, own_draft=source.draft)
    device = device_of(config)
    sizes = config.sizes(device.type)
    found = find_draft(spec.model)
    check_stores(config)
    has_keys = wants_keys or config.has_tiers or config.kv_transfer is not None
    digests = _make_digests() if has_keys else None
    on_read, on_read_head = (None, None) if digests is None else (digests.target, digests.head)
    target, ranks = load_target(source.path, config, device, on_read)
    if ranks is not None:
        undo.callback(ranks.end, at_once=True)
    if not isinstance(target.sampler, DeviceSampler):
        refuse_overlap(config)
    if target.states:
        refuse_tiers(config)
    keep_policy = keep_policy_of(config, target)
    set_threads = thread_setter(config, target.ops)
    set_threads()
    return _Models(
        target=target,
        ranks=ranks,
        keep_policy=keep_policy,
        vision=load_images(source.path, config, target, on_read),
        drafter=load_drafter(source.path, spec, found, config, target, on_read_head),
        digests=digests,
        set_threads=set_threads,
        sizes=sizes,
        sampling_defaults=defaults,
        pooling=msgspec.structs.replace(pooling, dimensions=target.config.hidden_size),
    )


def _keep_kv(
    models: _Models,
    pool: KVPool,
    proposer: Proposer | None,
    events: KVEventPublisher | None,
    config: EngineConfig,
    name: str,
) -> KeptKV:
    """Return the prefix cache, with page keys if other processes need them."""
    cache, digests = prefix_cache(config, pool), models.digests
    fingerprint = None
    if digests is not None:
        head = models.drafter.stored_head
        fingerprint = digests.fingerprint(models.target, head, models.vision, config, models.sizes)
    return KeptKV(
        config=config,
        cache=cache,
        pool=pool,
        proposer=proposer,
        fingerprint=fingerprint,
        keys=page_keys(cache, fingerprint, events, name),
    )


class _Parts(NamedTuple):
    """The parts from which a `Built` is made."""

    engine: Engine
    scheduler: Scheduler
    models: _Models
    kept: KeptKV
    settings: Mapping[str, object]
    events: KVEventPublisher | None
    transfers: TransferParams | None


def _built(parts: _Parts, source: ModelSource, config: EngineConfig) -> LocalBuilt:
    """Return the engine together with the facts about its model."""
    engine, models, kept = parts.engine, parts.models, parts.kept
    target, proposer = models.target, kept.proposer
    return Built(
        engine=engine,
        path=source.path,
        name=source.name,
        aliases=source.aliases,
        vocab_size=target.config.vocab_size,
        max_model_len=parts.scheduler.capacity,
        eos_token_ids=frozenset(target.config.eos_token_ids),
        exact=target.exact,
        drafters=(*models.drafter.spec.sources, *([] if proposer is None else [proposer.source])),
        no_self_draft=models.drafter.left_out,
        model_path=target.path,
        sampling_defaults=models.sampling_defaults,
        pooling=models.pooling,
        takes_branches=kept.pool.states is None,
        takes_images=models.vision is not None,
        settings=parts.settings,
        fingerprint=kept.fingerprint,
        kernels="" if models.digests is None else models.digests.kernels(target),
        keys=kept.keys,
        set_openings=None if kept.pool.states is None else parts.scheduler.set_openings,
        adapters=None
        if config.tp > 1
        else OwnAdapters(partial(load_lora, decoder=target, max_rank=config.max_lora_rank)),
        events=parts.events,
        transfers=parts.transfers,
        rollouts=_rollouts(parts, source, config),
    )


def _rollouts(parts: _Parts, source: ModelSource, config: EngineConfig) -> Rollouts | None:
    """Return the control of weight updates; None if they are not allowed."""
    engine, models = parts.engine, parts.models
    if not isinstance(engine, UpdatableEngine):
        return None
    from .updates.held_folder import remove_left_folders
    from .updates.rollouts import Rollouts
    from .updates.weight_exchange import WeightExchange, check_supported

    target = models.target
    check_supported(config, target, models.vision)
    load = partial(load_model, config=config, device=target.device)
    exchange = WeightExchange(source.path, target, parts.kept.proposer, load)
    remove_left_folders()
    return Rollouts(engine, exchange)


def _make_digests() -> ModelDigests:
    from .kv.fingerprint import ModelDigests

    return ModelDigests()


def _log_backend(target: Decoder, proposer: Proposer | None, pool: KVPool) -> None:
    drafting = () if proposer is None else proposer.models
    models = [target, *(decoder for decoder, own_pool in drafting if own_pool is not pool)]
    names = [type(decoder.ops).__name__.removesuffix("Ops").lower() for decoder in models]
    by = " and ".join(dict.fromkeys(names))
    num_tokens = pool.num_pages * pool.page_size
    logger.info("%s kernels on %s, a KV pool of %d tokens", by, pool.data.device, num_tokens)


@timed("warm-up")
def _warm_up(
    target: tuple[Decoder, KVPool],
    proposer: Proposer | None,
    limits: SchedulerLimits,
    costs: KeptCosts | None,
    *,
    threads: int,
) -> None:
    """Warm up a GPU and estimate step costs, in the model thread, before the first request.

    ``threads``: number of threads that compute.
    """
    taps: Taps = () if proposer is None else proposer.taps
    drafting = () if proposer is None else proposer.models
    chosen = 1 if costs is None else NUM_BEST  # candidate tokens per position of a draft pass
    remedy = "lower --kv-memory, --max-batch-tokens or --max-running"
    with out_of_memory_hint("while preparing the first step", remedy):
        for decoder, pool in (target, *drafting):
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
        if proposer is not None and proposer.device.type != "cpu":
            proposer.warm_up(limits.max_model_len, chosen)
        if costs is not None:
            costs.prepare(target, proposer, num_threads=threads)


def _settings(
    config: EngineConfig, sizes: Sizes, target: Decoder, pool: KVPool
) -> dict[str, object]:
    """Return the value of each option by name; for automatic options, the value that was chosen."""
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


def _limits(
    config: EngineConfig, sizes: Sizes, target: Decoder, pool: KVPool, *, takes_images: bool
) -> SchedulerLimits:
    """Return the limits of a step and of the queue.

    With recurrent states, at most as many requests run at once as the pool has logs.
    """
    num_logs = sizes.max_running if pool.states is None else pool.states.num_logs
    packing = config.packing()
    return SchedulerLimits(
        max_batch_tokens=sizes.max_batch_tokens,
        max_slowdown=config.max_slowdown,
        max_running=min(sizes.max_running, num_logs),
        max_queued=config.max_queued,
        max_model_len=model_len(config, target),
        vocab_size=target.config.vocab_size,
        aging_seconds=config.aging_seconds,
        max_priority=config.max_priority,
        kv_budget=0 if packing is None else packing[1],
        takes_images=takes_images,
    )
