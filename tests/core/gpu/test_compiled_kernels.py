"""Every kernel compiles for Hopper, within its memory and with the instructions it is meant for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SHARED_BYTES = 227 * 2**10  # that a block of Hopper may use
SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    made: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return made


def test_two_blocks_of_every_kernel_fit_a_multiprocessor(kernels) -> None:
    assert all(kernel["shared"] <= SHARED_BYTES // 2 for kernel in kernels.values())


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("attend narrow", "mma"),
        ("attend narrow int8", "mma"),
        ("attend wide", "wgmma"),
        ("attend wide int8", "wgmma"),
        ("linear", "mma"),
        ("linear int8", "mma"),
    ],
)
def test_what_multiplies_uses_tensor_cores_and_copies_ahead(kernels, name, instruction) -> None:
    assert kernels[name]["tensor cores"] == instruction
    assert kernels[name]["asynchronous copies"]


@pytest.mark.parametrize("name", ["merge", "rms norm", "add rms norm", "silu mul"])
def test_what_only_moves_memory_moves_it_in_wide_loads(kernels, name) -> None:
    assert kernels[name]["wide loads"]
