"""``foretoken selftest``: agrees on a healthy machine, and says what does not."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.api import cli, selftest
from foretoken.core.native import native_library
from foretoken.core.native.library import NativeLibrary
from foretoken.core.ops import TorchOps


@pytest.fixture(autouse=True)
def library(monkeypatch) -> NativeLibrary:
    found = native_library()
    if found is None:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(selftest, "_print_speeds", lambda _: None)  # seconds of full load
    return found


def test_every_operation_agrees_with_torch(capsys):
    assert cli.main(["selftest", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("native kernels: ")
    assert len([line for line in lines if line.endswith(" ok")]) == 2 * 9 + 4 + 4


def test_a_wrong_operation_is_named_and_fails_the_command(capsys, monkeypatch):
    right = TorchOps.silu_mul
    monkeypatch.setattr(TorchOps, "silu_mul", lambda self, x: right(self, x) * 1.1)
    assert cli.main(["selftest"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]
    assert [line.split()[0] for line in wrong] == ["silu_mul", "silu_mul"]


def test_a_nan_does_not_pass():
    assert not selftest.Comparison("x", torch.float32, math.nan, 1.0).passes


def test_no_kernels_is_an_error_and_not_a_success(capsys, monkeypatch):
    monkeypatch.setattr(selftest, "native_library", lambda: None)
    assert cli.main(["selftest"]) == 1
    assert "no native kernels" in capsys.readouterr().err


def test_a_thread_count_below_one_is_refused(capsys):
    assert cli.main(["selftest", "--threads", "0"]) == 2
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
