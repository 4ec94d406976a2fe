"""The pool: many short jobs, callers beside each other, a child process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foretoken.core.ops.native import native_library, variants
from foretoken.core.ops.native.declarations import STRUCTS
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.structs.linear import linear, pack_linear


@pytest.fixture(params=[variants()[0]])
def library(request: pytest.FixtureRequest):
    found = native_library(request.param)
    if found is None:
        pytest.skip("no C compiler")
    yield found
    found.set_threads(1)


def work(library: NativeLibrary, repeats: int) -> bool:
    """Whether many calls, each of many pieces, give what the first gave."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(640, 32, generator=generator)
    packed = pack_linear(library, weight, None)
    x = torch.randn(3, 32, generator=generator)
    first = linear(library, x, packed)
    assert torch.allclose(first[:, 0], x @ weight[0], atol=1e-4)
    return all(torch.equal(linear(library, x, packed), first) for _ in range(repeats))


def test_thousands_of_short_jobs_lose_no_piece(library):
    assert library.set_threads(4) == 4
    assert work(library, 3000)


def test_a_range_that_its_thread_does_not_take_is_taken_by_others(library):
    """More threads than cores, and fewer pieces than threads: some ranges are empty or unserved."""
    library.set_threads(7)
    for out_features in (33, 64, 65, 200):
        weight = torch.randn(out_features, 8, generator=torch.Generator().manual_seed(1))
        packed, x = pack_linear(library, weight, None), torch.eye(8)
        for _ in range(200):
            assert torch.equal(linear(library, x, packed), weight.T)


def test_callers_beside_each_other_share_the_pool_without_waiting_for_it(library):
    library.set_threads(3)
    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(lambda _: work(library, 500), range(3)))


def test_the_pool_can_be_resized_while_it_works(library):
    library.set_threads(2)
    with ThreadPoolExecutor(1) as caller:
        done = caller.submit(work, library, 2000)
        sizes = [library.set_threads(n) for n in (4, 1, 3, 2) * 5]
        assert done.result()
    assert sizes == [4, 1, 3, 2] * 5


def test_a_thread_count_below_one_means_one(library):
    assert library.set_threads(0) == 1
    assert library.set_threads(-5) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_without_its_parents_workers(library):
    library.set_threads(3)
    expected = work(library, 10)
    child = os.fork()
    if child == 0:
        os._exit(0 if work(library, 10) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert expected


def windows(
    crew: ctypes.Structure,
    library: NativeLibrary,
    count: int,
    cores: Mapping[int, tuple[float, float]],
) -> list[int]:
    """Threads that take part after each window.

    ``cores``: by threads that take part, those that run and those that wait for a core.
    """
    span, found = 100_000_000, []
    for _ in range(count):
        ran, delayed = cores[crew.active]
        times = STRUCTS.ft_times(ran=int(ran * span), delayed=int(delayed * span))
        library.c.ft_crew_judge(ctypes.byref(crew), span, times)
        found.append(crew.active)
    return found


def crew_of(threads: int) -> ctypes.Structure:
    return STRUCTS.ft_crew(threads=threads, active=threads, direction=-1, patience=2)


# Two cores: nothing else runs, or one busy process, or two. As measured.
QUIET = {1: (1.0, 0.0), 2: (1.9, 0.02)}
ONE_BUSY = {1: (1.02, 0.02), 2: (1.1, 0.87)}
TWO_BUSY = {1: (0.68, 0.36), 2: (0.92, 0.94)}


def test_where_nothing_else_runs_every_thread_takes_part(library):
    assert set(windows(crew_of(2), library, 200, QUIET)) == {2}


def test_a_thread_that_adds_little_beside_a_busy_process_is_left_out(library):
    """All the others would wait for it at each layer."""
    crew = crew_of(2)
    assert windows(crew, library, 6, ONE_BUSY) == [2, 1, 1, 1, 2, 1]
    assert windows(crew, library, 400, ONE_BUSY).count(2) < 20  # tried again, ever more rarely


def test_a_thread_that_wins_a_share_of_the_cores_stays_beside_busy_processes(library):
    crew = crew_of(2)
    assert windows(crew, library, 3, TWO_BUSY) == [2, 1, 2]
    assert windows(crew, library, 400, TWO_BUSY).count(1) < 20


def test_threads_come_back_when_the_neighbours_have_gone(library):
    crew = crew_of(8)
    busy = {active: (min(active, 4) + 0.01 * active, max(0, active - 4)) for active in range(1, 9)}
    assert windows(crew, library, 100, busy)[-1] in (4, 5)
    free = {active: (0.95 * active, 0.0) for active in range(1, 9)}
    assert windows(crew, library, 60, free)[-1] == 8
    assert set(windows(crew, library, 100, free)) == {8}


def test_a_system_that_tells_nothing_changes_nothing(library):
    assert set(windows(crew_of(4), library, 100, {4: (0.0, 0.0)})) == {4}
