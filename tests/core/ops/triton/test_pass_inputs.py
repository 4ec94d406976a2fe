"""A pass that C writes has the bytes of its `TileSchedule`."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from foretoken.core.ops.batch import (
    DeviceTokens,
    RaggedBatch,
    SamplingPlan,
    Segment,
    build_batch,
)
from foretoken.core.ops.chained_rows import ChainedRows
from foretoken.core.ops.native.declarations import STRUCTS, address_of
from foretoken.core.ops.rows.step_inputs import rows_library
from foretoken.core.ops.triton.attention.tile_schedule import build_tile_schedule
from foretoken.core.ops.triton.graph.input_fields import (
    fields,
    fill,
    fill_controls,
    fill_narrow,
    narrow_target,
    words_needed,
)
from foretoken.core.ops.triton.graph_inputs import GraphInputs, HostFields
from foretoken.core.ops.triton.sampling.sampling_inputs import (
    chained_controls,
    write_plain_controls,
)
from foretoken.core.sampling.drafted_row import DraftedRow
from support.sampling_rows import row_of

PAGE_SIZE, NUM_ROWS, NUM_WORDS = 16, 3000, 2**17
NOT_WRITTEN = ("adapters", "adapted", "sources", "controls", "cuts")


def random_segments(rng: random.Random, num_requests: int) -> list[Segment]:
    """Some with one long prefix, some with the runs of a draft tree behind their trunk."""
    trunk, segments = list(range(100, 160)), []
    for index in range(num_requests):
        num_shared = rng.choice([0, 0, 3, 16, 33, 48])
        start = num_shared * PAGE_SIZE + rng.randrange(1, 400)
        pages = array("q", trunk[:num_shared] + list(range(100 * index + 1000, 100 * index + 1040)))
        segments.append(Segment(range(rng.choice([1, 1, 5, 20, 32])), start, pages, 1))
        for _ in range(rng.choice([0, 0, 1, 3])):
            length, ancestors = rng.randrange(1, 4), rng.randrange(3)
            tail = array("q", [rng.randrange(9000) for _ in range(ancestors + length)])
            segments.append(Segment(range(length), start + 1 + ancestors, pages, length, tail=tail))
    return segments


def empty_fields(num_works: int, num_draws: int = 0) -> HostFields:
    room = fields(NUM_ROWS, num_works, NUM_WORDS, num_draws)
    return GraphInputs(room, torch.device("cpu")).open()


def in_c(
    to: HostFields, batch: RaggedBatch, windows: list[int | None], **limits: int
) -> int | None:
    return fill_narrow(to, batch, narrow_target(to, windows, **limits))


def in_python(
    batch: RaggedBatch, windows: list[int | None], tile_rows: int
) -> tuple[HostFields, int, int]:
    works = [
        build_tile_schedule(
            batch,
            narrow_rows=tile_rows,
            wide_rows=8,
            wide_partials=8,
            kv_split_group=2,
            window=each,
        )
        for each in windows
    ]
    to = empty_fields(len(windows))
    used = fill(to, batch, works)
    assert used == words_needed(batch, works)
    return to, used, max(work.num_partials for work in works)


@pytest.mark.parametrize("seed", range(40))
def test_random_passes_have_the_bytes_of_their_schedules(seed: int) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng, rng.choice([1, 2, 9, 64]))
    batch = build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)
    windows = rng.choice([[None], [None, 100], [300], [17, None]])
    tile_rows = rng.choice([1, 2, 4, 16])
    wanted, used, num_partials = in_python(batch, windows, tile_rows)
    found = empty_fields(len(windows))
    room = {"tile_rows": tile_rows, "max_partials": num_partials}
    assert in_c(found, batch, windows, **room) == used
    for name, numbers in wanted.items():
        if name not in NOT_WRITTEN:
            count = used if name == "words" else len(numbers)
            assert found[name][:count].tolist() == numbers[:count].tolist(), name
    room["max_partials"] = num_partials - 1
    assert in_c(empty_fields(len(windows)), batch, windows, **room) is None


def test_a_pass_that_has_no_room_for_its_words_is_not_written() -> None:
    segments = random_segments(random.Random(1), 5)
    batch = build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)
    _, used, num_partials = in_python(batch, [None], 4)
    for num_words in (0, used - 1, used):
        room = fields(NUM_ROWS, 1, num_words)
        to = GraphInputs(room, torch.device("cpu")).open()
        found = in_c(to, batch, [None], tile_rows=4, max_partials=num_partials)
        assert found == (used if num_words == used else None)


def test_rows_at_other_positions_for_rope_see_as_many_keys_as_their_segment_has() -> None:
    """A head's rows do not see every earlier position, and packed answers have dropped some."""
    rng = random.Random(3)
    batch = build_batch(random_segments(rng, 9), page_size=PAGE_SIZE, device="cpu", min_rows=1)
    moved = replace(batch, positions=batch.positions + 77, rope_until=4000)
    wanted, used, num_partials = in_python(moved, [None], 4)
    found = empty_fields(1)
    assert in_c(found, moved, [None], tile_rows=4, max_partials=num_partials) == used
    for name in ("positions", "last_seen", "slots"):
        assert found[name].tolist() == wanted[name].tolist(), name
    assert found["positions"][0] != found["last_seen"][0]


# -- chained passes --------------------------------------------------------------------------------

VOCAB_SIZE = 500
PARAMS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 7},
]


def chained_case(rng: random.Random, num_rows: int) -> tuple[ChainedRows, RaggedBatch, list[Any]]:
    """One pass as chained rows, as the batch of the same rows, and as rows to sample."""
    chained, segments, drawn, trunk = ChainedRows(), [], [], list(range(100, 160))
    starts = []
    for index in range(4):
        pages = array("q", trunk[: rng.choice([0, 20])] + list(range(100 * index + 1000, 1400)))
        drawn.append(row_of(index, **rng.choice(PARAMS)))
        chained.add_request(pages, drawn[-1].sampling)
        starts.append((rng.randrange(20, 600), pages))
    rows, draws = [], []
    for _ in range(num_rows):
        request, source = rng.randrange(4), rng.choice([-1, 5, 9])
        start, pages = starts[request]
        tail = array("q", [rng.randrange(9000) for _ in range(rng.choice([0, 0, 1, 4]))])
        token_id = rng.randrange(90) if source < 0 else 0
        position, slot = start + rng.choice([0, 30]), rng.randrange(9000)
        ahead = rng.randrange(1, 5)
        row = drawn[request]
        rows.append((position, slot, source))
        draws.append(DraftedRow(row.tokens, row.sampling, (), (), ahead))
        chained.records += (
            request, token_id, source, position, start, slot, len(tail), draws[-1].position,
        )  # fmt: skip
        chained.tails.extend(tail)
        segments.append(Segment([token_id], start, pages, 1, [*tail[:-1], slot] if tail else ()))
        if tail:
            chained.tails[-1] = slot
    chained.end_pass(num_rows, 4)
    batch = build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)
    numbers = torch.tensor(rows)
    moved = replace(batch, positions=numbers[:, 0], slots=numbers[:, 1], rope_until=2000)
    sources = numbers[:, 2].numpy().astype(np.int32)
    tokens = DeviceTokens(torch.zeros(20), sources, VOCAB_SIZE)
    return chained, replace(moved, device_tokens=tokens), draws


@pytest.mark.parametrize("seed", range(30))
def test_a_chained_pass_has_the_bytes_of_its_batch(seed: int) -> None:
    rng, library = random.Random(seed), rows_library()
    assert library is not None
    num_rows, windows = rng.choice([1, 4, 24, 64]), rng.choice([[None], [None, 100]])
    chained, batch, draws = chained_case(rng, num_rows)
    wanted, used, num_partials = in_python(batch, windows, 4)
    to = empty_fields(len(windows), NUM_ROWS)
    plain = write_plain_controls(SamplingPlan(draws, [1] * num_rows, 4), VOCAB_SIZE)
    fill_controls(to, plain)
    for name in ("controls", "cuts"):
        wanted[name] = to[name].copy()
        to[name][:] = 0
    table = chained.table
    controls = chained_controls(chained.samplings, table[:, 0], table[:, 7], VOCAB_SIZE)
    assert controls is not None
    first_pages = chained.first_pages
    arguments = (
        STRUCTS.ft_chained_row.from_address(address_of(table)), num_rows, address_of(first_pages),
        chained.page_ids.buffer_info()[0], PAGE_SIZE, chained.tails.buffer_info()[0],
        address_of(controls),
    )  # fmt: skip
    for room, result in ((num_partials, used), (num_partials - 1, -1)):
        to.narrow_target = None
        works, fields_of = narrow_target(to, windows, tile_rows=4, max_partials=room)
        assert library.ft_fill_chained(*arguments, works, len(works), fields_of) == result
        if result == used:
            for name, numbers in wanted.items():
                if name not in ("adapters", "adapted"):
                    count = used if name == "words" else len(numbers)
                    assert to[name][:count].tolist() == numbers[:count].tolist(), name


def test_controls_of_edited_rows_are_not_written() -> None:
    samplings = [row_of(1).sampling, row_of(2, min_tokens=6).sampling]
    requests = np.array([0, 1, 1])
    for first, is_edited in ((5, True), (6, False)):
        positions = np.array([0, first, 9])
        found = chained_controls(samplings, requests, positions, VOCAB_SIZE)
        assert (found is None) == is_edited


def test_a_row_without_a_page_is_refused() -> None:
    chained, batch, _ = chained_case(random.Random(1), 1)
    library, to = rows_library(), empty_fields(1, NUM_ROWS)
    assert library is not None
    works, fields_of = narrow_target(to, [None], tile_rows=4, max_partials=99)
    table, controls = chained.table, np.zeros(8, np.int64)
    few = np.array([0, int(batch.page_counts[0]) - 1, 0, 0, 0])
    few[1:] = few[1] if table[0, 0] == 0 else 0
    arguments = (
        STRUCTS.ft_chained_row.from_address(address_of(table)), 1, address_of(few),
        chained.page_ids.buffer_info()[0], PAGE_SIZE, chained.tails.buffer_info()[0],
        address_of(controls),
    )  # fmt: skip
    assert library.ft_fill_chained(*arguments, works, len(works), fields_of) == -1
