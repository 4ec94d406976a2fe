"""What speculation costs while it rests: on and off in turn within one run, a few steps each.

Whole runs that are compared differ by more than what is looked for where a machine has other work,
too. Here one run over a load is cut into phases of some `TIMED` steps. In those of one half the
speculator does what it always does; in the others it is told nothing but who comes and goes, drafts
nothing and takes no text in. Each phase has a neighbour of the other kind, in random order; the
quotient of their seconds for each served token is taken, and of all quotients a trimmed mean, with
an interval by bootstrap.

What one phase leaves to the other must not count: before it is timed, a phase runs for `SETTLE`
steps. In these the indexes catch up on what was said while speculation was off, and who came
then is weighed. So a phase that is timed pays for its own text and its own requests alone. What is
left out is what outlasts the settling: tables that learn from half of the steps are staler.

It tells the price of deciding, looking and taking in, where nothing is accepted: adversarial and
fresh text. It does not tell what drafts gain: a phase is too short for text that begins to repeat,
and a request that drafted its way ahead leaves longer contexts to the phase that follows. By the
CPU's time (of all threads) all counts in full that passes in the shadow of the model: that quotient
is what it is where no core is free for it. On two cores that others used, too, 150 pairs left the
interval at some 0.02 to either side with 16 and 32 requests, and 0.04 with 4.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ..api.build import Built
from ..core.request import Request
from ..core.speculation import Careful, DraftPlan, NoSpeculation, Speculator
from ..core.step import PlanRow, RowOutput, StepOutput, StepPlan
from .replay import ReplayRunner
from .speculation_load import Load, Stream, make_request

SETTLE, TIMED = 8, 16  # steps of a phase
WARM_UP = 300  # steps before the first phase, with speculation on
LIKE = 0.1  # of the batch: by so much the neighbours may differ
TRIM = 0.25  # of the quotients, at either end
FEW_PAIRS = 20
ROUNDS = 10  # of least squares, each without what stood out in the one before
NUM_DRAWS, SURE = 2000, 0.9  # of the bootstrap


@dataclass(slots=True)
class Phase:
    """Some steps in a row."""

    is_on: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads
    num_tokens: int = 0  # served
    num_rows: int = 0  # that were to serve them
    num_prompt: int = 0  # tokens of prompts that were computed
    num_chunks: int = 0  # rows that did so
    num_read: int = 0  # positions that all rows looked back at

    def work(self) -> NDArray[np.float64]:
        """What it had to do beyond a pass for each token, which no neighbour has quite alike."""
        return np.array([self.num_prompt, self.num_chunks, self.num_read, self.num_rows], float)


class Alternating(Careful):
    """A speculator that is on and off in turn, and what it measures of that.

    Stands where an engine has its own, and asks and tells as that does: while it is off, somebody
    who always rests.
    """

    def __init__(
        self,
        inner: Speculator,
        *,
        seed: int = 0,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        super().__init__(inner)
        self._on, self._off = Careful(inner), Careful(NoSpeculation())
        self._now = self._on
        self._cpu_clock, self._cpu_began = cpu_clock, cpu_clock()
        self.phases: list[Phase] = []  # neighbours in pairs; the last one is under way
        self._random = random.Random(seed)
        self._is_on = True
        self._num_steps = SETTLE + TIMED - WARM_UP  # of the phase under way

    @property
    def num_pairs(self) -> int:
        """Pairs of phases that are over."""
        return max(0, len(self.phases) - 1) // 2

    def rests(self) -> bool:
        """While it is off nobody drafts."""
        return self._now.rests()

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Passed on."""
        return self._on.plan(requests, limits, budget=budget, num_prefill=num_prefill)

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Passed on."""
        self._on.observe(request, row, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """What was planned while it was on is told; all is measured."""
        (self._now if plan.is_plain else self._on).observe_step(plan, output, seconds)
        self._num_steps += 1
        began, self._cpu_began = self._cpu_began, self._cpu_clock()
        if self._num_steps > SETTLE and self.phases:
            phase = self.phases[-1]
            phase.seconds += seconds
            phase.cpu_seconds += self._cpu_began - began
            phase.num_tokens += sum(len(row.token_ids) for row in output.rows)
            phase.num_rows += sum(row.samples for row in plan.rows)
            chunks = [row.stop - row.start for row in plan.rows if row.stop - row.start > 1]
            phase.num_prompt += sum(chunks)
            phase.num_chunks += len(chunks)
            phase.num_read += sum(row.stop for row in plan.rows)
        if self._num_steps >= SETTLE + TIMED:
            self._turn()

    def _turn(self) -> None:
        """The next phase: one of a pair by lot, the other one by what it was."""
        is_second = len(self.phases) % 2 == 1
        self._is_on = not self._is_on if is_second else self._random.random() < 0.5
        self._now = self._on if self._is_on else self._off
        self.phases.append(Phase(self._is_on))
        self._num_steps = 0

    def join(self, request: Request) -> None:
        """Passed on."""
        self._on.join(request)

    def leave(self, request: Request) -> None:
        """Passed on."""
        self._on.leave(request)

    def has_work(self) -> bool:
        """Only while it is on."""
        return self._now.has_work()

    def work(self) -> None:
        """What is said while it is off is taken in later, before it is timed again."""
        self._now.work()

    def flush(self, *namespaces: str | None) -> None:
        """Passed on."""
        self._on.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """Passed on."""
        return self._on.describe()

    def broke_step(self) -> None:
        """Passed on."""
        self._on.broke_step()

    @property
    def has_failed(self) -> bool:
        """Whether what is measured was let go of."""
        return self._on.inner is not self.inner

    def pairs(self) -> list[tuple[Phase, Phase]]:
        """On and off, of every pair that served about as many at once."""
        found = []
        for first, second in zip(self.phases[0:-1:2], self.phases[1:-1:2], strict=False):
            on, off = (first, second) if first.is_on else (second, first)
            if abs(on.num_rows - off.num_rows) <= LIKE * off.num_rows:
                found.append((on, off))
        return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """A trimmed mean, and where it lies by `SURE`."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, quotients: Sequence[float], *, seed: int = 0) -> Estimate:
        """Of quotients, at least one: of their logarithms, so that both ways round count alike."""
        logs = np.log(np.array(quotients))
        draws = np.random.default_rng(seed).integers(0, len(logs), (NUM_DRAWS, len(logs)))
        means = np.sort(_trimmed(logs[draws]))
        edge = round((1.0 - SURE) / 2.0 * NUM_DRAWS)
        found = (_trimmed(logs[None])[0], means[edge], means[-1 - edge])
        return cls(*(float(np.exp(value)) for value in found))

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f} .. {self.high:.3f}]"


def _trimmed(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each row without its lowest and highest."""
    cut = int(TRIM * rows.shape[1])
    means: NDArray[np.float64] = np.sort(rows)[:, cut : rows.shape[1] - cut].mean(axis=1)
    return means


def level(quotients: Sequence[float], more: NDArray[np.float64]) -> list[float]:
    """Quotients of neighbours as they were had both had the same work to do.

    ``more`` [pairs, kinds of work]: what the one had to do beyond the other. What of a quotient
    comes with it is found by least squares, without the pairs that something else disturbed. Few
    pairs would tell nothing of it: they are left as they are.
    """
    if len(quotients) < FEW_PAIRS:
        return list(quotients)
    logs = np.log(np.array(quotients))
    varies = more.std(axis=0) > 0.0
    work = np.column_stack([np.ones(len(logs)), more[:, varies] / more[:, varies].std(axis=0)])
    left, slopes = logs, np.zeros(work.shape[1])
    for _ in range(ROUNDS):
        low, high = np.quantile(left, [TRIM, 1.0 - TRIM])
        calm = (low <= left) & (left <= high)
        slopes = np.linalg.lstsq(work[calm], logs[calm], rcond=None)[0]
        left = logs - work @ slopes
    adjusted: list[float] = np.exp(left + slopes[0]).tolist()
    return adjusted


# -- the engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Requests without an end."""

    name: str
    make: Callable[[int], Stream]  # by their number
    is_replayed: bool
    temperature: float = 0.0


@dataclass(slots=True)
class _Asked:
    """What was asked for so far, and what came of it."""

    numbers: count[int] = field(default_factory=count)
    recorded: dict[str, Sequence[int]] = field(default_factory=dict)  # answers, by request
    num_proposed: int = 0
    num_tokens: int = 0


def texts(
    fresh: Sequence[Stream], vocab_size: int, *, prompt_len: int, output_len: int
) -> list[Text]:
    """Adversarial text that never comes again, and the model's own on the prompts of ``fresh``.

    Answers differ in length by half, so that requests end and come at any time.
    """
    few = random.Random(7).sample(range(5, vocab_size), k=5)

    def length(number: int) -> int:
        return random.Random(number).randint(output_len // 2, output_len * 3 // 2)

    def adversarial(number: int) -> Stream:
        rng = random.Random(number)
        return rng.choices(few, k=prompt_len), rng.choices(few, k=length(number))

    def own(number: int) -> Stream:
        return fresh[number % len(fresh)][0][-prompt_len:], [0] * length(number)

    return [
        Text("adversarial (replayed)", adversarial, is_replayed=True),
        Text("fresh text", own, is_replayed=False, temperature=1.0),
    ]


async def compare_phases(
    built: Built, text: Text, concurrency: int, num_pairs: int
) -> dict[str, object]:
    """On over off, so many requests at once, until so many pairs of phases were timed."""
    scheduler = built.engine.scheduler
    careful = scheduler.speculator
    scheduler.speculator = alternating = Alternating(careful.inner)
    asked = _Asked()
    built.engine.flush_cache()
    if isinstance(built.engine.runner, ReplayRunner):
        built.engine.runner.recorded = asked.recorded
    clients = (_client(built, text, alternating, num_pairs, asked) for _ in range(concurrency))
    try:
        await asyncio.gather(*clients)
    finally:
        scheduler.speculator = careful
    if alternating.has_failed:
        raise RuntimeError("the speculator failed again and again: there is nothing to compare")
    pairs = alternating.pairs()
    more = np.array([on.work() - off.work() for on, off in pairs])
    wall = [off.seconds * on.num_tokens / (on.seconds * off.num_tokens) for on, off in pairs]
    cpu = [off.cpu_seconds * on.num_tokens / (on.cpu_seconds * off.num_tokens) for on, off in pairs]
    return {
        "text": text.name,
        "concurrency": concurrency,
        "on / off": Estimate.of(level(wall, more)),
        "on / off, CPU": Estimate.of(level(cpu, more)),
        "pairs": len(pairs),
        "drafted/token": asked.num_proposed / asked.num_tokens,
    }


async def _client(
    built: Built, text: Text, alternating: Alternating, num_pairs: int, asked: _Asked
) -> None:
    """One request after the other."""
    load = Load(text.name, (), text.is_replayed, text.temperature)
    while alternating.num_pairs < num_pairs:
        number = next(asked.numbers)
        request = make_request(number, text.make(number), load, "auto")
        asked.recorded[request.request_id] = text.make(number)[1]
        async for _ in built.engine.submit(request):
            pass
        asked.num_proposed += request.usage.proposed_tokens
        asked.num_tokens += request.usage.completion_tokens
