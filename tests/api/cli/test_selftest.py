"""``foretoken selftest``: agrees on a healthy machine, and says what does not."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.api.cli import commands, selftest, selftest_ranks
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.torch.torch_ops import TorchOps
from support.rank_threads import ThreadComm, ThreadRanks


@pytest.fixture(autouse=True)
def library(monkeypatch) -> NativeLibrary:
    found = native_library()
    if found is None:
        pytest.skip("no native kernels here")
    for slow in ("_print_speeds", "_print_kinds"):  # seconds of full load
        monkeypatch.setattr(selftest, slow, lambda _: None)
    return found


def test_every_operation_agrees_with_torch(capsys):
    assert commands.main(["selftest", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("native kernels: ")
    assert len([line for line in lines if line.endswith(" ok")]) == 2 * 12 + 4 + 4


def test_a_wrong_operation_is_named_and_fails_the_command(capsys, monkeypatch):
    right = TorchOps.activate
    monkeypatch.setattr(TorchOps, "activate", lambda self, x, *kind: right(self, x, *kind) * 1.1)
    assert commands.main(["selftest"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]
    assert [line.split()[0] for line in wrong] == ["silu", "gelu", "silu", "gelu"]


def test_a_nan_does_not_pass():
    assert not selftest.Comparison("x", torch.float32, math.nan, 1.0).passes


def test_no_kernels_is_an_error_and_not_a_success(capsys, monkeypatch):
    monkeypatch.setattr(selftest, "native_library", lambda: None)
    assert commands.main(["selftest"]) == 1
    assert "no native kernels" in capsys.readouterr().err


def test_a_thread_count_below_one_is_refused(capsys):
    assert commands.main(["selftest", "--threads", "0"]) == 2
    assert "threads must be at least 1" in capsys.readouterr().err


def test_speeds_are_printed_beside_the_machines_limits(capsys, monkeypatch, library):
    monkeypatch.undo()
    monkeypatch.setattr(selftest, "_TIMED_BYTES", 1)
    monkeypatch.setattr(selftest, "read_bandwidth", lambda _: 1e9)
    monkeypatch.setattr(selftest, "matrix_rate", lambda _: 1e12)
    selftest._print_speeds(library)
    out = capsys.readouterr().out
    assert "machine: reads 1.0 GB/s, bf16 1000 GFLOP/s" in out
    assert out.count(" rows ") == len(selftest.KINDS) * len(selftest.ROWS)


def test_the_kinds_of_a_linear_are_compared_at_each_number_of_rows(capsys, monkeypatch, library):
    monkeypatch.undo()
    times = {"bf16": 2e-6, "float32": 3e-6, "torch": 1e-6}
    monkeypatch.setattr(selftest, "time_kinds", lambda _, num_rows: times)
    monkeypatch.setattr(selftest, "bfloat16_products", lambda _: "float32")
    selftest._print_kinds(library)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.endswith(" torch")] == [
        [str(rows), "2", "3", "1", "torch"] for rows in (1, 8, 64, 256)
    ]
    assert lines[-1] == "the engine uses float32 for all numbers of rows"


def test_every_kind_of_a_linear_is_timed(monkeypatch, library):
    monkeypatch.setattr(selftest, "_TIMED_BYTES", 1)
    times = selftest.time_kinds(library, 1)
    assert list(times) == ["bf16", "float32", "torch"]
    assert all(seconds > 0 for seconds in times.values())


def test_ranks_agree_with_one_process(capsys, monkeypatch):
    monkeypatch.setattr(selftest_ranks, "Ranks", ThreadRanks)
    assert commands.main(["selftest", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ranks: this process and ")
    assert [line.split()[-1] for line in lines[1:]] == ["ok", "ok"]


def test_ranks_whose_sum_is_wrong_fail_the_command(capsys, monkeypatch):
    monkeypatch.setattr(selftest_ranks, "Ranks", ThreadRanks)
    monkeypatch.setattr(ThreadComm, "sum", lambda self, part, dtype: 2 * part.to(dtype))
    assert commands.main(["selftest", "--tp", "2"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert commands.main(["selftest", "--tp", "3"]) == 2
    assert "which 3 ranks cannot share evenly" in capsys.readouterr().err
