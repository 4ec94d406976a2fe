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

from foretoken.core.ops.triton.attention.launch import NARROW

pytestmark = pytest.mark.slow

SHARED_BYTES = 228 * 2**10  # of a multiprocessor; a block may use all but the 1 KiB set aside
SET_ASIDE = 2**10  # of each block
REGISTERS = 2**16
SCRIPT = Path(__file__).with_name("compile_kernels.py")
ROUGH = "in 4 bits"
LITTLE = 32  # bytes of a thread, which the compiler may find cheaper than another register
ALONE = (  # many stages, two sums of rows, or tiles of 128 queries in two groups of warps
    "linear bf16, 128", "linear bf16 in pieces, 128", "attend wide"
)  # fmt: skip


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


def those(kernels: dict[str, dict[str, Any]], start: str) -> dict[str, dict[str, Any]]:
    found = {name: kernel for name, kernel in kernels.items() if name.startswith(start)}
    assert found, start
    return found


def test_two_blocks_of_a_kernel_share_a_multiprocessors_memory(kernels) -> None:
    for name, kernel in kernels.items():
        blocks = 1 if name.startswith(ALONE) else 2
        assert blocks * (kernel["shared"] + SET_ASIDE) <= SHARED_BYTES, name


def test_every_block_has_its_registers_and_spills_next_to_none(kernels) -> None:
    for name, kernel in kernels.items():
        assert kernel["threads"] * kernel["registers"] <= REGISTERS, name
        assert kernel["stack"] <= (0 if name.startswith("linear") else LITTLE), name


def test_two_blocks_of_attention_share_a_multiprocessors_registers(kernels) -> None:
    for name, kernel in those(kernels, "attend").items():
        blocks = 1 if name.startswith(ALONE) else 2
        assert blocks * kernel["threads"] * kernel["registers"] <= REGISTERS, name


def test_as_many_programs_of_decoding_rows_share_a_multiprocessor_as_are_launched(kernels) -> None:
    kernel = kernels["attend narrow"]
    registers = -(-kernel["registers"] // 8) * 8  # as they are given out
    assert NARROW.programs * kernel["threads"] * registers <= REGISTERS
    assert NARROW.programs * (kernel["shared"] + SET_ASIDE) <= SHARED_BYTES


def test_a_chained_kernel_waits_before_it_reads_or_writes(kernels) -> None:
    found = {name: kernel for name, kernel in kernels.items() if name.endswith(" chained")}
    assert len(found) >= 6
    for name, kernel in found.items():
        order = [each for each in kernel["chain"] if each != "prefetch.global"]
        first = ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
        assert order[:2] == first or name == "linear chained", name
    for name, kernel in kernels.items():
        assert name in found or not any("griddep" in each for each in kernel["chain"]), name
    assert kernels["linear chained"]["chain"][0] == "prefetch.global"


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("attend narrow", "mma"),
        ("attend narrow int8", "mma"),
        ("attend narrow fp8", "mma"),
        ("attend one tile", "mma"),
        ("attend wide", "wgmma"),
        ("attend wide window", "wgmma"),
        ("attend wide int8", "wgmma"),
        ("attend wide fp8", "wgmma"),
    ],
)
def test_what_multiplies_uses_tensor_cores_and_copies_ahead(kernels, name, instruction) -> None:
    assert kernels[name]["tensor cores"] == instruction
    assert kernels[name]["asynchronous copies"]


def test_sums_are_on_their_way_before_those_ahead_of_them_are_merged(kernels) -> None:
    for kernel in those(kernels, "merge").values():
        assert kernel["asynchronous copies"]


def test_every_linear_uses_hoppers_tensor_cores_and_copies_ahead(kernels) -> None:
    for name, kernel in those(kernels, "linear").items():
        assert kernel["tensor cores"] == ("mma" if is_few_rough(name) else "wgmma"), name
        assert ends_with_wide_copies(name, kernel), name


WIDE_PRODUCT = "m64n64k16.f32.bf16.bf16"


def is_few_rough(name: str) -> bool:
    return ROUGH in name and " 16 x " in name


def ends_with_wide_copies(name: str, kernel: dict[str, Any]) -> bool:
    """Beside the weight few threads copy the few rows and scales of a copy in 4 bits."""
    sizes = kernel["bytes of a copy"]
    return sizes[-1] == 16 and (len(sizes) == 1 or ROUGH in name)


def test_every_linear_of_experts_does_so_by_addresses_that_it_reads(kernels) -> None:
    for name, kernel in those(kernels, "expert linear").items():
        assert kernel["tensor cores"] == "wgmma", name
        assert ends_with_wide_copies(name, kernel), name
        assert kernel["multiplies"] == ["m64n64k16.f32.bf16.bf16"], name


def test_a_part_is_written_before_it_is_counted_and_read_after(kernels) -> None:
    order = "st.global bar.sync atom.global.gpu.acq_rel bar.sync st.global"  # that is the reset
    apart = {name: kernel for name, kernel in those(kernels, "linear").items() if "apart" in name}
    assert len(apart) >= 3
    for name, kernel in apart.items():
        assert kernel["around a count"] == [order], name


@pytest.mark.parametrize("kind", ["int8", ROUGH])
def test_weights_of_few_bits_are_widened_in_pairs_not_converted(kernels, kind: str) -> None:
    for name, kernel in those(kernels, f"linear {kind}").items():
        assert "fma.rn.bf16x2" in kernel["multiply-adds"], name
        assert "fma.rn.bf16" not in kernel["multiply-adds"], name
        assert not kernel["integer conversions"], name


def test_few_rows_of_a_copy_in_4_bits_have_the_older_instructions(kernels) -> None:
    """Instructions of four warps together would be waited for one by one."""
    kinds = {True: 0, False: 0}
    for name, kernel in those(kernels, f"linear {ROUGH}").items():
        kinds[is_few_rough(name)] += 1
        wanted = "m16n8k16.row.col.f32.bf16.bf16.f32" if is_few_rough(name) else WIDE_PRODUCT
        assert kernel["multiplies"] == [wanted], name
    assert all(kinds.values())


@pytest.mark.parametrize(
    ("kind", "instruction"),
    [("bf16", "m64n{columns}k16.f32.bf16.bf16"), ("int8", "m64n64k16.f32.bf16.bf16")],
)
@pytest.mark.parametrize("columns", [64, 128])
def test_a_weights_products_are_the_same_instructions_for_any_number_of_rows(
    kernels, kind, columns, instruction
) -> None:
    """The bits of a sum are an instruction's own: all kernels of a weight must have the same."""
    found = {
        name: kernel
        for name, kernel in those(kernels, f"linear {kind}").items()
        if f" x {columns}" in name
    }
    assert len(found) >= 2
    for name, kernel in found.items():
        assert kernel["multiplies"] == [instruction.format(columns=columns)], name
    assert len({tuple(kernel["operands"]) for kernel in found.values()}) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("merge", "rms norm", "add rms norm", "silu mul"),
        *("sample rank", "sample race", "sample race best", "sample merge best", "sample copy"),
    ],
)
def test_what_only_moves_memory_moves_it_in_wide_loads(kernels, name) -> None:
    assert kernels[name]["wide loads"]


@pytest.mark.parametrize("name", ["attend narrow fp8", "attend wide fp8"])
def test_fp8_is_read_by_two_numbers_an_instruction(kernels, name) -> None:
    assert kernels[name]["conversions of e4m3"] == ["cvt.rn.f16x2.e4m3x2"]


def test_fp8_is_written_by_the_instruction_and_scaled_by_exact_divisions(kernels) -> None:
    """Scaled items must be the oracle's bits: the usual division is off by a bit or two."""
    assert kernels["rope write fp8"]["conversions of e4m3"] == ["cvt.rn.satfinite.e4m3x2.f32"]
    for name in ("rope write int8", "rope write fp8"):
        assert kernels[name]["divisions"] == ["div.rn"]


def test_the_samplers_kernels_round_after_every_operation(kernels) -> None:
    """Two kernels that meet a value must have the same bits: no multiplication runs into a sum.

    Logarithms have some of their own, and flush what is subnormal.
    """
    for name, kernel in those(kernels, "sample").items():
        assert "fma.rn.f32" not in kernel["multiply-adds"], name
    for name in ("sample race", "sample race best", "sample cut", "sample edit"):
        assert "div.rn" in kernels[name]["divisions"], name
