"""A device that computes a formula in given seconds, to run the host code of the Triton backend.

The decoder, the inputs of its graphs and the sampler are the engine's own. Only the device is
replaced: kernels, events in its stream, and its clock. Every token is followed by the next token of
a fixed cycle; a draft model predicts it with a given probability.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ...core.execution import model_runner
from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig, LayerSpec
from ...core.model.description.rope import RopeSpec
from ...core.ops.kv_pool import KvLayer
from ...core.ops.mixers.attention import AttentionWeights
from ...core.ops.triton import graph_inputs
from ...core.ops.triton.graph import plan as graph_plan
from ...core.ops.triton.sampling import sampler as triton_sampler
from ...core.ops.triton.triton_ops import TritonOps
from ...core.ops.weights import DecoderWeights, LayerWeights, MlpWeights, Norm, PackedLinear, Table
from ...draft.control.outcome import NUM_BEST

VOCAB_SIZE = 2**13
# Each token is followed by the next one of this permutation.
CYCLE = np.random.default_rng(0).permutation(VOCAB_SIZE)
# A winner is encoded in one word: its score above the low 31 bits, which hold `_LAST_ID` - id.
_LAST_ID = 2**31 - 1


class SimulatedDevice:
    """One stream of work.

    ``sleeps``: whether waiting takes real time; otherwise it moves the clock forward.
    """

    def __init__(self, *, sleeps: bool) -> None:
        self._sleeps, self._now = sleeps, 0.0
        self._end = self._launched = 0.0

    def now(self) -> float:
        """Return the seconds on the device's clock."""
        return time.monotonic() if self._sleeps else self._now

    @property
    def end(self) -> float:
        """Time at which all launched work is done."""
        return max(self.now(), self._end)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the device has worked until now."""
        return self._launched - (self.end - self.now())

    def launch(self, seconds: float) -> None:
        """Queue work after all launched work."""
        self._end = self.end + seconds
        self._launched += seconds

    def wait(self, until: float) -> None:
        """Wait until a time, which may have passed."""
        if not self._sleeps:
            self._now = max(self._now, until)
        elif (left := until - self.now()) > 0:
            time.sleep(left)


class _Mark:
    """`Event` and `Stopwatch` of a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._began, self._at = device, 0.0, 0.0

    def record(self) -> None:
        self._at = self._device.end

    stop = record

    def synchronize(self) -> None:
        self._device.wait(self._at)

    def start(self) -> None:
        self._began = self._device.end

    def seconds(self) -> float:
        self.synchronize()
        return self._at - self._began


class Replay:
    """A `Graph` that runs its work again and copies the results into the same tensors."""

    def capture(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the work leaves
        """Record ``work``, which returns `GraphOutputs`."""
        self._work, self._outputs = work, work()
        return self._outputs

    def replay(self) -> None:
        """Run the recorded work again."""
        found = self._work()
        self._outputs.hidden.copy_(found.hidden)
        if found.winners is not None:
            self._outputs.winners.copy_(found.winners)


def _same(_: FormulaOps, x: Tensor, *__: object, **___: object) -> Tensor:
    """Return the rows unchanged, in place of a layer."""
    return x


class FormulaOps(TritonOps):
    """Operations of simulated passes; a pass takes the seconds given for its number of rows.

    A row's hidden state is its token id. Its logits begin with the words of the best tokens, int64:
    a word encodes a token's score and id. ``accuracy``: probability that the best token is the next
    token of the cycle; otherwise the second best is.
    """

    def __init__(
        self, device: SimulatedDevice, seconds: Mapping[int, float], accuracy: float = 1.0
    ) -> None:
        super().__init__(graphs=Replay)
        self.num_passes = 0
        self._device, self._best = device, _best_words(accuracy).view(torch.float32)
        self._seconds = list(seconds), list(seconds.values())

    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        """Begin a pass."""
        self.num_passes += 1
        self._device.launch(float(np.interp(len(token_ids), *self._seconds)))
        return super().embedding(token_ids, table)

    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:  # noqa: ARG002
        """Return rows as wide as the vocabulary that begin with the words of the best tokens."""
        logits = hidden.new_empty((len(hidden), VOCAB_SIZE))
        logits[:, : 2 * NUM_BEST] = self._best[hidden[:, 0].long()]
        return logits

    linear = norm = rope_write = attention = activate = cast("Any", _same)

    def add_norm(self, x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return both tensors unchanged."""
        return x, residual


class FormulaArgmax:
    """`GumbelArgmax` that finds the winners in the logits."""

    def __init__(self, logits: Tensor, *_: object, num_best: int = 1, **__: object) -> None:
        self._logits, self._num_best = logits, num_best

    def run(self) -> Tensor:
        """Return the words of the winners: their scores and ids."""
        words = self._logits[:, : 2 * NUM_BEST].contiguous().view(torch.int64)
        return words[:, 0] if self._num_best == 1 else words[:, : self._num_best]


class _Take:
    """A `take_kernel` that fills in the token ids that only the device knows."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def take(
            words: Tensor,
            sources: Tensor,
            ids: Tensor,
            last: int,
            names: Tensor | None,
            **_: int,
        ) -> None:
            sources = sources[: grid[0]]
            taken = _LAST_ID - (words.flatten()[sources.clamp(min=0)] & _LAST_ID)
            taken = taken if names is None else names[taken.clamp(max=last)]
            ids[: grid[0]] = torch.where(sources < 0, ids[: grid[0]], taken.int())

        return take


def formula_decoder(ops: FormulaOps, max_len: int) -> OwnDecoder:
    """Return a decoder of one layer with the heads of an 8B model."""
    config = DecoderConfig(
        model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1,
        num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, norm_eps=1e-6, rope=RopeSpec(),
        max_model_len=max_len, layers=(LayerSpec(),),
    )  # fmt: skip
    nothing, norm = PackedLinear(torch.empty(1), None, packed=False), Norm(torch.ones(1), 1e-6)
    attention = AttentionWeights(nothing, None, nothing, window=None, kv=KvLayer(0, 0))
    layer = LayerWeights(norm, attention, norm, MlpWeights(nothing, nothing))
    embedding = torch.arange(VOCAB_SIZE, dtype=torch.float32).unsqueeze(1)
    decoder = OwnDecoder(config, DecoderWeights(embedding, (layer,), norm, nothing), ops)
    for rope in decoder.ropes[0]:
        rope.table(max_len)
    return decoder


def _best_words(accuracy: float) -> Tensor:
    """Return the words (score and id) of each token's best successors [vocab, NUM_BEST], int64."""
    generator = np.random.default_rng(0)
    is_wrong = generator.random(VOCAB_SIZE) >= accuracy
    ranks = np.tile(np.arange(NUM_BEST), (VOCAB_SIZE, 1))
    ranks[is_wrong, :2] = 1, 0
    ids = (CYCLE[(CYCLE.argsort() + 1) % VOCAB_SIZE][:, None] + ranks) % VOCAB_SIZE
    scores = generator.normal(20.0, 1.5, ids.shape) + np.array([6.0, 2.0, 1.0, 0.0])
    scores = -np.sort(-scores, axis=1).astype(np.float32)
    return torch.from_numpy(scores.view(np.int32).astype(np.int64) << 32 | _LAST_ID - ids)


@contextmanager
def simulated(device: SimulatedDevice) -> Iterator[None]:
    """Use the device for everything that is created and computed inside the block."""

    def mark(_: torch.device) -> _Mark:
        return _Mark(device)

    with (
        patch.object(graph_inputs, "make_event", mark),
        patch.object(model_runner, "make_stopwatch", mark),
        patch.object(triton_sampler, "GumbelArgmax", FormulaArgmax),
        patch.object(graph_plan, "take_kernel", _Take()),
    ):
        yield
