"""``foretoken selftest``: check the native kernels on this machine, and time them.

Every operation of the native backend is compared with the torch backend on the same input. The
linears are timed, next to the memory bandwidth and matrix rate measured in the same run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...core.errors import ForetokenError
from ...core.interface.kv_codec import NATIVE, KvDtype
from ...core.interface.sampling import SamplingMetadata
from ...core.model.description.rope import RopeSpec, RopeTable
from ...core.ops.base import Ops
from ...core.ops.batch import RaggedBatch, Segment, build_batch
from ...core.ops.kv_pool import KVPool
from ...core.ops.native import NativeLibrary, native_library
from ...core.ops.native.limits import best_seconds, matrix_rate, read_bandwidth
from ...core.ops.native.native_ops import NativeOps
from ...core.ops.native.products import bfloat16_products
from ...core.ops.native.structs.linear import NativeLinear, Products, linear, pack_linear
from ...core.ops.quantize import Quantize
from ...core.ops.torch.torch_ops import TorchOps
from ...core.ops.weights import Activation, HeadLayout, HeadNorm, Norm, PackedLinear
from ...core.sampling.drafted_row import DraftedRow
from ...core.sampling.sampler import TorchSampler
from ..types.sampling_params import SamplingParams

DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # limits of relative errors
KV_LIMITS = {torch.float32: 2e-3, torch.bfloat16: 1e-2}  # limits for a scaled KV cache
KINDS: tuple[tuple[Quantize, torch.dtype, float], ...] = (
    ("none", torch.float32, 1e-5),
    ("none", torch.bfloat16, 1e-2),
    ("int8", torch.bfloat16, 2e-2),
    ("int4", torch.bfloat16, 0.12),
)
CHOICES = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(),
    "cut": SamplingParams(top_k=200, top_p=0.9, min_p=1e-4),
    "edited": SamplingParams(repetition_penalty=1.3, logit_bias={7: 20.0}),
}
ROWS = (1, 4, 8, 64, 256)
KIND_ROWS = (1, 8, 64, 256)
_OUT, _IN = 3072, 1024  # size of the timed linears
_TIMED_BYTES = 192 << 20  # bytes of weights, more than the CPU caches hold
_HEADS = HeadLayout(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
_PAGE_SIZE = 16

_NAMES: dict[Products, str] = {"bfloat16": "bf16", "float32": "float32"}

_Operation: TypeAlias = Callable[[Ops], Tensor]
_Weight = TypeVar("_Weight", bound=PackedLinear)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative error of an operation against PyTorch, and its limit."""

    name: str
    dtype: torch.dtype
    error: float
    limit: float

    @property
    def passes(self) -> bool:
        """Whether the error is within the limit; an error of NaN is not."""
        return self.error <= self.limit


def selftest(*, threads: int) -> int:
    """Print the results. Return 0 if every operation agrees with PyTorch, else 1.

    Raises `ForetokenError` if no kernels are available.
    """
    library = native_library()
    if library is None:
        raise ForetokenError("no native kernels are available (the log line above has the reason)")
    torch.manual_seed(0)
    ops = NativeOps(library)
    ops.set_threads(threads)
    print(f"native kernels: {library.variant}, threads: {library.set_threads(threads)}\n")
    found = [*compare(ops), *_compare_linears(library), *_compare_choices(ops)]
    for one in found:
        verdict = "ok" if one.passes else "WRONG"
        kind = str(one.dtype).removeprefix("torch.")
        print(f"{one.name:14} {kind:9} error {one.error:8.1e} of {one.limit:<5.2g}  {verdict}")
    _print_speeds(library)
    _print_kinds(library)
    return 0 if all(one.passes for one in found) else 1


@torch.inference_mode()
def compare(ops: Ops) -> Iterator[Comparison]:
    """Compare every operation except the linears with `TorchOps`."""
    oracle = TorchOps()
    for dtype in DTYPES:
        for name, operation in _operations(dtype):
            error = _error(operation(ops), operation(oracle))
            limits = KV_LIMITS if name.endswith(NATIVE) else LIMITS
            yield Comparison(name, dtype, error, limits[dtype])


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, _Operation]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x, residual, weight, table = draw(7, 200), draw(7, 200), draw(200), draw(50, 200)
    ids = torch.tensor([3, 0, 49, 3])
    yield "embedding", lambda ops: ops.embedding(ids, table)
    rms = Norm(weight, 1e-6)
    layer_norm = Norm(weight.float(), 1e-6, residual[0].float(), is_layer=True)
    yield "rms norm", lambda ops: ops.norm(x, rms)
    yield "add, rms norm", lambda ops: torch.cat(ops.add_norm(x, residual, rms))
    yield "layer norm", lambda ops: ops.norm(x, layer_norm)
    yield "silu", lambda ops: ops.activate(x)
    yield "gelu", lambda ops: ops.activate(x, Activation("gelu_tanh", gated=False))
    batch = _batch()
    width = _HEADS.num_heads + 2 * _HEADS.num_kv_heads
    qkv = draw(batch.num_rows, width * _HEADS.head_dim)
    norm = HeadNorm(torch.rand(width - _HEADS.num_kv_heads, _HEADS.head_dim) + 0.5, 1e-6)
    capped = {"cap": 2.0, "sinks": torch.randn(_HEADS.num_heads)}
    kv = draw(2 * _HEADS.num_kv_heads * 40 * _PAGE_SIZE * _HEADS.head_dim)
    yield "rope_write", lambda ops: _attend(ops, batch, qkv, kv, norm, None)[1]
    yield "attention", lambda ops: _attend(ops, batch, qkv, kv, norm, None)[0]
    yield "attn. window", lambda ops: _attend(ops, batch, qkv, kv, norm, 100)[0]
    yield "attn. capped", lambda ops: _attend(ops, batch, qkv, kv, norm, 100, rule=capped)[0]

    def scaled(name: KvDtype, window: int | None, part: int) -> _Operation:
        return lambda ops: _attend(ops, batch, qkv, kv, norm, window, name)[part]

    for name in NATIVE:
        yield f"rope_wr. {name}", scaled(name, None, 1)
        yield f"attn. {name}", scaled(name, 100, 0)


def _batch() -> RaggedBatch:
    """Return a batch of a prompt, of five rows to verify, and of a decode step.

    The pages of its three sequences are scattered over the pool.
    """
    pages = array("q", torch.randperm(40).tolist())
    return build_batch(
        [
            Segment(range(70), 0, pages[:5], 1),
            Segment(range(5), 300, pages[5:25], 5),
            Segment([1], 200, pages[25:38], 1),
        ],
        page_size=_PAGE_SIZE,
        device="cpu",
        min_rows=1,
    )


def _attend(
    ops: Ops,
    batch: RaggedBatch,
    qkv: Tensor,
    kv: Tensor,
    norm: HeadNorm,
    window: int | None,
    kv_dtype: KvDtype = "auto",
    rule: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention output, and the pool with the written keys and values."""
    pool = KVPool(
        40,
        num_layers=1,
        num_kv_heads=_HEADS.num_kv_heads,
        head_dim=_HEADS.head_dim,
        page_size=_PAGE_SIZE,
        dtype=qkv.dtype,
        device="cpu",
        kv_dtype=kv_dtype,
    )
    whole = (slice(None), slice(None))
    pool.store(pool.blocks, whole, kv.view(-1, _PAGE_SIZE, _HEADS.head_dim).float())
    rope = RopeTable(RopeSpec(), _HEADS.head_dim, "cpu")
    plan = ops.plan(batch, pool, _HEADS, rope)
    q = ops.rope_write(qkv.clone(), 0, plan, norm)
    out = ops.attention(q, 0, plan, window, **(rule or {}))
    return out, pool.load_blocks(pool.blocks)


def _compare_linears(library: NativeLibrary) -> Iterator[Comparison]:
    """Compare the linears with float64 over the original weights, including quantisation errors."""
    for quantize, dtype, limit in KINDS:
        weight, bias = torch.randn(101, 300).to(dtype), torch.randn(101).to(dtype)
        x = torch.randn(17, 300).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        out = linear(library, x, pack_linear(library, weight, bias, quantize))
        name = "linear" if quantize == "none" else f"linear {quantize}"
        yield Comparison(name, dtype, _error(out, expected), limit)


def _compare_choices(ops: Ops) -> Iterator[Comparison]:
    """Compare tokens sampled from a large vocabulary; the error is the share that differs."""
    logits = 3 * torch.randn(24, 32_000)
    for name, params in CHOICES.items():
        rows = [
            DraftedRow(array("q", [5, 9]), SamplingMetadata(params=params, seed=seed, prompt_len=1))
            for seed in range(len(logits))
        ]
        pairs = zip(
            ops.sampler.sample(logits, rows), TorchSampler().sample(logits, rows), strict=True
        )
        share = sum(found != expected for found, expected in pairs) / len(logits)
        yield Comparison(f"choose {name}", logits.dtype, share, 0.0)


def _error(found: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def _print_speeds(library: NativeLibrary) -> None:
    for quantize, dtype, _ in KINDS:
        # Measured for each kind, since a shared machine's speed changes within seconds.
        bandwidth, rate = read_bandwidth(library), matrix_rate(library)
        print(f"\nmachine: reads {bandwidth / 1e9:.1f} GB/s, bf16 {rate / 1e9:.0f} GFLOP/s")
        weight = torch.randn(_OUT, _IN).to(dtype)
        packed = [pack_linear(library, weight, None, quantize)]
        copies = max(1, _TIMED_BYTES // packed[0].num_bytes)
        packed += [pack_linear(library, weight, None, quantize) for _ in range(copies - 1)]
        name = str(dtype).removeprefix("torch.") if quantize == "none" else quantize
        for num_rows in ROWS:
            seconds = _time(library, packed, torch.randn(num_rows, _IN).to(dtype))
            read = packed[0].num_bytes / seconds
            computed = 2 * num_rows * _OUT * _IN / seconds
            print(
                f"linear {name:9} {num_rows:4} rows {read / 1e9:6.1f} GB/s ({read / bandwidth:4.0%}"
                f" of reading) {computed / 1e9:6.0f} GFLOP/s ({computed / rate:4.0%} of bf16)"
            )


def _time(library: NativeLibrary, packed: list[NativeLinear], x: Tensor) -> float:
    """Return the seconds of one linear with weights outside the CPU caches."""
    return _time_each(lambda weight: linear(library, x, weight), packed)


def _time_each(call: Callable[[_Weight], object], weights: Sequence[_Weight]) -> float:
    """Return the mean seconds of one call, over calls with each of the weights."""

    def all_of_them() -> None:
        for each in weights:
            call(each)

    return best_seconds(all_of_them) / len(weights)


def _print_kinds(library: NativeLibrary) -> None:
    """Print the time of a bfloat16 linear with each possible kernel."""
    print("\nbfloat16 weights, microseconds per linear by kernel:")
    print(f"{'rows':>4} {'bf16':>9} {'float32':>9} {'torch':>9}  fastest")
    for num_rows in KIND_ROWS:
        seconds = time_kinds(library, num_rows)
        cells = " ".join(f"{1e6 * each:9.0f}" for each in seconds.values())
        print(f"{num_rows:4} {cells}  {min(seconds, key=seconds.__getitem__)}")
    print(f"the engine uses {_NAMES[bfloat16_products(library)]} for all numbers of rows")


def time_kinds(library: NativeLibrary, num_rows: int) -> dict[str, float]:
    """Return the seconds that each kernel takes for a bfloat16 linear.

    The kernels are native ones, with bf16 and with float32 products, and torch's. Each is timed
    with more weights than the CPU caches hold. For torch, the rows are padded as its backend pads
    them.
    """
    weight, torch_ops = torch.randn(_OUT, _IN).bfloat16(), TorchOps()
    copies = range(max(1, _TIMED_BYTES // weight.nbytes))
    x = torch.randn(num_rows, _IN).bfloat16()
    found = {}
    for products, name in _NAMES.items():
        packed = [pack_linear(library, weight, None, products=products) for _ in copies]
        found[name] = _time(library, packed, x)
    reordered = [torch_ops.pack_linear(weight) for _ in copies]
    padded = torch.cat((x, x.new_zeros(max(0, torch_ops.min_rows - num_rows), _IN)))
    found["torch"] = _time_each(lambda each: torch_ops.linear(padded, each), reordered)
    return found
