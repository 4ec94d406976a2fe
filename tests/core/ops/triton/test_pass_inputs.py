"""A pass that C writes has the bytes of its `TileSchedule`."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

pytest.importorskip("triton")

from foretoken.core.ops.batch import RaggedBatch, Segment, build_batch
from foretoken.core.ops.triton.attention.tile_schedule import build_tile_schedule
from foretoken.core.ops.triton.graph.input_fields import fields, fill, fill_narrow, words_needed
from foretoken.core.ops.triton.graph_inputs import GraphInputs, HostFields

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


def empty_fields(num_works: int) -> HostFields:
    room = fields(NUM_ROWS, num_works, NUM_WORDS)
    return GraphInputs(room, torch.device("cpu")).open()


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
    assert fill_narrow(found, batch, windows, **room) == used
    for name, numbers in wanted.items():
        if name not in NOT_WRITTEN:
            count = used if name == "words" else len(numbers)
            assert found[name][:count].tolist() == numbers[:count].tolist(), name
    room["max_partials"] = num_partials - 1
    assert fill_narrow(empty_fields(len(windows)), batch, windows, **room) is None


def test_a_pass_that_has_no_room_for_its_words_is_not_written() -> None:
    segments = random_segments(random.Random(1), 5)
    batch = build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)
    _, used, num_partials = in_python(batch, [None], 4)
    for num_words in (0, used - 1, used):
        room = fields(NUM_ROWS, 1, num_words)
        to = GraphInputs(room, torch.device("cpu")).open()
        found = fill_narrow(to, batch, [None], tile_rows=4, max_partials=num_partials)
        assert found == (used if num_words == used else None)
