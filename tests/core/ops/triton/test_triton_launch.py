"""Steps launched one behind the other: the same tokens, and nobody waits before they are wanted."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import NO_DRAFT, Draft
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import StepRunner
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.sampler import TorchSampler
from foretoken.core.sampling.verifier import NOT_FINITE, Best
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.tree_grower import DecoderGrower, Opened, TreeGrower
from foretoken.draft.proposers.tree_growth import TreeGrowth
from support.drafts import with_drafts

pytest.importorskip("triton")

from foretoken.core.ops.triton import graph_inputs
from foretoken.core.ops.triton.graph import chained
from foretoken.core.ops.triton.graph.step import _Captured
from foretoken.core.ops.triton.sampling.sampler import TritonSampler
from foretoken.core.ops.triton.sampling.sampling_inputs import SamplingInputs
from support.fake_graph import Memory
from support.fake_stream import FakeStream, StreamGraph
from support.graph_fixture import PAGE_SIZE, VOCAB, Graphs, make_decoder, make_pool
from support.triton_sampling import as_on_a_gpu  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread", "as_on_a_gpu"), pytest.mark.slow]
PARAMS = {
    "greedy": TokenSamplingParams(temperature=0.0),
    "drawn": TokenSamplingParams(temperature=3.0),
    "cut": TokenSamplingParams(temperature=2.0, top_p=0.8, top_k=9),
}
EVERYBODY = tuple(PARAMS)
Rounds = Sequence[Sequence[str]]
# Rows change places, and leave; the third step is on the next page.
ROUNDS: Rounds = (EVERYBODY, EVERYBODY, ("cut", "greedy", "drawn"), ("drawn", "cut"), ("cut",))
PROMPT_LEN, PAGES_EACH = PAGE_SIZE - 2, 3


class Lab:
    """Three requests, each with pages of its own, and a slow device that computes them.

    The graphs are captured and the kernels know the vocabulary before anything is launched.
    """

    def __init__(self, *, has_graphs: bool, stream: FakeStream) -> None:
        self.stream, self.has_graphs = stream, has_graphs
        self.decoder = make_decoder(self._graphs() if has_graphs else None)
        self.pool = make_pool(self.decoder)
        self._content = self.pool.data.clone()
        self.runner = ModelRunner(self.decoder, self.pool)
        self.restart()
        self.step([EVERYBODY[:count] for count in ((3, 2, 1) if has_graphs else (1,))])
        self.restart()

    def _graphs(self) -> Any:
        if torch.get_default_device().type == "cuda":
            return Graphs()
        memory: Memory = []
        return lambda: StreamGraph(self.stream, memory)

    def restart(self) -> None:
        """Restore the pool and the requests from before any step."""
        self.pool.data.copy_(self._content)
        self.tokens = {
            name: array("q", [(3 * i + at) % VOCAB for i in range(PROMPT_LEN)])
            for at, name in enumerate(PARAMS)
        }
        self.sampling = {
            name: SamplingMetadata(params=params, seed=at, prompt_len=PROMPT_LEN)
            for at, (name, params) in enumerate(PARAMS.items())
        }

    def plan(self, names: Sequence[str], num_ahead: int = 0) -> StepPlan:
        """The step behind as many whose tokens nobody has."""
        rows = [self._row(name, num_ahead) for name in names]
        return StepPlan(requests=rows, newly_allocated_pages=array("q"), is_plain=True)

    def _row(self, name: str, num_ahead: int) -> ScheduledRequest:
        first = EVERYBODY.index(name) * PAGES_EACH
        tokens = self.tokens[name]
        stop = len(tokens) + num_ahead
        return ScheduledRequest(
            request_id=name,
            tokens=tokens,
            start=stop - 1,
            stop=stop,
            page_ids=array("q", range(first, first + PAGES_EACH)),
            sampling=self.sampling[name],
            is_ahead=num_ahead > 0,
        )

    def take(self, output: StepOutput) -> Sequence[RequestOutput]:
        """Commit a step."""
        assert output.num_rows == len(output.requests)
        assert list(output.times) == ["draft", "forward", "verify"]
        for row in output.requests:
            self.tokens[row.request_id].extend(row.token_ids)
        return output.requests

    def step(self, rounds: Rounds) -> list[Sequence[RequestOutput]]:
        """One by one."""
        return [self.take(self.runner.step(self.plan(names))) for names in rounds]

    def launch(self, rounds: Rounds) -> list[Sequence[RequestOutput]]:
        """Each asked for before the one ahead of it is read, and nothing waited for but that."""
        launcher: StepRunner = self.runner
        found, stream = [], self.stream
        under_way = launcher.launch(self.plan(rounds[0]))
        for names in rounds[1:]:
            following = launcher.launch(self.plan(names, num_ahead=1), under_way)
            assert stream.num_waits == len(found) * stream.is_driven
            found.append(self.take(under_way.finish()))
            assert stream.num_waits == len(found) * stream.is_driven
            assert stream.num_pending > 0 or not stream.is_driven, "the step that follows"
            under_way = following
        return [*found, self.take(under_way.finish())]

    @contextmanager
    def is_slow(self) -> Iterator[None]:
        """On the CPU nothing is done before it is waited for; a GPU is as it is."""
        if self.decoder.device.type == "cuda":
            yield
        else:
            self.stream.num_waits = 0
            with self.stream.driving():
                yield


@pytest.fixture(params=["graphs", "eager"])
def lab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lab:
    stream = FakeStream()
    if torch.get_default_device().type == "cpu":
        monkeypatch.setattr(graph_inputs, "make_event", stream.make_event)
    return Lab(has_graphs=request.param == "graphs", stream=stream)


only_eager = pytest.mark.parametrize("lab", ["eager"], indirect=True)
only_graphs = pytest.mark.parametrize("lab", ["graphs"], indirect=True)


@pytest.fixture
def num_behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each choice that was launched behind a pass, not with it."""
    counts: list[int] = []
    winners = TritonSampler._winners

    def counted(  # type: ignore[no-untyped-def]
        sampler: TritonSampler, logits: Any, controls: SamplingInputs, *rest
    ) -> Any:
        counts.append(len(controls.columns))
        return winners(sampler, logits, controls, *rest)

    monkeypatch.setattr(TritonSampler, "_winners", counted)
    return counts


def test_launched_steps_yield_what_steps_one_by_one_do(lab: Lab, num_behind: list[int]) -> None:
    expected = lab.step(ROUNDS)
    content = lab.pool.data.clone()
    assert len({row.token_ids for rows in expected for row in rows}) > 3
    lab.restart()
    with lab.is_slow():
        assert lab.launch(ROUNDS) == expected
    assert torch.equal(lab.pool.data, content)
    assert num_behind == ([] if lab.has_graphs else [len(rows) for rows in (*ROUNDS, *ROUNDS)])


@only_graphs
def test_a_launch_may_take_tokens_chosen_behind_a_graph_and_leave_them_to_one(
    lab: Lab, num_behind: list[int]
) -> None:
    rounds = (EVERYBODY, EVERYBODY, ("drawn", "greedy"), ("greedy", "drawn"))
    params = TokenSamplingParams(temperature=3.0, logit_bias={3: 3.0})

    def edit() -> None:
        lab.restart()
        lab.sampling["cut"] = SamplingMetadata(params=params, seed=1, prompt_len=PROMPT_LEN)

    edit()
    expected = lab.step(rounds)
    edit()
    num_behind.clear()
    with lab.is_slow():
        assert lab.launch(rounds) == expected
    assert num_behind == [3, 3], "while somebody is edited"


def test_a_row_that_is_not_finite_fails_alone_and_the_next_step_has_it_without_harm(
    lab: Lab,
) -> None:
    rounds = (EVERYBODY, EVERYBODY)
    expected = lab.step(rounds)
    lab.restart()
    lab.pool.data[EVERYBODY.index("drawn") * PAGES_EACH] = torch.nan
    with lab.is_slow():
        found = lab.launch(rounds)
    for rows, sound in zip(found, expected, strict=True):
        assert rows[1] == RequestOutput(request_id="drawn", error=NOT_FINITE)
        assert [rows[0], rows[2]] == [sound[0], sound[2]]


@only_eager
def test_steps_behind_a_launch_that_nobody_finished_are_as_ever(lab: Lab) -> None:
    expected = lab.step((EVERYBODY, EVERYBODY))
    lab.restart()
    with lab.is_slow():
        first = lab.runner.launch(lab.plan(EVERYBODY))
        lab.runner.launch(lab.plan(EVERYBODY, num_ahead=1), first)
        assert [lab.take(first.finish()), *lab.step([EVERYBODY])] == expected


@only_eager
def test_a_row_that_the_host_knows_may_stand_beside_rows_that_it_does_not(lab: Lab) -> None:
    expected = lab.step((("greedy", "cut"), EVERYBODY))[1]
    lab.restart()
    with lab.is_slow():
        first = lab.runner.launch(lab.plan(("greedy", "cut")))
        rows = [lab._row(name, int(name != "drawn")) for name in EVERYBODY]
        second = lab.runner.launch(replace(lab.plan(()), requests=rows), first)
        first.finish()
        assert second.finish().requests == expected


@only_eager
def test_the_proposer_forgets_what_a_launched_step_says_and_observes_it(lab: Lab) -> None:
    told: list[object] = []
    seen: list[object] = []
    proposer: Any = SimpleNamespace(
        taps=(), forget=lambda *what: told.append(what), observe=lambda *what: seen.append(what)
    )
    runner = ModelRunner(lab.decoder, lab.pool, proposer)
    plan = replace(
        lab.plan(["greedy"]), released_request_ids=["gone"], newly_allocated_pages=array("q", [3])
    )
    runner.launch(plan).finish()
    assert told == [(["gone"], array("q", [3]))]
    assert len(seen) == 1


@only_eager
def test_a_launch_that_cannot_follow_the_one_before_is_refused(lab: Lab) -> None:
    steady, behind = lab.plan(["greedy"]), lab.plan(["greedy"], num_ahead=1)
    (row,) = steady.requests
    reads = SamplingMetadata(params=TokenSamplingParams(logprobs=1), seed=0, prompt_len=PROMPT_LEN)
    for plan in (
        replace(steady, is_plain=False),
        replace(steady, requests=[replace(row, start=0)]),
        replace(steady, requests=[replace(row, start=1, stop=2)]),
        replace(steady, requests=[replace(row, sampling=reads)]),
    ):
        with pytest.raises(ValueError, match="may yield several tokens per request"):
            lab.runner.launch(behind, lab.runner.launch(plan))
    with pytest.raises(ValueError, match="was not launched here"):
        lab.runner.launch(behind)
    reading = replace(behind, requests=[replace(behind.requests[0], sampling=reads)])
    with pytest.raises(ValueError, match="needs its token history"):
        lab.runner.launch(reading, lab.runner.launch(steady))


@only_eager
def test_a_row_that_is_ahead_may_have_a_draft(lab: Lab) -> None:
    """The draft of a token that nobody knows: its last token comes from the device, too."""
    said = [list(rows[0].token_ids) for rows in lab.step((["greedy"],) * 3)]
    (first,), (second,), (third,) = said
    lab.restart()
    with lab.is_slow():
        under_way = lab.runner.launch(lab.plan(["greedy"]))
        (row,) = lab.plan(["greedy"], num_ahead=1).requests
        row = with_drafts(row, draft=Draft.of([second, (third + 1) % VOCAB], "a"))
        following = lab.runner.launch(
            StepPlan(requests=[row], newly_allocated_pages=array("q")), under_way
        )
        assert list(under_way.finish().requests[0].token_ids) == [first]
        (found,) = following.finish().requests
    assert (list(found.token_ids), len(found.path)) == ([second, third], 1)


@only_eager
def test_who_launches_computes_behind_the_hosts_back(lab: Lab) -> None:
    assert lab.runner.is_async
    decoder: Any = SimpleNamespace(device=lab.decoder.device, sampler=TorchSampler())
    assert not ModelRunner(decoder, cast("Any", None)).is_async


# -- a draft model -------------------------------------------------------------------------------


class Drafter:
    """A draft model over the lab's decoder; ``log`` has its passes and its reads in order."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.log = lab, list[str]()
        self._note(monkeypatch, type(lab.decoder), "forward", "pass")
        self._note(monkeypatch, _Captured, "run_chained", "pass")
        self._note(monkeypatch, graph_inputs.AsyncCopy, "read", "read")
        self._note(monkeypatch, graph_inputs.JoinedCopy, "read", "read")

    def _note(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any) -> Any:
            self.log.append(what)
            return call(*args)

        monkeypatch.setattr(owner, name, noted)

    def draft(self, depths: dict[str, int], *, is_slow: bool = False) -> list[list[int]]:
        """The drafts of two steps: the first computes the prompts, the second goes on from them."""
        self.lab.restart()
        proposer = LmProposer(self.lab.decoder, self.lab.pool)
        found = self._propose(proposer, depths)
        with self.lab.is_slow() if is_slow else nullcontext():
            return found + self._propose(proposer, depths)

    def _propose(self, proposer: LmProposer, depths: dict[str, int]) -> list[list[int]]:
        rows = self.lab.plan(list(depths)).requests
        self.log.clear()
        drafts = proposer.propose(
            [with_drafts(row, max_draft=depths[row.request_id]) for row in rows]
        )
        for row, draft in zip(rows, drafts, strict=True):
            self.lab.tokens[row.request_id].extend(draft.token_ids[:2])
        return [list(draft.token_ids) for draft in drafts]

    def read_one_by_one(self, depths: dict[str, int]) -> list[list[int]]:
        """The same, each token read before the next pass."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecoderGrower, "grow", TreeGrower.grow)
            return self.draft(depths)


DEPTHS = {"drawn": 5, "greedy": 1, "cut": 3}


@pytest.mark.parametrize("lab", ["graphs", "eager"], indirect=True)
def test_the_tokens_of_a_draft_model_are_read_when_all_its_passes_are_launched(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter(lab, monkeypatch)
    expected = drafter.read_one_by_one(DEPTHS)
    assert drafter.log == ["pass", "read"] * 5
    assert [len(token_ids) for token_ids in expected] == [5, 1, 3] * 2
    assert drafter.draft(DEPTHS, is_slow=True) == expected
    # The words of chained passes come to the host together.
    assert drafter.log == ["pass"] * 5 + ["read"] * (2 if lab.has_graphs else 5)


@only_graphs
def test_a_bias_and_a_least_length_need_no_token_on_the_host(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TokenSamplingParams(temperature=3.0, logit_bias={3: 3.0}, min_tokens=4)
    drafter, restart = Drafter(lab, monkeypatch), lab.restart

    def restart_edited() -> None:
        restart()
        lab.sampling["cut"] = SamplingMetadata(
            params=params, seed=1, prompt_len=PROMPT_LEN, stop_ids=frozenset({5, 6, 7})
        )

    monkeypatch.setattr(lab, "restart", restart_edited)
    expected = drafter.read_one_by_one(DEPTHS)
    assert drafter.draft(DEPTHS, is_slow=True) == expected
    assert drafter.log == ["pass"] * 5 + ["read"] * 5


@only_graphs
def test_a_penalty_needs_each_token_on_the_host_before_the_next(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TokenSamplingParams(temperature=3.0, presence_penalty=2.0)
    drafter, restart = Drafter(lab, monkeypatch), lab.restart

    def restart_penalised() -> None:
        restart()
        lab.sampling["cut"] = SamplingMetadata(params=params, seed=1, prompt_len=PROMPT_LEN)

    monkeypatch.setattr(lab, "restart", restart_penalised)
    drafter.draft(DEPTHS)
    assert drafter.log == ["pass", "read"] * 5


@only_graphs
def test_a_draft_ends_before_the_token_that_cannot_be_drawn(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes behind it are launched by then; what they drew is dropped."""
    drafter = Drafter(lab, monkeypatch)
    whole = drafter.draft(DEPTHS)[0]
    third, bests_of_words = 2, chained.bests_of_words  # "drawn" and "cut" are in the second pass

    def failing(words: Any, *rest: Any) -> list[Best]:
        found = bests_of_words(words, *rest)
        return [Best((), (), NOT_FINITE) if row == third else it for row, it in enumerate(found)]

    monkeypatch.setattr(chained, "bests_of_words", failing)
    drawn, greedy, cut = drafter.draft(DEPTHS)[:3]
    assert drawn == whole[:2]
    assert (len(greedy), len(cut)) == (1, 3)


# -- trees of a draft model ------------------------------------------------------------------------


def tree_rows(lab: Lab) -> list[ScheduledRequest]:
    """Rows with spare pages; the first begins with a looked-up chain."""
    prices = {"row_prices": (0.01,), "pass_prices": (0.01, 0.012)}
    known = Draft([3, 5], ("suffix",) * 2, survival=[0.6, 0.4])
    rows = []
    for at, row in enumerate(lab.plan(EVERYBODY).requests):
        spare = array("q", [len(EVERYBODY) * PAGES_EACH + at])
        planned = with_drafts(replace(row, spare_page_ids=spare), max_draft=9, **prices)
        rows.append(with_drafts(planned, may_branch=True, draft=known if at == 0 else NO_DRAFT))
    return rows


class Grown(NamedTuple):
    """The trees of a step, and their drafts."""

    found: list[dict[tuple[int, ...], list[int]]]  # the tokens found after each computed path
    scores: list[float]
    drafts: list[Any]
    survival: list[float]

    @classmethod
    def by(cls, lab: Lab, proposer: LmProposer) -> Grown:
        """Draft from the pool as it was before any step."""
        lab.restart()
        for model in proposer._grower.gap_models.values():
            model.rounded_chances = (0.9, 0.3, 0.1, 0.05)  # sure enough for several passes ahead
        drafts = proposer.propose(tree_rows(lab))
        trees = [proposer._grower._trees[name] for name in EVERYBODY]
        ranked = [
            {
                tuple(tree.tail(node)): [tree.nodes[each].token_id for each in ranking.ranked]
                for node, ranking in sorted(tree.rankings.items())
            }
            for tree in trees
        ]
        scores = {
            (name, *tree.tail(node)): ranking.scores
            for name, tree in zip(EVERYBODY, trees, strict=True)
            for node, ranking in tree.rankings.items()
        }
        return cls(
            ranked,
            [score for _, mine in sorted(scores.items()) for score in mine],
            [[draft.token_ids, draft.parents, draft.sources] for draft in drafts],
            [each for draft in drafts for each in draft.survival],
        )

    def is_like(self, other: Grown) -> bool:
        """Whether all is equal; passes of other sizes round other last bits."""
        return (
            (self.found, self.drafts) == (other.found, other.drafts)
            and self.scores == pytest.approx(other.scores, rel=1e-5)
            and self.survival == pytest.approx(other.survival, rel=1e-5)
        )


def grow_the_same(grower: DecoderGrower, trees: Sequence[TreeGrowth], of: list[set[Any]]) -> None:
    """Compute given paths level by level, each pass read before the next."""
    for level in range(1, 20):
        nodes = [
            (tree, node)
            for tree, paths in zip(trees, of, strict=True)
            for node in tree.open(
                [
                    node
                    for node in range(len(tree.nodes))
                    if len(tree.tail(node)) == level and tuple(tree.tail(node)) in paths
                ]
            )
        ]
        if nodes:
            grower.compute(nodes).read()


@only_graphs
def test_the_passes_of_draft_trees_are_launched_before_the_first_is_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = Grown.by(lab, LmProposer(lab.decoder, lab.pool))
    assert all(len(nodes) > 2 for nodes in grown.found)
    assert any(parents for _, parents, _ in grown.drafts)

    one_by_one = LmProposer(lab.decoder, lab.pool)

    def grow(trees: Sequence[TreeGrowth], first: Opened) -> None:
        first.read()
        grow_the_same(one_by_one._grower, trees, [set(nodes) for nodes in grown.found])

    with monkeypatch.context() as patch:
        patch.setattr(one_by_one._grower, "grow", grow)
        assert Grown.by(lab, one_by_one).is_like(grown)

    drafter, proposer = Drafter(lab, monkeypatch), LmProposer(lab.decoder, lab.pool)
    with lab.is_slow():
        assert Grown.by(lab, proposer).is_like(grown)
    assert drafter.log.index("read") > 2
