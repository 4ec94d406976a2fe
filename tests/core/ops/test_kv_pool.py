"""The KV pool: what a scaled codec keeps of a vector, what a page is, and how pages are copied."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.core.interface.kv_codec import KV_CODECS, SCALED, KvDtype
from foretoken.core.ops.kv_pool import (
    KVPool,
    KvShape,
    bytes_per_mixed_page,
    bytes_per_page,
    decode,
    encode,
)
from foretoken.core.ops.kv_pool import make_pool as make_mixed_pool

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = tuple(codec.name for codec in SCALED)
WHOLE = (slice(None), slice(None))


def make_pool(
    kv_dtype: KvDtype, *, page_size: int = 16, head_dim: int = 64, num_blocks: int = 2
) -> KVPool:
    return KVPool(
        5,
        num_layers=3,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kv_dtype=kv_dtype,
        num_blocks=num_blocks,
    )


# -- a vector -----------------------------------------------------------------------------------


def kept(rows: torch.Tensor, kind: KvDtype, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    codec = KV_CODECS[kind]
    return decode(codec, *encode(codec, rows), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_comes_back_to_half_a_step(kind: KvDtype) -> None:
    """A step of whole numbers is the same for all of a vector, one of floats follows their size."""
    torch.manual_seed(0)
    rows = torch.randn(50, 64) * torch.logspace(-20, 20, 50).unsqueeze(1)
    back = kept(rows, kind)
    largest = rows.abs().amax(dim=1, keepdim=True)
    top, number = KV_CODECS[kind].top, getattr(torch, KV_CODECS[kind].number)
    steps = largest / top
    if number.is_floating_point:
        info = torch.finfo(number)
        powers = torch.exp2(torch.frexp(rows * top / largest).exponent - 1)
        steps = powers.clamp(min=info.smallest_normal) * info.eps * largest / top
    assert ((back - rows).abs() <= 0.5001 * steps).all()
    at = rows.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(back.gather(1, at), rows.gather(1, at), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("int8", [254, 1, 3, 5, -1, -3], [254, 0, 4, 4, 0, -4]),
        ("fp8", [448, 17, 19, 25, -27, 2**-10], [448, 16, 20, 24, -28, 0]),
        ("fp8", [-896, 432, 3 * 2**-9], [-896, 448, 2**-7]),
    ],
)
def test_half_way_between_two_steps_the_even_one_is_taken(
    kind: KvDtype, row: list[float], expected: list[float]
) -> None:
    assert kept(torch.tensor([row]), kind).tolist() == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_come_back_as_zeros_and_the_smallest_numbers_without_harm(kind: KvDtype) -> None:
    """The scale of such numbers is itself rounded: the largest must not become more than it may."""
    rows = torch.tensor([[0.0, -0.0], [1e-45, -1e-45], [9.6e-43, 3e-43], [1e-39, -2e-39]])
    back = kept(rows, kind)
    assert (back[0] == 0).all()
    assert ((back - rows).abs() <= rows.abs() / 2 + 2e-45).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_stays_so_and_harms_no_other(bad: float, kind: KvDtype) -> None:
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    back = kept(rows, kind, torch.bfloat16)
    assert not back[1].isfinite().any()
    assert torch.equal(back[[0, 2]], torch.ones(2, 8).bfloat16())


# -- a pool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 6), (3, 6), (16, 64), (4, 24)])
def test_a_page_is_one_blob_of_the_size_that_the_helper_says(
    page_size: int, head_dim: int, kind: KvDtype
) -> None:
    """The vectors' bytes may end between two places for a scale."""
    pool = make_pool(kind, page_size=page_size, head_dim=head_dim)
    per_page = bytes_per_page(
        num_layers=3,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_dtype=kind,
    )
    assert pool.num_bytes == 5 * per_page
    assert pool.data[0].is_contiguous()
    vectors, scales = pool.split(pool.blocks)
    assert scales is not None
    assert vectors.shape == (60, page_size, head_dim)
    assert scales.shape == (60, page_size)
    rows = torch.arange(60 * page_size, dtype=torch.float32).view(60, page_size, 1)
    pool.store(pool.blocks, WHOLE, rows.expand(60, page_size, head_dim))
    back = pool.load(pool.blocks, WHOLE, torch.float32)
    torch.testing.assert_close(back, rows.expand_as(back))


def parts_by_slot(pool: KVPool) -> list[torch.Tensor]:
    """The vectors of all slots, and their scales, ``[num_slots, ...]`` in bits."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    found = [part.view(bits[part.itemsize]) for part in pool.split(pool.blocks) if part is not None]
    return [part.unflatten(0, (pool.num_pages, -1)).transpose(1, 2).flatten(0, 1) for part in found]


@pytest.mark.parametrize("num_blocks", [2, 1])
@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_several_slots_are_copied_at_once_and_no_other_changes(
    kind: KvDtype, num_blocks: int
) -> None:
    pool = make_pool(kind, page_size=3, head_dim=6, num_blocks=num_blocks)
    memory = pool.data.view(torch.int32)
    memory.copy_(torch.randint(2**30, memory.shape))
    before = [part.clone() for part in parts_by_slot(pool)]
    pool.copy_slots([13, 2, 0], [4, 12, 1])
    wanted = [0, 0, 2, 3, 13, 5, 6, 7, 8, 9, 10, 11, 2, 13, 14]
    for part, old in zip(parts_by_slot(pool), before, strict=True):
        assert torch.equal(part, old[wanted])
    pool.copy_slots([], [])


@pytest.mark.parametrize(("sources", "targets"), [([0, 1], [2, 2]), ([0, 1], [1, 2]), ([0], [0])])
def test_slots_are_not_copied_where_the_order_would_matter(
    sources: list[int], targets: list[int]
) -> None:
    with pytest.raises(ValueError, match="cannot copy slots"):
        make_pool("auto").copy_slots(sources, targets)


@pytest.mark.parametrize("kind", ["auto", *KINDS])
@pytest.mark.parametrize(
    "shapes", [((50, 16, 256), (10, 4, 512)), ((12, 1, 256), (3, 1, 512))], ids=["31B", "E2B"]
)
def test_a_page_of_layers_of_two_shapes_is_hardly_longer_than_its_layers(
    shapes: tuple[tuple[int, int, int], ...], kind: KvDtype
) -> None:
    layers = [KvShape(*shape) for shape in shapes]
    pool = make_mixed_pool(
        3, layers, page_size=16, dtype=torch.bfloat16, device="cpu", kv_dtype=kind
    )
    alone = sum(
        bytes_per_page(**shape._asdict(), page_size=16, dtype=torch.bfloat16, kv_dtype=kind)
        for shape in layers
    )
    expected = bytes_per_mixed_page(layers, page_size=16, dtype=torch.bfloat16, kv_dtype=kind)
    assert pool.num_bytes == 3 * expected
    assert alone <= expected < 1.04 * alone


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_parts_whose_blocks_are_nearly_multiples_are_split_into_vectors(kind: KvDtype) -> None:
    pool = make_mixed_pool(
        3, [KvShape(1, 1, 128), KvShape(2, 1, 252)], page_size=16, dtype=torch.bfloat16,
        device="cpu", kv_dtype=kind,
    )  # fmt: skip
    for part, head_dim in zip(pool.parts, (128, 252), strict=True):
        assert part.load_blocks(part.blocks).shape[-2:] == (16, head_dim)
    pool.copy_slots([1, 18], [40, 35])


def test_parts_of_a_pool_have_no_byte_in_common() -> None:
    shapes = [KvShape(2, 3, 6), KvShape(3, 1, 8), KvShape(1, 2, 6), KvShape(3, 1, 10, 1)]
    pool = make_mixed_pool(5, shapes, page_size=3, dtype=torch.float32, device="cpu")
    pool.data.zero_()
    for index, (part, shape) in enumerate(zip(pool.parts, shapes, strict=True)):
        vectors, _ = part.split(part.data[:, : part.own_blocks].flatten(0, 1))
        assert part.own_blocks == math.prod((shape.num_blocks, *shape[:2]))
        assert (vectors == 0).all()
        part.data[:, : part.own_blocks] = index + 1.0
    written = (pool.data > 0).sum(dim=1)
    assert (written == sum(math.prod(shape) * 3 for shape in shapes)).all()
    before = pool.data.clone()
    pool.copy_slots([0, 4], [7, 14])
    assert torch.equal(pool.data, before)  # every slot of a part holds the same


@pytest.mark.parametrize("kv_dtype", ["auto", *KINDS])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_packing_moves_each_heads_own_tokens_and_nothing_else(
    kv_dtype: KvDtype, num_blocks: int
) -> None:
    pool = make_pool(kv_dtype, page_size=4, head_dim=8, num_blocks=num_blocks)
    pool.data.view(torch.uint8).copy_(
        torch.randint(0, 120, pool.data.view(torch.uint8).shape, dtype=torch.uint8)
    )
    before = pool.data.clone()
    pages, first = [3, 0, 4], 5  # places 0 to 11; page 1 and 2 are others'
    kept = torch.stack(
        [torch.stack([torch.randperm(7)[:4].sort().values + first for _ in range(2)])
         for _ in range(3)]
    )  # fmt: skip
    pool.pack(pages, kept, first)
    old, new = (slots_of(each, pool) for each in (before, pool.data))
    for layer in range(3):
        for block in range(num_blocks):
            for head in range(2):
                for to, place in enumerate(kept[layer, head].tolist(), first):
                    moved = new(pages[to // 4], layer, block, head, to % 4)
                    source = old(pages[place // 4], layer, block, head, place % 4)
                    assert all(map(torch.equal, moved, source))
                for place in (*range(first), *range(first + 4, 12)):
                    at = (pages[place // 4], layer, block, head, place % 4)
                    assert all(map(torch.equal, new(*at), old(*at)))
    untouched = [1, 2]
    assert torch.equal(pool.data[untouched].view(torch.uint8), before[untouched].view(torch.uint8))


def slots_of(data: torch.Tensor, pool: KVPool):
    """Read a token's vector, and its scale, by page, layer, block, head and place in the page."""
    vectors, scales = pool.split(data.view(-1, pool.block.num_items))
    vectors = vectors.view(torch.uint8) if vectors.itemsize == 1 else vectors

    def read(page: int, layer: int, block: int, head: int, offset: int) -> list[torch.Tensor]:
        at = page * pool.page_blocks + (layer * pool.num_blocks + block) * 2 + head
        return [each[at, offset].clone() for each in (vectors, scales) if each is not None]

    return read
