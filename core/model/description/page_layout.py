"""PageLayout: where in a page each layer's keys and values lie, and which tables turn them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ops.kv_pool import KvPlace, KvShape
from ...ops.weights import HeadLayout, Tables
from .config import DecoderConfig
from .rope import RopeSpec, layer_tables


class PoolPart(NamedTuple):
    """Layers with heads alike: a part of the pool, with a plan of its own in each pass."""

    heads: HeadLayout
    num_layers: int  # that keep keys and values
    ropes: tuple[RopeSpec, ...]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A page is one blob over all layers; those with heads alike are a part of the pool.

    ``places`` and ``tables`` are of the layers. A layer that reads the keys and values of another
    has the place of that one; one without attention has none.
    """

    parts: tuple[PoolPart, ...]
    places: tuple[KvPlace | None, ...]  # [num_layers]
    tables: tuple[Tables, ...]  # [num_layers] among the tables of its part

    @classmethod
    def of(cls, config: DecoderConfig) -> PageLayout:
        """The layout of a model's pages."""
        layouts = [
            layout if spec.has_attention else None
            for layout, spec in zip(config.head_layouts, config.layers, strict=True)
        ]
        kinds = list(dict.fromkeys(layout for layout in layouts if layout is not None))
        places: list[KvPlace | None] = []
        counts = [0] * len(kinds)
        for layout, spec in zip(layouts, config.layers, strict=True):
            if layout is None:
                places.append(None)
                continue
            if spec.kv_of is not None:
                places.append(places[spec.kv_of])
                continue
            part = kinds.index(layout)
            places.append(KvPlace(part, counts[part]))
            counts[part] += 1
        parts = [PoolPart(heads, counts[part], ()) for part, heads in enumerate(kinds)]
        return cls._turned(config, parts, places)

    @classmethod
    def beside(cls, config: DecoderConfig, other: PageLayout) -> PageLayout:
        """The layout of a model whose layers read those of another one, ``kv_of`` of each.

        Layers that read the same part have heads alike.
        """
        places = [other.places[spec.kv_of] for spec in config.layers if spec.kv_of is not None]
        heads = {
            place.part: layout
            for place, layout in zip(places, config.head_layouts, strict=True)
            if place is not None
        }
        parts = [
            part._replace(heads=heads.get(index, part.heads))
            for index, part in enumerate(other.parts)
        ]
        return cls._turned(config, parts, places)

    @classmethod
    def _turned(
        cls, config: DecoderConfig, parts: Sequence[PoolPart], places: Sequence[KvPlace | None]
    ) -> PageLayout:
        """The layout with the tables that turn the layers of each part; others keep theirs."""
        tables, found = [Tables()] * len(places), list[PoolPart]()
        for number, part in enumerate(parts):
            layers = [i for i, place in enumerate(places) if place and place.part == number]
            specs, by_layer = layer_tables([config.ropes[index] for index in layers])
            for index, turned in zip(layers, by_layer, strict=True):
                tables[index] = turned
            found.append(part._replace(ropes=specs or part.ropes))
        return cls(tuple(found), tuple(places), tuple(tables))

    @property
    def shapes(self) -> list[KvShape]:
        """KV shape of each part of the pool."""
        return [
            KvShape(
                part.num_layers, part.heads.num_kv_heads, part.heads.head_dim, part.heads.num_blocks
            )
            for part in self.parts
        ]
