"""Segments that share pages: the bits of each on its own, and every shared block read once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.base import Ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.native.structs.plan import NativePlan
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import HeadLayout
from support.checkpoints import ModelDriver, make_checkpoint, void_item
from support.native_variants import every_variant
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 64  # keys that attention takes at a time
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {
    (torch.float32, "auto"): {"atol": 2e-5, "rtol": 1e-5},
    (torch.float32, "int8"): {"atol": 2e-4, "rtol": 2e-4},
    (torch.bfloat16, "auto"): {"atol": 2e-2, "rtol": 2e-2},
    (torch.bfloat16, "int8"): {"atol": 2e-2, "rtol": 2e-2},
}


@pytest.fixture(params=every_variant())
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    torch.manual_seed(0)
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


@pytest.fixture
def fastest_ops() -> Iterator[NativeOps]:
    torch.manual_seed(0)
    library = native_library()
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


class Crowd:
    """Segments of a pool, which begin with the pages of a trunk and go on with their own."""

    def __init__(
        self,
        *,
        page_size: int = 16,
        shape: tuple[int, int, int] = (4, 2, 16),
        dtype: torch.dtype = torch.float32,
        kv_dtype: KvDtype = "auto",
        positions: int = 30_000,  # in the pool
    ) -> None:
        num_heads, num_kv_heads, head_dim = shape
        self.heads = HeadLayout(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        self.width = (num_heads + 2 * num_kv_heads) * head_dim
        self.page_size = page_size
        self.pool = KVPool(
            positions // page_size,
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
            kv_dtype=kv_dtype,
        )
        self.kv_dtype = kv_dtype
        self.pool.data.fill_(void_item(self.pool))  # what nobody has written must reach nobody
        self.rng = random.Random(0)
        free = self.rng.sample(range(self.pool.num_pages), self.pool.num_pages)
        self._free = iter(free)
        self.segments: list[Segment] = []

    def trunk(self, num_tokens: int, root: Sequence[int] = ()) -> list[int]:
        """Pages that ``num_tokens`` fill, of which the first are those of ``root``."""
        pages = list(root)
        return pages + [next(self._free) for _ in range(num_tokens // self.page_size - len(pages))]

    def join(self, trunk: Sequence[int], start: int, rows: int = 1) -> None:
        """A segment that shares what lies wholly before its rows, and has a copy of the rest."""
        shared = list(trunk[: start // self.page_size])
        needed = -(-(start + rows) // self.page_size)
        own = [next(self._free) for _ in range(needed - len(shared))]
        self.segments.append(Segment(range(rows), start, array("q", shared + own), 0))

    def plan(self, ops: Ops, segments: Sequence[Segment] | None = None) -> NativePlan:
        chosen = self.segments if segments is None else segments
        batch = build_batch(chosen, page_size=self.page_size, device="cpu", min_rows=1)
        turns = Turns(0.7 ** torch.arange(self.heads.head_dim // 2))
        return ops.plan(batch, self.pool, self.heads, turns)  # type: ignore[return-value]

    def write(self, ops: Ops) -> Tensor:
        """KV of every position up to the last rows, which stand in random order; their queries."""
        self.rng.shuffle(self.segments)
        for segment in self.segments:
            if segment.start:
                past = Segment(range(segment.start), 0, segment.page_ids, 0)
                ops.rope_write(self._rows(segment.start), 0, self.plan(ops, [past]), None)
        num_rows = sum(len(segment.token_ids) for segment in self.segments)
        return ops.rope_write(self._rows(num_rows), 0, self.plan(ops), None)

    def _rows(self, count: int) -> Tensor:
        return torch.randn(count, self.width).to(self.pool.dtype)


def check_rows_stand_alone(crowd: Crowd, ops: NativeOps, windows: Sequence[int | None]) -> None:
    """Every segment's output has the bits of that segment by itself, and is the oracle's."""
    q = crowd.write(ops)
    oracle = TorchOps()
    for window in windows:
        out = ops.attention(q, 0, crowd.plan(ops), window)
        expected = oracle.attention(q, 0, crowd.plan(oracle), window)
        torch.testing.assert_close(out, expected, **CLOSE[q.dtype, crowd.kv_dtype])
        at = 0
        for segment in crowd.segments:
            rows = slice(at, at + len(segment.token_ids))
            alone = ops.attention(q[rows], 0, crowd.plan(ops, [segment]), window)
            assert torch.equal(out[rows], alone), (segment.start, window)
            at = rows.stop


def num_blocks(crowd: Crowd, ops: NativeOps, window: int = 0) -> int:
    crowd.rng.shuffle(crowd.segments)
    plan = crowd.plan(ops)  # keeps alive what the pointers lend
    return int(ops.library.c.ft_attention_blocks(*plan.pointers, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 100, 128])
@pytest.mark.parametrize("num_sharers", [1, 4, 16, 40])
def test_sharers_of_a_prefix_get_the_bits_of_each_alone(
    num_sharers: int, page_size: int, dtype: torch.dtype, ops: NativeOps
) -> None:
    """The prefix ends inside a block and inside a page; some have gone on a little farther."""
    crowd = Crowd(page_size=page_size, dtype=dtype)
    trunk = crowd.trunk(217)
    for i in range(num_sharers):
        crowd.join(trunk, 217 + i % 3 * 30)
    check_rows_stand_alone(crowd, ops, [None, 70])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 2, 24), (3, 1, 80), (64, 1, 16), (4, 4, 128)])
def test_a_tree_beside_strangers_and_chunks_gets_the_bits_of_each_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, ops: NativeOps
) -> None:
    """Three levels, verify rows, a long chunk behind the shared pages, rows that begin there."""
    crowd = Crowd(shape=shape, dtype=dtype)
    root = crowd.trunk(140)
    branches = [crowd.trunk(length, root) for length in (210, 270, 400)]
    for trunk in branches:
        for start, rows in ((130, 2), (210, 5), (271, 1), (290, 5), (410, 1), (450, 3)):
            crowd.join(trunk, start, rows)
    crowd.join(branches[0], 200, rows=90)
    crowd.join(branches[1], 270, rows=17)
    for start, rows in ((0, 1), (0, 70), (300, 1), (63, 2), (64, 1)):
        crowd.join([], start, rows)
    check_rows_stand_alone(crowd, ops, [None, 1, 130])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_get_the_bits_of_each_alone(
    seed: int, kv_dtype: KvDtype, ops: NativeOps
) -> None:
    rng = random.Random(seed)
    page_size, dtype = rng.choice((3, 16, 64, 128)), rng.choice(DTYPES)
    crowd = Crowd(page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    trunks: list[list[int]] = [[]]
    for _ in range(rng.randrange(1, 9)):
        root = rng.choice(trunks)
        length = len(root) * crowd.page_size + rng.randrange(300)
        trunks.append(crowd.trunk(length, root))
    for _ in range(rng.choice((5, 20, 40))):
        trunk = rng.choice(trunks)
        start = max(0, len(trunk) * crowd.page_size + rng.randrange(-100, 100))
        crowd.join(trunk, start, rng.choice((1, 1, 1, 5, 5, 40)))
    ops.set_threads(rng.choice((1, 2)))
    check_rows_stand_alone(crowd, ops, [rng.choice((None, 50, 200))])


@pytest.mark.parametrize("page_size", [1, 16, 32, 100, 512])
@pytest.mark.parametrize("num_sharers", [1, 2, 16, 32])
def test_a_shared_prefix_is_read_once(
    num_sharers: int, page_size: int, fastest_ops: NativeOps
) -> None:
    """Blocks wholly inside the shared pages once, then those of each on its own."""
    crowd, strangers = Crowd(page_size=page_size), Crowd(page_size=page_size)
    trunk = crowd.trunk(330)
    for _ in range(num_sharers):
        crowd.join(trunk, 330)
        strangers.join([], 330)
    shared = len(trunk) * page_size // BLOCK
    assert num_blocks(strangers, fastest_ops) == num_sharers * 6
    assert num_blocks(crowd, fastest_ops) == shared + num_sharers * (6 - shared)


def test_every_level_of_a_tree_is_read_once(fastest_ops: NativeOps) -> None:
    crowd = Crowd()
    root = crowd.trunk(3 * BLOCK)
    for branch in (crowd.trunk(5 * BLOCK, root) for _ in range(2)):
        for leaf in (crowd.trunk(6 * BLOCK, branch) for _ in range(2)):
            for start in (6 * BLOCK, 6 * BLOCK + 7):
                crowd.join(leaf, start)
    assert num_blocks(crowd, fastest_ops) == 3 + 2 * 2 + 4 * 1 + 8 * 1


@pytest.mark.parametrize("page_size", [16, 128])
def test_keys_at_or_behind_somebodys_rows_are_not_shared(
    page_size: int, fastest_ops: NativeOps
) -> None:
    """One computes what the other has long passed; both in the same pages."""
    crowd = Crowd(page_size=page_size)
    trunk = crowd.trunk(4 * BLOCK)
    for start in (2 * BLOCK - 1, 3 * BLOCK):
        pages = array("q", trunk)
        crowd.segments.append(Segment(range(1), start, pages, 0))
    assert num_blocks(crowd, fastest_ops) == 1 + 1 + 3
    check_rows_stand_alone(crowd, fastest_ops, [None, 30])


def test_more_sharers_than_fit_into_a_task_are_parted_where_the_least_is_shared(
    fastest_ops: NativeOps,
) -> None:
    """Two groups of 20 under one root: 32 rows fit, and 20 and 20 read the least."""
    crowd = Crowd(shape=(4, 2, 16))
    root = crowd.trunk(BLOCK)
    for trunk in (crowd.trunk(5 * BLOCK, root) for _ in range(2)):
        for _ in range(20):
            crowd.join(trunk, 5 * BLOCK)
    assert num_blocks(crowd, fastest_ops) == 2 * (1 + 4) + 40


def test_long_chunks_share_nothing_and_short_ones_do(fastest_ops: NativeOps) -> None:
    crowd = Crowd(shape=(4, 2, 16))
    trunk = crowd.trunk(2 * BLOCK)
    for rows in (16, 16, 33):
        crowd.join(trunk, 2 * BLOCK, rows)
    assert num_blocks(crowd, fastest_ops) == 2 + 2 * 1 + 2 * (2 + 1)


def test_blocks_that_nobody_sees_are_not_read(fastest_ops: NativeOps) -> None:
    """A window of a block: of the shared ones only those that the shortest sees count."""
    crowd = Crowd()
    trunk = crowd.trunk(10 * BLOCK)
    for start in (4, 6, 6, 10):
        crowd.join(trunk, start * BLOCK)
    # Each sees its own row and 63 before it: the block before, shared or not, and its own.
    assert num_blocks(crowd, fastest_ops, window=BLOCK) == 3 + 4
    assert num_blocks(crowd, fastest_ops, window=1) == 4
    assert num_blocks(crowd, fastest_ops) == 10 + 4


def test_sharers_keep_every_thread_busy(fastest_ops: NativeOps) -> None:
    """With one KV head a task is all that a thread can take: better to read the prefix twice."""
    crowd = Crowd(shape=(2, 1, 16))
    trunk = crowd.trunk(2 * BLOCK)
    for _ in range(8):
        crowd.join(trunk, 2 * BLOCK)
    assert num_blocks(crowd, fastest_ops) == 2 + 8
    fastest_ops.set_threads(4)
    assert num_blocks(crowd, fastest_ops) == 4 * 2 + 8
    check_rows_stand_alone(crowd, fastest_ops, [None])


@pytest.mark.parametrize("kind", ["qwen3", "mistral_window"])
def test_a_step_of_sharers_in_one_call_is_the_same_bits_as_each_in_its_own(
    kind: str, tmp_path_factory: pytest.TempPathFactory, fastest_ops: NativeOps
) -> None:
    """Down to the logits, and with the tasks planned once for all layers."""
    folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind)
    decoder = load_decoder(folder, dtype="bfloat16", backend="native")
    prefix = [n * 7 % 200 for n in range(200)]
    tails = [[n] * (1 + n % 3) for n in range(6)]

    def sharers() -> tuple[ModelDriver, list[tuple[object, list[int], int]]]:
        driver = ModelDriver(decoder)
        first = driver.add(prefix)
        driver.prefill(first, len(prefix))
        added = [driver.add(prefix + tail, prefix=first) for tail in tails]
        return driver, [(stream, list(stream.tokens[stream.num_computed :]), 1) for stream in added]

    driver, rows = sharers()
    together = driver.step(rows)  # type: ignore[arg-type]
    driver, rows = sharers()
    alone = [driver.step([row])[0] for row in rows]  # type: ignore[list-item]
    assert torch.equal(torch.cat(together), torch.cat(alone))
