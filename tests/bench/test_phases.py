"""The phases bench: what it computes, what it says of that, and a whole run on a tiny model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from foretoken.bench.common import machine
from foretoken.bench.common.report import Spread
from foretoken.bench.common.roofline import (
    LENGTHS,
    Limits,
    Shape,
    batch_ridge,
    clipped,
    decode_floor,
    prefill_floor,
    prefill_ridge,
)
from foretoken.bench.phases import command
from foretoken.bench.phases.data import (
    BatchPoint,
    DecodePoint,
    DepthPoint,
    Phases,
    PrefillPoint,
    load,
)
from foretoken.bench.phases.measure import QUICK
from foretoken.bench.phases.report import render
from foretoken.core.errors import ForetokenError
from support.checkpoints import make_checkpoint

LIMITS = Limits(read=1e9, matrix=1e11, drift=0.0, dtype="bfloat16", how="by hand")
SHAPE = Shape(
    block_params=1_000_000,
    head_params=200_000,
    query_width=100,
    windows=(None, 4),
    weight_bytes=2_000_000,
    kv_bytes=200,
)
NAMES = ("prefill", "decode", "batch", "cached", "depth")


def steady(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds)


def point(length: int, cold: float, cached: float, num_cached: int) -> PrefillPoint:
    spreads = {"cold": steady(cold), "cached": steady(cached)}
    return PrefillPoint(prompt_len=length, num_cached=num_cached, runs=3, **spreads)


def depth(value, seconds: float, tokens: float) -> DepthPoint:
    accepted = None if value == 0 else 0.5
    spread = steady(seconds)
    return DepthPoint(
        depth=value, runs=3, tokens_per_step=tokens, acceptance=accepted, seconds=spread
    )


@pytest.fixture
def run() -> Phases:
    """A run made by hand: every figure in it is easy to follow."""
    return Phases(
        command="foretoken bench phases",
        machine={"cpu": "by hand", "cores": 2},
        model="toy",
        settings={"threads": 1, "dtype": "bfloat16"},
        text="random ids",
        draft="oracle:0.8",
        simulated=True,
        cache_bytes=1000,
        shape=SHAPE,
        limits=LIMITS,
        depth_position=20,
        prefill=[point(10, 0.01, 0.01, 0), point(64, 0.02, 0.01, 48), point(512, 0.5, 0.01, 496)],
        decode=[
            DecodePoint(position=9, runs=3, seconds=steady(0.004)),
            DecodePoint(position=500, runs=3, seconds=steady(0.006)),
        ],
        batches=[
            BatchPoint(size=n, position=40, runs=3, rate=steady(n / s), seconds=steady(s))
            for n, s in ((1, 0.01), (2, 0.01), (4, 0.016))
        ],
        depths=[depth(0, 0.01, 1.0), depth(1, 0.008, 1.5), depth(2, 0.005, 2.5),
                depth("auto", 0.004, 2.6)],
    )  # fmt: skip


# -- roofline -----------------------------------------------------------------------------------


def test_a_token_sees_what_is_before_it_in_each_layers_window():
    assert [SHAPE.seen(position) for position in (0, 3, 9)] == [2, 8, 14]


def test_what_a_prompt_sees_is_the_sum_over_its_tokens():
    for length in (1, 3, 4, 5, 50):
        assert SHAPE.seen_by_all(length) == sum(SHAPE.seen(position) for position in range(length))


def test_a_prompt_costs_two_operations_a_parameter_and_token_and_its_attention():
    linears = 2 * (1_000_000 * 5 + 200_000)
    assert SHAPE.prefill_ops(5) == linears + 4 * 100 * (15 + 14)


def test_a_step_reads_the_weights_once_and_the_kv_of_every_request():
    assert SHAPE.decode_bytes(9, batch=3) == 2_000_000 + 3 * 14 * 200 / 2


def test_no_step_is_faster_than_the_slower_of_its_bytes_and_its_operations():
    assert prefill_floor(SHAPE, LIMITS, 1) == 2_000_000 / 1e9
    assert prefill_floor(SHAPE, LIMITS, 5000) == SHAPE.prefill_ops(5000) / 1e11
    assert decode_floor(SHAPE, LIMITS, 9) == SHAPE.decode_bytes(9) / 1e9
    assert decode_floor(SHAPE, LIMITS, 9, 1000) == SHAPE.decode_ops(9, 1000) / 1e11


def test_the_ridge_is_where_operations_begin_to_outweigh_bytes():
    ridge = prefill_ridge(SHAPE, LIMITS)
    by_bytes = SHAPE.weight_bytes / LIMITS.read
    assert prefill_floor(SHAPE, LIMITS, ridge - 1) == by_bytes
    assert prefill_floor(SHAPE, LIMITS, ridge) > by_bytes
    batch = batch_ridge(SHAPE, LIMITS, 9)
    bound = [SHAPE.decode_ops(9, n) / LIMITS.matrix for n in (batch - 1, batch)]
    read = [SHAPE.decode_bytes(9, n) / LIMITS.read for n in (batch - 1, batch)]
    assert bound[0] < read[0]
    assert bound[1] >= read[1]


def test_a_batch_whose_kv_weighs_most_is_never_bound_by_arithmetic():
    heavy = msgspec.structs.replace(SHAPE, kv_bytes=1e7)
    assert batch_ridge(heavy, LIMITS, 1000) is None


@pytest.mark.parametrize(
    ("longest", "last"),
    [(4, [4]), (10, [10]), (11, [10]), (100, [64, 100]), (4095, [2048, 4095]), (32768, [32768])],
)
def test_lengths_end_with_the_longest_that_fits(longest, last):
    grid = clipped(LENGTHS, longest)
    assert grid[-len(last) :] == last
    assert all(n <= longest for n in grid)
    assert grid == sorted(set(grid))


def test_nothing_fits_into_no_room():
    assert clipped(LENGTHS, 0) == []


def test_of_several_measurements_of_the_machine_the_best_counts(monkeypatch):
    measured = iter([(1.0, 5.0), (2.0, 4.0)])
    monkeypatch.setattr(machine, "_measured", lambda *_: next(measured))
    meter = machine.Meter(None, torch.bfloat16, 2)
    meter.measure()
    meter.measure()
    assert (meter.limits.read, meter.limits.matrix, meter.limits.drift) == (2.0, 5.0, 0.5)


# -- the page -----------------------------------------------------------------------------------


def test_the_page_has_what_follows_from_the_data(run):
    page = render(run, has_plots=False)
    ridge = prefill_ridge(SHAPE, LIMITS)
    assert f"prompts of {ridge} tokens or more are bound by arithmetic." in page
    assert cells(page, "| 64 ")[2] == "3200"
    assert cells(page, "| 4 ")[1:3] == ["250 [250 .. 250]", "0.016 [0.016 .. 0.016]"]
    assert cells(page, "| 512 ", last=True)[1:] == [
        "496", "0.5 [0.5 .. 0.5]", "0.01 [0.01 .. 0.01]", "50",
    ]  # fmt: skip
    assert cells(page, "| 2 ", last=True)[1:3] == ["2.5", "0.5"]
    assert cells(page, "| auto ")[-1] == "2.5", "times the speed"


def cells(page: str, begin: str, *, last: bool = False) -> list[str]:
    """The cells of the first line that begins so, or of the last one."""
    lines = [line for line in page.splitlines() if line.startswith(begin)]
    return [cell.strip() for cell in lines[-1 if last else 0].strip("| ").split("|")]


def test_weights_that_fit_the_cache_are_told_of(run):
    assert "not a strict limit" not in render(run, has_plots=True)
    run.cache_bytes = 4_000_000
    assert "not a strict limit" in render(run, has_plots=True)


def test_simulated_acceptance_is_said_to_be_simulated(run):
    assert "oracle:0.8; acceptance is simulated" in render(run, has_plots=True)
    run.simulated = False
    assert "simulated" not in render(run, has_plots=True)


def test_repeats_that_lie_apart_and_points_without_any_are_told_of(run):
    assert "Repeats of a point" not in render(run, has_plots=True)
    run.decode[0] = msgspec.structs.replace(run.decode[0], seconds=Spread(0.004, 0.004, 0.006))
    run.decode[1] = msgspec.structs.replace(run.decode[1], runs=1)
    assert "up to 50% of its median" in render(run, has_plots=True)
    assert "without a bar: 1" in render(run, has_plots=True)


def test_a_machine_whose_limits_drift_is_not_called_quiet(run):
    assert "not idle" not in render(run, has_plots=True)
    run.limits = msgspec.structs.replace(LIMITS, drift=0.3)
    assert "by 30% within the run: the machine was not idle" in render(run, has_plots=True)


def test_a_report_shows_tables_and_plots_where_there_are_any(run):
    with_plots, without = render(run, has_plots=True), render(run, has_plots=False)
    for name in NAMES:
        assert f"]({name}.png)" in with_plots
        assert f"{name}.png" not in without
    assert "| depth" in without
    assert "| depth" in with_plots
    assert run.command in with_plots


# -- the command --------------------------------------------------------------------------------


def test_without_matplotlib_it_says_what_to_install_before_it_measures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(command, "_measure", lambda args: pytest.fail("it measured"))
    with pytest.raises(ForetokenError, match=r"pip install 'foretoken\[bench\]'"):
        command.main([])


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (["--max-len", "0"], "max_len"),
        (["--speculation", "3"], "speculation"),
        (["--threads", "0"], "threads"),
        (["--redraw", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options_are_refused_by_name(line, field, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*line, "--no-plots"])
    assert ended.value.code == 2
    assert field in capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The folder of a run over everything, on a tiny model without a tokenizer."""
    folder = tmp_path_factory.mktemp("phases")
    model = make_checkpoint(folder / "model", max_position_embeddings=256)
    sizes = replace(QUICK, repeats=2, decode_len=4, batch_len=4, depth_prompts=1, depth_len=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "QUICK", sizes)
        line = ["--model", str(model), "--quick", "--no-plots", "--out", str(folder / "out")]
        assert command.main([*line, "--threads", "1"]) == 0
    return folder / "out"


def test_a_run_measures_every_phase_up_to_the_models_context(measured):
    found = load(measured.with_suffix(".json"))
    assert [p.prompt_len for p in found.prefill] == [10, 32, 64, 128, 255]
    assert [p.num_cached for p in found.prefill] == [0, 16, 48, 112, 240]
    assert [p.position for p in found.decode] == [3, 66, 254]
    assert [p.size for p in found.batches] == [1, 2, 4, 8, 16, 32, 64]
    assert [p.depth for p in found.depths] == [*range(9), "auto"]
    assert all(runs == 2 for _, runs, _ in found.spreads())
    assert found.limits.read > 0
    assert found.limits.matrix > 0


def test_a_checkpoint_without_a_draft_model_is_drafted_for_by_the_labelled_oracle(measured):
    found = load(measured.with_suffix(".json"))
    assert (found.draft, found.simulated) == ("oracle:0.8", True)
    by_depth = {p.depth: p for p in found.depths}
    assert by_depth[0].tokens_per_step == 1.0
    assert by_depth[0].acceptance is None
    assert by_depth[1].tokens_per_step > 1.5, "it knew the answers from the first run on"
    assert by_depth[4].tokens_per_step > by_depth[1].tokens_per_step


def test_the_shape_counts_every_parameter_that_a_token_is_multiplied_by(measured):
    shape = load(measured.with_suffix(".json")).shape
    attention = 64 * (4 + 2 * 2) * 32 + 4 * 32 * 64
    assert shape.block_params == 3 * (attention + 3 * 64 * 100)
    assert shape.head_params == 261 * 64
    assert shape.kv_bytes == 3 * 2 * 2 * 32 * 4
    assert shape.weight_bytes >= 4 * (shape.block_params + shape.head_params)


def test_a_report_is_written_without_matplotlib(measured):
    said = (measured / "report.md").read_text(encoding="utf-8")
    for title in ("Prefill", "Decode", "Batch size", "Cold and cached", "Depth of speculation"):
        assert f"## {title}\n\n|" in said


def test_a_recorded_run_is_drawn_again(measured, tmp_path):
    pytest.importorskip("matplotlib")
    recorded = measured.with_suffix(".json")
    assert command.main(["--redraw", str(recorded), "--out", str(tmp_path / "again")]) == 0
    assert load(tmp_path / "again.json") == load(recorded)
    for name in NAMES:
        assert (tmp_path / "again" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"]({name}.png)" in (tmp_path / "again" / "report.md").read_text(encoding="utf-8")


def test_the_same_run_draws_the_same_file_and_only_what_was_measured(run, tmp_path):
    pytest.importorskip("matplotlib")
    from foretoken.bench.phases.plots import draw_all

    run.prefill, run.decode, run.batches = [], [], []
    folders = [tmp_path / each for each in ("once", "twice")]
    for folder in folders:
        folder.mkdir()
        assert draw_all(run, folder) == ["depth"]
    first, second = ((folder / "depth.png").read_bytes() for folder in folders)
    assert first == second
