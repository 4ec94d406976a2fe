"""Fields of a pass's `GraphInputs`, and the host's writes to them.

``words`` is one array of int32 whose used part, and so the copied size, depends on the pass: the
pages and tails of all segments, then, for each work list and kind of tile, the rows of its items
and the items. They refer to each other by indices in ``words``.

A pass over recurrent states also has the fields of recurrent/pass_states.py. A pass that chooses
tokens has ``controls`` and ``cuts``, the inputs of its sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray

from ...batch import RaggedBatch
from ...native.declarations import STRUCTS, address_of
from ...rows.step_inputs import rows_library
from ...state_pool import StatePool
from ..attention.tile_schedule import SPLIT, TileSchedule, WorkItems
from ..graph_inputs import Field, HostFields
from ..recurrent.pass_states import fill_states
from ..sampling.sampling_inputs import NUM_COLUMNS, ROW, SamplingInputs

Windows: TypeAlias = Sequence[int | None]
NarrowTarget: TypeAlias = tuple[Any, Any]
"""Work lists and fields of a host block as structs of pass_inputs.c, made once for each block."""
_PASS_FIELDS = (
    "token_ids", "positions", "slots", "logit_rows", "rows_in_tile", "last_seen", "words",
    "sources", "controls", "cuts",
)  # fmt: skip
# Numbers of an item: index of its rows, their number, index of its pages, first split, last split,
# first position in its tail, index of its tail.
ITEM_WORDS = 7


def fields(
    num_rows: int,
    num_works: int,
    num_words: int,
    num_draws: int = 0,
    states: Sequence[Field] = (),
) -> list[Field]:
    """Return the fields with the given capacities.

    ``num_draws``: number of tokens that the pass can choose.
    """
    rows = (
        "token_ids", "positions", "slots", "logit_rows", "sources", "rows_in_tile", "last_seen",
        "adapted",
    )  # fmt: skip
    return [
        *(Field(name, num_rows) for name in rows),
        Field("adapters", num_rows, torch.int64),  # addresses of the adapters' tables
        *(Field(f"counts{work}", 4) for work in range(num_works)),
        *(Field(f"partials{work}", num_rows) for work in range(num_works)),
        Field("controls", num_draws * NUM_COLUMNS, torch.int64),
        Field("cuts", num_draws),
        *states,
        Field("words", num_words),  # last, because only a part of it is copied
    ]


def words_needed(batch: RaggedBatch, works: Sequence[TileSchedule]) -> int:
    """Return the number of words that a pass uses."""
    kinds = [items for work in works for items in (work.narrow, work.wide)]
    listed = len(batch.pages) + len(batch.tails)
    return listed + sum(len(k.rows) + ITEM_WORDS * len(k) for k in kinds)


def fill(
    to: HostFields,
    batch: RaggedBatch,
    works: Sequence[TileSchedule],
    states: StatePool | None = None,
) -> int:
    """Write a pass, and mark unused rows as empty; return the number of used words."""
    if states is not None:
        fill_states(to, batch, states)
    count = int(batch.lens.sum())  # copies of the last row must not write to its slot
    _put(to["token_ids"], batch.token_ids.numpy()[:count], 0)
    _put(to["positions"], batch.positions.numpy()[:count], 0)
    _put(to["slots"], batch.slots.numpy()[:count], -1)
    _put(to["logit_rows"], batch.logit_rows.numpy(), 0)
    if works:  # both arrays are equal in all work lists
        _put(to["rows_in_tile"], works[0].rows_in_tile, -1)
        _put(to["last_seen"], works[0].last_seen, 0)
    if batch.device_tokens is not None:  # sources are read only with device tokens
        _put(to["sources"], batch.device_tokens.sources, -1)
    words, num_pages = to["words"], len(batch.pages)
    used = num_pages + len(batch.tails)
    words[:num_pages], words[num_pages:used] = batch.pages, batch.tails
    for index, work in enumerate(works):
        counts = to[f"counts{index}"]
        for kind, items in enumerate((work.narrow, work.wide)):
            counts[2 * kind : 2 * kind + 2] = used + len(items.rows), len(items)
            used = _put_items(words, used, items, batch)
        _put(to[f"partials{index}"], work.partials, -1)
    return used


def fill_narrow(to: HostFields, batch: RaggedBatch, target: NarrowTarget) -> int | None:
    """Write what `fill` writes for a batch without long chunks, in C and without a `TileSchedule`.

    ``target``: `narrow_target` of ``to``. Returns how many words it used, or None if it cannot
    write the pass: the batch has states or images, or does not fit, or there is no C library.
    """
    library = rows_library()
    has_extras = batch.states is not None or batch.reaches is not None
    if library is None or has_extras or batch.positions.ndim > 1:
        return None
    ragged = STRUCTS.ft_ragged(
        num_rows=int(batch.lens.sum()),
        num_logits=batch.num_logits,
        num_segments=len(batch.lens),
        num_pages=len(batch.pages),
        num_tails=len(batch.tails),
        page_size=batch.page_size,
        token_ids=batch.token_ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        slots=batch.slots.data_ptr(),
        logit_rows=batch.logit_rows.data_ptr(),
        starts=address_of(batch.starts),
        lens=address_of(batch.lens),
        page_counts=address_of(batch.page_counts),
        tail_lens=address_of(batch.tail_lens),
        pages=address_of(batch.pages),
        tails=address_of(batch.tails),
    )
    works, room = target
    used = int(library.ft_fill_pass(ragged, works, len(works), room))
    if used < 0:
        return None
    if batch.device_tokens is not None:  # sources are read only with device tokens
        _put(to["sources"], batch.device_tokens.sources, -1)
    return used


def narrow_target(
    to: HostFields, windows: Windows, *, tile_rows: int, max_partials: int
) -> NarrowTarget:
    """Return the arguments for writing passes without long chunks to a host block.

    ``tile_rows``: rows of a narrow tile. ``max_partials``: greatest number of partials.
    """
    at = to.addresses
    works = [
        STRUCTS.ft_pass_work(
            window=window or 0,
            split=SPLIT,
            tile_rows=tile_rows,
            counts=at[f"counts{index}"],
            partials=at[f"partials{index}"],
        )
        for index, window in enumerate(windows)
    ]
    room = STRUCTS.ft_pass_fields(
        room=len(to["token_ids"]),
        num_words=len(to["words"]),
        num_partials=max_partials,
        **{name: at[name] for name in _PASS_FIELDS},
    )
    return (STRUCTS.ft_pass_work * len(windows))(*works), room


def fill_controls(to: HostFields, controls: SamplingInputs | None) -> None:
    """Write the sampler's inputs, and mark the other draws as unused; None: all are unused."""
    columns = to["controls"].reshape(-1, NUM_COLUMNS)
    count = 0 if controls is None else len(controls.columns)
    columns[count:, ROW] = -1
    if controls is None:
        to["cuts"][:] = -1
    else:
        columns[:count] = controls.columns
        _put(to["cuts"], controls.cuts, -1)


def fill_idle(to: HostFields) -> int:
    """Write a pass without rows; return the number of used words, 0."""
    for name, field in to.items():
        is_void = name.startswith(("slots", "partials", "controls", "cuts", "state_rows"))
        field[:] = -1 if is_void else 0
    return 0


def _put(field: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding


def _put_items(words: NDArray[Any], at: int, items: WorkItems, batch: RaggedBatch) -> int:
    """Write rows, then items, from index ``at`` of ``words``; return the index after them."""
    if not len(items):
        return at
    items_at = at + len(items.rows)
    words[at:items_at] = items.rows
    end = items_at + ITEM_WORDS * len(items)
    table = words[items_at:end].reshape(-1, ITEM_WORDS)
    table[:, 0] = items.first_rows + at
    table[:, 1] = items.num_rows
    table[:, 2] = batch.first_pages[items.tables]
    table[:, 3] = items.first_splits
    table[:, 4] = items.last_splits
    table[:, 5] = batch.tail_from[items.tables]
    table[:, 6] = len(batch.pages) + batch.first_tails[items.tables]
    return end
