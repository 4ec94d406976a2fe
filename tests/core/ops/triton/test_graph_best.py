"""The best few tokens of each place, chosen in the graph of a draft's pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.ops.batch import ForwardOutput, SamplingPlan, Segment, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.sampler import DraftVocab

pytest.importorskip("triton")

from support.graph_fixture import PAGE_SIZE, SIZE, VOCAB, Graphs, make_decoder, make_pool
from support.sampling_rows import row_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
ROWS = [
    row_of(1, temperature=0.0),
    row_of(2, temperature=1.0),
    row_of(3, temperature=0.7, top_k=3),
]
SEGMENTS = [Segment([7 + n], 3 * n, array("q", [40 + n]), 1) for n in range(3)]
DRAFT_IDS = [11, 3, 8, 19, 2, 14]


class Drafter:
    """A decoder with graphs, and passes of it that choose."""

    def __init__(self, decoder: Decoder, graphs: Graphs) -> None:
        self.decoder, self.graphs = decoder, graphs
        self.pool: KVPool = make_pool(decoder)

    def run(
        self,
        rows: Sequence[DraftedRow],
        num_best: int,
        draft_vocab: DraftVocab | None = None,
        vectors: torch.Tensor | None = None,
    ) -> ForwardOutput:
        batch = self.decoder.batch(SEGMENTS[: len(rows)], page_size=PAGE_SIZE)
        draws = SamplingPlan(rows, [1] * len(rows), num_best, draft_vocab)
        return self.decoder.forward(batch, self.pool, Wanted(draws, inputs=vectors))


@pytest.fixture
def drafter() -> Drafter:
    graphs = Graphs()
    return Drafter(make_decoder(graphs), graphs)


def reduced(graphs: Graphs) -> Drafter:
    """A decoder whose output layer is of some ids alone."""
    whole = make_decoder(graphs)
    assert isinstance(whole, OwnDecoder)
    head = whole.ops.pack_linear(whole.weights.embedding[DRAFT_IDS].contiguous())
    weights = replace(whole.weights, lm_head=head)
    return Drafter(OwnDecoder(whole.config, weights, whole.ops), graphs)


def test_a_graph_chooses_what_the_sampler_would_choose_of_its_logits(drafter: Drafter) -> None:
    for count in (3, 2, 3):
        output = drafter.run(ROWS[:count], 4)
        assert output.tokens is None
        assert output.best is not None
        expected = drafter.decoder.sampler.best(output.logits.clone(), ROWS[:count], 4)
        assert output.best.bests() == expected
        assert len(expected[0].token_ids) == 4
    assert drafter.graphs.num_replayed == 3
    alone = drafter.run(ROWS, 1)
    assert alone.best is None
    assert alone.tokens is not None, "one of each, as a target's"
    assert len(drafter.graphs.made) == 3, "of two and four rows, and of four that draw one"


def test_a_place_whose_logits_are_edited_is_left_to_the_sampler(drafter: Drafter) -> None:
    edited = [ROWS[0], row_of(2, temperature=1.0, presence_penalty=1.0)]
    output = drafter.run(edited, 4)
    assert output.best is None
    assert output.tokens is None
    assert output.logits.isfinite().all()
    assert drafter.graphs.num_replayed == 1


@pytest.mark.parametrize("num_best", [1, 4])
def test_rows_of_vectors_race_for_the_ids_that_are_drafted(num_best: int) -> None:
    drafter = reduced(Graphs())
    vocab = DraftVocab(torch.tensor(DRAFT_IDS), VOCAB)
    torch.manual_seed(5)
    for _ in range(2):
        output = drafter.run(ROWS, num_best, vocab, torch.randn(3, SIZE))
        assert output.logits.shape == (3, len(DRAFT_IDS))
        expected = drafter.decoder.sampler.best(
            output.logits.clone(), ROWS, num_best, draft_vocab=vocab
        )
        assert output.best is not None
        assert output.best.bests() == expected
        assert {token for each in expected for token in each.token_ids} <= set(DRAFT_IDS)
    assert (len(drafter.graphs.made), drafter.graphs.num_replayed) == (1, 2)
    edited = [*ROWS[:2], row_of(3, temperature=1.0, presence_penalty=1.0)]
    output = drafter.run(edited, num_best, vocab, torch.randn(3, SIZE))
    assert (output.best, output.tokens) == (None, None), "which has edits is left to the sampler"
    assert output.logits.shape == (3, len(DRAFT_IDS))


def test_a_pass_of_which_no_logits_are_wanted_ends_with_the_layers(drafter: Drafter) -> None:
    batch = drafter.decoder.batch(SEGMENTS, page_size=PAGE_SIZE)
    drafter.decoder.forward(batch, drafter.pool, Wanted(hidden_alone=True))
    (captured,) = (
        each
        for shared in drafter.decoder._compiled._graphs.values()  # type: ignore[attr-defined]
        for each in shared.captured.values()
    )
    assert captured.head is None
    assert captured.outcome.logits is None


def test_graphs_of_what_a_draft_will_want_are_captured_before(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretoken.core.ops.triton.graph import step

    monkeypatch.setattr(step, "BUCKETS", (1, 4))
    drafter.decoder.warm_up(drafter.pool, 100, Wanted(SamplingPlan((), (), 4)))
    num_made = len(drafter.graphs.made)
    for count in (1, 3):
        assert drafter.run(ROWS[:count], 4).best is not None
    assert len(drafter.graphs.made) == num_made == 2
