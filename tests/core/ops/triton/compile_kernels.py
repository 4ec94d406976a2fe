"""Compiles every variant of every kernel for sm_90, which needs no GPU; prints what came out.

One process apart: Triton decides at import whether kernels are compiled or interpreted.
To have a kernel compiled, add a line to VARIANTS.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foretoken.core.ops.triton.attention import launch
from foretoken.core.ops.triton.attention.attention import attend_kernel, merge_kernel
from foretoken.core.ops.triton.elementwise import (
    activate_kernel,
    norm_kernel,
    rope_write_kernel,
)
from foretoken.core.ops.triton.graph.plan import WIDE_TILE
from foretoken.core.ops.triton.linear.experts import (
    EXPERT_OPTIONS,
    SORTED_CHUNK,
    SUMMED_TILE,
    expert_constants,
)
from foretoken.core.ops.triton.linear.experts_kernels import (
    add_up_kernel,
    expert_linear_kernel,
    route_kernel,
    sort_kernel,
)
from foretoken.core.ops.triton.linear.linear import linear_kernel
from foretoken.core.ops.triton.linear.lora import LORA_OPTIONS, TILE_IN, TILE_RANKS, TILE_ROWS
from foretoken.core.ops.triton.linear.lora_kernels import lora_a_kernel, lora_b_kernel
from foretoken.core.ops.triton.linear.tiled_linear import linear_constants, linear_options
from foretoken.core.ops.triton.linear.tiles import FEW_COLUMNS, Bits, linear_launch, linear_tiles
from foretoken.core.ops.triton.recurrent.inputs_kernels import (
    inputs_kernel,
    keep_inputs_kernel,
    short_conv_kernel,
)
from foretoken.core.ops.triton.recurrent.layer_memory import CHANNELS_TILE
from foretoken.core.ops.triton.recurrent.recur import VALUES
from foretoken.core.ops.triton.recurrent.recur_kernels import (
    gated_norm_kernel,
    log_kernel,
    products_kernel,
    recur_kernel,
)
from foretoken.core.ops.triton.sampling.gumbel_argmax import EDIT_TILE, LIST_TILE, ROUNDED, TILE
from foretoken.core.ops.triton.sampling.gumbel_argmax_kernels import (
    gumbel_argmax_kernel,
    merge_best_kernel,
    rank_kernel,
    take_kernel,
)
from foretoken.core.ops.triton.sampling.logits_processors import copy_kernel, edit_kernel
from foretoken.core.ops.triton.sampling.top_k_top_p import cut_kernel

TARGET = GPUTarget("cuda", 90, 32)
NONE: Mapping[str, Any] = {}


class Variant(NamedTuple):
    """A kernel, its constants, the dtypes that differ from POINTERS, and num_warps and the like."""

    kernel: Any
    constants: Mapping[str, Any]
    dtypes: Mapping[str, str] = NONE
    options: Mapping[str, int] = NONE


POINTERS = {  # others are int32
    "acc_ptr": "fp32", "max_score_ptr": "fp32", "exp_sum_ptr": "fp32", "scale_ptr": "fp32",
    "q_cos_ptr": "fp32", "q_sin_ptr": "fp32", "k_cos_ptr": "fp32", "k_sin_ptr": "fp32",
    "scales_ptr": "fp32", "sinks_ptr": "fp32",
    "kv_ptr": "bf16", "q_ptr": "bf16", "out_ptr": "bf16", "x_ptr": "bf16", "weight_ptr": "bf16",
    "bias_ptr": "bf16", "qkv_ptr": "bf16", "norm_ptr": "bf16", "residual_ptr": "bf16",
    "total_ptr": "bf16", "parts_ptr": "fp32",
}  # fmt: skip
SCALARS = dict.fromkeys(("eps", "scale", "least", "factor"), "fp32")  # others are int32
DIVISIBLE = ("IN", "OUT", "logits_stride")  # scalars that are multiples of 16; pointers all are

HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PAGE_SIZE": 32}
PLAIN = {"NUM_ITEMS": 32 * 128, "SCALES_AT": 0, "CODEC": "auto"}
INT8 = {"NUM_ITEMS": 32 * 128 + 32 * 4, "SCALES_AT": 32 * 128, "CODEC": "int8"}
FP8 = {**INT8, "CODEC": "fp8"}
KV_INT8, KV_FP8 = {"kv_ptr": "i8"}, {"kv_ptr": "fp8e4nv"}
RULE = {"WINDOW": 0, "CAP": 0.0, "HAS_SINKS": False}
ATTEND = {**HEADS, **RULE, "SPLIT": 256, "KV_SPLIT_GROUP": 16, "TILE": 32, "ITEM_WORDS": 7}
MERGE = {
    "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEADS": 4, "HEAD_DIM": 128,
    "SPLIT": 256, "KV_SPLIT_GROUP": 16, "WIDE_TILE": WIDE_TILE, "WINDOW": 0, "HAS_SINKS": False,
}  # fmt: skip
NORM = {
    "WIDTH": 4096, "TILE": 4096, "HAS_RESIDUAL": False, "HAS_NORM": True, "IS_LAYER": False,
    "HAS_BIAS": False,
}  # fmt: skip
NORMED, PLAIN_HEADS = (
    {"HAS_NORM": has, "IS_WHOLE": False, "IS_AFTER_ROPE": False} for has in (True, False)
)
ACTIVATION = {"WIDTH": 12288, "TILE": 1024, "IS_GATED": True, "KIND": "silu", "LIMIT": 0.0}
NARROW = {"TILE_ROWS": 16, "IS_NARROW": True, "IS_WHOLE": False}
WIDE = {"TILE": launch.WIDE.keys, "TILE_ROWS": WIDE_TILE, "IS_NARROW": False, "IS_WHOLE": True}
ONE_TILE = {"TILE_ROWS": 16, "IS_NARROW": False, "IS_WHOLE": False}

LAUNCHED = {
    kind: {"num_warps": each.num_warps, "num_stages": each.num_stages}
    for kind, each in (("narrow", launch.NARROW), ("wide", launch.WIDE))
}

VARIANTS: dict[str, Variant] = {
    "attend narrow": Variant(attend_kernel, {**ATTEND, **PLAIN, **NARROW}),
    "attend narrow window": Variant(attend_kernel, {**ATTEND, **PLAIN, **NARROW, "WINDOW": 4096}),
    "attend narrow int8": Variant(attend_kernel, {**ATTEND, **INT8, **NARROW}, KV_INT8),
    "attend narrow fp8": Variant(attend_kernel, {**ATTEND, **FP8, **NARROW}, KV_FP8),
    "attend wide": Variant(attend_kernel, {**ATTEND, **PLAIN, **WIDE}),
    "attend wide window": Variant(attend_kernel, {**ATTEND, **PLAIN, **WIDE, "WINDOW": 4096}),
    "attend wide int8": Variant(attend_kernel, {**ATTEND, **INT8, **WIDE}, KV_INT8),
    "attend wide fp8": Variant(attend_kernel, {**ATTEND, **FP8, **WIDE}, KV_FP8),
    "attend one tile": Variant(attend_kernel, {**ATTEND, **PLAIN, **ONE_TILE}),
    "attend one tile int8": Variant(attend_kernel, {**ATTEND, **INT8, **ONE_TILE}, KV_INT8),
    "merge": Variant(merge_kernel, MERGE),
    "merge window": Variant(merge_kernel, {**MERGE, "WINDOW": 4096}),
    "attend narrow capped": Variant(attend_kernel, {**ATTEND, **PLAIN, **NARROW, "CAP": 50.0}),
    "attend wide capped": Variant(attend_kernel, {**ATTEND, **PLAIN, **WIDE, "CAP": 50.0}),
    "attend wide sinks": Variant(attend_kernel, {**ATTEND, **PLAIN, **WIDE, "HAS_SINKS": True}),
    "merge sinks": Variant(merge_kernel, {**MERGE, "HAS_SINKS": True}),
    "rms norm": Variant(norm_kernel, NORM),
    "add rms norm": Variant(norm_kernel, {**NORM, "HAS_RESIDUAL": True}),
    "layer norm": Variant(
        norm_kernel,
        {**NORM, "IS_LAYER": True, "HAS_BIAS": True},
        {"weight_ptr": "fp32", "bias_ptr": "fp32"},
    ),
    "add": Variant(norm_kernel, {**NORM, "HAS_RESIDUAL": True, "HAS_NORM": False}),
    "rope write": Variant(rope_write_kernel, {**HEADS, **PLAIN, **NORMED}),
    "rope write behind": Variant(
        rope_write_kernel, {**HEADS, **PLAIN, **NORMED, "IS_AFTER_ROPE": True}
    ),
    "rope write whole": Variant(rope_write_kernel, {**HEADS, **PLAIN, **NORMED, "IS_WHOLE": True}),
    "rope write int8": Variant(rope_write_kernel, {**HEADS, **INT8, **PLAIN_HEADS}, KV_INT8),
    "rope write fp8": Variant(rope_write_kernel, {**HEADS, **FP8, **PLAIN_HEADS}, KV_FP8),
    "silu mul": Variant(activate_kernel, ACTIVATION),
    "relu2": Variant(activate_kernel, {**ACTIVATION, "IS_GATED": False, "KIND": "relu2"}),
    "gelu": Variant(activate_kernel, {**ACTIVATION, "IS_GATED": False, "KIND": "gelu_tanh"}),
}

VOCAB = {"VOCAB": 151_936, "TILE": TILE, "NUM_TILES": -(-151_936 // TILE)}
LOGITS = {
    **dict.fromkeys(("logits_ptr", "values_ptr", "list_ptr", "amounts_ptr"), "fp32"),
    **dict.fromkeys(("controls_ptr", "hashes_ptr", "winners_ptr"), "i64"),
    **dict.fromkeys(("tile_best_ptr", "best_ptr"), "i64"),
}
RACE = {**VOCAB, "TILES": 256}
MERGE_BEST = {"NUM_TILES": VOCAB["NUM_TILES"], "NUM_BEST": 4, "WORDS": 1024}
CUT = {"TILES": 256, "MASS_SCALE": 2.0**44, "LIST_TILE": LIST_TILE}
VARIANTS |= {
    "sample rank": Variant(rank_kernel, VOCAB, LOGITS, ROUNDED),
    "sample race": Variant(gumbel_argmax_kernel, {**RACE, "NUM_BEST": 1}, LOGITS, ROUNDED),
    "sample race best": Variant(gumbel_argmax_kernel, {**RACE, "NUM_BEST": 4}, LOGITS, ROUNDED),
    "sample merge best": Variant(merge_best_kernel, MERGE_BEST, LOGITS),
    "sample cut": Variant(cut_kernel, {**VOCAB, **CUT}, LOGITS, {"num_warps": 8, **ROUNDED}),
    "sample copy": Variant(copy_kernel, {**VOCAB, "MASK_WORDS": 4748}, LOGITS, ROUNDED),
    "sample take": Variant(
        take_kernel, {"HAS_NAMES": True}, LOGITS | {"names_ptr": "i64"}, {"num_warps": 1}
    ),
    "sample edit": Variant(edit_kernel, {"VOCAB": 151_936, "TILE": EDIT_TILE}, LOGITS, ROUNDED),
}

LINEAR_SHAPES = (  # [out, in] of qkv, o, gate and up, down, lm_head
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),  # Qwen3 0.6B
    *((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (151936, 2048)),  # 1.7B
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),  # 8B
    *((28672, 4096), (4096, 14336), (128256, 4096)),  # Llama 3 8B
    *((3072, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),  # 3.2 1B
)
LINEAR_ROWS = (1, 65, 512, 4096)
WEIGHTS: Mapping[Bits, str] = {0: "bf16", 8: "int8", 4: "in 4 bits"}
FEW_BITS: Mapping[Bits, Mapping[str, str]] = {
    0: {},
    8: {"weight_ptr": "i16"},
    4: {"weight_ptr": "i16", "scale_ptr": "i32"},
}


def linear_variants() -> dict[str, Variant]:
    """One for everything that can be compiled for these shapes, named by what is special in it."""
    variants = {}
    for out_features, in_features in LINEAR_SHAPES:
        for bits, kind in WEIGHTS.items():
            tiles = linear_tiles(out_features, in_features, torch.bfloat16, bits=bits)
            for num_rows in LINEAR_ROWS:
                launch = linear_launch(tiles, out_features, num_rows)
                pieces = " apart" if launch.is_apart else " in pieces" if tiles.pieces > 1 else ""
                policy = " streamed" if launch.policy else ""
                name = f"linear {kind}{pieces}, {launch.rows} x {launch.columns}{policy}"
                variants[name] = Variant(
                    linear_kernel,
                    linear_constants(tiles, launch, in_features, has_bias=bits == 8),
                    FEW_BITS[bits],
                    linear_options(launch),
                )
    return variants


VARIANTS |= linear_variants()
_LINEAR = VARIANTS["linear bf16, 64 x 128 streamed"]
_LINEAR_INT8 = VARIANTS["linear int8, 64 x 128 streamed"]
FLOAT16 = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "fp16")
VARIANTS |= {
    "linear logits": _LINEAR._replace(dtypes={"out_ptr": "fp32"}),
    "linear odd": _LINEAR._replace(constants={**_LINEAR.constants, "IS_EVEN": False}),
    "linear float16": _LINEAR._replace(dtypes=FLOAT16),
    "linear float16 int8": _LINEAR_INT8._replace(dtypes={**FLOAT16, "weight_ptr": "i16"}),
}

for _name, _variant in VARIANTS.items():
    if _variant.kernel is attend_kernel:
        _kind = "wide" if _variant.constants["TILE_ROWS"] == WIDE["TILE_ROWS"] else "narrow"
        VARIANTS[_name] = _variant._replace(options=LAUNCHED[_kind])
CHAINED = {"IS_CHAINED": True}
VARIANTS |= {
    f"{name} chained": VARIANTS[name]._replace(constants={**VARIANTS[name].constants, **CHAINED})
    for name in ("attend narrow", "merge", "rms norm", "rope write", "silu mul")
}
VARIANTS["linear chained"] = _LINEAR._replace(constants={**_LINEAR.constants, **CHAINED})

ROUTE = {
    "NUM_EXPERTS": 128, "TILE": 128, "TOP_K": 8, "TOP_TILE": 8, "IS_SIGMOID": False,
    "OF_CHOSEN": False, "NUM_GROUPS": 1, "KEPT_GROUPS": 1, "BY_TWO": True, "RENORMS": True,
    "HAS_BIAS": False, "HAS_SLOTS": True,
}  # fmt: skip
ROUTED = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr", "shared_ptr", "gate_ptr"), "fp32")
GROUPED = {"IS_SIGMOID": True, "NUM_GROUPS": 8, "KEPT_GROUPS": 4, "HAS_BIAS": True}
SORT = {"NUM_EXPERTS": 128, "TILE_ROWS": 64, "IS_FEW": False, "CHUNK": SORTED_CHUNK}
ADD_UP = {
    "WIDTH": 2048, "TILE": SUMMED_TILE, "TOP_K": 8, "NUM_EXPERTS": 128,
    "HAS_SHARED": True, "HAS_GATE": True,
}  # fmt: skip
ADDRESSES = {
    **dict.fromkeys(("weights_ptr", "scales_ptr", "biases_ptr"), "i64"),
    "items_ptr": "bf16", "floats_ptr": "fp32",
}  # fmt: skip


def expert_variants() -> dict[str, Variant]:
    """Both matrices of Qwen3 30B-A3B's experts, and what other models' have besides."""
    variants = {}
    cases: Sequence[tuple[Bits, int, bool]] = (
        (0, 2048, False), (0, 768, True), (0, 2080, False), (8, 2048, True), (4, 2048, False),
    )  # fmt: skip
    for bits, in_features, has_bias in cases:
        sharers = 1 if in_features == 768 else 8
        constants = expert_constants(
            torch.bfloat16, in_features, sharers=sharers, bits=bits, has_bias=has_bias
        )
        dtypes = {**ADDRESSES, "items_ptr": "i16"} if bits else dict(ADDRESSES)
        if bits == 4:
            dtypes["floats_ptr"] = "i32"
        name = f"expert linear {WEIGHTS[bits]} of {in_features}"
        variants[name] = Variant(expert_linear_kernel, constants, dtypes, EXPERT_OPTIONS)
    return variants


VARIANTS |= expert_variants()
VARIANTS |= {
    "route": Variant(route_kernel, ROUTE, ROUTED, {"num_warps": 4}),
    "route groups": Variant(route_kernel, {**ROUTE, **GROUPED}, ROUTED, {"num_warps": 4}),
    "sort": Variant(sort_kernel, SORT),
    "sort few": Variant(sort_kernel, {**SORT, "IS_FEW": True}),
    "add up": Variant(add_up_kernel, ADD_UP, {**ROUTED, "y_ptr": "bf16", "shared_ptr": "bf16"}),
}

LORA = {"TILE_ROWS": TILE_ROWS, "TILE_RANKS": TILE_RANKS}
LORA_DTYPES = {"tables_ptr": "i64", "hidden_ptr": "fp32"}
VARIANTS |= {
    "lora a": Variant(lora_a_kernel, {**LORA, "TILE_IN": TILE_IN}, LORA_DTYPES, LORA_OPTIONS),
    "lora b": Variant(lora_b_kernel, {**LORA, "TILE_OUT": FEW_COLUMNS}, LORA_DTYPES, LORA_OPTIONS),
}


RECURRENT_FLOATS = dict.fromkeys(
    (
        "x_ptr", "c_ptr", "beta_ptr", "u_ptr", "read_ptr", "products_ptr", "skip_ptr", "taps_ptr",
        "taps_bias_ptr", "decay_ptr", "dt_bias_ptr", "norm_ptr", "states_ptr", "log_k_ptr",
        "log_u_ptr", "log_c_ptr",
    ),
    "fp32",
)  # fmt: skip
RECURRENT_DTYPES = {
    **RECURRENT_FLOATS,
    **dict.fromkeys(
        ("mixed_ptr", "gates_ptr", "inputs_ptr", "tails_ptr", "log_inputs_ptr"), "bf16"
    ),
}
# 32 heads of 128 values, 16 of keys.
RECURRENT = {
    "STRIDE": 12288, "CHANNELS": 8192, "TAPS": 4, "RING": 64, "PAGE": 32, "SLOT": 2**20,
    "SLOT_FLOATS": 2**20, "LOG": 2**20, "LOG_FLOATS": 2**20, "KEY_HEADS": 16, "HEADS": 32,
    "KEY_DIM": 128, "VALUE_DIM": 128, "KEYS": 128, "VALUES": VALUES, "TILE": 128,
    "HEADS_TILE": 32, "HAS_BIAS": False, "IS_TILED": False, "IS_DELTA": True, "PARTS": 32,
    "WIDTH": 128, "HAS_NORM": True, "MOST_BETA": 1.0, "HAS_SKIP": False, "HAS_GATES": True,
    "IS_LIGHTNING": False, "GATES_LAST": True,
}  # fmt: skip


def recurrent_variants() -> dict[str, Variant]:
    """Both rules, in pages of the usual size and of the largest."""
    cases = {
        "inputs": (inputs_kernel, {}),
        "products": (products_kernel, {}),
        "recur": (recur_kernel, {}),
        "log": (log_kernel, {"VALUES": 128}),
        "keep inputs": (keep_inputs_kernel, {"TILE": CHANNELS_TILE}),
        "gated norm": (gated_norm_kernel, {"TILE": 512}),
        "short conv": (short_conv_kernel, {"TILE": CHANNELS_TILE}),
    }
    changes = {
        "delta": {},
        "delta of large pages": {"PAGE": 64, "RING": 96},
        "mamba2": {
            "IS_DELTA": False,
            "HAS_BIAS": True,
            "PARTS": 8,
            "WIDTH": 512,
            "HAS_SKIP": True,
            "GATES_LAST": False,
        },
    }
    return {
        f"{name} {rule}": Variant(
            kernel,
            {
                key: value
                for key, value in {**RECURRENT, **change, **constants}.items()
                if key in kernel.arg_names
            },
            RECURRENT_DTYPES,
        )
        for rule, change in changes.items()
        for name, (kernel, constants) in cases.items()
    }


VARIANTS |= recurrent_variants()


def compiled(variant: Variant) -> dict[str, object]:
    """Shared memory, registers and stack in bytes, and which instructions are there."""
    kernel, constants, dtypes, options = variant
    names, pointers = kernel.arg_names, {**POINTERS, **dtypes}
    if "IS_CHAINED" in names:
        constants = {"IS_CHAINED": False, **constants}
    signature = {
        each: "constexpr" if each in constants
        else f"*{pointers.get(each, 'i32')}" if each.endswith("_ptr")
        else SCALARS.get(each, "i32")
        for each in names
    }  # fmt: skip
    values = {(names.index(each),): value for each, value in constants.items()}
    aligned = {
        (names.index(each),): [["tt.divisibility", 16]]
        for each in names
        if (each.endswith("_ptr") or each in DIVISIBLE) and each not in constants
    }
    source = ASTSource(kernel, signature, values, aligned)
    made = triton.compile(source, target=TARGET, options=dict(options))
    ptx, layouts = made.asm["ptx"], made.asm["ttgir"]
    registers, stack = usage(made.asm["cubin"])
    return {
        "shared": made.metadata.shared,
        "threads": 32 * made.metadata.num_warps,
        "registers": registers,
        "stack": stack,
        "tensor cores": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "",
        "multiplies": sorted(set(re.findall(r"mma\S*\.aligned\.(m\d+n\d+k\d+\S*)", ptx))),
        "operands": sorted(set(re.findall(r"kWidth = \d", layouts))),
        "conversions of e4m3": sorted(set(re.findall(r"cvt\.\S*e4m3\S*", ptx))),
        "divisions": sorted(set(re.findall(r"div\.\w+", ptx))),
        "multiply-adds": sorted(set(re.findall(r"fma\.rn\.\w+", ptx))),
        "integer conversions": sorted(set(re.findall(r"cvt\.rn\.f\w+\.[su]\d+", ptx))),
        "asynchronous copies": "cp.async" in ptx,
        "bytes of a copy": sorted(
            {int(n, 16) for n in re.findall(r"cp\.async\.c.*?, 0x(\d+)", ptx)}
        ),
        "around a count": around_a_count(ptx),
        "chain": re.findall(
            r"griddepcontrol\.\w+|prefetch\.global|ld\.global|cp\.async\.c|st\.global", ptx
        )[:16],
        "wide loads": "ld.global.v4" in ptx or "ld.global.v2" in ptx or "cp.async" in ptx,
    }


def around_a_count(ptx: str) -> list[str]:
    """Two things before an atomic addition that is seen by all the device, and two behind it."""
    order = re.findall(r"bar\.sync|atom\.global\.gpu\.acq_rel|[sl][td]\.global", ptx)
    order = [each for at, each in enumerate(order) if at == 0 or each != order[at - 1]]
    return [
        " ".join(order[at - 2 : at + 3]) for at, each in enumerate(order) if each.startswith("atom")
    ]


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which is where they are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump tells no registers: {said}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    json.dump({name: compiled(variant) for name, variant in VARIANTS.items()}, sys.stdout)
