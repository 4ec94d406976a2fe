"""Every row of a draft tree has the bits of plain decoding along its path."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch

from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment, build_batch
from support.checkpoints import make_checkpoint
from support.draft_trees import TreeRows, random_paths, tree_of

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 40
LENGTHS = [2, 30, 62, 127, 140]
BACKENDS = {
    "torch": ("torch", "float32", "auto"),
    "torch bfloat16": ("torch", "bfloat16", "auto"),
    "torch int8": ("torch", "float32", "int8"),
    "native": ("native", "float32", "auto"),
    "native bfloat16": ("native", "bfloat16", "auto"),
    "native int8": ("native", "bfloat16", "int8"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a window of 50 positions and without."""
    return make_checkpoint(tmp_path_factory.mktemp("trees"), "qwen3_layer_types", vocab_size=VOCAB)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def decoder(folder: Path, backend: tuple[str, str, str]) -> Decoder:
    name, dtype, _ = backend
    return load_decoder(folder, backend=name, dtype=dtype, exact="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("length", LENGTHS)
def test_random_trees(decoder: Decoder, backend, length: int) -> None:
    """Backends, lengths and page sizes know nothing of each other: every two of them meet."""
    page_size = (1, 16)[(LENGTHS.index(length) + [*BACKENDS.values()].index(backend)) % 2]
    rng = random.Random(length)
    right = [rng.randrange(VOCAB) for _ in range(5)]
    draft = tree_of(random_paths(rng, right, 8, VOCAB))
    assert len(draft.runs) > 2
    TreeRows(decoder, page_size, length, kv_dtype=backend[2]).check(draft)


@pytest.mark.parametrize("fork", [3, 40, 66])
def test_runs_beside_long_trunks_share_no_key_behind_their_fork(
    decoder: Decoder, backend, fork: int
) -> None:
    """A trunk over whole blocks of keys, which a run that leaves it must not take from it."""
    rng = random.Random(fork)
    trunk = [rng.randrange(VOCAB) for _ in range(70)]
    wrong = (trunk[fork] + 1) % VOCAB
    draft = tree_of([trunk, [*trunk[:fork], wrong, *trunk[fork + 1 :]], [(trunk[0] + 1) % VOCAB]])
    rows = TreeRows(decoder, 16, 60, kv_dtype=backend[2])
    together = rows.tree(draft)
    for node in (0, fork, 69, 70, len(draft.token_ids) - 2, len(draft.token_ids) - 1):
        path = [draft.token_ids[each] for each in draft.path(node)]
        assert torch.equal(together[node + 1], rows.plain(path))


def test_a_tail_must_have_a_slot_for_every_row_and_leave_a_position_to_the_pages() -> None:
    def build(start: int, tail: list[int]) -> None:
        segment = Segment(array("q", [1, 2]), start, array("q", [0]), 0, array("q", tail))
        build_batch([segment], page_size=16, device="cpu", min_rows=1)

    build(3, [20, 21, 22])
    for start, tail in ((3, [20]), (1, [20, 21, 22])):
        with pytest.raises(ValueError, match="a tail must have a slot for every row"):
            build(start, tail)


def test_rows_with_and_without_tails_lie_where_they_should() -> None:
    pages = array("q", [7, 5])
    segments = [
        Segment(array("q", [1]), 3, pages, 1),
        Segment(array("q", [2, 3]), 6, pages, 2, array("q", [40, 12, 33])),
        Segment(array("q", [4]), 4, pages, 1, array("q", [13])),
    ]
    batch = build_batch(segments, page_size=4, device="cpu", min_rows=1)
    assert batch.slots.tolist() == [31, 12, 33, 13]
    assert batch.positions.tolist() == [3, 6, 7, 4]
    assert batch.page_counts.tolist() == [1, 2, 1]
    assert (batch.tail_from.tolist(), batch.first_tails.tolist()) == ([4, 5, 4], [0, 0, 3])
