"""PageRecords: a page's bytes leave the pool and come back as they were, whatever its layout."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.ops.kv_pool import KVPool, KvShape, MixedKVPool, make_pool
from foretoken.core.tiers.page_records import PageRecords
from foretoken.draft.heads.common.head_kv import HeadKV
from support.tiny_heads import block_config, eagle_config

NUM_PAGES, PAGE_SIZE = 6, 4
WIDE, NARROW = KvShape(2, 1, 16), KvShape(3, 2, 8)


def pool_of(
    *shapes: KvShape, dtype: torch.dtype = torch.bfloat16, kv_dtype: KvDtype = "auto"
) -> Callable[[], KVPool]:
    def make() -> KVPool:
        return make_pool(
            NUM_PAGES, shapes, page_size=PAGE_SIZE, dtype=dtype, device="cpu", kv_dtype=kv_dtype
        )

    return make


LAYOUTS = {
    "float32": pool_of(NARROW, dtype=torch.float32),
    "bfloat16": pool_of(NARROW),
    "int8": pool_of(NARROW, kv_dtype="int8"),
    "fp8": pool_of(NARROW, kv_dtype="fp8"),
    "mixed": pool_of(WIDE, NARROW),
    "mixed int8": pool_of(WIDE, NARROW, kv_dtype="int8"),
}


def bytes_of(rows: Tensor) -> list[bytes]:
    """The bytes of each page."""
    flat = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    return [row.numpy().tobytes() for row in flat]


def fill(rows: Tensor, seed: int) -> None:
    """Any bytes, those that are no numbers included."""
    generator = torch.Generator().manual_seed(seed)
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    flat.copy_(torch.randint(256, flat.shape, dtype=torch.uint8, generator=generator))


@pytest.fixture(params=LAYOUTS)
def pools(request: pytest.FixtureRequest) -> tuple[KVPool, KVPool]:
    """Two pools of a layout that share no byte."""
    here, there = LAYOUTS[request.param](), LAYOUTS[request.param]()
    assert isinstance(here, MixedKVPool) == ("mixed" in request.param)
    fill(here.data, 1)
    fill(there.data, 2)
    return here, there


def copy(source: PageRecords, page_id: int, target: PageRecords, to: int) -> None:
    target.target(to)[:] = bytes(source.read(page_id))
    target.write(to)


def test_a_page_comes_back_to_another_pool_to_the_byte(pools: tuple[KVPool, KVPool]) -> None:
    here, there = pools
    source, target = PageRecords([here.data]), PageRecords([there.data])
    expected = bytes_of(there.data)
    assert source.num_bytes == target.num_bytes == len(expected[0])
    for page_id, to in ((0, 5), (3, 0), (5, 2)):
        assert bytes(source.read(page_id)) == bytes_of(here.data)[page_id]
        copy(source, page_id, target, to)
        expected[to] = bytes_of(here.data)[page_id]
        assert bytes_of(there.data) == expected, "and no other page has changed"


def test_one_tensor_on_the_host_is_read_and_written_where_it_lies(
    pools: tuple[KVPool, KVPool],
) -> None:
    pool, _ = pools
    records = PageRecords([pool.data])
    read = records.read(3)
    records.target(3)[:] = bytes(records.num_bytes)
    assert bytes(read) == bytes(records.num_bytes) == bytes_of(pool.data)[3]
    assert any(bytes_of(pool.data)[2])


def test_several_tensors_are_one_record_in_their_order() -> None:
    parts = [
        torch.arange(NUM_PAGES * 3, dtype=torch.float32).view(NUM_PAGES, 3),
        torch.arange(NUM_PAGES, dtype=torch.int64),
        torch.arange(NUM_PAGES) % 2 == 1,
    ]
    records = PageRecords(parts)
    assert records.num_bytes == 12 + 8 + 1
    expected = b"".join(bytes_of(part)[3] for part in parts)
    assert bytes(records.read(3)) == expected
    copy(records, 3, records, 0)
    assert [part[0].tolist() for part in parts] == [[9.0, 10.0, 11.0], 3, True]
    assert [part[1].tolist() for part in parts] == [[3.0, 4.0, 5.0], 1, True]


def test_a_target_that_is_given_up_changes_no_page_of_several_tensors() -> None:
    parts = [torch.ones(NUM_PAGES, 3), torch.ones(NUM_PAGES)]
    records = PageRecords(parts)
    records.target(2)[:] = b"\xff" * records.num_bytes  # what was read was unsound
    assert all(bool((part == 1).all()) for part in parts)


# -- heads ----------------------------------------------------------------------------------------


def head_kv(kind: str, seed: int) -> HeadKV:
    config = {"block": block_config, "eagle": eagle_config}[kind]()
    pool = pool_of(KvShape(config.num_layers, config.num_kv_heads, config.head_dim))()
    fill(pool.data, seed)
    found = HeadKV(config, pool, lambda written: None)
    if found._page_features is not None:
        fill(found._page_features, seed + 1)
    return found


def records_of(kv: HeadKV) -> PageRecords:
    return PageRecords([each.source for each in kv.stored], [each.target for each in kv.stored])


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_a_heads_kv_and_feature_come_back_and_its_mark_once_it_is_adopted(kind: str) -> None:
    here, there = head_kv(kind, 1), head_kv(kind, 10)
    here.ready[[1, 2]] = True
    source, target = records_of(here), records_of(there)
    for page_id, to in ((1, 4), (3, 5)):
        copy(source, page_id, target, to)
    assert not there.ready.any(), "until then they are new pages, which are void"
    there.forget([], array("q", [4, 5]))
    there.adopt(array("q", [4, 5]))
    assert there.ready.tolist() == [False] * 4 + [True, False], "a page without head KV has none"
    assert bytes_of(there.pool.data)[4] == bytes_of(here.pool.data)[1]
    if kind == "eagle":
        assert there._page_features is not None
        assert here._page_features is not None
        assert bytes_of(there._page_features)[4] == bytes_of(here._page_features)[1]
    assert source.num_bytes == math.prod(here.pool.data.shape[1:]) * 2 + 1 + (
        64 if kind == "eagle" else 0
    )


def test_a_mark_that_came_earlier_is_not_that_of_a_later_page() -> None:
    here, there = head_kv("block", 1), head_kv("block", 10)
    here.ready[1] = True
    source, target = records_of(here), records_of(there)
    copy(source, 1, target, 4)
    there.adopt(array("q", [4]))
    copy(source, 2, target, 4)
    there.forget([], array("q", [4]))
    there.adopt(array("q", [4]))
    assert not there.ready.any()
