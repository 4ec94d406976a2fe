"""The kernels on the matrix unit, emulated: its arithmetic, the edges of its tiles, who may use it.

Two emulations run here. amx_emulated.c stands in for the unit's instructions in the sources.
amx_trap.c computes the instructions themselves, as the compiler made them, where this CPU refuses
each one; a CPU that has the unit computes them itself, and its bits are compared.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from array import array
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.api.cli.selftest import compare
from foretoken.core.ops.backends import choose_ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import build as building
from foretoken.core.ops.native import library as loading
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.build import (
    NativeBuildError,
    build,
    can_run,
    cpu_flags,
    engine_variants,
    variants,
)
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.native.recipe import FLAGS, KERNELS, VARIANT_FLAGS
from foretoken.core.ops.native.structs.linear import (
    NativeLinear,
    linear,
    pack_linear,
    rough_copy,
)
from foretoken.core.ops.weights import HeadLayout
from support.native_variants import EMULATION
from support.rope_fixture import Turns
from support.stored_weights import GROUPED, fitting, stored

pytestmark = pytest.mark.slow

AMX = building._NEEDED["amx"]
SHAPES = [  # [out, in]: whole tiles; less than one; odd; a tile and a bit; many tiles and a bit
    (64, 64),
    (32, 4),
    (1, 1),
    (33, 31),
    (70, 49),
    (97, 65),
    (130, 200),
]


@pytest.fixture(scope="module", params=["avx512", "plain C"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[NativeLibrary]:
    """The emulated unit beside the vectors of AVX-512, and beside plain C as on other machines."""
    if not can_run("amx-emulated") or (request.param == "avx512" and not can_run("avx512")):
        pytest.skip("this CPU cannot run it")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain C":
            flags = (*VARIANT_FLAGS["amx-emulated"], "-O1")  # -O3 takes a minute
            patch.setattr(building, "variant_flags", lambda _: flags)
        try:
            found = NativeLibrary("amx-emulated", ctypes.CDLL(str(build("amx-emulated"))))
        except NativeBuildError as error:
            pytest.skip(str(error))
    yield found
    found.set_threads(1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# -- the arithmetic, against whole numbers

ONE = 300  # numbers are multiples of 2 ** -ONE, which all sums and products here are exactly


def scaled(value: float) -> int:
    """A number of the unit's: what is not normal counts as 0."""
    return 0 if abs(value) < 2.0**-126 else int(Fraction(value) * 2**ONE)


def rounded(value: int) -> int:
    """To 24 bits, ties to even; below the normal numbers, to 0."""
    excess = max(0, abs(value).bit_length() - 24)
    half, size = (1 << excess) >> 1, abs(value)
    whole, rest = size >> excess, size & ((1 << excess) - 1)
    whole += rest > half or (excess > 0 and rest == half and whole & 1)
    size = whole << excess
    return 0 if size < 2 ** (ONE - 126) else size * (1 if value > 0 else -1)


def chain(pairs: list[tuple[int, int]]) -> int:
    total = 0
    for a, b in pairs:
        total = rounded(total + (a * b >> ONE))
    return total


def sum_of_tiles(x: list[int], w: list[int]) -> int:
    """Sum products in the order that amx.h describes: a tile is 32 numbers along K."""
    total = 0
    for at in range(0, len(x), 32):
        pairs = list(zip(x[at : at + 32], w[at : at + 32], strict=True))
        total = rounded(total + rounded(chain(pairs[0::2]) + chain(pairs[1::2])))
    return total


def of_wide_range(*shape: int, lowest: int, highest: int) -> Tensor:
    """bfloat16 with exponents from ``lowest`` to ``highest``, some zeros among them."""
    generator = torch.Generator().manual_seed(sum(shape) - lowest)
    powers = torch.randint(lowest, highest + 1, shape, generator=generator)
    powers[torch.rand(shape, generator=generator) < 0.1] = -1000
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    fractions = torch.rand(shape, generator=generator, dtype=torch.float64) + 1
    return (signs * fractions * 2.0 ** powers.double()).bfloat16()


@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize(
    ("lowest", "highest"),
    [(0, 0), (-12, 12), (-66, -60), (-126, 10), (-133, -120)],
    ids=["like numbers", "unlike", "products that are not normal", "all sizes", "not normal"],
)
def test_sums_are_those_of_the_units_two_chains(emulated, lowest, highest, rows):
    x = of_wide_range(rows, 70, lowest=lowest, highest=highest)
    weight = of_wide_range(5, 70, lowest=lowest, highest=highest)
    out = linear(emulated, x, pack_linear(emulated, weight, None), torch.float32)
    left, right = ([[scaled(v) for v in row] for row in t.tolist()] for t in (x, weight))
    expected = [[sum_of_tiles(row, column) for column in right] for row in left]
    assert [[int(Fraction(v) * 2**ONE) for v in row] for row in out.tolist()] == expected


def test_the_order_of_additions_matters_to_that_test(emulated):
    """One chain over all of K differs, so the numbers above could tell an order from another."""
    x = of_wide_range(4, 70, lowest=-12, highest=12)
    weight = of_wide_range(5, 70, lowest=-12, highest=12)
    out = linear(emulated, x, pack_linear(emulated, weight, None), torch.float32)
    left, right = ([[scaled(v) for v in row] for row in t.tolist()] for t in (x, weight))
    one_chain = [[chain(list(zip(a, b, strict=True))) for b in right] for a in left]
    assert [[int(Fraction(v) * 2**ONE) for v in row] for row in out.tolist()] != one_chain


# -- linear layers


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(emulated, shape, quantize):
    """1 to 40 rows, from the front and from the back of 75, on one and on three threads."""
    packed = pack_linear(emulated, draw(*shape).bfloat16(), draw(shape[0]), quantize)
    x = draw(75, shape[1]).bfloat16()
    together = linear(emulated, x, packed, torch.float32)
    for count in range(1, 41):
        emulated.set_threads(1 if count % 2 else 3)
        first, last = x[:count].clone(), x[-count:].clone()
        assert torch.equal(linear(emulated, first, packed, torch.float32), together[:count])
        assert torch.equal(linear(emulated, last, packed, torch.float32), together[-count:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_has_the_bits_of_the_kernels_without_the_unit(emulated, shape):
    """The unit takes over from 8 rows on: a row alone and in a batch must agree."""
    plain = native_library(next(each for each in variants() if each != "amx"))
    assert plain is not None
    weight, bias, x = draw(*shape), draw(shape[0]), draw(40, shape[1]).bfloat16()
    ours, theirs = (pack_linear(each, weight, bias, "int8") for each in (emulated, plain))
    for count in (1, 7, 8, 16, 17, 32, 33, 40):
        expected = linear(plain, x[:count], theirs, torch.float32)
        assert torch.equal(linear(emulated, x[:count], ours, torch.float32), expected), count


def packed_groups(library: NativeLibrary, kind: str, shape: tuple[int, int]) -> NativeLinear:
    """A weight of a kind whose groups have scales; "rough": one for drafts."""
    if kind == "rough":
        return rough_copy(library, pack_linear(library, draw(*shape), draw(shape[0])))
    weight = stored(kind, fitting(kind, shape))  # type: ignore[arg-type]
    return pack_linear(library, weight, draw(shape[0]))


@pytest.mark.parametrize("kind", [*GROUPED, "rough"])
def test_groups_have_the_bits_of_the_kernels_without_the_unit(emulated, kind):
    """Prompts take the unit, fewer rows the vectors: with 1, 2 and 3 threads, 3 and 8 groups."""
    packed = packed_groups(emulated, kind, (37, 96))
    x = draw(130, packed.in_features).bfloat16()
    alone = torch.cat([linear(emulated, some, packed, torch.float32) for some in x.split(7)])
    for count in range(1, 131):
        emulated.set_threads(1 + count % 3)
        together = linear(emulated, x[-count:], packed, torch.float32)
        assert torch.equal(together, alone[-count:]), count


@pytest.mark.parametrize("kind", ["int4", "int4_zero", "int6_k"])
def test_a_long_prompt_over_groups_has_the_bits_of_its_rows(emulated, kind):
    """More rows than share what is unpacked, and float32 rows with some that are not finite."""
    packed = packed_groups(emulated, kind, (70, 160))
    x = draw(530, packed.in_features)
    x[40, 3], x[300, 70] = torch.nan, torch.inf
    alone = torch.cat([linear(emulated, some, packed) for some in x.split(9)])
    together = linear(emulated, x, packed)
    assert together[[40, 300]].isnan().all()
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())
    assert together.isfinite().all(dim=1).sum() == 528


def test_what_is_not_finite_stays_in_its_own_row(emulated):
    """A neighbour's tile, or the panel behind, may lie beside it in memory."""
    weight = draw(37, 51)
    weight[0, 0] = torch.inf
    packed = pack_linear(emulated, weight.bfloat16(), None)
    for count in (4, 20, 40):
        x = draw(count, 51).bfloat16()
        x[1, 50], x[2, 8] = torch.nan, torch.inf
        out = linear(emulated, x, packed)
        assert out[1].isnan().all()
        assert not out[2].isfinite().any()
        assert out[3:, 1:].isfinite().all()


GUARDED = """
import ctypes, mmap, sys, torch
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.structs.linear import pack_linear

library = NativeLibrary("amx-emulated", ctypes.CDLL(sys.argv[1]))
size = 1 << 20
pages = mmap.mmap(-1, size + mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc = ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
for width in (2, 31, 64, 65, 200):
    packed = pack_linear(library, torch.ones(40, width).bfloat16(), None)
    for rows in (1, 5, 16, 17, 31, 33, 40):
        whole = torch.frombuffer(pages, dtype=torch.bfloat16, count=size // 2)
        x = whole[size // 2 - rows * width :].view(rows, width).fill_(1)
        out = torch.empty(rows, 40)
        library.linear(packed.struct, x, out)
        assert out.eq(width).all()
"""


def test_nothing_is_read_behind_the_last_row(emulated):
    """x ends where memory ends: one byte more would end the process."""
    command = [sys.executable, "-c", GUARDED, emulated.c._name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# -- attention


class Rows:
    """Keys and values of one sequence, and of a stranger beside it, in pages full of NaN."""

    def __init__(self, shape: tuple[int, int, int], kv_dtype: str, length: int = 150) -> None:
        num_heads, num_kv_heads, head_dim = shape
        self.heads = HeadLayout(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        self.kv_dtype, self.num_kv_heads, self.head_dim = kv_dtype, num_kv_heads, head_dim
        self.qkv = draw(length, (num_heads + 2 * num_kv_heads) * head_dim).bfloat16()
        self.length = length

    def pool(self) -> KVPool:
        pool = KVPool(
            40,
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=16,
            dtype=torch.bfloat16,
            device="cpu",
            kv_dtype=self.kv_dtype,  # type: ignore[arg-type]
        )
        pool.data.fill_(-1 if self.kv_dtype == "int8" else torch.nan)
        return pool

    def run(self, library: NativeLibrary, chunks: list[int]) -> Tensor:
        """The sequence in chunks, a stranger's rows before each of them."""
        ops, pool, outs, at = NativeOps(library), self.pool(), [], 0
        turns = Turns(0.7 ** torch.arange(self.head_dim // 2))
        own, other = array("q", range(10)), array("q", range(20, 30))
        for number, size in enumerate(chunks):
            beside = number % 5
            segments = [Segment(range(beside), 0, other, 0)] if beside else []
            segments.append(Segment(range(size), at, own, 0))
            batch = build_batch(segments, page_size=16, device="cpu", min_rows=1)
            plan = ops.plan(batch, pool, self.heads, turns)
            rows = torch.cat((self.qkv[:beside], self.qkv[at : at + size]))
            q = ops.rope_write(rows, 0, plan, None)
            outs.append(ops.attention(q, 0, plan, None)[beside:])
            at += size
        assert at == self.length
        return torch.cat(outs)


CHUNKS = [[1] * 150, [1, 2, 3, 5, 8, 13, 21, 34, 55, 8], [17, 33, 100], [75, 75]]
HEADS = [(6, 2, 24), (4, 1, 64), (9, 3, 80), (20, 1, 128), (2, 2, 256), (3, 1, 6)]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attention_has_the_same_bits_in_chunks_of_any_size(emulated, shape, kv_dtype):
    rows = Rows(shape, kv_dtype)
    whole = rows.run(emulated, [150])
    assert whole.isfinite().all()
    for chunks in CHUNKS:
        assert torch.equal(rows.run(emulated, chunks), whole), chunks


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attention_of_int8_keys_has_the_bits_of_the_kernels_without_the_unit(shape):
    if not can_run("avx512"):
        pytest.skip("elsewhere the vectors around the unit differ")
    unit, plain = native_library("amx-emulated"), native_library("avx512")
    assert unit is not None
    assert plain is not None
    rows = Rows(shape, "int8")
    for chunks in ([150], CHUNKS[1]):
        assert torch.equal(rows.run(unit, chunks), rows.run(plain, chunks))


def test_every_operation_agrees_with_torch(emulated):
    torch.manual_seed(0)
    found = list(compare(NativeOps(emulated)))
    assert len(found) == 24
    assert all(each.passes for each in found), found


# -- the rules of the unit


def test_tiles_are_released_when_a_call_is_done(emulated):
    packed = pack_linear(emulated, draw(40, 40).bfloat16(), None)
    for count in (1, 40):
        linear(emulated, draw(count, 40).bfloat16(), packed)
        assert emulated.c.ft_amx_in_use() == 0
    Rows((4, 1, 64), "auto", 20).run(emulated, [20])
    emulated.c.ft_multiply(1)
    assert emulated.c.ft_amx_in_use() == 0


@pytest.mark.parametrize(
    ("calls", "refused"),
    [
        ("c.ft_emulated_zero(0)", "a tile before its shape is set"),
        ("configure(16); c.ft_emulated_release(); c.ft_emulated_zero(0)", "before its shape"),
        ("configure(17)", "a shape"),
        ("configure(16, 0); c.ft_emulated_zero(1)", "a tile without a shape"),
        ("configure(16); c.ft_emulated_dot_bf16(0, 1, 1)", "one tile twice"),
        ("configure(4); c.ft_emulated_dot_bf16(0, 1, 2)", "shapes that do not match"),
        ("configure(16, palette=0)", "any palette but 1"),
    ],
)
def test_misuse_ends_the_process_as_the_unit_would(emulated, calls, refused):
    code = f"""
import ctypes
c = ctypes.CDLL({emulated.c._name!r})
def configure(rows, second=None, palette=1):
    each = [rows, rows if second is None else second] + [rows] * 6
    widths = [64 * (n > 0) for n in each] + [0] * 8
    shapes = bytes([palette] + [0] * 15) + b"".join(n.to_bytes(2, "little") for n in widths)
    c.ft_emulated_configure(shapes + bytes(each) + bytes(8))
{calls}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert refused in done.stderr


# -- who gets it


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a CPU with AMX, under a Linux that permits it or does not."""

    def pretend(*, permitted: bool) -> None:
        monkeypatch.delenv(building.SETTING, raising=False)
        monkeypatch.setattr(building, "cpu_flags", lambda: AMX)
        monkeypatch.setattr(building, "tiles_permitted", lambda: permitted)

    return pretend


def test_the_unit_is_first_where_the_cpu_has_it_and_linux_permits_it(machine):
    machine(permitted=True)
    assert engine_variants() == ("amx", "avx512", "avx2")


def test_without_permission_avx512_computes(machine):
    machine(permitted=False)
    assert variants() == ("avx512", "avx2", "scalar")
    assert engine_variants() == ("avx512", "avx2")


def test_without_the_cpus_flags_permission_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(building, "cpu_flags", lambda: AMX - {"amx_bf16"})
    monkeypatch.setattr(building, "tiles_permitted", lambda: pytest.fail("asked"))
    assert "amx" not in variants()


class Refusing:
    """Stands for the C library of a Linux that gives no tiles."""

    def __init__(self, *_: object, **__: object) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.syscall = self

    def __call__(self, *arguments: ctypes.c_long) -> int:
        self.asked.append(tuple(each.value for each in arguments))
        return -1


def test_a_refusal_of_linux_is_logged_once(monkeypatch, caplog):
    refusing = Refusing()
    monkeypatch.setattr(building.ctypes, "CDLL", lambda *_, **__: refusing)
    monkeypatch.setattr(building, "cpu_flags", lambda: AMX)
    monkeypatch.setattr(building.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(building.sys, "platform", "linux")
    building.tiles_permitted.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not building.tiles_permitted()
            assert not building.tiles_permitted()
    finally:
        building.tiles_permitted.cache_clear()
    assert refusing.asked == [(158, 0x1023, 18)]  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    assert len(caplog.records) == 1
    assert "does not permit the use of AMX" in caplog.text


def test_a_compiler_that_does_not_know_the_unit_leaves_avx512(machine, monkeypatch):
    machine(permitted=True)
    tried = []

    def load(variant: str) -> str:
        tried.append(variant)
        if variant == "amx":
            raise NativeBuildError("unrecognized option -mamx-tile")
        return variant

    monkeypatch.setattr(loading, "_load", load)
    assert native_library() == "avx512"
    assert tried == ["amx", "avx512"]


def test_the_variant_of_the_environment_is_the_engines(monkeypatch):
    if not can_run("amx-emulated"):
        pytest.skip("this CPU cannot run it")
    monkeypatch.setenv(building.SETTING, "amx-emulated")
    ops = choose_ops("cpu", backend="native", dtype=torch.bfloat16)
    assert isinstance(ops, NativeOps)
    assert ops.library.variant == "amx-emulated"
    assert ops.products == "bfloat16"


@pytest.mark.parametrize("asked", ["amx512", "amx"])
def test_a_variant_that_cannot_run_here_is_refused_by_name(asked, monkeypatch):
    monkeypatch.setattr(building, "cpu_flags", lambda: AMX - {"amx_tile"})
    monkeypatch.setenv(building.SETTING, asked)
    with pytest.raises(NativeBuildError, match=f"{asked}, but this machine runs avx512, avx2"):
        engine_variants()


def assembly(source: str) -> str:
    """Compile a source for the true matrix unit, to assembly."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    flags += [*building.variant_flags("amx"), f"-I{KERNELS}"]
    command = [*building._find_compiler(), *flags, "-S", "-o", "-", str(KERNELS / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr:
        pytest.skip("this compiler does not know the unit")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("source", "products"),
    [
        ("linear/linear_amx.c", ["tdpbf16ps", "tdpbsud"]),
        ("linear/linear_amx_groups.c", ["tdpbsud"]),
        ("attention/attention.c", ["tdpbf16ps", "tdpbssd"]),
    ],
)
def test_the_true_unit_compiles_to_its_instructions(source, products):
    """Compiled, never run: on a machine without the unit it would end the process."""
    code = assembly(source)
    for name in ("ldtilecfg", "tileloadd", "tilestored", "tilerelease", *products):
        assert f"\t{name}" in code
    assert "ft_emulated" not in code


def test_the_library_for_the_unit_is_whole_and_others_have_none_of_it():
    if not can_run("avx512"):
        pytest.skip("no AVX-512 here")
    try:
        unit = ctypes.CDLL(str(build("amx")))
    except NativeBuildError as error:
        pytest.skip(str(error))
    plain = ctypes.CDLL(str(build("avx512")))
    assert hasattr(unit, "ft_amx_linear")
    assert not hasattr(unit, "ft_emulated_zero")
    assert not hasattr(plain, "ft_amx_linear")
    assert NativeLibrary("amx", unit).lanes == 16  # all functions are there; this one needs no tile


TRAPPED = """
import ctypes, sys, torch
sys.path[:0] = sys.argv[4:]
from test_amx import GROUPED, HEADS, SHAPES, Rows, draw, packed_groups
from foretoken.core.ops.native.build import can_run
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.structs.linear import linear, pack_linear

trap = ctypes.CDLL(sys.argv[1])
trap.trap_count.restype = ctypes.c_long
if not can_run("amx"):  # else Linux has given this process the tiles, and nothing traps
    trap.trap_install()
unit, emulated = (NativeLibrary("amx", ctypes.CDLL(path)) for path in sys.argv[2:4])
for threads in (1, 3):
    unit.set_threads(threads)
    for shape in SHAPES[1:]:
        for quantize in ("none", "int8"):
            packed = pack_linear(unit, draw(*shape).bfloat16(), draw(shape[0]), quantize)
            for rows in (1, 8, 16, 17, 33, 40):
                x = draw(rows, shape[1]).bfloat16()
                outs = [linear(each, x, packed, torch.float32) for each in (unit, emulated)]
                assert torch.equal(*outs), (shape, quantize, rows)
    for kind in GROUPED:
        packed = packed_groups(unit, kind, (70, 160))
        x = draw(33, packed.in_features).bfloat16()
        outs = [linear(each, x, packed, torch.float32) for each in (unit, emulated)]
        assert torch.equal(*outs), kind
unit.set_threads(1)
for shape in HEADS:
    for kv_dtype in ("auto", "int8"):
        rows = Rows(shape, kv_dtype, 40)
        outs = [rows.run(each, [1, 7, 32]) for each in (unit, emulated)]
        assert torch.equal(*outs), (shape, kv_dtype)
print(trap.trap_count())
"""


def test_what_the_compiler_made_for_the_true_unit_computes_the_same_bits(tmp_path):
    if not can_run("avx512"):
        pytest.skip("the code around the unit needs AVX-512")
    if cpu_flags() >= AMX and not can_run("amx"):
        pytest.skip("Linux refuses the tiles, but not the instruction that sets their shapes")
    folder, trap = Path(__file__).parent, tmp_path / "trap.so"
    sources = [folder / "amx_trap.c", EMULATION]
    flags = [*FLAGS, "-march=x86-64-v3", "-DFT_AMX_EMULATED"]
    headers = f"-I{KERNELS}"
    command = [*building._find_compiler(), *flags, headers, *map(str, sources)]
    subprocess.run([*command, "-o", str(trap), "-lm"], check=True)
    try:
        libraries = [str(build("amx")), str(build("amx-emulated"))]
    except NativeBuildError as error:
        pytest.skip(str(error))
    paths = [str(folder), str(folder.parents[2])]
    command = [sys.executable, "-c", TRAPPED, str(trap), *libraries, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    num_trapped = int(done.stdout)  # instructions that this CPU refused
    assert num_trapped == 0 if can_run("amx") else num_trapped > 1000
