"""The pool: many short jobs, callers beside each other, a child process."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foretoken.core.ops.native import native_library, variants
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.linear import linear, pack_linear


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
    packed = pack_linear(library, torch.randn(640, 32, generator=generator), None)
    x = torch.randn(3, 32, generator=generator)
    first = linear(library, x, packed)
    assert torch.allclose(first[:, 0], x @ packed.weight[0, :, 0].flatten(), atol=1e-4)
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


class Crew(ctypes.Structure):
    """``ft_crew`` of threads.c."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("active", ctypes.c_int32),
        ("patience", ctypes.c_int32),
        ("calm", ctypes.c_int32),
        ("span", ctypes.c_int64),
        ("waited", ctypes.c_int64),
    )

    def note(self, library: NativeLibrary, windows: int, waited_share: float) -> list[int]:
        """Threads that take part after each window of jobs of 5 ms, four to a window."""
        span, found = 5_000_000, []
        for _ in range(windows):
            for _ in range(4):
                waited = ctypes.c_int64(int(span * waited_share))
                library.c.ft_crew_note(ctypes.byref(self), ctypes.c_int64(span), waited)
            found.append(self.active)
        return found


def crew_of(threads: int) -> Crew:
    return Crew(threads=threads, active=threads, patience=4)


def test_threads_that_wait_for_each_other_become_fewer_and_are_tried_again_later(library):
    """If other processes leave a core too little, all threads would wait for it at each layer."""
    crew = crew_of(3)
    assert crew.note(library, 3, 0.5) == [2, 1, 1]  # never fewer than the caller
    assert crew.note(library, 16, 0.0) == [1] * 15 + [2]  # its patience has doubled twice
    assert crew.note(library, 1, 0.5) == [1]
    assert crew.note(library, 32, 0.0) == [1] * 31 + [2]
    assert crew.note(library, 32, 0.0) == [2] * 31 + [3]


def test_where_nothing_else_runs_every_thread_takes_part(library):
    """The last pieces of a job are waited for as well: an eighth of the time is no sign."""
    crew = crew_of(2)
    assert set(crew.note(library, 200, 0.13)) == {2}
    assert crew.patience == 4


def test_short_waits_are_no_sign_however_short_the_jobs(library):
    crew = crew_of(2)
    for _ in range(10_000):
        library.c.ft_crew_note(ctypes.byref(crew), ctypes.c_int64(20_000), ctypes.c_int64(10_000))
    assert crew.active == 2
