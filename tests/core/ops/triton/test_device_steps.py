"""A GPU's memory and time: what the pools get, what is said when it runs out, what a step took.

No GPU is there: torch is made to say what one would.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.api.build import engine_builder as building
from foretoken.api.build import target as target_loading
from foretoken.api.build.kv import pools as kv_pools
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from foretoken.core.execution import model_runner as running
from foretoken.core.execution import warm_up as warming
from foretoken.core.execution.warm_up import warm_up
from foretoken.core.model import loader
from foretoken.core.model.opening import read_config
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Segment, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.machine import device as devices
from foretoken.core.ops.machine.device import make_stopwatch
from foretoken.core.ops.triton.linear import tiles
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.draft.control.outcome import NUM_BEST

pytestmark = pytest.mark.slow

FOLDER = BUILTIN / "target"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    """None of these tests computes on a GPU."""
    return CPU


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "free", "budget"),
    [
        (CUDA, 120 * GIB, 108 * GIB),
        (CUDA, 10 * GIB, 29 * GIB // 4),
        (CUDA, 2 * GIB, 1 * GIB),
        (CPU, 120 * GIB, 2 * GIB),
        (CPU, 4 * GIB, 1 * GIB),
    ],
)
def test_the_pools_get_most_of_a_gpu_and_little_of_a_host(
    where: torch.device, free: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pools, "free_memory", lambda device: free if device == where else 0)
    assert kv_pools.default_budget(where) == budget


def test_memory_that_torch_keeps_of_what_was_freed_counts_as_free(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: calls.append("ask") or (7, 9))
    assert devices.free_memory(CUDA) == 7
    assert calls == ["empty", "ask"]


def test_memory_that_runs_out_while_loading_names_what_to_lower(monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(target_loading, "load_decoder", full)
    with pytest.raises(ModelLoadError, match="while loading target: use a smaller --dtype"):
        building.build(FOLDER, EngineConfig(device="cpu"))
    monkeypatch.undo()
    decoder = loader.load_decoder(FOLDER, dtype="float32")
    monkeypatch.setattr(type(decoder), "make_pool", full)
    config = EngineConfig(kv_tokens=64)
    with pytest.raises(
        ModelLoadError, match="allocating 4 KV pages: lower --kv-memory or --kv-tokens"
    ):
        kv_pools.make_pools(decoder, [], config, config.sizes("cpu"))


def test_random_weights_of_a_gpu_are_drawn_there_in_their_dtype(monkeypatch) -> None:
    real, generator, drawn = torch.randn, torch.Generator, []

    def randn(shape: tuple[int, ...], *, generator: torch.Generator, **where: Any) -> torch.Tensor:
        drawn.append(where)
        return real(shape, generator=generator, device=CPU)

    monkeypatch.setattr(torch, "Generator", lambda device: generator(CPU))
    monkeypatch.setattr(torch, "randn", randn)
    config = read_config(FOLDER)
    for where, dtype in ((CPU, torch.float32), (CUDA, torch.bfloat16)):
        drawn.clear()
        read = loader._random_reader(config, torch.bfloat16, where)
        first, again = (read("model.layers.0.mlp.up_proj.weight") for _ in range(2))
        assert drawn == [{"device": where, "dtype": dtype}] * 2
        assert torch.equal(first, again)


# -- time ---------------------------------------------------------------------------------------


def test_a_gpu_is_timed_by_marks_in_its_queue_and_waited_for_when_the_time_is_wanted(
    monkeypatch,
) -> None:
    queue: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            queue.append(self)

        def synchronize(self) -> None:
            queue.append("wait")

        def elapsed_time(self, later: Event) -> float:
            return 1000.0 * (queue.index(later) - queue.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = make_stopwatch(CUDA)
    watch.start()
    queue += ["kernel", "kernel"]
    watch.stop()
    assert "wait" not in queue
    assert watch.seconds() == 3.0
    assert queue[-1] == "wait"


def test_the_times_of_a_step_are_the_devices_and_deciding_is_the_rest(monkeypatch) -> None:
    clocks: Any = (SimpleNamespace(seconds=lambda: 1.0), SimpleNamespace(seconds=lambda: 2.0))
    assert running._times(clocks, 3.5) == {"draft": 1.0, "forward": 2.0, "verify": 0.5}
    assert running._times(clocks, 2.9)["verify"] == 0.0


def test_what_warms_up_computes_the_largest_steps_and_draws_in_every_way() -> None:
    decoder = loader.load_decoder(FOLDER, dtype="float32")
    pool = decoder.make_pool(3, page_size=16)
    told: list[object] = []
    tapped: set[tuple[int, ...]] = set()

    class Watched:
        @property
        def sampler(self) -> Watched:
            return self

        def sample(self, logits: torch.Tensor, rows: list[DraftedRow]) -> None:
            decoder.sampler.sample(logits, rows)
            told.append(len(rows))

        def best(self, logits: torch.Tensor, rows: list[DraftedRow], num_best: int) -> None:
            decoder.sampler.best(logits, rows, num_best)
            told.append(f"{num_best} of {len(rows)}")

        def warm_up(self, _: object, max_len: int, wanted: Wanted) -> None:
            told.append(max_len)
            tapped.add(wanted.taps)

        def forward(self, batch: RaggedBatch, pool: KVPool, wanted: Wanted) -> ForwardOutput:
            tapped.add(wanted.taps)
            return decoder.forward(batch, pool, wanted)

        def batch(self, segments: list[Segment], *, page_size: int) -> RaggedBatch:
            told.append([len(segment.token_ids) for segment in segments])
            return decoder.batch(segments, page_size=page_size)

    watched: Any = Watched()
    warm_up(watched, pool, max_len=4096, num_tokens=64, num_requests=5, wanted=Wanted(taps=(0, 1)))
    assert tapped == {(0, 1)}, "the graphs and every step leave the boundaries that are observed"
    kinds, many = [1] * 4, [[1] * 65, 65]
    assert told == [48, [48], *kinds, [1] * 5, 5, *many], "the pool, a prompt, decodes, many rows"
    told.clear()
    warm_up(watched, pool, max_len=48, num_tokens=64, num_requests=65, num_best=3)
    assert told == [48, [48], *([1, "3 of 1"] * 4), [1] * 65, 65], "a draft model's, of every kind"


def test_more_rows_than_few_are_those_for_which_a_linear_layer_has_another_kernel() -> None:
    assert warming.FEW_ROWS == tiles.FEW_ROWS


def test_a_gpu_is_made_ready_before_the_first_request_and_a_cpu_is_not(monkeypatch) -> None:
    warmed: list[tuple[object, dict[str, object]]] = []
    monkeypatch.setattr(building, "warm_up", lambda d, _, **sizes: warmed.append((d, sizes)))
    limits: Any = SimpleNamespace(max_model_len=99, max_batch_tokens=64, max_running=8)
    host, target, draft = (SimpleNamespace(device=each) for each in (CPU, CUDA, CUDA))
    building._warm_up((host, None), None, limits, None, threads=1)  # type: ignore[arg-type]
    assert not warmed
    proposer: Any = SimpleNamespace(
        taps=(2,),
        models=((draft, None),),
        device=CUDA,
        warm_up=lambda max_len, num_best: warmed.append((max_len, {"num_best": num_best})),
    )
    building._warm_up((target, None), proposer, limits, None, threads=1)  # type: ignore[arg-type]
    sizes = {"max_len": 99, "num_tokens": 64, "num_requests": 8}
    draws = warmed[1][1]["wanted"].draws  # type: ignore[attr-defined]
    assert warmed == [
        (target, sizes | {"wanted": Wanted(taps=(2,)), "num_best": 0}),
        (draft, sizes | {"wanted": Wanted(draws), "num_best": NUM_BEST}),
        (99, {"num_best": 1}),
    ]
    assert draws.num_best == 1, "without prices tokens are drawn alone"
