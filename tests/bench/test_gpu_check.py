"""The GPU check: rehearsed from end to end without one, and what it does when a stage breaks."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from argparse import Namespace
from array import array
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken.bench.common.report import write_json
from foretoken.bench.common.roofline import Limits
from foretoken.bench.common.shapes import write_config
from foretoken.bench.lab.gpu import check, drafts, lab
from foretoken.bench.lab.gpu import page as gpu_page
from foretoken.bench.lab.gpu.bed import fill
from foretoken.bench.lab.gpu.check import PARTS, Part
from foretoken.bench.lab.gpu.equality import difference
from foretoken.bench.lab.gpu.gauge import Activity, Gauge, _add_up
from foretoken.bench.lab.gpu.oracle import _compared, _ragged, _slots, report_tests
from foretoken.bench.lab.gpu.page import PAGE, RESULTS, read_results, render
from foretoken.bench.lab.gpu.stage import SHAPES, Place, Result, Stage
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.kv_codec import KV_CODECS
from foretoken.core.model.opening import read_config
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.radix_cache import PrefixCache

ROOT = Path(check.__file__).resolve().parents[3]
SCRIPT = ROOT / "bench" / "lab" / "gpu_check.sh"


def made_up(name: str = "decode", **more: object) -> Result:
    fields = {
        "stage": name,
        "title": PARTS[name].title,
        "command": "bench/lab/gpu_check.sh",
        "machine": {"cpu": "a processor", "load_average": 0.123456},
        "card": {"name": "a card"},
        "versions": {"torch": "2"},
        "status": "ok",
        "seconds": 12.3,
    }
    return Result(**(fields | more))  # type: ignore[arg-type]


def make_stage(tmp_path: Path, seconds: float = 60.0) -> Stage:
    place = Place(work=tmp_path, rehearses=True)
    return Stage(place, made_up(status="running"), seconds)


# -- the whole ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_rehearses_from_end_to_end_without_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [SCRIPT, "--rehearse", "--only", "decode"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu-check.json", "gpu-check.log", "gpu-results.md",
    }  # fmt: skip
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert {name: each["status"] for name, each in found.items()} == {"facts": "ok", "decode": "ok"}
    assert found["decode"]["limits"] == found["facts"]["limits"]
    assert found["decode"]["limits"]["read"] > 0
    steps, _, rounds = found["decode"]["tables"].values()
    assert [row["batch"] for row in steps] == [1, 4]
    assert all(row["ms a step"]["low"] > row["roofline ms"] > 0 for row in steps)
    assert all(row["round"] > row["forward"] > 0 for row in rounds)
    assert "A rehearsal without a GPU" in done.stdout


def test_passes_of_drafts_are_priced_by_their_requests(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    drafts.run(stage)
    assert not stage.result.errors
    rows = stage.result.tables[drafts.TABLE]
    found = {(row["drafter"], row["requests"]) for row in rows}
    heads = {(kind, count) for kind in ("eagle3", "block") for count in (1, 2)}
    copies = {("self", 1), ("self", 2)} if native_library() is not None else set()
    assert found == heads | copies
    assert all(row["ms a pass"] > 0 for row in rows)  # type: ignore[operator]


def test_the_script_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "GPU_WHEELS": str(tmp_path / "none")}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert {"torch", "msgspec", "--pack"} <= set(done.stderr.replace(";", "").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_and_no_result_touched(capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        check.main([])
    assert refused.value.code == 2
    assert "--rehearse" in capsys.readouterr().err


def test_all_stages_together_end_within_nine_minutes() -> None:
    assert 60 * check.MINUTES + 2 * check.GRACE <= 9 * 60


# -- stages that break --------------------------------------------------------------------------


def run_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, str], seconds: float = 60.0
) -> dict[str, Result]:
    """Run processes that execute ``codes`` as the stages."""

    def command_of(args: list[str], *rest: object) -> int | None:
        code = codes[args[args.index("--stage") + 1]]
        return real([sys.executable, "-c", code], *rest)  # type: ignore[arg-type]

    real = check._wait
    monkeypatch.setattr(check, "_wait", command_of)
    monkeypatch.setattr(check, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(check, "PARTS", {n: Part(n, "", seconds) for n in codes})
    monkeypatch.setattr(gpu_page, "ORDER", tuple(codes))
    work = tmp_path / "work"
    work.mkdir()
    args = Namespace(minutes=9.0, only=None, limit=[], rehearse=True, out=tmp_path / "out")
    check._run_all(args, Place(work=work, rehearses=True))
    return {each.stage: each for each in read_results(work / "results")}


def writing(path: Path, name: str, then: str = "") -> str:
    """Code of a stage that finds a row and goes on."""
    row = {"found": [{"what": 1}]}
    write_json(path / name, {**vars_of(made_up("facts", status="running")), "tables": row})
    return f"import shutil; shutil.copy({str(path / name)!r}, 'RESULT'); {then}"


def vars_of(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


@pytest.mark.slow
def test_a_stage_that_dies_or_hangs_costs_itself_alone(tmp_path, monkeypatch, capsys) -> None:
    work = tmp_path / "work"
    dies = writing(tmp_path, "row", "import os; os.abort()")
    codes = {
        "facts": dies.replace("RESULT", str(work / "gpu-facts.json")),
        "oracle": "import os, pathlib, signal; "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); signal.pause()",
        "decode": "pass",
    }
    found = run_all(tmp_path, monkeypatch, codes, seconds=4.0)
    assert {name: each.status for name, each in found.items()} == {
        "facts": "failed", "oracle": "out of time", "decode": "failed",
    }  # fmt: skip
    assert found["facts"].tables == {"found": [{"what": 1}]}, "what it had found is kept"
    assert "code -6" in found["facts"].errors[0]
    assert "no results were written" in found["decode"].errors[0]
    page = capsys.readouterr().out
    assert "### found" in page
    assert "stopped after 4 s" in page
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_a_stage_found_is_kept_before_the_next_one_begins(tmp_path, monkeypatch) -> None:
    def run_part(name: str, *_: object) -> Result:
        if name == "decode":
            raise KeyboardInterrupt
        return made_up(name)

    monkeypatch.setattr(check, "PARTS", {n: Part(n, "", 9.0) for n in ("facts", "decode")})
    monkeypatch.setattr(check, "_run_part", run_part)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    args = Namespace(minutes=9.0, only=None, limit=[], rehearse=True, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        check._run_all(args, Place(work=tmp_path, rehearses=True))
    kept = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert kept["facts"]["status"] == "ok"


def test_an_error_that_is_only_logged_fails_a_stage_and_a_warning_is_a_note(tmp_path) -> None:
    stage, logger = make_stage(tmp_path), logging.getLogger("foretoken.core.ops")
    with stage.listening():
        for _ in range(2):
            logger.error("no graph of %d rows", 8)
        logger.warning("it takes long")
    logger.error("of another stage")
    assert stage.result.errors == ["logged: no graph of 8 rows"]
    assert stage.result.notes == ["logged: it takes long"]


def test_a_stage_is_not_begun_when_the_time_is_over(tmp_path) -> None:
    result = check._run_part("decode", Place(work=tmp_path, rehearses=True), 1.0)
    assert (result.status, result.notes) == ("not run", ["There was no time left."])


def test_a_part_that_fails_is_told_and_the_next_ones_run(tmp_path, capsys) -> None:
    stage, ran = make_stage(tmp_path), []

    def fails() -> None:
        raise ForetokenError("it broke\nand here is why")

    async def waits() -> None:
        ran.append("waits")

    stage.try_each({"first": fails, "second": waits})
    assert ran == ["waits"]
    assert stage.result.errors == ["first: ForetokenError: it broke"]
    saved = read_results_of(stage)
    assert saved["errors"] == stage.result.errors


def test_parts_for_which_no_time_is_left_are_told(tmp_path) -> None:
    stage = make_stage(tmp_path, seconds=-1.0)
    stage.try_each({"first": lambda: pytest.fail("it ran")})
    assert stage.result.notes == ["There was no time left for first."]


def read_results_of(stage: Stage) -> dict[str, object]:
    return json.loads(stage.place.result("decode").read_text())


# -- the page -----------------------------------------------------------------------------------


def test_the_page_in_the_repository_is_that_of_the_results_in_it() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read_results(RESULTS))


def test_the_page_says_when_nothing_was_measured(tmp_path) -> None:
    assert render(read_results(tmp_path)).endswith("Not yet measured.\n")


def test_the_page_shows_spreads_gaps_notes_and_errors(tmp_path) -> None:
    rows = [
        {"batch": 1, "ms": {"low": 1.0, "median": 2.0, "high": 3.0}},
        {"batch": 2, "why": "a | b"},
    ]
    limits = Limits(read=4.2e12, matrix=7.7e14, drift=0.0, dtype="bfloat16", how="torch")
    first = made_up(tables={"Steps": rows}, limits=limits, notes=["A note."], errors=["x\ny"])
    write_json(tmp_path / "all.json", {"decode": vars_of(first)})
    gpu_page.main(
        ["--from", str(tmp_path / "all.json"), "--results", str(tmp_path / "results"),
         "--page", str(tmp_path / "page.md")]
    )  # fmt: skip
    page = (tmp_path / "page.md").read_text()
    assert "4.2 TB/s, 770 TFLOP/s in bfloat16" in page
    assert "| 1     | 2 [1 .. 3] |" in page
    assert r"| 2     |            | a \| b |" in page
    assert "A note." in page
    assert "- x y" in page
    assert "load_average 0.123" in page
    assert "rehearsal" not in page


# -- what the stages stand on -------------------------------------------------------------------


def test_activity_counts_overlapping_kernels_once() -> None:
    def event(start: int, end: int, name: str, kind: str = "CUDA") -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(time_range=span, name=name, device_type=SimpleNamespace(name=kind))

    found = Activity()
    events = [event(0, 10, "a"), event(5, 12, "b"), event(20, 25, "a"), event(0, 99, "c", "CPU")]
    _add_up(events, found)
    assert found.busy_seconds == pytest.approx(17e-6)
    assert found.num_kernels == 3
    assert found.seconds_by_name["a"] == pytest.approx(15e-6)
    assert set(found.seconds_by_name) == {"a", "b"}


def test_without_a_gpu_the_host_s_clock_is_used_and_nothing_is_watched() -> None:
    gauge, calls = Gauge("cpu"), []
    assert all(each >= 0 for each in gauge.seconds(lambda: calls.append(1), repeats=4))
    assert len(calls) == 4 + 3
    gauge.graph(lambda: calls.append(2))()
    assert calls[-1] == 2
    with gauge.watch() as activity:
        pass
    assert activity == Activity()
    assert gauge.card() == {"name": "cpu"}


def test_planted_prompts_are_cached_all_but_the_last_token() -> None:
    cache = PrefixCache(20, 4)
    engine = SimpleNamespace(scheduler=SimpleNamespace(cache=cache))
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5]]
    lab.plant(engine, prompts)
    assert [cache.match_len(array("q", prompt)) for prompt in prompts] == [8, 4]
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_total_pages
    with pytest.raises(ForetokenError, match="too small"):
        lab.plant(engine, [list(range(100))])


@pytest.mark.parametrize("kv_dtype", KV_CODECS)
def test_made_up_keys_and_values_are_finite_and_not_zero(kv_dtype) -> None:
    pool = KVPool(
        3,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
        kv_dtype=kv_dtype,
    )
    fill(pool)
    values = pool.load_blocks(pool.blocks)
    assert values.isfinite().all()
    assert 0.1 < float(values.abs().mean()) < 10
    assert float((values == 0).float().mean()) < 0.1


PYTEST = """\
[gw0] [  1%] PASSED tests/core/ops/triton/test_a.py::test_one[x y]
[gw1] [  2%] FAILED tests/core/ops/triton/test_a.py::test_two[3]
[gw0] [  3%] SKIPPED tests/core/ops/triton/test_b.py::test_three
[gw0] [  4%] ERROR tests/core/ops/triton/test_b.py::test_four
=========================== short test summary info ===========================
FAILED tests/core/ops/triton/test_a.py::test_two[3] - AssertionError: 1 is not 2
"""


def test_bits_that_differ_and_logits_that_are_no_numbers_are_no_equality() -> None:
    ones, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert difference(ones, ones.clone()) == 0
    assert difference(ones, torch.tensor([1.0, 1.5])) == 0.5
    assert difference(nan, nan) == difference(ones, nan) == float("inf")


def test_outcomes_are_read_from_what_pytest_prints_even_if_it_never_ends(tmp_path) -> None:
    stage = make_stage(tmp_path)
    report_tests(stage, PYTEST)
    (rows,) = stage.result.tables.values()
    assert [tuple(row.values()) for row in rows] == [("test_a", 1, 1, 0), ("test_b", 0, 1, 1)]
    assert stage.result.errors == [
        "test_a, test_two[3]: AssertionError: 1 is not 2",
        "test_b, test_four: see the log",
    ]
    report_tests(stage, "ImportError: no such thing")
    assert stage.result.errors[-1] == "no test was run; see the log"


def test_no_two_rows_of_a_ragged_case_write_one_slot() -> None:
    for seed in range(30):
        segments = _ragged(random.Random(seed), 512, is_small=False)
        assert max(Counter(_slots(segments)).values()) == 1
        for each in segments:
            assert len(each.page_ids) * check_page_size() >= each.stop


def check_page_size() -> int:
    return lab.PAGE_SIZE


def test_a_wrong_logit_and_a_stray_write_are_seen() -> None:
    oracle = (torch.ones(2, 3), torch.ones(2, 4), torch.zeros(5))
    assert _compared(oracle, oracle)[3] is True
    wrong = (oracle[0] * torch.tensor([1.0, 1.0, 1.5]), oracle[1], oracle[2] + 1)
    logits, kv, same, untouched = _compared(oracle, wrong)
    assert logits == pytest.approx(0.5 / 3**0.5)
    assert (kv, same, untouched) == (0.0, 0.0, False)
    broken = (oracle[0] * float("nan"), oracle[1], oracle[2])
    assert _compared(oracle, broken)[0] == float("inf")


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.6), ("qwen3-8b", 8.2), ("llama-8b", 8.0)]
)
def test_the_shapes_are_the_published_ones(name: str, billions: float, tmp_path) -> None:
    config = read_config(write_config(tmp_path, SHAPES[name]()))
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (width + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    assert (config.num_layers * layer + embeddings) / 1e9 == pytest.approx(billions, abs=0.06)
    assert config.dtype == "bfloat16"
