"""DraftSpeculator: who may guess, for whom, how much, and what it learns from the outcome."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from foretoken.core.params import SamplingParams
from foretoken.core.request import Request
from foretoken.core.speculation import NOTHING, DraftPlan
from foretoken.core.step import PlanRow, RowOutput, RowSampling, StepOutput, StepPlan
from foretoken.draft.allocation import Candidates
from foretoken.draft.calibration import Calibration
from foretoken.draft.controller import Allocation, Controller
from foretoken.draft.costs import CostModel, StepProfile
from foretoken.draft.meter import MAX_REST, RUN
from foretoken.draft.peek import TELLING
from foretoken.draft.prediction import PredictionSource
from foretoken.draft.radix import RadixSource
from foretoken.draft.rest import BITE, MOST_LEFT, NEWS_EVERY, REST_BITE, REST_EVERY
from foretoken.draft.source import Guess
from foretoken.draft.speculator import DraftSpeculator
from foretoken.draft.suffix import SuffixSource
from sampling_rows import Countdown

TEXT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 13, 12, 17, 19, 14, 16, 23, 21, 22, 29, 27, 31, 33, 37]
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHEAP = StepProfile({n: 1.0 + 0.001 * n for n in ROWS}, dict.fromkeys(ROWS, 0.01))
DEAR = StepProfile({n: 1.0 * n for n in ROWS}, dict.fromkeys(ROWS, 5.0))


class Clock:
    """Every look at it takes a second."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Bench:
    """A speculator, and a target that says what it is told to."""

    def __init__(self, profile: StepProfile = CHEAP, **options: object) -> None:
        options.setdefault("clock", lambda: 0.0)  # a machine that stalls would begin a rest
        self.speculator = DraftSpeculator(
            [PredictionSource(), RadixSource(), SuffixSource()],
            Controller(CostModel(profile)),
            Calibration(),
            **options,  # type: ignore[arg-type]
        )
        self.num_requests = 0

    def request(self, prompt: Sequence[int], **options: object) -> Request:
        request = self.join(prompt, **options)
        self.speculator.work()
        return request

    def join(self, prompt: Sequence[int], **options: object) -> Request:
        self.num_requests += 1
        sampling = RowSampling(params=SamplingParams(), seed=0, prompt_len=len(prompt))
        options.setdefault("sampling", sampling)
        request = Request(
            request_id=str(self.num_requests),
            tokens=array("q", prompt),
            max_len=1000,
            **options,  # type: ignore[arg-type]
        )
        self.speculator.join(request)
        return request

    def plan(self, *requests: Request, limit: int = 20) -> Sequence[DraftPlan]:
        limits = [limit] * len(requests)
        return self.speculator.plan(requests, limits, budget=200, num_prefill=0)

    def step(self, request: Request, said: Sequence[int], **options: object) -> DraftPlan:
        """One step of one request, which goes on with ``said``."""
        (plan,) = self.plan(request, **options)  # type: ignore[arg-type]
        row = PlanRow(
            request_id=request.request_id,
            tokens=request.tokens,
            start=len(request.tokens) - 1,
            stop=len(request.tokens),
            page_ids=array("q"),
            sampling=request.sampling,
            draft=plan.draft,
            max_draft=plan.max_draft,
        )
        request.tokens.extend(said)
        length = max(len(plan.draft.token_ids), plan.max_draft)
        output = RowOutput(
            request_id=request.request_id,
            token_ids=said,
            num_proposed=length,
            num_accepted=min(length, len(said) - 1),
            draft_len=length,
        )
        self.speculator.observe(request, row, output, len(said))
        spent = StepOutput(rows=[output], times={"forward": 1.0}, num_rows=1 + length)
        self.speculator.observe_step(StepPlan(rows=[row], fresh_pages=array("q")), spent, 1.0)
        self.speculator.work()
        return plan

    def tell(self, prompt: Sequence[int], answer: Sequence[int], **options: object) -> None:
        """A request comes, says its answer and leaves."""
        request = self.request(prompt, **options)
        for token_id in answer:
            self.step(request, [token_id])
        self.speculator.leave(request)
        self.speculator.work()


@pytest.mark.parametrize("depth", ["auto", 8])
def test_what_was_said_before_is_drafted(depth) -> None:
    bench = Bench(depth=depth)
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8]))
    assert list(plan.draft.token_ids[:6]) == TEXT[8:14]
    assert set(plan.draft.sources) <= {"radix", "suffix"}


@pytest.mark.parametrize("depth", ["auto", 8])
@pytest.mark.parametrize(("told", "asked"), [(None, "b"), ("a", "b"), ("a", None)])
def test_another_salt_gets_no_draft(depth, told, asked) -> None:
    bench = Bench(depth=depth)
    bench.tell(TEXT[:6], TEXT[6:], namespace=told)
    assert bench.plan(bench.request(TEXT[:8], namespace=asked)) == [NOTHING]
    assert bench.plan(bench.request(TEXT[:8], namespace=told)) != [NOTHING]


def test_a_flush_forgets_a_namespace() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:], namespace="a")
    bench.tell(TEXT[:6], TEXT[6:], namespace="b")
    bench.speculator.flush("a")
    assert bench.plan(bench.request(TEXT[:8], namespace="a")) == [NOTHING]
    assert bench.plan(bench.request(TEXT[:8], namespace="b")) != [NOTHING]
    bench.speculator.flush()
    assert bench.plan(bench.request(TEXT[:8], namespace="b")) == [NOTHING]


def test_a_flush_forgets_what_has_just_been_said() -> None:
    bench = Bench()
    request = bench.request(TEXT[:6])
    for token_id in TEXT[6:]:
        bench.step(request, [token_id])
    bench.speculator.leave(request)
    bench.speculator.flush()
    assert bench.plan(bench.request(TEXT[:8])) == [NOTHING]


def test_a_request_that_is_off_drafts_nothing_and_teaches_nothing() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:], depth=0)
    assert bench.plan(bench.request(TEXT[:8])) == [NOTHING]
    bench.tell(TEXT[:6], TEXT[6:])
    assert bench.plan(bench.request(TEXT[:8], depth=0)) == [NOTHING]


def test_a_request_may_fix_its_own_depth() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8], depth=3))
    assert plan.num_rows == 3


@pytest.mark.parametrize(("adapts", "expected"), [(True, 14), (False, 2)])
def test_auto_means_the_fixed_depth_where_adapting_would_bias(adapts, expected) -> None:
    bench = Bench(depth=2, adapts=adapts)
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:10], depth="auto"))
    assert plan.num_rows >= expected if adapts else plan.num_rows == expected


def test_limits_are_kept() -> None:
    bench = Bench(depth=8)
    bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:8])
    assert [bench.plan(request, limit=limit)[0].num_rows for limit in (0, 1, 5)] == [0, 1, 5]


def test_the_budget_is_kept_by_fixed_depths() -> None:
    bench = Bench(depth=8)
    bench.tell(TEXT[:6], TEXT[6:])
    requests = [bench.request(TEXT[:8]) for _ in range(4)]
    plans = bench.speculator.plan(requests, [20] * 4, budget=10, num_prefill=0)
    assert 0 < sum(plan.num_rows for plan in plans) <= 10


def test_the_draft_model_is_asked_where_nothing_is_known() -> None:
    bench = Bench(depth=4, has_lm=True)
    assert bench.plan(bench.request(TEXT[:8])) == [DraftPlan(max_draft=4)]
    bench.tell(TEXT[:6], TEXT[6:])
    (plan,) = bench.plan(bench.request(TEXT[:8]))
    assert (plan.max_draft, plan.depth) == (0, 4)


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    bench = Bench()
    request = bench.request([1, 2, 3], prediction=array("q", TEXT))
    plan = bench.step(request, TEXT[:6])
    assert list(plan.draft.token_ids[:6]) == TEXT[:6]
    assert set(plan.draft.sources) == {"prediction"}


def test_where_drafts_are_dear_nothing_is_drafted() -> None:
    bench = Bench(DEAR, has_lm=True)
    bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:8])
    assert [bench.step(request, [t]).num_rows for t in (41, 42, 43, 44)] == [0] * 4


def test_guesses_that_fail_are_trusted_less() -> None:
    bench = Bench(StepProfile({n: 1.0 + 0.1 * n for n in ROWS}))
    for _ in range(3):
        bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:6])
    before = bench.step(request, [TEXT[6]]).num_rows
    others = []
    for index in range(40):  # what the sources say after these tokens is never what is said
        others = [bench.request(TEXT[:6]) for _ in range(1)]
        bench.step(others[0], [100 + index])
        bench.speculator.leave(others[0])
    after = bench.plan(bench.request(TEXT[:6]))[0].num_rows
    assert after < before


def test_deciding_rests_when_it_takes_too_long_for_what_it_brings() -> None:
    clock = Clock()
    bench = Bench(DEAR, has_lm=True, clock=clock)
    bench.tell(TEXT[:6], TEXT[6:])
    request = bench.request(TEXT[:8])
    for _ in range(5):
        bench.step(request, [50])
    looked_at = clock.now
    for _ in range(10):
        bench.step(request, [51])
    assert clock.now - looked_at <= 5  # each decision looks at it two or four times


@pytest.mark.parametrize(("temperature", "is_weighed"), [(1.0, False), (0.0, True)])
def test_who_comes_alone_is_weighed_unless_the_verdict_was_about_its_like(
    temperature, is_weighed
) -> None:
    clock = Clock()
    bench = Bench(DEAR, has_lm=True, clock=clock)
    bench.tell([1, 2, 3], [50, 51, 52, 53, 54, 55])  # at temperature 1
    bench.speculator.meter.rest()
    params = SamplingParams(temperature=temperature)
    bench.join(TEXT[:8], sampling=RowSampling(params=params, seed=0, prompt_len=8))
    assert bench.speculator.meter.is_ending == is_weighed


def test_nothing_is_kept_of_requests_that_left() -> None:
    bench = Bench()
    for index in range(5):
        bench.tell([index, 2, 3], TEXT)
    who, rest = bench.speculator._who, bench.speculator._rest
    assert not who.tracks
    assert not any(vars(rest._reader)[name] for name in ("_requests", "_num_read", "_left"))
    assert not rest._glance._new
    assert not rest._glance._known
    assert not any(track.bends for track in bench.speculator.calibration._tracks.values())


def test_a_request_that_never_ran_may_leave() -> None:
    bench = Bench()
    sampling = RowSampling(params=SamplingParams(), seed=0, prompt_len=2)
    bench.speculator.leave(Request(request_id="x", tokens=array("q", [1, 2]), sampling=sampling))
    bench.speculator.work()


def test_it_says_what_it_does_and_why() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    said = bench.speculator.describe()
    assert {"share_plain", "share_free", "mean_drafted", "reason"} <= said.keys()


class Says:
    """A source with one opinion."""

    priors = (0.9,)

    def __init__(self, name: str, said: Sequence[int]) -> None:
        self.name = name
        self.said = said
        self.num_calls = 0

    def propose(self, request: Request, most: int) -> Guess | None:
        self.num_calls += 1
        return Guess(array("q", self.said[:most]), self.name, 0)

    def index(self, request: Request) -> int:
        return 0

    def leave(self, request: Request) -> None: ...

    def flush(self, *namespaces: str | None) -> None: ...


class Broken(Says):
    """A source that fails whatever it is asked."""

    def propose(self, request: Request, most: int) -> Guess | None:
        self.num_calls += 1
        raise RuntimeError("propose")

    def index(self, request: Request) -> int:
        raise RuntimeError("index")

    def leave(self, request: Request) -> None:
        raise RuntimeError("leave")

    def flush(self, *namespaces: str | None) -> None:
        raise RuntimeError("flush")


def over(*sources: Says, profile: StepProfile = CHEAP, **options: object) -> Bench:
    bench = Bench()
    bench.speculator = DraftSpeculator(
        sources,
        Controller(CostModel(profile)),
        Calibration(),
        **options,  # type: ignore[arg-type]
    )
    return bench


def test_branches_stay_within_the_rows_that_are_offered() -> None:
    bench = over(Says("a", [1] * 9), Says("b", [2] * 9), Says("c", [3] * 9))
    requests = [bench.request(TEXT[:4]) for _ in range(3)]
    seen = set()
    for budget in (*range(60), 200):
        plans = bench.speculator.plan(requests, [20] * 3, budget=budget, num_prefill=0)
        assert sum(plan.num_rows for plan in plans) <= budget
        seen |= {len(plan.branches) for plan in plans}
    assert 2 in seen, "no branch was ever opened, so nothing was shown"


def test_a_source_that_fails_takes_no_other_with_it() -> None:
    broken = Broken("broken", [])
    bench = over(broken, Says("sound", TEXT), depth=5)
    for _ in range(30):
        request = bench.request(TEXT[:4])
        assert bench.step(request, [9]).depth == 5
        bench.speculator.leave(request)
        bench.speculator.work()
    assert broken.num_calls <= 5
    bench.speculator.flush()


def test_a_draft_model_that_says_nothing_is_not_asked_for_long() -> None:
    bench = over(Says("weak", [1, 2, 3]), has_lm=True)
    request = bench.request(TEXT[:4])
    asked = 0
    for _ in range(60):
        (plan,) = bench.plan(request)
        asked += plan.max_draft > 0
        row = PlanRow(
            request_id=request.request_id,
            tokens=request.tokens,
            start=len(request.tokens) - 1,
            stop=len(request.tokens),
            page_ids=array("q"),
            sampling=request.sampling,
            max_draft=plan.max_draft,
        )
        request.tokens.append(1)
        output = RowOutput(request_id=request.request_id, token_ids=[1])
        bench.speculator.observe(request, row, output, 1)
    assert asked < 15


def candidates_of(bench: Bench) -> list[Candidates]:
    """What its controller is asked from now on."""
    seen: list[Candidates] = []
    allocate = bench.speculator.controller.allocate

    def watch(candidates: Candidates) -> Allocation:
        seen.append(candidates)
        return allocate(candidates)

    bench.speculator.controller.allocate = watch  # type: ignore[method-assign]
    return seen


def rested_steps(bench: Bench, said: Sequence[int]) -> int:
    """Steps of a long rest, while a request says so, until deciding is worth it again."""
    meter = bench.speculator.meter
    meter.decide_s = 100.0
    request = bench.request([90, 91, 92])
    bench.step(request, [93])
    assert meter.is_resting
    for count, token_id in enumerate(said):
        request.tokens.append(token_id)
        request.num_computed = len(request.tokens) - 1
        if not bench.speculator.rests():
            return count + 1
        if bench.speculator.has_work():
            bench.speculator.work()
    return len(said) + 1


def test_a_rest_ends_soon_after_the_text_begins_to_repeat_what_was_said() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    repeating = rested_steps(bench, [95, 96, *TEXT])
    assert 8 <= repeating <= 12, "six tokens in a row are enough to trust a look-up"


def test_a_rest_goes_on_over_text_that_nobody_said() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    assert rested_steps(bench, range(200, 230)) == 31


def test_a_rest_goes_on_where_look_ups_never_came_true() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    for kind in range(5):
        for _ in range(40):
            bench.speculator.calibration.score("suffix", kind, "another", 0, True)
    assert rested_steps(bench, [95, *TEXT]) == len(TEXT) + 2


class Counting(SuffixSource):
    """Counts what it is asked to take in."""

    num_calls = 0
    num_tokens = 0

    def index(self, request: Request) -> int:
        taken = super().index(request)
        self.num_calls += 1
        self.num_tokens += taken
        return taken


def go_on(bench: Bench, requests: Sequence[Request], said: Sequence[int]) -> bool:
    """A step in which each says one token; whether it rested."""
    for request, token_id in zip(requests, said, strict=True):
        request.tokens.append(token_id)
        request.num_computed = len(request.tokens) - 1
    rests = bench.speculator.rests() > 0
    if not rests:
        bench.plan(*requests)
    if bench.speculator.has_work():
        bench.speculator.work()
    return rests


def resting(bench: Bench, num_requests: int) -> list[Request]:
    """So many requests, of which none repeats another, under a verdict that holds for long."""
    requests = [bench.request([100 * n, 100 * n + 1]) for n in range(1, num_requests + 1)]
    meter = bench.speculator.meter
    meter.decide_s = 100.0
    bench.step(requests[0], [1])  # tells what a step takes
    meter.rest()
    assert meter.is_resting
    return requests


def decisions_until_found(prompt: Sequence[int], said: Sequence[int]) -> tuple[int, int]:
    """Steps until somebody who joins eight others ends their rest, and steps of them that did."""
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    others = resting(bench, 8)
    fresh = [range(10_000 * each, 10_000 * each + 100) for each in range(1, 9)]
    for index in range(20):  # they are looked at, and nothing is found
        assert go_on(bench, others, [text[index] for text in fresh])
    newcomer = bench.request(prompt)
    steps = []
    for index, token_id in enumerate(said):
        next_ids = [text[20 + index] for text in fresh]
        steps.append(go_on(bench, [*others, newcomer], [*next_ids, token_id]))
    return (steps.index(False) + 1 if False in steps else 0), steps.count(False)


def test_who_joins_others_and_repeats_what_was_said_is_found_soon() -> None:
    first, _ = decisions_until_found([90, 91], TEXT)
    assert TELLING < first <= TELLING + RUN + 1


def test_who_joins_others_and_says_nothing_known_costs_no_decision() -> None:
    assert decisions_until_found([90, 91], range(200, 230)) == (0, 0)


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_verdict_is_made_again_behind_a_step_that_rests(num_requests) -> None:
    bench = Bench()
    requests = resting(bench, num_requests)
    fresh = [range(10_000 * each, 10_000 * each + 400) for each in range(num_requests)]
    assert all(go_on(bench, requests, [text[n] for text in fresh]) for n in range(400))


def test_a_verdict_that_does_not_hold_any_more_ends_the_rest() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    (request,) = resting(bench, 1)
    bench.speculator.meter.decide_s = 0.02
    bench.speculator.meter._peek_in = 2 * MAX_REST  # nobody else looks
    said = [*range(10_000, 10_000 + MAX_REST - 2 * len(TEXT)), *TEXT * 3]
    rested = [go_on(bench, [request], [token_id]) for token_id in said]
    assert rested.index(False) <= MAX_REST + 1


def test_a_few_steps_rest_at_once_but_for_who_is_to_be_looked_at_or_read() -> None:
    bench = Bench()
    resting(bench, 1)
    bench.speculator.work()
    assert bench.speculator.rests() == 1 + RUN
    newcomer = bench.join(TEXT, depth=4)
    assert bench.speculator.rests() == 1, "it does not decode yet"
    newcomer.tokens.append(1)
    newcomer.num_computed = len(newcomer.tokens) - 1
    assert bench.speculator.rests() == 0, "who fixed a depth never rests"


def test_a_verdict_is_made_again_by_the_rows_that_there_are_now() -> None:
    bench = Bench()
    others = resting(bench, 4)
    bench.speculator._room = 0
    bench.speculator.plan(others, [0] * 4, budget=0, num_prefill=0)  # no room beside them
    for other in others[1:]:
        bench.speculator.leave(other)
    seen = candidates_of(bench)
    bench.speculator.meter.rest()
    assert all(go_on(bench, others[:1], [10_000 + each]) for each in range(MAX_REST))
    assert [candidates.budget for candidates in seen] == [3]


def test_what_a_verdict_guessed_is_not_scored_against_what_comes_later() -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    (request,) = resting(bench, 1)
    bench.speculator.meter._peek_in = 2 * MAX_REST  # nobody else looks
    said = [*range(10_000, 10_000 + MAX_REST - len(TEXT)), *TEXT]
    assert all(go_on(bench, [request], [token_id]) for token_id in said)
    assert not bench.speculator._who.of(request).guesses


@pytest.mark.parametrize("is_constrained", [False, True])
def test_who_comes_alone_with_a_constraint_is_weighed(is_constrained) -> None:
    bench = Bench(DEAR)
    bench.tell([1, 2, 3], [50, 51, 52, 53, 54, 55])
    bench.speculator.meter.decide_s = 100.0
    bench.speculator.meter.rest()
    assert bench.speculator.meter.rests()
    bench.speculator.meter._num_uncut = 0  # not one rest in a few
    constraint = Countdown(64) if is_constrained else None
    sampling = RowSampling(params=SamplingParams(), seed=0, prompt_len=8, constraint=constraint)
    bench.join(TEXT[:8], sampling=sampling)
    assert bench.speculator.meter.is_ending == is_constrained


def test_nobody_works_for_requests_that_may_not_draft() -> None:
    bench = Bench()
    (request,) = resting(bench, 1)
    assert bench.speculator.rests()
    bench.speculator.leave(request)
    bench.speculator.work()
    bench.request(TEXT, depth=0)
    for _ in range(MAX_REST):
        assert bench.speculator.rests()
        assert not bench.speculator.has_work()


@pytest.mark.parametrize(("prompt", "is_found"), [(TEXT[:6], True), ([90, 91], False)])
def test_who_comes_alone_and_asks_again_what_was_asked_is_found_at_once(prompt, is_found) -> None:
    bench = Bench()
    bench.tell(TEXT[:6], TEXT[6:])
    (request,) = resting(bench, 1)
    bench.speculator.meter._peek_in = 2 * MAX_REST  # nobody else looks
    bench.speculator.leave(request)
    newcomer = bench.join(prompt)
    rested = [go_on(bench, [newcomer], [token_id]) for token_id in TEXT[6:]]
    assert rested[:2] == [True, not is_found]


def test_who_may_not_draft_counts_where_a_verdict_is_made_again() -> None:
    bench = Bench()
    silent = [bench.request(TEXT[::-1], depth=0) for _ in range(3)]
    requests = resting(bench, 1)
    seen = candidates_of(bench)
    bench.speculator.leave(silent.pop())
    said = range(10_000, 10_000 + 2 * MAX_REST)
    assert all(go_on(bench, [*requests, *silent], [each] * 3) for each in said)
    assert {candidates.num_decodes for candidates in seen} == {3}


def test_in_a_rest_prompts_are_taken_in_at_once_and_answers_by_the_bite() -> None:
    source = Counting()
    bench = over(source)  # type: ignore[arg-type]
    requests = resting(bench, 4)
    source.num_calls = source.num_tokens = 0
    newcomer = bench.request(TEXT)
    assert (source.num_calls, source.num_tokens) == (1, len(TEXT))
    for index in range(BITE):
        go_on(bench, requests, [10_000 + 100 * each + index for each in range(4)])
    assert source.num_calls == 1
    bench.speculator.leave(newcomer)
    bench.speculator.meter.end_rest()
    bench.speculator.work()
    assert source.num_calls == 1 + 4
    assert source.num_tokens >= 4 * BITE


def test_answers_are_taken_in_where_every_rest_ends_early() -> None:
    source = Counting()
    bench = over(source)  # type: ignore[arg-type]
    requests = resting(bench, 4)
    source.num_tokens = 0
    for index in range(2 * REST_BITE):
        bench.speculator.meter.end_rest()  # as a step does that takes longer than was meant
        assert not go_on(bench, requests, [10_000 + 1000 * each + index for each in range(4)])
        assert bench.speculator.meter.is_resting
    assert source.num_tokens >= 4 * REST_BITE


def test_in_a_rest_who_came_or_left_waits_for_a_few_others() -> None:
    bench = Bench()
    requests = resting(bench, 4)
    speculator = bench.speculator
    speculator.work()
    speculator.meter.peeked(1.0, found=False)  # so dear that nobody looks again

    def idle_steps() -> int:
        """Steps until something is to be taken in."""
        count = 0
        while not speculator.has_work():
            assert speculator.rests()
            count += 1
        speculator.work()
        return count

    assert idle_steps() == REST_EVERY
    newcomer = bench.join(TEXT)
    assert idle_steps() == NEWS_EVERY < TELLING, "before it is glanced at"
    speculator.leave(newcomer)
    speculator.meter.rest()
    speculator.meter.peeked(1.0, found=False)
    assert idle_steps() == REST_EVERY - 1
    for _ in range(MOST_LEFT):
        assert not speculator.has_work()
        speculator.leave(bench.join(TEXT))
    assert speculator.has_work(), "though nobody decoded"
    speculator.work()
    speculator.meter.end_rest()
    assert speculator.has_work()
    bench.plan(*requests)
    assert speculator.meter.is_resting
    bench.request(TEXT, depth=4)
    assert speculator.has_work(), "who fixed a depth never rests"


def test_in_a_rest_ended_requests_do_not_pile_up() -> None:
    bench = Bench()
    resting(bench, 4)
    speculator, most = bench.speculator, 0
    for _ in range(60):
        for _ in range(4):
            speculator.leave(bench.join(TEXT[:3]))
        assert speculator.rests()
        if speculator.has_work():
            speculator.work()
        most = max(most, len(speculator._rest._reader._left))
    assert most <= 2 * MOST_LEFT


def test_prompts_that_one_call_does_not_take_in_come_next() -> None:
    bench = Bench()
    resting(bench, 4)
    speculator = bench.speculator
    speculator.meter.peeked(1.0, found=False)  # so dear that nobody looks again
    for each in range(4):
        bench.join(range(10_000 * each, 10_000 * each + 1500))
    steps = 0
    while speculator._rest._reader.has_prompts:
        assert speculator.rests()
        steps += 1
        if speculator.has_work():
            speculator.work()
    assert steps < 2 * NEWS_EVERY


def test_while_nobody_may_draft_only_news_is_work() -> None:
    bench = Bench()
    request = bench.request(TEXT)
    bench.speculator.leave(request)
    assert bench.speculator.has_work()
    bench.speculator.work()
    assert not bench.speculator.has_work()


def test_requests_that_may_not_draft_count_in_what_a_step_takes() -> None:
    """Two draft beside fourteen: what is learnt is of sixteen, and so is what is asked."""
    bench = Bench()
    auto = [bench.request(TEXT) for _ in range(2)]
    others = [bench.request(TEXT[::-1], depth=0) for _ in range(14)]
    seen = candidates_of(bench)
    bench.plan(*auto, *others)
    (candidates,) = seen
    assert len(candidates.free) == 2
    assert candidates.num_decodes == candidates.num_rows == 16


def test_while_drafts_are_made_every_token_is_taken_in() -> None:
    source = Counting()
    bench = over(source)  # type: ignore[arg-type]
    request = bench.request(TEXT)
    for token_id in TEXT:
        plan = bench.step(request, [token_id])
    assert plan.num_rows > 0
    assert source.num_tokens == len(request.tokens)


def test_who_fixed_its_depth_repeats_itself_while_others_rest() -> None:
    bench = Bench()
    other, request = bench.request([1, 2, 3]), bench.request([4, 5, 6], depth=4)
    bench.speculator.meter.rest(briefly=True)  # of the other, who leaves in it
    bench.speculator.leave(other)
    plans = [bench.step(request, [token_id]) for token_id in TEXT * 2]
    assert bench.speculator.meter.is_resting
    assert any(plan.num_rows for plan in plans[len(TEXT) :])
