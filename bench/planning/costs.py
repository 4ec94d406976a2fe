"""StepCosts: the time of an engine's steps, measured once and kept in a file.

The passes are those that the cost model of speculation measures at start-up
(`draft/control/cost_model.py`). What a step takes beyond its pass (scheduling, sampling, events,
the keys behind requests that decode) is fitted to the steps of a short load on the same engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ...api.sdk.async_llm import AsyncLLM
from ...api.types.sampling_params import SamplingParams
from ...core.engine.engine import Engine
from ...core.execution.model_runner import ModelRunner
from ...core.interface.output import StepOutput
from ...core.interface.plan import StepPlan
from ...core.telemetry.observers import EngineObserver
from ...draft.control.cost_model import CostCurve, StepProfile
from ...draft.speculator import DraftSpeculator
from ..common.report import machine

LENGTHS = (16, 64, 256, 1024, 3072)  # tokens of prompts of the load, as far as the context goes
AT_ONCE = (1, 4, 12)  # requests of each length
OUTPUT_LEN = 24
LOAD_SECONDS = 8.0  # after which no more of the load begins
IDLE_SECONDS = 0.02  # a step that begins so long after another does not follow it
GB = 1e9  # of rates
OUTLIER = 4.0  # times the median error: such steps were disturbed


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step of one engine, and the sizes that its plan depends on.

    A step takes ``scale`` times its pass, ``step_s``, ``request_s`` for each request and ``key_s``
    for each token behind one. ``forward``: seconds of a pass by its rows. ``row_key_s``: that a
    token behind a request adds for each of its rows after the first.
    """

    model: str
    machine: dict[str, object]
    forward: dict[int, float]
    row_key_s: float
    scale: float
    step_s: float
    request_s: float
    key_s: float
    page_size: int  # tokens
    page_bytes: int
    max_model_len: int  # tokens
    max_batch_tokens: int
    max_running: int
    max_slowdown: float | None  # None: no bound
    vocab_size: int
    overlaps: bool  # whether a step is planned while the one before runs

    def curve(self) -> CostCurve:
        """Seconds of passes by their rows."""
        return CostCurve(self.forward)

    def slower(self, pace: float) -> StepCosts:
        """Costs of steps that take ``pace`` times as long."""
        names = ("scale", "step_s", "request_s", "key_s")
        parts = {name: pace * getattr(self, name) for name in names}
        return msgspec.structs.replace(self, **parts)

    def seconds(self, plan: StepPlan, curve: CostCurve) -> float:
        """Seconds of a step; ``curve`` is this one's own."""
        features = np.array(_features(plan, curve, self.row_key_s))
        return float(features @ (self.scale, self.step_s, self.request_s, self.key_s))


def read_costs(path: Path) -> StepCosts:
    """Read a file of `write_costs`. Raises SystemExit that says what is wrong with another one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"--costs: {path}: {error}") from None


def write_costs(path: Path, costs: StepCosts) -> None:
    """Write costs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")


def _features(plan: StepPlan, curve: CostCurve, row_key_s: float) -> tuple[float, ...]:
    """The pass by the cost model, 1, requests, and tokens behind requests."""
    stops = [each.stop + each.draft_plan.num_rows for each in plan.requests]
    rows = [(each.start, stop) for each, stop in zip(plan.requests, stops, strict=True)]
    num_rows = sum(stop - start for start, stop in rows)
    num_keys = sum(_keys_of_rows(*each) for each in rows)
    behind = float(sum(each.start for each in plan.requests))
    pass_s = float(curve.at(num_rows)) + row_key_s * num_keys
    return pass_s, 1.0, float(len(plan.requests)), behind


def _keys_of_rows(start: int, stop: int) -> float:
    """Tokens that rows after the first one attend to, summed."""
    num_rows = stop - start - 1
    return num_rows * (start + num_rows / 2)


# -- measuring ----------------------------------------------------------------------------------


class _Steps(EngineObserver):
    """Steps of an engine with their seconds, from the end of the step before."""

    def __init__(self) -> None:
        self.found: list[tuple[StepPlan, float]] = []
        self._ended = float("-inf")

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """See `EngineObserver.observe_step`."""
        del output
        follows = began - self._ended < IDLE_SECONDS
        self.found.append((plan, ended - (self._ended if follows else began)))
        self._ended = ended


def measured_costs(
    model: str | None, options: Mapping[str, object] | None = None, *, seed: int = 0
) -> StepCosts:
    """Measure an engine of this model in this process. Raises what `AsyncLLM.start` raises.

    ``options``: of the engine, as `EngineConfig` has them.
    """
    # Speculation is on so that the cost model is filled; no request of the load uses it.
    on: dict[str, Any] = {**(options or {}), "draft": "suffix", "speculation": "auto"}
    return asyncio.run(_measured(AsyncLLM(model, **on), seed))


async def _measured(llm: AsyncLLM, seed: int) -> StepCosts:
    async with llm:
        engine = cast("Engine", llm.engine)
        profile = _profile(engine)
        steps = _Steps()
        await _load(llm, random.Random(seed))  # the first steps are those of a cold process
        engine.metrics.observers.append(steps)
        await _load(llm, random.Random(seed + 1))
        fitted = fit(profile, steps.found)
        limits, runner = engine.limits, cast("ModelRunner", engine.runner)
        return StepCosts(
            model=llm.built.name,
            machine=machine(),
            forward=dict(profile.forward),
            row_key_s=profile.key_s,
            scale=fitted[0],
            step_s=fitted[1],
            request_s=fitted[2],
            key_s=fitted[3],
            page_size=engine.page_size,
            page_bytes=runner.decoder.bytes_per_page(
                page_size=engine.page_size, kv_dtype=llm.config.kv_cache_dtype
            ),
            max_model_len=limits.max_model_len,
            max_batch_tokens=limits.max_batch_tokens,
            max_running=limits.max_running,
            max_slowdown=None if limits.max_slowdown == float("inf") else limits.max_slowdown,
            vocab_size=limits.vocab_size,
            overlaps=llm.config.overlap != "off" and runner.is_async,
        )


def _profile(engine: Engine) -> StepProfile:
    speculator = engine.scheduler.speculator
    inner = getattr(speculator, "inner", speculator)
    return cast("DraftSpeculator", inner).controller.costs.profile


async def _load(llm: AsyncLLM, rng: random.Random) -> None:
    """Prompts of all lengths, alone and several at once, each with a short answer."""
    longest = llm.built.max_model_len - OUTPUT_LEN - 1
    lengths = sorted({min(length, longest) for length in LENGTHS})
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, speculation="off"
    )
    ids, ends = range(llm.built.vocab_size), time.monotonic() + LOAD_SECONDS
    for length in lengths:
        for count in AT_ONCE:
            if time.monotonic() > ends:
                return
            prompts = [rng.choices(ids, k=length) for _ in range(count)]
            await llm.generate(prompts, params)


def fit(profile: StepProfile, steps: Sequence[tuple[StepPlan, float]]) -> tuple[float, ...]:
    """Factors of `_features` with the least squared error, none below 0; without outliers."""
    curve = CostCurve(profile.forward)
    features = np.array([_features(plan, curve, profile.key_s) for plan, _ in steps])
    seconds = np.array([each for _, each in steps])
    found = _non_negative(features, seconds)
    errors = np.abs(features @ found - seconds) / seconds
    keep = errors <= OUTLIER * np.median(errors)
    return tuple(_non_negative(features[keep], seconds[keep]).tolist())


def _non_negative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares of the relative error; factors that would be negative are 0."""
    weighted, ones = features / seconds[:, None], np.ones(len(seconds))
    used = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while used:
        best = np.linalg.lstsq(weighted[:, used], ones, rcond=None)[0]
        if (best >= 0).all():
            found[used] = best
            break
        used.pop(int(best.argmin()))
    return found
