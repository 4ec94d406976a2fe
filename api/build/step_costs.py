"""Step costs that are saved in a file, so that later processes need not measure them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..._version import __version__
from ...core.execution.proposer import Proposer
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.ops.kv_pool import KVPool
from ...core.ops.machine.cache_folder import cache_folder
from ...core.ops.machine.identity import machine_identity
from ...draft.control.cost_model import CostModel, StepProfile
from ...draft.control.profiler import guess_step, profile_step

logger = logging.getLogger(__name__)
Model: TypeAlias = tuple[Decoder, KVPool]
MOST_SECONDS = 1e4  # maximum plausible seconds of a pass in a file


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `StepProfile` in the form in which it is stored as JSON."""

    forward: dict[int, float]
    draft: dict[int, float]
    key_s: float


class KeptCosts:
    """The cost tables of an engine, and the file that keeps them between processes."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._file: Path | None = None  # None if nothing is saved

    def prepare(
        self,
        target: Model,
        proposer: Proposer | None,
        *,
        num_threads: int,
    ) -> None:
        """Fill the tables before the first request, in the model thread.

        On a CPU, the costs that an earlier process saved are loaded; without them, they are
        guessed. On a GPU, passes are measured, since its kernels must be warmed up anyway.
        """
        if target[0].device.type != "cpu":
            self.costs.load(profile_step(target, proposer))
            return
        self._file = _file_of(target, proposer, num_threads)
        profile = self._load()
        if profile is None:
            profile = guess_step(target, proposer)
            self._save(profile)
        self.costs.load(profile)

    def keep(self) -> None:
        """Save the costs learnt from steps, if there were any steps."""
        if self.costs.num_observed:
            self._save(self.costs.learnt())

    def _load(self) -> StepProfile | None:
        """Return the costs in the file; None if there is no valid file."""
        if self._file is None:
            return None
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.info("ignoring step costs in %s: %s", self._file, error)
            return None
        if 1 not in kept.forward or not (_is_sound(kept.forward) and _is_sound(kept.draft)):
            logger.info("ignoring step costs in %s: values are out of range", self._file)
            return None
        return StepProfile(kept.forward, kept.draft, max(0.0, kept.key_s))

    def _save(self, profile: StepProfile) -> None:
        if self._file is None:
            return
        kept = _Kept(dict(profile.forward), dict(profile.draft), profile.key_s)
        new = self._file.with_suffix(f".{os.getpid()}")
        try:
            new.write_bytes(msgspec.json.encode(kept))
            new.replace(self._file)
        except OSError as error:
            logger.info("cannot save step costs: %s", error)


def _file_of(target: Model, proposer: Proposer | None, num_threads: int) -> Path | None:
    """Return the file for the costs; None if the cache folder cannot be written.

    Its name is a hash of everything that affects the time of a step.
    """
    parts = [__version__, str(num_threads), *_described(*target)]
    if proposer is not None:
        described = [part for model in proposer.models for part in _described(*model)]
        parts += described or [type(proposer).__name__]
    parts += [f"{name}={value}" for name, value in machine_identity(target[0].device).items()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        return cache_folder() / f"costs-{name}.json"
    except OSError as error:
        logger.info("cannot save step costs: %s", error)
        return None


def _described(decoder: Decoder, pool: KVPool) -> list[str]:
    """Return all properties of a model that affect its speed."""
    found = [repr(decoder.config), str(decoder.dtype), str([part.dtype for part in pool.parts])]
    if isinstance(decoder, OwnDecoder):
        identity: Mapping[str, str] = decoder.ops.identity
        found += [f"{name}={value}" for name, value in identity.items()]
        weights = [each for layer in decoder.weights.layers for each in layer.linears]
        found.append(str(sum(each.num_bytes for each in (*weights, decoder.weights.lm_head))))
    return found


def _is_sound(seconds: Mapping[int, float]) -> bool:
    return all(rows > 0 and 0.0 < value < MOST_SECONDS for rows, value in seconds.items())
