"""PageLayout: the position of each layer's KV in a page, and the RoPE tables of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ops.kv_pool import KvLayer, KvShape
from ...ops.weights import HeadLayout, Tables
from .config import DecoderConfig
from .rope import RopeSpec, layer_tables


class PoolPart(NamedTuple):
    """A part of the pool: layers with equal heads, which share a plan in each pass."""

    heads: HeadLayout
    num_layers: int  # number of layers that keep keys and values
    ropes: tuple[RopeSpec, ...]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of a page, which has the KV of all layers; layers with equal heads form one part.

    ``places`` has the position of each layer's KV. A layer that reads another layer's keys and
    values has that layer's place; a layer without attention has None.
    """

    parts: tuple[PoolPart, ...]
    places: tuple[KvLayer | None, ...]  # [num_layers]
    tables: tuple[Tables, ...]  # [num_layers], indices into the `ropes` of the layer's part

    @classmethod
    def of(cls, config: DecoderConfig) -> PageLayout:
        """Return the layout of a model's pages."""
        layouts = [
            layout if spec.has_attention else None
            for layout, spec in zip(config.head_layouts, config.layers, strict=True)
        ]
        kinds = list(dict.fromkeys(layout for layout in layouts if layout is not None))
        places: list[KvLayer | None] = []
        counts = [0] * len(kinds)
        for layout, spec in zip(layouts, config.layers, strict=True):
            if layout is None:
                places.append(None)
                continue
            if spec.kv_of is not None:
                places.append(places[spec.kv_of])
                continue
            part = kinds.index(layout)
            places.append(KvLayer(part, counts[part]))
            counts[part] += 1
        parts = [PoolPart(heads, counts[part], ()) for part, heads in enumerate(kinds)]
        return cls._with_tables(config, parts, places)

    @classmethod
    def beside(cls, config: DecoderConfig, other: PageLayout) -> PageLayout:
        """Return the layout of a model that reads another model's KV; that model's is ``other``.

        Each layer reads the other model's layer `LayerSpec.kv_of`. Layers that read the same part
        of the pool must have equal heads.
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
        return cls._with_tables(config, parts, places)

    @classmethod
    def _with_tables(
        cls, config: DecoderConfig, parts: Sequence[PoolPart], places: Sequence[KvLayer | None]
    ) -> PageLayout:
        """Return a layout with ``places``, in which each part has the RoPE tables of its layers.

        A part that no layer uses keeps the tables that it has in ``parts``.
        """
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
