"""A decoder without weights, under the real `ModelRunner`: KV and logits are hashes of prefixes.

The KV of a position is a function of the tenant and of all tokens up to it, computed from the KV
before it as that lies in the pages. So a page with foreign content is noticed when it is read,
changes the answer as it would in earnest, and every right answer is known in advance. The next
token depends now on the last two tokens, now on all: texts repeat themselves, and drafts come
true sometimes.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from msgspec.structs import replace

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.packing.policies import KeepWindow
from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import (
    OnKernelsStarted,
    Pending,
    ignore_kernels,
)
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.ops.batch import ForwardOutput, Segment, Wanted
from foretoken.core.ops.rows.row_table import RowTable
from foretoken.core.ops.rows.step_inputs import lay_out, rows_library
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.verifier import NOT_FINITE, Verified
from support.launch_behind import Finished, launch_behind
from support.toy_states import ToyStates

VOCAB_SIZE = 6
State = tuple[int, int, int]  # KV of a position: hash of the prefix, the last two tokens
BROKEN: State = (0, -1, -1)  # not a number
Violation = Callable[[str], None]


def root(salt: int) -> State:
    """Return the state before the first token."""
    return (hash((7, salt)), 0, 0)


def advance(state: State, token: int) -> State:
    """The KV of a token behind a prefix."""
    return BROKEN if state == BROKEN else (hash((state[0], token)), state[2], token)


def choose(state: State) -> int:
    """The token that follows."""
    digest, before, last = state
    return hash((before, last, 3) if digest % 4 else (digest,)) % VOCAB_SIZE


@lru_cache(maxsize=4096)
def solo(prompt: tuple[int, ...], salt: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a request that is served alone, without drafts and stops."""
    state = root(salt)
    for token in prompt:
        state = advance(state, token)
    said = []
    for _ in range(num_tokens):
        said.append(choose(state))
        state = advance(state, said[-1])
    return tuple(said)


class Pages:
    """KV by page and slot, with the face of a `KVPool`. Fresh pages hold what was there before.

    With ``states`` they are those of a model whose rows come from recurrent states: its KV are
    written and looked at, and decide nothing.
    """

    def __init__(self, num_pages: int, page_size: int, states: ToyStates | None = None) -> None:
        self.page_size = page_size
        self.states = states
        self.data: list[list[State | None]] = [[None] * page_size for _ in range(num_pages)]

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self[target] = self[source]

    def pack(self, page_ids: Sequence[int], kept: torch.Tensor, first: int) -> None:
        """Move the kept places forward; all layers and heads are one here."""
        size = self.page_size

        def slot(place: int) -> int:
            return page_ids[place // size] * size + place % size

        states = [self[slot(place)] for place in kept.flatten().tolist()]
        for place, state in enumerate(states, first):
            self[slot(place)] = state

    def __getitem__(self, slot: int) -> State | None:
        return self.data[slot // self.page_size][slot % self.page_size]

    def __setitem__(self, slot: int, state: State | None) -> None:
        self.data[slot // self.page_size][slot % self.page_size] = state

    def slot(self, segment: Segment, position: int) -> int:
        """Return the slot of a segment's position."""
        behind = position - (segment.stop - len(segment.tail))
        if behind >= 0:
            return segment.tail[behind]
        page_id = segment.page_ids[position // self.page_size]
        return page_id * self.page_size + position % self.page_size


class Chains:
    """The right KV of every position of the requests that are there."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[SamplingMetadata, list[State]] = WeakKeyDictionary()

    def of(self, row: ScheduledRequest) -> list[State]:
        """One for each token before the last of a row, which may be a guess; tokens only grow."""
        chain = self._known.setdefault(row.sampling, [])
        for token in row.tokens[len(chain) : row.stop - 1]:
            chain.append(advance(chain[-1] if chain else root(row.sampling.seed), token))
        return chain


@dataclass
class Laid:
    """Batch of segments with the properties of a `RaggedBatch` that are read here."""

    segments: Sequence[Segment]
    lens: np.ndarray = field(init=False)
    first_rows: np.ndarray = field(init=False)
    num_logits: int = field(init=False)
    states: list[list[State]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lens = np.array([len(segment.token_ids) for segment in self.segments])
        self.first_rows = np.cumsum(self.lens) - self.lens
        self.num_logits = sum(segment.num_logits for segment in self.segments)


class HashDecoder:
    """A `Decoder` as far as the runner needs one; also its own sampler, greedy."""

    def __init__(self, violation: Violation) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.device = torch.device("cpu")
        self.sampler = self
        self.rows: Sequence[ScheduledRequest] = ()  # of the step under way
        self.broken: set[str] = set()  # requests whose rows come out as not a number
        self._chains = Chains()
        self._violation = violation

    def batch(
        self, segments: Sequence[Segment], *, page_size: int, device_tokens: None = None
    ) -> Laid:
        return Laid(segments)

    def row_batch(self, rows: RowTable, *, device_tokens: None = None) -> Laid:
        """The segments of the batch that C lays out."""
        library = rows_library()
        assert library is not None
        batch = lay_out(rows, library, device="cpu", min_rows=1)
        owners = np.searchsorted(batch.first_rows, batch.logit_rows.numpy(), side="right") - 1
        num_logits = np.bincount(owners, minlength=len(batch.lens)).tolist()
        token_ids, pages, tails = (
            np.split(of, ends[:-1])
            for of, ends in (
                (batch.token_ids.numpy(), batch.lens.cumsum()),
                (batch.pages, batch.page_counts.cumsum()),
                (batch.tails, batch.tail_lens.cumsum()),
            )
        )
        return Laid(
            [
                Segment(
                    array("q", token_ids[index].tolist()),
                    start,
                    array("q", pages[index].tolist()),
                    num_logits[index],
                    tail=array("q", tails[index].tolist()),
                )
                for index, start in enumerate(batch.starts.tolist())
            ]
        )

    def forward(self, batch: Laid, pool: Pages, wanted: Wanted) -> ForwardOutput:
        """Hidden states [num_rows, 1], not a number where a row is broken; writes all KV."""
        assert wanted.on_kernels_started is not None
        wanted.on_kernels_started()
        if pool.states is not None:
            pool.states.check_batch(batch.segments)
        rows, row = iter(self.rows), self.rows[0]
        written: set[int] = set()
        for segment in batch.segments:
            row = row if segment.tail else next(rows)
            self._check_context(row, segment, pool)
            self._check_writes(row, segment, pool, written)
            states = _computed(row, segment, pool)
            if row.request_id in self.broken:
                states = [BROKEN] * len(states)
                if pool.states is not None:
                    pool.states.spoil(segment, BROKEN)
            for position, state in enumerate(states, segment.start):
                pool[pool.slot(segment, position)] = state
            batch.states.append(states)
        values = [math.nan if s == BROKEN else 0.0 for states in batch.states for s in states]
        return ForwardOutput(torch.tensor(values)[:, None], self._logits(batch))

    def _check_context(self, row: ScheduledRequest, segment: Segment, pool: Pages) -> None:
        """I7: what stands before the draft is the KV of exactly the request's tokens."""
        chain, prompt_len = self._chains.of(row), row.sampling.prompt_len
        if segment.extras is not None:
            chain = chain[:prompt_len] + chain[prompt_len + segment.extras.shift :]
        stop = min(segment.start, len(chain))
        held = [pool[pool.slot(segment, position)] for position in range(stop)]
        if held != chain[:stop]:
            self._violation(f"foreign KV on the path of {row.request_id}")

    def _check_writes(
        self, row: ScheduledRequest, segment: Segment, pool: Pages, written: set[int]
    ) -> None:
        """No slot is written by two, and drafts have slots for every token."""
        in_pages = segment.stop - len(segment.tail)
        if len(segment.page_ids) * pool.page_size < in_pages:
            self._violation(f"a page table of {row.request_id} is too short for its step")
        slots = {pool.slot(segment, at) for at in range(segment.start, segment.stop)}
        if slots & written or len(slots) < len(segment.token_ids):
            self._violation(f"{row.request_id} writes a slot that another path writes")
        written |= slots

    def _logits(self, batch: Laid) -> torch.Tensor:
        """[num_logits, vocab], 1 at the token that follows."""
        wanted = [
            state
            for segment, states in zip(batch.segments, batch.states, strict=True)
            for state in states[len(states) - segment.num_logits :]
        ]
        values = np.zeros((len(wanted), VOCAB_SIZE), dtype=np.float32)
        values[np.arange(len(wanted)), [choose(state) for state in wanted]] = 1.0
        values[[state == BROKEN for state in wanted]] = math.nan
        return torch.from_numpy(values)

    def verify(self, logits: torch.Tensor, rows: Sequence[DraftedRow]) -> list[Verified]:
        """Verify drafts as `core.sampling.verifier` does at temperature 0."""
        finite = logits.isfinite().all(dim=-1).tolist()
        chosen = list(zip(logits.argmax(dim=-1).tolist(), finite, strict=True))
        found = []
        for row in rows:
            found.append(_verified(row, chosen[: len(row.draft) + 1]))
            del chosen[: len(row.draft) + 1]
        return found


def _computed(row: ScheduledRequest, segment: Segment, pool: Pages) -> list[State]:
    """The state behind each row of a segment, from the request's recurrent state or from KV."""
    first = root(row.sampling.seed)
    if pool.states is not None:
        return pool.states.compute(row.request_id, segment, first, advance)
    state = pool[pool.slot(segment, segment.start - 1)] if segment.start else None
    states = []
    for token in segment.token_ids:
        states.append(state := advance(state or first, token))
    return states


def _verified(row: DraftedRow, chosen: Sequence[tuple[int, bool]]) -> Verified:
    token_ids, path = list[int](), list[int]()
    node: int | None = -1
    while node is not None:
        token_id, is_finite = chosen[node + 1]
        if not is_finite:
            return Verified(tuple(token_ids), tuple(path), error=NOT_FINITE)
        token_ids.append(token_id)
        node = row.child(node, token_id)
        if node is not None:
            path.append(node)
    return Verified(tuple(token_ids), tuple(path))


@dataclass
class SimulatedLaunch:
    """Outcome that the device has for the host, if it waits for it."""

    outcome: StepOutput | Exception

    def finish(self) -> StepOutput:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class SimulatedRunner(ModelRunner):
    """The real runner over pages of hashes; faults come from ``before`` and ``after`` each step.

    Times are told by ``seconds``, not by a clock: what is measured decides what is drafted.
    """

    def __init__(
        self,
        decoder: HashDecoder,
        pool: Pages,
        proposer: Proposer | None,
        *,
        before: Callable[[StepPlan], None],
        after: Callable[[StepPlan], None],
        seconds: Callable[[], float],
        fails_late: random.Random | None = None,
    ) -> None:
        super().__init__(decoder, pool, proposer, keep_policy=KeepWindow())  # type: ignore[arg-type]
        self._before, self._after, self._part_seconds = before, after, seconds
        self._fails_late = fails_late
        self.num_ahead = 0  # steps whose plan was made while the one before ran

    @property
    def is_async(self) -> bool:
        """With ``fails_late``, as on a GPU: some failures are told when a step is waited for."""
        return self._fails_late is not None

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Compute it at once: a device keeps the order, whenever it comes to it.

        What it makes of a row without a token, or behind a step that failed, nobody reads.
        """
        if self._fails_late is None:
            return Finished(self._computed(plan, on_kernels_started))
        if isinstance(after, SimulatedLaunch) and isinstance(after.outcome, Exception):
            return after
        try:
            return SimulatedLaunch(self._behind(plan, after, on_kernels_started).finish())
        except RuntimeError as failure:
            if self._fails_late.random() < 0.5:
                raise
            return SimulatedLaunch(failure)

    def _behind(
        self, plan: StepPlan, after: Pending | None, on_kernels_started: OnKernelsStarted
    ) -> Pending:
        if after is None:
            return Finished(self._computed(plan, on_kernels_started))
        self.num_ahead += 1
        known = partial(self._behind, after=None, on_kernels_started=on_kernels_started)
        return launch_behind(known, plan, after.finish())

    def _computed(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> StepOutput:
        if not plan.requests:  # no row has a token
            return StepOutput(requests=[])
        self.decoder.rows = plan.requests
        self._before(plan)
        output = super().launch(plan, on_kernels_started=on_kernels_started).finish()
        self._after(plan)
        times = {name: self._part_seconds() for name in ("draft", "forward", "verify")}
        return replace(output, times=times)
