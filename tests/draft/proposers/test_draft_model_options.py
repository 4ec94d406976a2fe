"""Options of a drafting model: what it reports beside its tokens, and how it draws them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.verifier import sample
from foretoken.draft.proposers.lm_proposer import LmProposer
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 256, 4, 120


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Decoder, Decoder]:
    torch.set_num_threads(1)
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    target, draft = (load_decoder(folder) for folder in folders)
    return target, draft


def proposer_of(decoder: Decoder, **options) -> LmProposer:
    return LmProposer(decoder, decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE), **options)


def row_of(tokens: Sequence[int], max_draft: int = 4, *, seed: int = 1, **form) -> ScheduledRequest:
    return ScheduledRequest(
        request_id="a",
        tokens=array("q", tokens),
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=array("q", range(NUM_PAGES)),
        sampling=SamplingMetadata(params=TokenSamplingParams(**form), seed=seed, prompt_len=5),
        draft_plan=DraftPlan(max_draft=max_draft),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def logits_after(decoder: Decoder, tokens: Sequence[int], tail: Sequence[int]) -> torch.Tensor:
    """The model's logits [vocab] after ``tokens`` and ``tail``, computed from nothing."""
    seen: list[torch.Tensor] = []

    class Watched:
        config, device = decoder.config, decoder.device
        batch, sampler = staticmethod(decoder.batch), decoder.sampler

        def row_passes(self, pool: KVPool) -> None:
            return None

        def chained_passes(self, pool: KVPool) -> None:
            return None

        def forward(self, batch: RaggedBatch, pool: KVPool, wanted: Wanted) -> ForwardOutput:
            output = decoder.forward(batch, pool, wanted)
            seen.append(output.logits)
            return output

    pool = decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    LmProposer(Watched(), pool, window=999).propose([row_of([*tokens, *tail], 1)])  # type: ignore[arg-type]
    return seen[-1][-1]


# ---- backlog -----------------------------------------------------------------------------------


def test_a_draft_says_how_much_of_its_kv_is_missing(pair) -> None:
    proposer, row = proposer_of(pair[1], window=20), row_of(prompt_of(60))
    told = []
    for _ in range(4):
        (draft,) = proposer.propose([row])
        told.append((draft.note.num_uncached, len(draft.token_ids)))
    assert told == [(39, 0), (18, 0), (0, 4), (0, 4)]


def test_the_backlog_of_each_row_is_its_own(pair) -> None:
    proposer = proposer_of(pair[1], window=20)
    rows = [
        replace(row_of(prompt_of(60)), page_ids=array("q", range(60))),
        replace(row_of(prompt_of(9)), request_id="b", page_ids=array("q", range(60, 80))),
    ]
    assert [draft.note.num_uncached for draft in proposer.propose(rows)] == [
        60 - (20 + 2 - 9),
        0,
    ]


def test_where_the_context_ends_there_is_no_backlog(pair) -> None:
    """Nothing would ever catch it up, and nobody should wait for that."""
    longest = pair[1].config.max_model_len
    pool = pair[1].make_pool(longest // PAGE_SIZE + 2, page_size=PAGE_SIZE)
    row = row_of(prompt_of(longest - 2))
    row = replace(row, page_ids=array("q", range(pool.num_pages)))
    (draft,) = LmProposer(pair[1], pool).propose([row])
    assert (draft.note.num_uncached, len(draft.token_ids)) == (0, 0)


# ---- the target's noise ------------------------------------------------------------------------


def test_a_draft_is_drawn_as_the_target_draws(pair) -> None:
    prompt, proposer = prompt_of(20), proposer_of(pair[1])
    for seed in range(5):
        row = row_of(prompt, 1, seed=seed, temperature=2.0)
        rows = [DraftedRow(row.tokens, row.sampling)]
        expected = sample(logits_after(pair[1], prompt, ())[None], rows)
        assert proposer.propose([row])[0].token_ids == [expected[0].token_id]


# ---- breakdown ---------------------------------------------------------------------------------


def test_a_draft_model_that_breaks_down_stops_drafting(pair) -> None:
    proposer = proposer_of(pair[1])
    forward = pair[1].forward

    class Breaking:
        config, device = pair[1].config, pair[1].device
        batch = staticmethod(pair[1].batch)
        calls = 0

        def forward(self, batch: RaggedBatch, pool: KVPool, wanted: Wanted) -> ForwardOutput:
            Breaking.calls += 1
            output = forward(batch, pool, wanted)
            factor = math.nan if Breaking.calls == 3 else 1.0
            return output._replace(logits=output.logits * factor)

    proposer._grower._decoder = Breaking()  # type: ignore[assignment]
    (draft,) = proposer.propose([row_of(prompt_of(9), temperature=0.0)])
    assert len(draft.token_ids) == len(draft.sources) == 2
