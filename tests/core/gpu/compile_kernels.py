"""Compiles every variant of every kernel for sm_90, which needs no GPU; prints what came out.

One process apart: Triton decides at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foretoken.core.ops.triton.attention import attend_kernel, merge_kernel
from foretoken.core.ops.triton.elementwise import (
    rms_norm_kernel,
    rope_write_kernel,
    silu_mul_kernel,
)
from foretoken.core.ops.triton.linear import linear_kernel

TARGET = GPUTarget("cuda", 90, 32)
HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PAGE_SIZE": 32}
PLAIN = {"NUM_ITEMS": 32 * 128, "SCALES_AT": 0}
INT8 = {"NUM_ITEMS": 32 * 128 + 32 * 4, "SCALES_AT": 32 * 128}
ATTEND = {**HEADS, "SPLIT": 256, "TILE": 32, "WINDOW": 0}
NARROW = {"TILE_ROWS": 16, "IS_NARROW": True}
WIDE = {"TILE_ROWS": 64, "IS_NARROW": False}
LINEAR = {"IN": 4096, "OUT": 4096, "TILE_ROWS": 16, "TILE_OUT": 32, "TILE_IN": 128}
POINTERS = {
    "sums_ptr": "fp32", "tops_ptr": "fp32", "totals_ptr": "fp32", "scale_ptr": "fp32",
    "cos_ptr": "fp32", "sin_ptr": "fp32", "scales_ptr": "fp32", "slots_ptr": "i64",
    "kv_ptr": "bf16", "q_ptr": "bf16", "out_ptr": "bf16", "x_ptr": "bf16", "weight_ptr": "bf16",
    "bias_ptr": "bf16", "qkv_ptr": "bf16", "norm_ptr": "bf16", "residual_ptr": "bf16",
    "total_ptr": "bf16", "gate_up_ptr": "bf16",
}  # fmt: skip
SCALARS = {"eps": "fp32", "scale": "fp32"}

VARIANTS = {
    "attend narrow": (attend_kernel, {**ATTEND, **PLAIN, **NARROW}, {}),
    "attend narrow window": (attend_kernel, {**ATTEND, **PLAIN, **NARROW, "WINDOW": 4096}, {}),
    "attend narrow int8": (attend_kernel, {**ATTEND, **INT8, **NARROW}, {"kv_ptr": "i8"}),
    "attend wide": (attend_kernel, {**ATTEND, **PLAIN, **WIDE}, {}),
    "attend wide int8": (attend_kernel, {**ATTEND, **INT8, **WIDE}, {"kv_ptr": "i8"}),
    "merge": (merge_kernel, {"NUM_HEADS": 32, "HEADS_TILE": 32, "HEAD_DIM": 128}, {}),
    "rms norm": (rms_norm_kernel, {"WIDTH": 4096, "TILE": 4096, "HAS_RESIDUAL": False}, {}),
    "add rms norm": (rms_norm_kernel, {"WIDTH": 4096, "TILE": 4096, "HAS_RESIDUAL": True}, {}),
    "rope write": (rope_write_kernel, {**HEADS, **PLAIN, "HAS_NORM": True}, {}),
    "rope write int8": (rope_write_kernel, {**HEADS, **INT8, "HAS_NORM": False}, {"kv_ptr": "i8"}),
    "silu mul": (silu_mul_kernel, {"WIDTH": 12288, "TILE": 1024}, {}),
    "linear": (linear_kernel, {**LINEAR, "IS_INT8": False, "HAS_BIAS": False}, {}),
    "linear int8": (
        linear_kernel, {**LINEAR, "IS_INT8": True, "HAS_BIAS": True}, {"weight_ptr": "i8"},
    ),
}  # fmt: skip


def compiled(name: str) -> dict[str, object]:
    """Shared memory in bytes, registers spilled, and which instructions are there."""
    kernel, constants, dtypes = VARIANTS[name]
    names, pointers = kernel.arg_names, {**POINTERS, **dtypes}
    signature = {
        each: "constexpr" if each in constants
        else f"*{pointers.get(each, 'i32')}" if each.endswith("_ptr")
        else SCALARS.get(each, "i32")
        for each in names
    }  # fmt: skip
    values = {(names.index(each),): value for each, value in constants.items()}
    aligned = {
        (names.index(each),): [["tt.divisibility", 16]] for each in names if each.endswith("_ptr")
    }
    made = triton.compile(ASTSource(kernel, signature, values, aligned), target=TARGET)
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "tensor cores": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "",
        "asynchronous copies": "cp.async" in ptx,
        "wide loads": "ld.global.v4" in ptx or "ld.global.v2" in ptx or "cp.async" in ptx,
    }


if __name__ == "__main__":
    json.dump({name: compiled(name) for name in VARIANTS}, sys.stdout)
