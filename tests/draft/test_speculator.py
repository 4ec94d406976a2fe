"""DraftSpeculator: which sources guess, how much is drafted, what is learnt from the outcome."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.core.interface.draft import NO_DRAFT_PLAN, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.draft.control.controller import Allocation, Controller, StepCandidates
from foretoken.draft.control.cost_model import CostCurve, CostModel, StepProfile
from foretoken.draft.control.draft_state import FRUITLESS, MAX_PERIOD
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.sources.merge import common_len
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.sources.prefix import PrefixSource
from foretoken.draft.sources.source import GuardedSource, Guess, Priors, Source
from foretoken.draft.sources.suffix import SuffixSource
from foretoken.draft.speculator import LOOKUP_LEN, PROPOSER_NODES, DraftSpeculator
from support.drafts import proposed
from support.proposers import MODEL

TEXT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 13, 12, 17, 19, 14, 16, 23, 21, 22, 29, 27, 31, 33, 37]
NEWS = range(10_000, 20_000)  # tokens that were never said
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHEAP = StepProfile({n: 1.0 + 0.001 * n for n in ROWS}, dict.fromkeys(ROWS, 0.01))
TENTH = StepProfile({n: 1.0 + 0.1 * n for n in ROWS}, dict.fromkeys(ROWS, 0.01))
DEAR = StepProfile({n: 1.0 * n for n in ROWS}, dict.fromkeys(ROWS, 5.0))


class Ticking:
    """A clock of which every look takes a while; a decision is two looks."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


class Says:
    """A source with one opinion, or none."""

    def __init__(self, name: str, token_ids: Sequence[int] = (), *, chance: float = 0.9) -> None:
        self.name, self.token_ids = name, token_ids
        self.priors = Priors.constant(chance)
        self.num_asked = 0

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        self.num_asked += 1
        token_ids = array("q", self._opinion(request)[:most])
        return (Guess(token_ids, self.name, 0),) if token_ids else ()

    def _opinion(self, request: Request) -> Sequence[int]:
        return self.token_ids

    def index(self, request: Request, *, for_others: bool = False) -> int:
        return 0

    def leave(self, request: Request) -> None: ...

    def flush(self, *namespaces: str | None) -> None: ...


class Knows(Says):
    """A source that knows the text, and says what follows it."""

    def _opinion(self, request: Request) -> Sequence[int]:
        return self.token_ids[len(request.tokens) :]


class Broken(Says):
    """A source that fails whatever it is asked."""

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        self.num_asked += 1
        raise RuntimeError("propose")

    def index(self, request: Request, *, for_others: bool = False) -> int:
        raise RuntimeError("index")

    def leave(self, request: Request) -> None:
        raise RuntimeError("leave")

    def flush(self, *namespaces: str | None) -> None:
        raise RuntimeError("flush")


class Bench:
    """A speculator in a loop without a model: what a request says is given."""

    def __init__(
        self,
        *sources: Source,
        profile: StepProfile = CHEAP,
        tick_s: float = 0.0,
        **options: object,
    ) -> None:
        self.costs, self._machine = CostModel(profile), CostCurve(profile.forward)
        self.speculator = DraftSpeculator(
            sources or [PredictionSource(), PrefixSource(), SuffixSource(num_slots=2**16)],
            Controller(self.costs),
            AcceptanceModel(),
            clock=Ticking(tick_s),
            **options,  # type: ignore[arg-type]
        )
        self.num_requests = 0
        self.seen: list[StepCandidates] = []  # what the controller was asked
        self._watch()

    def _watch(self) -> None:
        allocate = self.speculator.controller.allocate

        def watched(candidates: StepCandidates) -> Allocation:
            self.seen.append(candidates)
            return allocate(candidates)

        self.speculator.controller.allocate = watched  # type: ignore[method-assign]

    def request(
        self, prompt: Sequence[int], *, temperature: float = 1.0, **options: object
    ) -> Request:
        """One that has joined, with its prompt indexed."""
        self.num_requests += 1
        params = TokenSamplingParams(temperature=temperature)
        request = Request(
            request_id=str(self.num_requests),
            tokens=array("q", prompt),
            sampling=SamplingMetadata(params=params, seed=0, prompt_len=len(prompt)),
            max_len=1000,
            **options,  # type: ignore[arg-type]
        )
        self.speculator.join(request)
        self.speculator.work()
        return request

    def plan(
        self, *requests: Request, limit: int = 20, budget: int = 200, num_prefill: int = 0
    ) -> Sequence[DraftPlan]:
        limits = [limit] * len(requests)
        return self.speculator.plan(requests, limits, budget=budget, num_prefill=num_prefill)

    def step(
        self,
        request: Request,
        said: Sequence[int],
        *,
        limit: int = 20,
        lm_hits: int = 0,
        num_uncached: int = 0,
        draft_s: float = 0.0,
    ) -> DraftPlan:
        """A step of one request, which goes on with ``said`` as far as its draft comes true.

        Of the draft model's tokens ``lm_hits`` come true; a pass takes ``draft_s``. It is skipped
        where it may be.
        """
        drafts_nothing = self.speculator.drafts_nothing([request])
        plan = NO_DRAFT_PLAN if drafts_nothing else self.plan(request, limit=limit)[0]
        row = _row(request, plan)
        hits = max(min(lm_hits, plan.max_draft), common_len(list(plan.draft.token_ids), list(said)))
        served = said[: hits + 1]
        # the model knows how far to trust itself, and stops where a pass would bring too little
        most = min(plan.max_draft, lm_hits + 1 if max(plan.pass_prices, default=0.0) < 0.5 else 1)
        num_own = 0 if num_uncached else most
        draft = proposed(
            len(plan.draft.token_ids),
            hits,
            num_own=num_own,
            num_own_hits=min(lm_hits, num_own),
            num_uncached=num_uncached,
        )
        num_rows = 1 + len(draft.token_ids)
        output = RequestOutput(
            request_id=request.request_id, token_ids=served, draft=draft, path=range(hits)
        )
        request.tokens.extend(served)
        if not drafts_nothing:
            self.speculator.observe(request, row, output, len(served))
        forward_s = float(self._machine.at(num_rows))
        draft_s *= num_own
        self._commit([row], [output], num_rows, forward_s, draft_s)
        return plan

    def _commit(
        self,
        rows: Sequence[ScheduledRequest],
        outputs: Sequence[RequestOutput],
        num_rows: int,
        forward_s: float,
        draft_s: float,
    ) -> None:
        times = {"forward": forward_s, "draft": draft_s}
        self.speculator.observe_step(
            StepPlan(requests=rows, newly_allocated_pages=array("q")),
            StepOutput(requests=outputs, times=times, num_rows=num_rows),
            forward_s + draft_s,
        )
        self.speculator.work()

    def tell(self, prompt: Sequence[int], answer: Sequence[int], **options: object) -> None:
        """A request comes, says its answer and leaves."""
        request = self.request(prompt, **options)  # type: ignore[arg-type]
        for token_id in answer:
            self.step(request, [token_id])
        self.speculator.leave(request)
        self.speculator.work()


def _row(request: Request, plan: DraftPlan) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request.request_id,
        tokens=request.tokens,
        start=len(request.tokens) - 1,
        stop=len(request.tokens),
        page_ids=array("q"),
        sampling=request.sampling,
        draft_plan=plan,
    )


# -- what was said before -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["auto", 8])
def test_what_was_said_before_is_drafted(depth) -> None:
    bench = Bench(depth=depth)
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8]))
    assert list(plan.draft.token_ids[:6]) == TEXT[8:14]
    assert set(plan.draft.sources) <= {"radix", "suffix"}


@pytest.mark.parametrize("depth", ["auto", 8])
@pytest.mark.parametrize(("said", "asked"), [(None, "b"), ("a", "b"), ("a", None)])
def test_another_salt_gets_no_draft(depth, said, asked) -> None:
    bench = Bench(depth=depth)
    bench.tell(TEXT[:6], TEXT[6:], namespace=said)
    assert bench.plan(bench.request(TEXT[:8], namespace=asked)) == [NO_DRAFT_PLAN]
    assert bench.plan(bench.request(TEXT[:8], namespace=said)) != [NO_DRAFT_PLAN]


def test_a_flush_forgets_a_namespace() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:], namespace="a")
    bench.tell(TEXT[:6], TEXT[6:], namespace="b")
    bench.speculator.flush("a")
    assert bench.plan(bench.request(TEXT[:8], namespace="a")) == [NO_DRAFT_PLAN]
    assert bench.plan(bench.request(TEXT[:8], namespace="b")) != [NO_DRAFT_PLAN]
    bench.speculator.flush()
    assert bench.plan(bench.request(TEXT[:8], namespace="b")) == [NO_DRAFT_PLAN]


def test_a_flush_forgets_what_has_just_been_said() -> None:
    bench = Bench()
    request = bench.request(TEXT[:6])
    for token_id in TEXT[6:]:
        bench.step(request, [token_id])
    bench.speculator.leave(request)
    bench.speculator.flush()
    assert bench.plan(bench.request(TEXT[:8])) == [NO_DRAFT_PLAN]


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    bench = Bench()
    plan = bench.step(bench.request([1, 2, 3], prediction=array("q", TEXT)), TEXT[:6])
    assert list(plan.draft.token_ids[:6]) == TEXT[:6]
    assert set(plan.draft.sources) == {"prediction"}


def test_every_token_of_a_running_request_is_indexed() -> None:
    class Counting(SuffixSource):
        num_tokens = 0

        def index(self, request: Request, *, for_others: bool = False) -> int:
            done = super().index(request)
            self.num_tokens += done
            return done

    source = Counting(num_slots=2**12)
    bench = Bench(source, overlaps=True)
    request = bench.request(TEXT)
    for token_id in [*TEXT, *NEWS[:30]]:
        bench.step(request, [token_id])
        assert source.num_tokens == len(request.tokens)


def test_while_look_ups_back_off_requests_are_indexed_before_the_next_one_only() -> None:
    bench = Bench(overlaps=True)
    request, rests, works = bench.request(TEXT), list[bool](), list[bool]()
    for token_id in range(1000, 1040):
        rests.append(bench.speculator.drafts_nothing([request]))
        works.append(bench.speculator.has_work())
        bench.step(request, [token_id])
    assert [at for at, rest in enumerate(rests) if rest and works[at]] == [7, 15, 23, 31, 39]
    assert all(work for work, rest in zip(works, rests, strict=True) if not rest)
    assert rests.count(False) < 12
    bench.speculator.leave(request)
    assert bench.speculator.has_work(), "an ended request is stored at once"
    bench.speculator.work()
    assert bench.plan(bench.request(range(1010, 1020))) != [NO_DRAFT_PLAN]


def test_a_prompt_is_indexed_at_once_while_others_back_off() -> None:
    bench = Bench(overlaps=True)
    request = bench.request(TEXT)
    while not bench.speculator.drafts_nothing([request]) or bench.speculator.has_work():
        bench.step(request, [1000 + len(request.tokens)])
    late = bench.request(NEWS)
    bench.speculator.leave(late)
    assert bench.speculator.has_work()


# -- fixed depths -------------------------------------------------------------------------------


def test_a_request_that_is_off_drafts_nothing_and_teaches_nothing() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:], depth=0)
    assert bench.plan(bench.request(TEXT[:8])) == [NO_DRAFT_PLAN]
    bench.tell(TEXT[:6], TEXT[6:])
    silent = bench.request(TEXT[:8], depth=0)
    assert bench.plan(silent) == [NO_DRAFT_PLAN]
    assert bench.speculator.drafts_nothing([silent])


def test_a_request_may_fix_its_own_depth() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8], depth=3))
    assert plan.num_rows == 3


def test_a_request_may_ask_for_auto_where_the_depth_is_fixed() -> None:
    bench = Bench(depth=2)
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:10], depth="auto"))
    assert plan.depth == 14


@pytest.mark.parametrize("depth", ["auto", 8])
def test_limits_are_kept(depth) -> None:
    bench = Bench(depth=depth)
    bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:8])
    assert [bench.plan(request, limit=limit)[0].num_rows for limit in (0, 1, 5)] == [0, 1, 5]


@pytest.mark.parametrize("depth", ["auto", 8])
def test_nothing_is_drafted_beyond_a_token_that_ends_the_answer(depth) -> None:
    bench = Bench(Says("a", [5, 6, 7, 8, 7, 9]), depth=depth)
    (plan,) = bench.plan(bench.request(TEXT, stop_ids=frozenset({7, 40})))
    assert list(plan.draft.token_ids) == [5, 6, 7]


def test_the_budget_is_kept_by_fixed_depths_and_what_they_leave_is_for_the_rest() -> None:
    bench = Bench(Says("a", TEXT))
    fixed = [bench.request(TEXT[:8], depth=8) for _ in range(3)]
    auto = bench.request(TEXT[:8])
    plans = bench.plan(*fixed, auto, budget=10)
    assert [plan.num_rows for plan in plans] == [2, 2, 2, 4]


def test_at_a_fixed_depth_the_draft_model_competes_with_what_is_known() -> None:
    bench = Bench(depth=4, proposer=MODEL)
    assert bench.plan(bench.request(TEXT[:8])) == [DraftPlan(max_draft=4)]
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8]))
    assert list(plan.draft.token_ids) == TEXT[8:12]
    assert len(plan.draft.survival) == 4, "the better chain is chosen by survival"
    assert (plan.max_draft, plan.may_branch) == (4, False)


def test_the_better_of_two_chains_is_no_sample_of_the_draft_models() -> None:
    """Else a fixed depth would teach requests with "auto" that the model finds nothing."""
    bench = Bench(Says("a", NEWS), profile=TENTH, proposer=MODEL)
    fixed = bench.request(TEXT, depth=4)
    for token_id in TEXT:
        bench.step(fixed, [token_id])
    bench.plan(auto := bench.request(TEXT))
    assert bench.seen[-1].expected_accepted[0, 0] == pytest.approx(0.65), "as if it was never asked"
    assert bench.plan(auto)[0].max_draft > 0


# -- the controller's choice --------------------------------------------------------------------


def test_all_that_a_source_knows_is_drafted_where_it_comes_true() -> None:
    text = list(range(2000))
    bench = Bench(Knows("a", text, chance=0.5), profile=TENTH)
    request = bench.request(text[:3])
    lengths = [bench.step(request, text[len(request.tokens) :], limit=99).depth for _ in range(40)]
    assert lengths[0] < 5
    assert lengths[-1] == LOOKUP_LEN
    assert len(request.tokens) > 500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_where_guesses_never_come_true(temperature) -> None:
    bench = Bench(Says("a", TEXT, chance=0.5), profile=TENTH)
    request = bench.request(TEXT[:3], temperature=temperature)
    lengths = [bench.step(request, [token_id]).depth for token_id in NEWS[:60]]
    assert lengths[0] > 0
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths[40:]) == 0


def test_what_fails_for_sampled_requests_is_still_trusted_for_greedy_ones() -> None:
    bench = Bench(Says("a", TEXT, chance=0.5), profile=TENTH)
    sampled, greedy = bench.request(TEXT[:3]), bench.request(TEXT[:3], temperature=0.0)
    for token_id in NEWS[:60]:
        bench.step(sampled, [token_id])
    assert [plan.depth > 0 for plan in bench.plan(sampled, greedy)] == [False, True]


def test_guesses_are_scored_though_they_are_not_verified() -> None:
    bench = Bench(Knows("a", TEXT * 20, chance=0.05), profile=TENTH)
    request = bench.request(TEXT[:3])
    lengths = []
    for _ in range(60):
        token_id = (TEXT * 20)[len(request.tokens)]
        lengths.append(bench.step(request, [token_id]).depth)
    assert lengths[0] == 0
    assert lengths[-1] > 0


def test_where_rows_are_dear_nothing_is_drafted() -> None:
    bench = Bench(profile=DEAR, proposer=MODEL)
    bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:8])
    assert [bench.step(request, [t]).num_rows for t in (41, 42, 43, 44)] == [0] * 4


def test_guesses_are_scored_with_their_step_though_the_next_one_is_planned() -> None:
    source = Says("says", [4, 5, 6])
    bench = Bench(source)
    request = bench.request(TEXT[:4])
    (plan,) = bench.plan(request)
    row = _row(request, plan)
    request.tokens.extend([4, 5, 6])
    source.token_ids = [7, 8, 9]  # the next guess, which the outcome below does not judge
    bench.plan(request)
    scored = []
    bench.speculator.acceptance.score = (  # type: ignore[method-assign]
        lambda name, kind, request_id, hits, **others: scored.append((hits, others["missed"]))
    )
    output = RequestOutput(request_id=request.request_id, token_ids=[4, 5, 6])
    bench.speculator.observe(request, row, output, 3)
    request.tokens.extend([7, 1])
    bench.speculator.observe(request, row, output, 2)
    assert scored == [(3, False), (1, True)]


def test_several_requests_share_the_budget_by_what_their_guesses_are_worth() -> None:
    sure, doubtful = Says("sure", [1] * 9, chance=0.95), Says("doubtful", [2] * 9, chance=0.4)
    sure.propose = _only_for("sure", sure)  # type: ignore[method-assign]
    doubtful.propose = _only_for("doubtful", doubtful)  # type: ignore[method-assign]
    bench = Bench(sure, doubtful)
    requests = [bench.request([5], namespace=name) for name in ("doubtful", "sure")]
    assert [plan.depth for plan in bench.plan(*requests, budget=10)] == [1, 9]
    assert [plan.depth for plan in bench.plan(*requests, budget=30)] == [6, 9]


def _only_for(namespace: str, source: Says) -> object:
    propose = source.propose

    def asked(request: Request, most: int) -> Sequence[Guess]:
        return propose(request, most) if request.namespace == namespace else ()

    return asked


def test_requests_that_may_not_draft_count_in_what_a_step_takes() -> None:
    bench = Bench()
    auto = [bench.request(TEXT) for _ in range(2)]
    others = [bench.request(TEXT[::-1], depth=0) for _ in range(14)]
    bench.plan(*auto, *others, num_prefill=40)
    (candidates,) = bench.seen
    assert len(candidates.lookup_survival) == 2
    assert (candidates.num_decodes, candidates.num_rows) == (16, 56)


def test_prompts_in_a_step_are_no_part_of_what_decoding_yields() -> None:
    bench = Bench(profile=TENTH)
    request = bench.request(TEXT)
    bench.step(request, [1])
    before = bench.costs.rate(1)
    decode, chunk = _row(request, NO_DRAFT_PLAN), _row(bench.request(TEXT), NO_DRAFT_PLAN)
    chunk = ScheduledRequest(
        request_id=chunk.request_id,
        tokens=chunk.tokens,
        start=0,
        stop=9,
        page_ids=array("q"),
        sampling=chunk.sampling,
    )
    outputs = [RequestOutput(request_id=row.request_id, token_ids=[1]) for row in (decode, chunk)]
    for _ in range(20):
        bench._commit([decode, chunk], outputs, 10, 2.0, 0.0)
    assert bench.costs.rate(1) == before


# -- trees --------------------------------------------------------------------------------------


def test_guesses_that_differ_become_a_tree_where_rows_cost_next_to_nothing() -> None:
    rivals = [Says("a", [1] * 9, chance=0.6), Says("b", [2] * 9, chance=0.5), Says("c", [1, 3, 3])]
    bench = Bench(*rivals)
    (plan,) = bench.plan(bench.request(TEXT[:4]))
    paths = [plan.draft.path(node) for node in range(plan.num_rows)]
    found = {tuple(plan.draft.token_ids[node] for node in path) for path in paths}
    assert {(1, 3), (1, 1), (2, 2)} <= found
    assert list(plan.draft.trunk().token_ids[:2]) == [1, 3]
    bench = Bench(*rivals, profile=TENTH)
    (plan,) = bench.plan(bench.request(TEXT[:4]))
    assert plan.num_rows > 0
    assert not plan.draft.parents


def test_trees_stay_within_the_rows_that_are_offered() -> None:
    bench = Bench(*(Says(name, [number] * 9) for number, name in enumerate("abcd")))
    requests = [bench.request(TEXT[:4]) for _ in range(3)]
    num_runs = set()
    for budget in (*range(0, 60, 3), 200):
        plans = bench.plan(*requests, budget=budget)
        assert sum(plan.num_rows for plan in plans) <= budget
        num_runs |= {len(plan.draft.runs) for plan in plans}
    assert num_runs >= {0, 1, 2, 3}


# -- the draft model ----------------------------------------------------------------------------


def test_a_draft_model_is_asked_as_deep_as_its_guesses_come_true() -> None:
    bench = Bench(Says("nothing"), profile=TENTH, proposer=MODEL)
    request = bench.request([1, 2, 3])
    depths = [bench.step(request, [4] * 20, lm_hits=20, draft_s=0.01).max_draft for _ in range(30)]
    assert depths[0] > 0
    assert depths[-1] == PROPOSER_NODES
    depths = [bench.step(request, [4] * 20, lm_hits=0, draft_s=0.01).max_draft for _ in range(240)]
    assert sum(depths[-30:]) <= 1, "but for a trial"


def test_look_ups_that_find_nothing_pause_beside_a_draft_model_that_pays() -> None:
    nothing = Says("nothing", [9, 9])  # which never comes true
    bench = Bench(nothing, profile=TENTH, proposer=MODEL, overlaps=True)
    request, silent = bench.request([1, 2, 3]), bench.request(TEXT[:8], depth=0)
    plans = [bench.step(request, [4, 4], lm_hits=1, draft_s=0.01) for _ in range(60)]
    assert all(plan.max_draft for plan in plans[20:]), "the model drafts all the same"
    assert not bench.speculator.drafts_nothing([request])
    assert bench.speculator.drafts_nothing([silent]), "it drafts for others alone"
    assert nothing.num_asked < 40


def test_the_draft_model_helps_out_where_nothing_is_known() -> None:
    bench = Bench(Knows("a", [1, 2, 3, 4, 5]), proposer=MODEL)
    knowing, other = bench.request([1, 2]), bench.request(TEXT)
    plans = bench.plan(knowing, other)
    assert (list(plans[0].draft.token_ids), plans[0].max_draft) == ([3, 4, 5], 0)
    assert plans[1].max_draft > 0


def test_a_draft_model_that_is_slower_than_measured_is_asked_ever_less() -> None:
    measured = StepProfile(TENTH.forward, dict.fromkeys(ROWS, 0.3))
    bench = Bench(Says("nothing"), profile=measured, proposer=MODEL)
    request = bench.request([1, 2, 3])
    depths = [bench.step(request, [4, 5], lm_hits=1, draft_s=2.0).max_draft for _ in range(250)]
    assert sum(depths[:50]) >= 50
    assert sum(depths[-50:]) <= 10


def test_a_draft_model_that_says_nothing_is_not_asked_for_long() -> None:
    dear = StepProfile(TENTH.forward, dict.fromkeys(ROWS, 0.1))
    bench = Bench(Says("nothing"), profile=dear, proposer=MODEL)
    request = bench.request(TEXT[:4])
    asked = []
    for token_id in NEWS[:60]:
        (plan,) = bench.plan(request)
        asked.append(plan.max_draft)
        row = _row(request, plan)
        request.tokens.append(token_id)
        output = RequestOutput(request_id=request.request_id, token_ids=[token_id])
        bench.speculator.observe(request, row, output, 1)
    assert asked[0] > 0
    assert sum(asked[35:]) == 0


def test_what_the_draft_model_lacks_is_followed() -> None:
    bench = Bench(Says("nothing"), proposer=MODEL)
    request = bench.request(TEXT)
    lacking = []
    for num_uncached in (10, 4, 0, 0):
        assert bench.step(
            request,
            [1, 2, 3],
            lm_hits=2 * (not num_uncached),
            num_uncached=num_uncached,
        ).max_draft
        lacking.append(int(bench.seen[-1].num_uncached_draft_tokens[0]))
    assert lacking[:3] == [len(TEXT) - 1, 10, 4], "the first pass computes the last token anyway"
    assert lacking[3] == 0


def test_catching_up_teaches_nothing_about_the_draft_model() -> None:
    bench = Bench(Says("nothing"), proposer=MODEL)
    request = bench.request(TEXT)
    for _ in range(30):
        bench.step(request, [1], num_uncached=10)
    trusted = bench.seen[-1].expected_accepted[0, 0]
    assert trusted == pytest.approx(bench.seen[0].expected_accepted[0, 0])


def test_while_prompts_wait_the_draft_model_does_not_catch_up_with_much() -> None:
    bench = Bench(Says("nothing"), proposer=MODEL)
    request = bench.request(TEXT)
    assert bench.plan(request)[0].max_draft > 0
    assert bench.plan(request, num_prefill=40)[0].max_draft == 0
    bench.step(request, [1, 2], lm_hits=1)
    assert bench.plan(request, num_prefill=1)[0].max_draft > 0


@pytest.mark.parametrize("is_used", [True, False])
def test_cached_kv_of_the_draft_model_is_expected_only_where_it_was_in_use(is_used) -> None:
    bench = Bench(Says("nothing"), profile=CHEAP if is_used else DEAR, proposer=MODEL)
    bench.plan(bench.request(TEXT))
    request = bench.request(TEXT, num_computed=16)
    bench.plan(request)
    assert bench.seen[-1].num_uncached_draft_tokens.tolist() == [len(TEXT) - 1 - 16 * is_used]


# -- silence ------------------------------------------------------------------------------------


def pattern(bench: Bench, request: Request, said: Sequence[int]) -> str:
    """A letter for each step: silent, asked, or drafted."""
    letters = []
    for token_id in said:
        drafts_nothing = bench.speculator.drafts_nothing([request])
        plan = bench.step(request, [token_id])
        letters.append("s" if drafts_nothing else "d" if plan.num_rows else "a")
    return "".join(letters)


LONGEST = "a" + "s" * (MAX_PERIOD - 1)
GROWING = "a" * FRUITLESS + "as" + "as" + "as" + LONGEST + LONGEST + "a"  # from step 0 on


def test_look_ups_that_find_nothing_back_off_where_steps_overlap() -> None:
    bench = Bench(source := Says("nothing"), overlaps=True)
    request = bench.request(TEXT)
    assert pattern(bench, request, NEWS[: len(GROWING)]) == GROWING
    assert source.num_asked == GROWING.count("a")


@pytest.mark.parametrize(("tick_s", "backs_off"), [(0.01, False), (0.05, True)])
def test_else_they_back_off_only_where_deciding_takes_a_share_of_a_step(tick_s, backs_off) -> None:
    bench = Bench(Says("nothing"), tick_s=tick_s)  # a step takes a second
    found = pattern(bench, bench.request(TEXT), NEWS[: len(GROWING)])
    assert found == (GROWING if backs_off else "a" * len(GROWING))


def test_guesses_that_are_not_worth_their_rows_back_off_too() -> None:
    bench = Bench(Says("a", TEXT), profile=DEAR, overlaps=True)
    assert pattern(bench, bench.request(TEXT), NEWS[: len(GROWING)]) == GROWING


def test_a_draft_ends_the_back_off() -> None:
    bench = Bench(source := Says("a"), overlaps=True)
    request = bench.request(TEXT)
    assert pattern(bench, request, NEWS[:9]) == GROWING[:9]
    source.token_ids = TEXT
    found = pattern(bench, request, NEWS[9:18])
    assert found == "s" * (MAX_PERIOD - 1) + "dd", "found when it is looked up again"
    source.token_ids = ()
    assert pattern(bench, request, NEWS[18:30]) == "aaasasasssas"


def test_the_pauses_of_requests_that_joined_at_other_times_end_together() -> None:
    """Else some request is looked up in most steps, and each such step waits for its decision."""
    bench = Bench(Says("nothing"), overlaps=True)
    requests = [bench.request(TEXT)]
    silent = ""
    for index, token_id in enumerate(NEWS[:60]):
        if index in (3, 5, 10):
            requests.append(bench.request(TEXT))
        silent += "s" if bench.speculator.drafts_nothing(requests) else "a"
        bench.plan(*requests)
        no_pages = array("q")
        plan = StepPlan(requests=(), newly_allocated_pages=no_pages)
        bench.speculator.observe_step(plan, StepOutput(requests=()), 1.0)
        for request in requests:
            request.tokens.append(token_id)
    assert 2 * LONGEST + "a" in silent


def test_a_request_that_joins_ends_no_pause_of_others() -> None:
    """Short answers come and go all the time; a pause is short enough to end by itself."""
    bench = Bench(Says("nothing"), overlaps=True)
    request = bench.request(TEXT)
    bench_steps = GROWING.index(LONGEST) + 1
    pattern(bench, request, NEWS[:bench_steps])
    assert bench.speculator.drafts_nothing([request])
    newcomer = bench.request(TEXT)
    assert bench.speculator.drafts_nothing([request])
    assert not bench.speculator.drafts_nothing([newcomer])


def test_a_step_is_silent_where_all_of_its_requests_are() -> None:
    bench = Bench(source := Says("nothing"), overlaps=True)
    first, second = bench.request(TEXT), bench.request(TEXT)
    pattern(bench, first, NEWS[:3])
    assert bench.speculator.drafts_nothing([first])
    assert not bench.speculator.drafts_nothing([first, second])
    before = source.num_asked
    assert bench.plan(first, second) == [NO_DRAFT_PLAN] * 2
    assert source.num_asked == before + 1, "the silent one is not looked up beside the other"


def test_silence_is_counted_in_tokens_so_it_is_known_ahead() -> None:
    bench = Bench(Says("nothing"), overlaps=True)
    request = bench.request(TEXT)
    pattern(bench, request, NEWS[: GROWING.index(LONGEST) + MAX_PERIOD - 4])
    assert [bench.speculator.drafts_nothing([request], num_new_tokens=n) for n in range(6)] == [
        True
    ] * 4 + [False] * 2
    request.tokens.extend(NEWS[:3])
    assert [bench.speculator.drafts_nothing([request], num_new_tokens=n) for n in range(2)] == [
        True,
        False,
    ]


def test_a_fixed_depth_is_never_silent() -> None:
    bench = Bench(Says("nothing"), overlaps=True)
    request, other = bench.request(TEXT, depth=4), bench.request(TEXT)
    assert pattern(bench, request, NEWS[:20]) == "a" * 20
    pattern(bench, other, NEWS[:3])
    assert not bench.speculator.drafts_nothing([request, other])


# -- a proposer that is lost ----------------------------------------------------------------------


def lose_proposer(bench: Bench) -> None:
    """The model thread gives it up, and says so with every step from then on."""
    for _ in range(2):
        bench.speculator.observe_step(
            StepPlan(requests=(), newly_allocated_pages=array("q")),
            StepOutput(requests=(), lost_proposer=True),
            1.0,
        )


@pytest.mark.parametrize("depth", ["auto", 4])
def test_a_lost_proposer_is_planned_for_no_more(depth) -> None:
    bench = Bench(Says("nothing"), depth=depth, proposer=MODEL)
    request = bench.request(TEXT)
    assert bench.step(request, [1]).max_draft > 0
    lose_proposer(bench)
    assert [bench.step(request, [1]) for _ in range(300)] == [NO_DRAFT_PLAN] * 300
    assert not bench.seen or bench.seen[-1].num_uncached_draft_tokens.tolist() == [0]


@pytest.mark.parametrize(("overlaps", "expected"), [(True, GROWING), (False, "a" * len(GROWING))])
def test_look_ups_that_a_lost_proposer_leaves_alone_back_off_where_steps_overlap(
    overlaps, expected
) -> None:
    bench = Bench(source := Says("nothing"), depth=4, proposer=MODEL, overlaps=overlaps)
    request = bench.request(TEXT)
    assert pattern(bench, request, NEWS[:14]) == "d" * 14
    lose_proposer(bench)  # two steps
    before = source.num_asked
    assert pattern(bench, request, NEWS[14 : 14 + len(expected)]) == expected
    assert source.num_asked == before + expected.count("a")
    source.token_ids = TEXT
    assert "d" in pattern(bench, request, NEWS[100:110])


def test_a_pause_at_a_fixed_depth_holds_beside_others() -> None:
    bench = Bench(source := Says("nothing"), depth=4, proposer=MODEL, overlaps=True)
    lose_proposer(bench)
    paused, other = bench.request(TEXT), bench.request(TEXT)
    pattern(bench, paused, NEWS[: GROWING.index("s")])
    before = source.num_asked
    bench.plan(paused, other)
    assert source.num_asked == before + 1


def test_drafters_are_listed_with_those_that_were_lost() -> None:
    bench = Bench(Broken("broken"), Says("sound", TEXT), proposer=MODEL)
    assert bench.speculator.drafters() == {"broken": True, "sound": True, "proposer": True}
    request = bench.request(TEXT[:4])
    for _ in range(MAX_FAILURES):
        bench.plan(request)
    assert bench.speculator.drafters() == {"broken": False, "sound": True, "proposer": True}
    lose_proposer(bench)
    assert bench.speculator.drafters() == {"broken": False, "sound": True, "proposer": False}
    assert Bench(Says("sound")).speculator.drafters() == {"sound": True}, "there is no proposer"


# -- failures and upkeep ------------------------------------------------------------------------


def test_a_source_that_fails_takes_no_other_with_it_and_is_dropped() -> None:
    broken = Broken("broken")
    bench = Bench(broken, Says("sound", TEXT), depth=5)
    for _ in range(2 * MAX_FAILURES):
        request = bench.request(TEXT[:4])
        assert bench.step(request, [9]).depth == 5
        bench.speculator.leave(request)
        bench.speculator.work()
    assert 0 < broken.num_asked <= MAX_FAILURES
    assert bench.speculator.drafters() == {"broken": False, "sound": True}
    bench.speculator.flush()


@pytest.mark.parametrize("call", ["propose", "index", "leave"])
def test_a_source_is_dropped_after_failures_in_close_succession_alone(call, make_request) -> None:
    """One malformed request a week took a source after five weeks."""
    failing = False

    class Fragile(Says):
        def propose(self, request: Request, most: int) -> Sequence[Guess]:
            return self._fail("propose") or super().propose(request, most)

        def index(self, request: Request, *, for_others: bool = False) -> int:
            self._fail("index")
            return 0

        def leave(self, request: Request) -> None:
            self._fail("leave")

        def _fail(self, name: str) -> None:
            if failing and name == call:
                raise RuntimeError(name)

    source, request = GuardedSource(Fragile("a", TEXT)), make_request(TEXT[:4])
    calls = {
        "propose": lambda: source.propose_all([request], [4]),
        "index": lambda: source.index(request),
        "leave": lambda: source.leave(request),
    }
    for number in range(30 * MAX_FAILURES):
        failing = number % 30 == 0
        calls[call]()
    assert source.works
    failing = True
    for _ in range(MAX_FAILURES):
        assert source.works
        for each in calls.values():
            each()  # that the others succeed forgives nothing
    assert not source.works


def test_a_source_that_cannot_forget_is_dropped_at_once() -> None:
    class Clinging(Says):
        def flush(self, *namespaces: str | None) -> None:
            raise RuntimeError("flush")

    bench = Bench(Clinging("clinging", TEXT), depth=5)
    request = bench.request(TEXT[:4])
    assert bench.step(request, [9]).depth == 5
    bench.speculator.flush("a")
    assert bench.step(request, [9]).depth == 0


def test_nothing_is_kept_of_requests_that_left() -> None:
    bench = Bench()
    for index in range(5):
        bench.tell([index, 2, 3], TEXT)
    speculator = bench.speculator
    assert not speculator._states
    assert not speculator._indexer._num_indexed
    assert not speculator.acceptance._adjustments
    assert not speculator.has_work()


def test_a_request_that_never_ran_may_leave() -> None:
    bench = Bench()
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=2)
    bench.speculator.leave(Request(request_id="x", tokens=array("q", [1, 2]), sampling=sampling))
    bench.speculator.work()


def test_the_log_shows_what_was_drafted_and_why() -> None:
    bench = Bench(Knows("a", TEXT))
    request = bench.request(TEXT[:4])
    bench.step(request, TEXT[4:])
    bench.step(request, NEWS)
    lines = bench.speculator.describe()
    assert lines["share_lookup"] == lines["share_plain"] == 0.5
    assert lines["mean_drafted"] == (len(TEXT) - 4) / 2
    assert 0.0 < float(np.float64(lines["row_price"])) < 0.1  # type: ignore[arg-type]
    assert bench.speculator.describe()["share_lookup"] == 0.0


def test_the_price_of_a_row_is_the_controllers_and_unknown_until_costs_are_measured() -> None:
    bench = Bench()
    price = bench.speculator.row_price(2)
    assert price is not None
    assert price.seconds == bench.costs.row_seconds(2, 1, 2)[-1] > 0
    assert price.tokens == price.seconds * bench.costs.rate(2)
    assert bench.speculator.row_price(0) == bench.speculator.row_price(1) != price
    assert Bench(profile=StepProfile()).speculator.row_price(1) is None
