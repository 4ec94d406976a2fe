"""StepCosts: the time of an engine's steps, measured once and kept in a file.

The passes are those that the cost model of speculation measures at start-up
(`draft/control/cost_model.py`). The time of a step beyond its pass (scheduling, sampling, events,
attention to the context of decoding requests) is fitted to the steps of a short load on the same
engine.
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

# Prompt lengths of the load in tokens, as far as the context allows.
LENGTHS = (16, 64, 256, 1024, 3072)
AT_ONCE = (1, 4, 12)  # Numbers of concurrent requests of each length.
OUTPUT_LEN = 24
LOAD_SECONDS = 8.0  # No more requests of the load begin after this time.
# A step that begins this long after the last one does not count as following it.
IDLE_SECONDS = 0.02
GB = 1e9  # Bytes of a gigabyte.
OUTLIER = 4.0  # Steps whose error is larger than this multiple of the median were disturbed.


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step of one engine, and the sizes that its plan depends on.

    A step takes ``scale`` times its pass, plus ``step_s``, plus ``request_s`` for each request and
    ``key_s`` for each of their context tokens. ``forward``: seconds of a pass by its rows.
    ``row_key_s``: seconds that a context token adds for each of a request's rows after the first.
    """

    model: str
    machine: dict[str, object]
    forward: dict[int, float]
    row_key_s: float
    scale: float
    step_s: float
    request_s: float
    key_s: float
    page_size: int  # Tokens of a page.
    page_bytes: int
    max_model_len: int  # Tokens of the longest context.
    max_batch_tokens: int
    max_running: int
    max_slowdown: float | None  # None: unlimited.
    vocab_size: int
    overlaps: bool  # Whether a step is planned while the one before it runs.

    def curve(self) -> CostCurve:
        """Return the seconds of passes by their rows."""
        return CostCurve(self.forward)

    def slower(self, pace: float) -> StepCosts:
        """Return the costs of steps that take ``pace`` times as long."""
        names = ("scale", "step_s", "request_s", "key_s")
        parts = {name: pace * getattr(self, name) for name in names}
        return msgspec.structs.replace(self, **parts)

    def seconds(self, plan: StepPlan, curve: CostCurve) -> float:
        """Return the seconds of a step; ``curve`` must come from these costs."""
        features = np.array(_features(plan, curve, self.row_key_s))
        return float(features @ (self.scale, self.step_s, self.request_s, self.key_s))


def read_costs(path: Path) -> StepCosts:
    """Read a file of `write_costs`. Raises SystemExit for a missing or malformed file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"--costs: {path}: {error}") from None


def write_costs(path: Path, costs: StepCosts) -> None:
    """Write costs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")


def _features(plan: StepPlan, curve: CostCurve, row_key_s: float) -> tuple[float, ...]:
    """Return the time of the pass, 1, the number of requests, and the number of context tokens."""
    stops = [each.stop + each.draft_plan.num_rows for each in plan.requests]
    rows = [(each.start, stop) for each, stop in zip(plan.requests, stops, strict=True)]
    num_rows = sum(stop - start for start, stop in rows)
    num_keys = sum(_keys_of_rows(*each) for each in rows)
    behind = float(sum(each.start for each in plan.requests))
    pass_s = float(curve.at(num_rows)) + row_key_s * num_keys
    return pass_s, 1.0, float(len(plan.requests)), behind


def _keys_of_rows(start: int, stop: int) -> float:
    """Return how many tokens the rows after the first one attend to, in total."""
    num_rows = stop - start - 1
    return num_rows * (start + num_rows / 2)


# -- measuring ----------------------------------------------------------------------------------


class _Steps(EngineObserver):
    """Records the steps of an engine with their seconds, measured from the end of the last step."""

    def __init__(self) -> None:
        self.found: list[tuple[StepPlan, float]] = []
        self._ended = float("-inf")

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """Record a step."""
        del output
        follows = began - self._ended < IDLE_SECONDS
        self.found.append((plan, ended - (self._ended if follows else began)))
        self._ended = ended


def measured_costs(
    model: str | None, options: Mapping[str, object] | None = None, *, seed: int = 0
) -> StepCosts:
    """Measure an engine of this model in this process. Raises the errors of `AsyncLLM.start`.

    ``options``: options of the engine, as in `EngineConfig`.
    """
    # Speculation is on so that the cost model is filled; no request of the load uses it.
    on: dict[str, Any] = {**(options or {}), "draft": "suffix", "speculation": "auto"}
    return asyncio.run(_measured(AsyncLLM(model, **on), seed))


async def _measured(llm: AsyncLLM, seed: int) -> StepCosts:
    async with llm:
        engine = cast("Engine", llm.engine)
        profile = _profile(engine)
        steps = _Steps()
        await _load(llm, random.Random(seed))  # The first load warms the process up.
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
    """Generate short answers to prompts of all lengths, alone and several at once."""
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
    """Fit non-negative factors of `_features` by least squares, without outliers."""
    curve = CostCurve(profile.forward)
    features = np.array([_features(plan, curve, profile.key_s) for plan, _ in steps])
    seconds = np.array([each for _, each in steps])
    found = _non_negative(features, seconds)
    errors = np.abs(features @ found - seconds) / seconds
    keep = errors <= OUTLIER * np.median(errors)
    return tuple(_non_negative(features[keep], seconds[keep]).tolist())


def _non_negative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return least squares of the relative error, with factors that would be negative set to 0."""
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
