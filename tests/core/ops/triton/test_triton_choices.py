"""Tokens that a pass chooses in its graph: those that the sampler would choose behind it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.batch import SamplingPlan, Segment, Wanted
from foretoken.core.sampling.gumbel import vocabulary_hashes
from foretoken.core.sampling.verifier import NOT_FINITE
from foretoken.draft.proposers.lm_proposer import LmProposer
from support.draft_trees import tree_of
from support.drafts import with_drafts

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from foretoken.core.ops.triton.attention import tile_schedule
from foretoken.core.ops.triton.graph import plan, step
from foretoken.core.ops.triton.graph.input_fields import fields, fill_controls, fill_idle
from foretoken.core.ops.triton.graph_inputs import GraphInputs
from foretoken.core.ops.triton.sampling.gumbel_argmax import GumbelArgmax
from foretoken.core.ops.triton.sampling.sampling_inputs import (
    NUM_COLUMNS,
    ROW,
    write_controls,
    write_plain_controls,
)
from support.fake_graph import _fresh
from support.graph_fixture import PAGE_SIZE, VOCAB, CountedGraph, Graphs, make_decoder, make_pool
from support.sampling_rows import Countdown, logits_of, row_of
from support.triton_sampling import SAMPLER, as_on_a_gpu  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread", "as_on_a_gpu"), pytest.mark.slow]
LENGTH = 4  # tokens of a prompt
BROKEN_PAGE = 59
PARAMS: dict[str, TokenSamplingParams] = {
    "greedy": TokenSamplingParams(temperature=0.0),
    "drawn": TokenSamplingParams(temperature=9.0),
    "cut": TokenSamplingParams(temperature=9.0, top_p=0.8, top_k=9),
    "floored": TokenSamplingParams(temperature=9.0, min_p=0.1),
    "told": TokenSamplingParams(temperature=3.0, logprobs=2),
    "broken": TokenSamplingParams(temperature=3.0),
    "biased": TokenSamplingParams(temperature=3.0, logit_bias={3: 4.0}),
    "refused": TokenSamplingParams(temperature=3.0, logit_bias={VOCAB: 1.0}),
    "prompt": TokenSamplingParams(temperature=0.0, prompt_logprobs=1),
}
NAMES = tuple(PARAMS)
Rows = Sequence[ScheduledRequest]


class Twins:
    """A runner whose decoder has graphs and one without, over pools with the same content."""

    def __init__(self) -> None:
        self.graphs = Graphs()
        decoders = make_decoder(self.graphs), make_decoder(None)
        self.runners = [ModelRunner(each, make_pool(each)) for each in decoders]
        for runner in self.runners:
            runner.pool.data[BROKEN_PAGE] = torch.nan
        sampler: Any = decoders[0].sampler
        winners, self.num_behind = sampler._winners, 0  # choices launched behind the graphs

        def counted(*args: Any) -> Any:
            self.num_behind += 1
            return winners(*args)

        sampler._winners = counted

    def step(self, rows: Rows, *, in_graph: bool) -> Sequence[RequestOutput]:
        """The same outcome and content of both."""
        self.num_behind = 0
        plan = StepPlan(requests=rows, newly_allocated_pages=array("q"))
        found, expected = (runner.step(plan).requests for runner in self.runners)
        assert found == expected
        pools = [runner.pool.data for runner in self.runners]
        assert torch.equal(*(each.nan_to_num(77.0) for each in pools))
        assert (self.num_behind == 0) == in_graph
        return found


@pytest.fixture(scope="module")
def twins(device: torch.device) -> Iterator[Twins]:
    """Five rows of a request are a long chunk already."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (step, plan, tile_schedule):
            patch.setattr(module, "NARROW_LEN", 4)
        yield Twins()


def row(name: str, more: Sequence[int] = (), *, pending: int = 1) -> ScheduledRequest:
    """The next step of a request that has said ``more``; its pages are its own."""
    at = NAMES.index(name)
    tokens = array("q", [(3 * i + at) % VOCAB for i in range(LENGTH)])
    tokens.extend(more)
    return ScheduledRequest(
        request_id=name,
        tokens=tokens,
        start=len(tokens) - pending,
        stop=len(tokens),
        page_ids=array("q", [BROKEN_PAGE if name == "broken" else at]),
        sampling=SamplingMetadata(params=PARAMS[name], seed=at, prompt_len=LENGTH),
    )


def part(name: str, start: int, stop: int) -> ScheduledRequest:
    """A piece of a prompt that yields no token."""
    return replace(row(name), start=start, stop=stop)


def test_every_way_to_draw_is_chosen_in_the_graph_to_the_same_tokens(twins: Twins) -> None:
    every = ("greedy", "drawn", "cut", "floored")
    told = [twins.step([row(name) for name in every], in_graph=True)]
    told.append(twins.step([row(name, [1]) for name in ("cut", "greedy", "drawn")], in_graph=True))
    told.append(twins.step([row(name, [1, 2]) for name in ("floored", "drawn")], in_graph=True))
    assert len({each.token_ids for rows in told for each in rows}) > 4


def test_log_probabilities_are_those_of_the_logits_that_the_graph_left(twins: Twins) -> None:
    told, _ = twins.step([row("told"), row("greedy")], in_graph=True)
    assert [len(each.top) for each in told.logprobs] == [2]


def test_a_row_that_is_not_finite_fails_alone(twins: Twins) -> None:
    sound, broken = twins.step([row("drawn"), row("broken")], in_graph=True)
    assert (sound.error, broken.error) == (None, NOT_FINITE)


@pytest.mark.parametrize("name", ["biased", "refused"])
def test_beside_an_edited_row_all_are_chosen_behind_the_graph(twins: Twins, name: str) -> None:
    before = twins.graphs.num_replayed
    found = twins.step([row("drawn"), row(name)], in_graph=False)
    assert (found[1].error is not None) == (name == "refused")
    assert twins.graphs.num_replayed == before + 1
    twins.step([row("cut"), row("greedy")], in_graph=True)


def test_draft_trees_are_followed_by_what_the_graph_chose(twins: Twins) -> None:
    names, said = ("drawn", "cut"), [list[int](), list[int]()]
    for _ in range(3):
        rows = [row(name, more) for name, more in zip(names, said, strict=True)]
        for more, found in zip(said, twins.step(rows, in_graph=True), strict=True):
            more += found.token_ids
    drawn, cut = said
    assert min(len(set(drawn)), len(set(cut))) > 1, "each place draws with its own noise"
    wrong = [(token + 1) % VOCAB for token in cut]
    tree = tree_of([wrong[:2], [wrong[0], cut[1]], cut[:2]])
    rows = [
        with_drafts(row("drawn"), draft=Draft.of([*drawn[:1], (drawn[1] + 1) % VOCAB], "a")),
        replace(row("cut"), draft_plan=DraftPlan(tree), spare_page_ids=array("q", [40])),
    ]
    refused, won = twins.step(rows, in_graph=True)
    assert (list(refused.token_ids), len(refused.path)) == (drawn[:2], 1)
    assert (list(won.token_ids), len(won.path)) == (cut, 2)


def test_a_short_chunk_yields_its_token_in_the_graph_and_none_where_it_ends_early(
    twins: Twins,
) -> None:
    twins.step([row("drawn", pending=3), row("greedy")], in_graph=True)
    _, chunk = twins.step([row("greedy"), part("drawn", 0, 3)], in_graph=True)
    assert chunk.token_ids == ()
    twins.step([part("drawn", 0, 3)], in_graph=True)


def test_log_probabilities_of_a_prompt_leave_the_choice_to_the_sampler(twins: Twins) -> None:
    prompt, _ = twins.step([row("prompt", pending=3), row("drawn")], in_graph=False)
    assert len(prompt.prompt_logprobs) == 2


def test_beside_a_long_chunk_tokens_are_chosen_behind_the_graph(twins: Twins) -> None:
    twins.step([row("drawn", [1], pending=5), row("cut")], in_graph=False)


def test_graphs_of_more_rows_choose_nothing(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MAX_ROWS", 7)
    before, begun = len(twins.graphs.made), twins.graphs.num_replayed
    rows = [with_drafts(row("drawn"), draft=Draft.of([1] * 6, "a")), row("cut")]
    twins.step(rows, in_graph=False)
    assert (len(twins.graphs.made), twins.graphs.num_replayed) == (before + 1, begun + 1)


def test_a_number_of_draws_that_is_not_that_of_the_logits_is_refused(twins: Twins) -> None:
    decoder, pool = twins.runners[0].decoder, twins.runners[0].pool
    batch = decoder.batch([Segment([1], 0, array("q", [0]), 1)], page_size=PAGE_SIZE)
    wanted = Wanted(SamplingPlan([row_of()], [2]))
    with pytest.raises(ValueError, match="1 rows of logits for 2 tokens to draw"):
        decoder.forward(batch, pool, wanted)


# -- what a step asks of the device --------------------------------------------------------------


class Asked(TorchDispatchMode):
    """Notes what is asked of the device, but for views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        is_new = bool(_fresh(result, args)) and name not in ("zeros", "empty")
        if is_new or name.endswith("_"):
            self.log.append(name)
        return result


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_step_of_few_rows_is_a_copy_a_graph_and_a_copy_back(
    twins: Twins, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    rows = [
        with_drafts(row(name), draft=Draft.of([1, 2][:num_drafts], "a"))
        for name in ("cut", "drawn")
    ]
    twins.step(rows, in_graph=True)
    if torch.get_default_device().type != "cpu":
        pytest.skip("what is launched is noted by the interpreter")
    asked, replay = Asked(), CountedGraph.replay

    def replayed(graph: CountedGraph) -> None:
        asked.log.append("replay")
        with _disable_current_modes():
            replay(graph)

    monkeypatch.setattr(CountedGraph, "replay", replayed)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *_, **__: asked.log.append(str(kernel))
    )
    with asked:
        twins.runners[0].step(StepPlan(requests=rows, newly_allocated_pages=array("q")))
    assert asked.log == ["copy_", "replay", "copy_"]


# -- a draft model -------------------------------------------------------------------------------


def test_a_draft_models_tokens_are_chosen_in_the_graph(twins: Twins) -> None:
    rows = [with_drafts(row(name), max_draft=3) for name in ("drawn", "floored")]
    found = []
    for runner in twins.runners:
        twins.num_behind = 0
        pool = make_pool(runner.decoder)
        proposer = LmProposer(runner.decoder, pool)
        found.append([list(draft.token_ids) for draft in proposer.propose(rows)])
        assert twins.num_behind == 0
    assert found[0] == found[1]
    assert [len(token_ids) for token_ids in found[0]] == [3, 3]


def test_trees_of_a_draft_model_are_the_same_over_graphs_and_without(twins: Twins) -> None:
    """A pass of a level is a graph that leaves the logits; the best few are raced for behind it.

    Passes that are launched ahead have other sizes than those that are read one by one, so scores
    differ in their last bits.
    """
    rows = [
        replace(row(name), draft_plan=DraftPlan(max_draft=5), spare_page_ids=array("q", [40 + at]))
        for at, name in enumerate(("drawn", "cut"))
    ]
    found, survivals = [], []
    for runner in twins.runners:
        before = twins.graphs.num_replayed
        proposer = LmProposer(runner.decoder, make_pool(runner.decoder))
        drafts = proposer.propose(rows)
        found.append([(list(each.token_ids), list(each.parents)) for each in drafts])
        survivals.append([probability for each in drafts for probability in each.survival])
        num_passes = (
            max(len(each.note.pass_rows) for each in drafts) if runner is twins.runners[0] else 0
        )
        assert twins.graphs.num_replayed - before == num_passes
    assert found[0] == found[1]
    assert survivals[0] == pytest.approx(survivals[1], abs=1e-5)
    assert any(parents for _, parents in found[0]), "a tree"
    assert all(len(token_ids) == 5 for token_ids, *_ in found[0])


# -- nobody --------------------------------------------------------------------------------------


def test_nothing_is_chosen_where_there_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read or written for an absent row: it would be outside the logits."""
    rows, logits = [row_of(1, top_k=3), row_of(2), row_of(3, top_p=0.5)], logits_of(3, 40)
    controls = write_plain_controls(SamplingPlan(rows, [1, 1, 1]), 40)
    assert controls is not None
    columns = torch.from_numpy(controls.columns).to(logits.device)
    cuts, hashes = torch.tensor([0, -1, 2, -1]), vocabulary_hashes(40, logits.device)
    around: list[torch.Tensor] = []

    def space(race: GumbelArgmax, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.full((shape[0] + 2, *shape[1:]), 77, dtype=dtype)
        around.extend((made[0], made[-1]))
        return made[1:-1]

    monkeypatch.setattr(GumbelArgmax, "_space", space)
    whole = SAMPLER.gumbel_argmax(logits, columns.flatten(), cuts.int(), hashes)
    columns[1] = -1
    partial = SAMPLER.gumbel_argmax(logits, columns.flatten(), cuts.int(), hashes)
    assert partial.tolist() == [whole[0], 77, whole[2]]
    assert all((each == 77).all() for each in around)


def test_what_a_pass_left_in_a_packet_is_nobodys_in_the_next() -> None:
    to = GraphInputs(fields(4, 1, 8, num_draws=4), torch.device("cpu")).open()
    fill_idle(to)
    told = [(to["controls"].reshape(-1, NUM_COLUMNS)[:, ROW].tolist(), to["cuts"].tolist())]
    rows = [row_of(1), row_of(2, top_k=3), row_of(3, top_k=3)]
    for count in (3, 2, 0):
        draws = SamplingPlan(rows[:count], [1] * count)
        fill_controls(to, write_plain_controls(draws, 40) if count else None)
        columns = to["controls"].reshape(-1, NUM_COLUMNS)
        told.append((columns[:, ROW].tolist(), to["cuts"].tolist()))
    nobody = [-1] * 4
    assert told == [
        (nobody, nobody),
        ([0, 1, 2, -1], [1, 2, -1, -1]),
        ([0, 1, -1, -1], [1, -1, -1, -1]),
        (nobody, nobody),
    ]


def test_a_run_of_draws_is_told_as_its_places_would_be_one_by_one() -> None:
    """With a tail before the first, as rows of a draft model have."""
    first, second = row_of(1, top_k=3), replace(row_of(2, temperature=0.5, min_p=0.1), draft=[7, 8])
    last = replace(second, draft=[7, 8, 1, 2])
    told = write_plain_controls(SamplingPlan([first, last], [1, 3]), 40)
    tails = [(), (), (1,), (1, 2)]
    rows = [
        replace(row, draft=(*row.draft, *tail))
        for row, tail in zip([first, second, second, second], tails, strict=True)
    ]
    expected = write_controls(list(enumerate(rows)), 40)
    assert told is not None
    assert told.columns.tolist() == expected.columns.tolist()
    assert told.cuts.tolist() == expected.cuts.tolist() == [0]


@pytest.mark.parametrize("wish", [{"logit_bias": {3: 1.0}}, {"min_tokens": 99}])
def test_beside_an_edited_row_the_graph_chooses_for_nobody(wish: dict[str, Any]) -> None:
    plain, edited = row_of(1), row_of(2, **wish)
    for rows in ([edited, plain, plain], [plain, edited, plain], [plain, plain, edited]):
        assert write_plain_controls(SamplingPlan(rows, [1, 1, 1]), 40) is None
    assert write_plain_controls(SamplingPlan([plain] * 3, [1, 1, 1]), 40) is not None


def test_a_constraint_is_asked_once_though_its_row_is_not_for_the_graph(twins: Twins) -> None:
    constraint = Countdown(VOCAB)
    sampling = SamplingMetadata(
        params=PARAMS["drawn"], seed=1, prompt_len=LENGTH, constraint=constraint
    )
    twins.runners[0].step(
        StepPlan(
            requests=[replace(row("drawn"), sampling=sampling)], newly_allocated_pages=array("q")
        )
    )
    assert constraint.asked == [0]
