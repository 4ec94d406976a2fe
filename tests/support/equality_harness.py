"""A pair of models, requests with every sampling parameter, and what each says when alone."""

from __future__ import annotations

import random
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import torch

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.bench.common.oracle import OracleSource
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import Proposer
from foretoken.core.execution.step_layout import table_slots
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.extras.tiers import KVTiers
from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.protocols import ProposerTraits, Speculator
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.model.loader import ModelImpl, load_decoder
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.state_pool import DRAFT_ROOM
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.control.controller import Controller
from foretoken.draft.control.cost_model import CostModel, StepProfile
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.self_draft import SelfProposer
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.sources.prefix import PrefixSource
from foretoken.draft.sources.source import Source
from foretoken.draft.sources.suffix import SuffixSource
from foretoken.draft.speculator import DraftSpeculator
from foretoken.radix_cache import PrefixCache, StateSlots
from support.checkpoints import void_item
from support.draft_trees import TreeProposer
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.proposers import BareProposer
from support.tiny_heads import TINY, join_random, tiny
from support.tiny_pair import write_pair

NUM_TOKENS = 16
STOP_IDS = frozenset({2, 3})
TEMPERATURES = (0.0, 0.7, 1.0)
PARAMETERS: dict[str, dict[str, object]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all_cuts": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {7: 4.0, 9: -50.0}},
    "allowed": {"allowed_token_ids": [4, 5, 6, 7, 8, 9, 10, 11, 12]},
    "bad_words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 12},
    "logprobs": {"logprobs": 3},
    "ignore_eos": {"ignore_eos": True},
}


def requests(shared: Sequence[int]) -> list[tuple[list[int], SamplingMetadata]]:
    """One request for each parameter and temperature; half of them share a prefix."""
    made = []
    for index, (name, temperature) in enumerate(
        (name, temperature) for name in PARAMETERS for temperature in TEMPERATURES
    ):
        rng = random.Random(index)
        own = [rng.randrange(4, 256) for _ in range(rng.randrange(1, 30))]
        prompt = [*shared, *own] if index % 2 else own
        params = SamplingParams(
            temperature=temperature,
            max_tokens=NUM_TOKENS,
            **PARAMETERS[name],  # type: ignore[arg-type]
        )
        sampling = SamplingMetadata(
            params=params,
            seed=1000 + index,
            prompt_len=len(prompt),
            stop_ids=frozenset() if params.ignore_eos else STOP_IDS,
            bad_words_ids=((5,), (6, 7), (8, 9, 10)) if params.bad_words else (),
        )
        made.append((prompt, sampling))
    return made


# Two of the native kernels' blocks of keys, which sharers read together, and a bit.
SHARED = [random.Random(99).randrange(4, 256) for _ in range(137)]
REQUESTS = requests(SHARED)


class RandomDrafts(BareProposer):
    """Guesses anything, ids that do not exist included."""

    def __init__(self, targets: dict[str, list[int]]) -> None:
        self._rng = random.Random(5)

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        return [Draft.of(self._guess(row.draft_plan.max_draft), "random") for row in rows]

    def _guess(self, most: int) -> list[int]:
        return [self._rng.randrange(-2, 260) for _ in range(self._rng.randrange(most + 1))]


class Perfect(BareProposer):
    """Knows the answer."""

    def __init__(self, targets: dict[str, list[int]]) -> None:
        self._targets = targets

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        return [Draft.of(self._rest(row)[: row.draft_plan.max_draft], "perfect") for row in rows]

    def _rest(self, row: ScheduledRequest) -> list[int]:
        return self._targets[row.request_id][len(row.tokens) - row.sampling.prompt_len :]


class Wrong(Perfect):
    """Knows the answer and never says it."""

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        right = super().propose(rows)
        return [Draft.of([(t + 1) % 256 for t in draft.token_ids], "wrong") for draft in right]


class Peeking(Perfect):
    """Looks at what it drafted before it decides how much of it to show."""

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        return [self._prune(draft) for draft in super().propose(rows)]

    @staticmethod
    def _prune(draft: Draft) -> Draft:
        kept = [t for t in draft.token_ids if t % 3]
        return Draft.of(kept, "peeking")


class Raising(Perfect):
    """Fails every other time."""

    calls = 0

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("the draft model is broken")
        return super().propose(rows)


SYNTHETIC = {
    "random": RandomDrafts,
    "perfect": Perfect,
    "wrong": Wrong,
    "peeking": Peeking,
    "raising": Raising,
    "trees": TreeProposer,
}


SOURCES: dict[str, Callable[[], list[Source]]] = {
    "radix": lambda: [PrefixSource()],
    "suffix": lambda: [SuffixSource()],
    "ngram": lambda: [SuffixSource(own_only=True)],
    "prediction": lambda: [PredictionSource()],
    "oracle": lambda: [OracleSource(0.7)],
    "all": lambda: [
        PredictionSource(),
        PrefixSource(),
        SuffixSource(),
        SuffixSource(own_only=True),
    ],
}
CHEAP = StepProfile(  # drafts cost next to nothing: the controller drafts, and opens branches
    {1: 0.1, 64: 0.1001, 256: 0.101}, {1: 0.0001, 64: 0.0002}
)
DEPTHS: dict[str, int | Literal["auto"]] = dict.fromkeys(SOURCES, 4)
DEPTHS |= {"auto": "auto", "auto+lm": "auto", "fixed+lm": 4, "fixed+block": 4}
DEPTHS |= {f"auto+{kind}": "auto" for kind in TINY}
# drafters with a head of `join_random`: each kind alone, and beside the free sources
HEADS = {name: name for name in (*TINY, "reduced")}
HEADS |= {f"auto+{kind}": kind for kind in TINY} | {"fixed+block": "block"}


class Forgetful(SelfProposer):
    """Makes void what its drafts wrote, as if nothing of it might be read again."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        super().__init__(decoder, pool)
        self._kv = pool

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        drafts = super().propose(rows)
        size = self._kv.page_size
        for row in rows:
            slots = {page * size + at for page in row.spare_page_ids for at in range(size)}
            slots |= {*table_slots(row, row.start, len(row.page_ids) * size - row.start, size)}
            self._kv.copy_slots([self._kv.num_pages * size - 1] * len(slots), [*slots])
            self._forget_entries(row)
        return drafts

    def _forget_entries(self, row: ScheduledRequest) -> None:
        """Make void the log from the pending token on, as much as it holds beside a page."""
        states = self._kv.states
        state = row.extras.state
        if states is None or state is None:
            return
        places = [at % states.ring for at in range(row.start, row.start + DRAFT_ROOM)]
        for layer in range(len(states.shapes)):
            log = states.log(state.log, layer)
            for field in (log.k, log.u, log.c):
                field[:, places] = float("nan")
            if len(log.inputs):  # a layer with a convolution
                log.inputs[places] = float("nan")


class Failing(SelfProposer):
    """Fails every other time when its passes are over."""

    calls = 0

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        drafts, self.calls = super().propose(rows), self.calls + 1
        if self.calls % 2:
            raise RuntimeError("the draft is lost")
        return drafts


def _rough(make: Callable[[Decoder, KVPool], Proposer]) -> Callable[[Decoder, KVPool], Proposer]:
    return lambda target, pool: make(rough_decoder(target), pool)


SELF_DRAFTERS: dict[str | None, Callable[[Decoder, KVPool], Proposer]] = {
    "self": _rough(Forgetful),
    "auto+self": _rough(Forgetful),
    "failing self": _rough(Failing),
    "unrounded self": Forgetful,
}


class Frozen(CostModel):
    """Costs that no measurement changes: what is drafted follows from the tokens alone."""

    def observe(self, **_: object) -> None: ...  # type: ignore[override]

    def observe_draft(self, *_: object) -> None: ...


def make_speculator(name: str) -> DraftSpeculator:
    """The sources of that name; "auto" is all of them under the controller, "fixed" without it."""
    return DraftSpeculator(
        SOURCES.get(name, SOURCES["all"])(),
        Controller(Frozen(CHEAP)),
        AcceptanceModel(),
        depth=DEPTHS.get(name, "auto"),
        proposer=_traits(name) if "+" in name else None,
        clock=lambda: 0.0,
    )


def _traits(name: str) -> ProposerTraits:
    tokens_per_pass = tiny(HEADS[name]).tokens_per_pass if name in HEADS else 1
    catches_up = name not in HEADS and name != "auto+self"
    return ProposerTraits(tokens_per_pass=tokens_per_pass, catches_up=catches_up, weighs=True)


class HouseTiers(Protocol):
    """Tiers of a run of a `House`."""

    def open(self, cache: PrefixCache, pool: KVPool, proposer: Proposer | None) -> KVTiers:
        """Open the stores of what is run now."""

    def drive(self, scheduler: Scheduler, runner: Any) -> Driver:
        """Make what runs the requests, and makes the calls of the I/O thread."""


class House:
    """A target, a draft model, and what each of some requests says when it is alone."""

    def __init__(
        self,
        target: Decoder,
        draft: Decoder,
        kv_dtype: KvDtype = "auto",
        *,
        indices: Iterable[int] = range(len(REQUESTS)),
    ) -> None:
        self.target, self.draft, self.kv_dtype = target, draft, kv_dtype
        self.page_size = 16 if target.states else 4
        self.solo = {}
        for index in indices:
            self.solo |= self.run([index], None, depth=0)

    @classmethod
    def load(
        cls,
        pair: Sequence[Path],
        dtype: Literal["float32", "bfloat16"],
        backend: Literal["torch", "native"] = "torch",
        kv_dtype: KvDtype = "auto",
        impl: ModelImpl = "auto",
        indices: Iterable[int] = range(len(REQUESTS)),
    ) -> House:
        target, draft = (
            load_decoder(folder, dtype=dtype, exact="batch", backend=backend, impl=impl)
            for folder in pair
        )
        return cls(target, draft, kv_dtype, indices=indices)

    def run(
        self,
        order: Sequence[int],
        drafter: str | None,
        *,
        depth: int = 4,
        max_running: int = 8,
        num_pages: int = 600,
        page_size: int | None = None,
        num_slots: int = 24,
        state_interval: int = 64,
        max_batch_tokens: int = 48,
        repeats: int = 1,
        poison: bool = False,
        speculator: Speculator | None = None,
        tiers: HouseTiers | None = None,
        drive: Callable[[Scheduler, Any], Driver] = Driver,
    ) -> dict[str, list[int]]:
        page_size = page_size or self.page_size
        states = slots = None
        if self.target.states:
            max_running = min(max_running, num_slots - 2)
            states = self.target.make_state_pool(num_slots, max_running, page_size=page_size)
            slots = StateSlots(num_slots, max_running, interval=state_interval)
        self.states = states
        cache = PrefixCache(num_pages, page_size, states=slots)
        limits = SchedulerLimits(
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_queued=100,
            max_model_len=300,
            vocab_size=256,
        )
        if speculator is None:
            speculator = (
                make_speculator(drafter)
                if drafter in DEPTHS or drafter == "auto+self"
                else FixedDepth(depth)
            )
        more = drafter in SELF_DRAFTERS  # one page that is never used
        pool = self.target.make_pool(
            num_pages + more, page_size=page_size, kv_dtype=self.kv_dtype, states=states
        )
        if poison or more:
            pool.data.fill_(void_item(pool))
        if poison and states is not None:
            for memory in (states.slots, states.logs):
                memory.fill_(255)  # NaN as float32 and as bfloat16
        proposer = (
            SELF_DRAFTERS[drafter](self.target, pool)
            if drafter in SELF_DRAFTERS
            else self._proposer(drafter, num_pages, page_size)
        )
        runner = ModelRunner(self.target, pool, proposer)
        self.scheduler = Scheduler(
            cache, limits, speculator, tiers and tiers.open(cache, pool, proposer)
        )
        driver = (tiers.drive if tiers else drive)(self.scheduler, runner)
        for _ in range(repeats):
            driver.ended.clear()
            self.requests = [self._request(index) for index in order]
            driver.add(*self.requests)
            driver.run()
        return driver.served

    def _proposer(self, name: str | None, num_pages: int, page_size: int) -> Proposer | None:
        if name in SYNTHETIC:
            return SYNTHETIC[name](self.solo)
        if name in HEADS:
            joined = join_random(HEADS[name], self.target)
            head_pool = joined.make_pool(num_pages, page_size=page_size)
            head_pool.data.fill_(float("nan"))
            return joined.proposer(head_pool)
        if name not in ("lm", "auto+lm", "fixed+lm"):
            return None
        pool = self.draft.make_pool(num_pages, page_size=page_size, kv_dtype=self.kv_dtype)
        return LmProposer(self.draft, pool, window=16)

    def _request(self, index: int) -> Request:
        prompt, sampling = REQUESTS[index]
        return Request(
            request_id=str(index),
            tokens=array("q", prompt),
            sampling=sampling,
            stop_ids=sampling.stop_ids,
            prediction=array("q", self._predict(index)),
        )

    def _predict(self, index: int) -> list[int]:
        """The answer, with a token changed, one dropped and one added."""
        known = self.solo.get(str(index), [])
        return [
            *known[:3],
            77,
            *known[3:6],
            *known[7:10],
            *(t ^ 1 for t in known[10:11]),
            *known[11:],
        ]

    def check(self, served: dict[str, list[int]]) -> None:
        for request_id, tokens in served.items():
            assert tokens == self.solo[request_id], REQUESTS[int(request_id)][1].params


def tiny_house(
    dtype: Literal["float32", "bfloat16"],
    backend: Literal["torch", "native"] = "torch",
    kv_dtype: KvDtype = "auto",
    impl: ModelImpl = "auto",
) -> House:
    """The tiny pair's, made once a process: what its requests say alone is the same for all."""
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    torch.set_num_threads(1)  # each time: other tests in between may have set more
    return _tiny_house(dtype, backend, kv_dtype, impl)


@cache
def _tiny_house(
    dtype: Literal["float32", "bfloat16"],
    backend: Literal["torch", "native"],
    kv_dtype: KvDtype,
    impl: ModelImpl,
) -> House:
    with tempfile.TemporaryDirectory() as folder:
        pair = write_pair(Path(folder), vocab_size=256)
        return House.load(pair, dtype, backend, kv_dtype, impl)


def shuffled(seed: int) -> list[int]:
    order = list(range(len(REQUESTS)))
    random.Random(seed).shuffle(order)
    return order
