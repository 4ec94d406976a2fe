"""Controls that the host writes for the sampler's kernels: histories, masks, cached parts."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections import Counter

import numpy as np

from foretoken.core.ops.triton.sampling.history import History
from foretoken.core.ops.triton.sampling.sampling_inputs import write_controls
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.encoded import EncodedSampling
from support.sampling_rows import Countdown, row_of, sampling_of

VOCAB = 40


def test_a_history_counts_what_is_there_while_its_tokens_grow_and_others_come() -> None:
    rng, history = random.Random(1), History(3, VOCAB)
    paths = [array("q"), array("q", range(9))]
    for _ in range(200):
        tokens = rng.choice(paths)
        tokens.extend(rng.choices([*range(VOCAB), VOCAB, -1, 2**40], k=rng.randrange(3)))
        tail = rng.choices([0, 1, 2, VOCAB, 39], k=rng.randrange(3))
        ids, counts = history.counts(tokens, tail)
        known = Counter(i for i in [*tokens[3:], *tail] if 0 <= i < VOCAB)
        assert len(set(ids.tolist())) == len(ids)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == known


def test_a_tail_is_forgotten_again() -> None:
    history, tokens = History(0, VOCAB), array("q", (4, 4))
    history.counts(tokens, (4, 5))
    ids, counts = history.counts(tokens, ())
    assert (ids.tolist(), counts.tolist()) == ([4], [2])


def test_places_of_one_request_share_its_mask_and_others_have_their_own() -> None:
    listed = sampling_of(allowed_token_ids=[3, 35])
    rows = [
        DraftedRow(array("q", (0, 0)), listed),
        row_of(constraint=Countdown(VOCAB)),
        DraftedRow(array("q", (0, 0)), listed, (3,)),
        row_of(logit_bias={1: 1.0}),
        row_of(),
    ]
    controls = write_controls(list(enumerate(rows)), VOCAB)
    assert controls.edits is not None
    assert controls.edits.draws.tolist() == [0, 1, 2, 3]
    assert controls.edits.mask_of.tolist() == [0, 1, 0, -1]
    bits = np.unpackbits(controls.edits.masks.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(mask).tolist() for mask in bits] == [[3, 35], list(range(10))]


def test_min_tokens_edits_nothing_once_they_are_there() -> None:
    sampling = sampling_of(min_tokens=2, stop_ids=frozenset({7}))
    for num_tokens, is_early in ((3, True), (4, False)):
        row = DraftedRow(array("q", [1] * num_tokens), sampling)
        assert (write_controls([(0, row)], VOCAB).edits is not None) == is_early


def test_what_is_known_of_a_request_goes_with_it() -> None:
    row = row_of()
    write_controls([(0, row)], VOCAB)
    known = row.sampling.cached(EncodedSampling, VOCAB)
    assert row.sampling.cached(EncodedSampling, VOCAB) is known
    gone = weakref.ref(known)
    del row, known
    gc.collect()
    assert gone() is None
