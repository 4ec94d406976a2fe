"""Counts that the live page shows, and the icicle of the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from foretoken.core.interface.protocols import RowPrice, Speculator
from foretoken.core.telemetry.metrics import EngineMetrics
from foretoken.core.telemetry.overview import MAX_BOXES, describe_engine, icicle
from foretoken.radix_cache import PrefixCache
from support.fake_model import make_scheduler


def node(tokens: int, *children: object, uses: int = 0, hits: int = 0) -> Any:
    below = {index.to_bytes(2): child for index, child in enumerate(children)}
    return SimpleNamespace(key=range(tokens), children=below, ref_count=uses, num_hits=hits)


def test_a_parent_spans_its_children_and_the_boxes_are_bounded() -> None:
    tree = node(0, node(32, node(16), node(16, node(48), uses=1), uses=1, hits=3), node(16))
    assert icicle([tree])[0] == [
        [0, 0, 2, 32, 1, 3], [0, 1, 1, 16, 0, 0], [1, 1, 1, 16, 1, 0], [1, 2, 1, 48, 0, 0],
        [2, 0, 1, 16, 0, 0],
    ]  # fmt: skip
    assert len(icicle([node(0, *(node(16) for _ in range(256)), node(8))] * 3)[0]) == MAX_BOXES
    assert icicle([*PrefixCache(4, 16).tree.roots()]) == ([], {})


def test_what_a_path_needs_is_drawn_beyond_the_limit() -> None:
    last = node(8)
    many = node(0, *(node(16) for _ in range(2 * MAX_BOXES)), last)
    boxes, places = icicle([many], {id(last)})
    assert len(boxes) == MAX_BOXES + 1
    assert boxes[places[id(last)]][3] == 8


class Priced(Speculator):
    def row_price(self, num_requests):
        return RowPrice(seconds=0.5, tokens=num_requests + 2.0)


def test_an_idle_engine_has_all_its_pages_free_and_the_price_of_its_speculator() -> None:
    for speculator, row in ((Speculator(), None), (Priced(), {"seconds": 0.5, "tokens": 2.0})):
        scheduler = make_scheduler(num_pages=64, speculator=speculator)
        found = describe_engine(scheduler, EngineMetrics(scheduler))
        assert found["pages"] == {"held": 0, "pinned": 0, "cached": 0, "free": 64}
        assert found["row"] == row
        assert found["tree"] == found["requests"] == []
