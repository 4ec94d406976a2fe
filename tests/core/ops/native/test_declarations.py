"""What ctypes lays out is what the C compiler lays out, and C that cannot be read is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p, pointer, sizeof
from pathlib import Path

import numpy as np
import pytest

from foretoken.core.ops.native import declarations
from foretoken.core.ops.native.declarations import STRUCTS, Structs, signatures
from foretoken.core.ops.native.recipe import FOLDER, KERNELS, sources
from foretoken.core.sampling import encoded

Read = Callable[[str], Structs]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """A function that reads the structs of a text in place of the kernels'."""

    def read(text: str) -> Structs:
        source = tmp_path / "source.c"
        source.write_text(text)
        monkeypatch.setattr(declarations, "sources", lambda: [source])
        monkeypatch.setattr(declarations, "STRUCTS", Structs())
        declarations._declarations.cache_clear()
        return declarations.STRUCTS

    yield read
    declarations._declarations.cache_clear()


def structs_of_python() -> dict[str, type[Structure]]:
    """Every struct that Python makes, and those inside them."""
    code = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    for name in re.findall(r"STRUCTS\.(ft_\w+)", code):
        getattr(STRUCTS, name)
    return dict(vars(STRUCTS))


def defining_file(name: str) -> str:
    """The source that defines a struct, as the kernels include it."""
    definition = re.compile(rf"struct {name} \{{|^\}} {name};", re.MULTILINE)
    (found,) = (path for path in sources() if definition.search(path.read_text()))
    return str(found.relative_to(KERNELS))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_ctypes_and_the_c_compiler_lay_out_every_struct_alike(tmp_path: Path) -> None:
    structs = structs_of_python()
    assert len(structs) > 25
    claims: dict[str, list[str]] = {}
    for name, struct in structs.items():
        claim = claims.setdefault(defining_file(name), [])
        claim.append(f'_Static_assert(sizeof({name}) == {sizeof(struct)}, "{name}");')
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            claim += [
                f'_Static_assert({have} == {wanted}, "{name}.{field}");'
                for have, wanted in (
                    (f"offsetof({name}, {field})", place.offset),
                    (f"sizeof((({name} *)0)->{field})", place.size),
                )
            ]
    for file, claim in claims.items():
        unit = tmp_path / "unit.c"
        unit.write_text("\n".join([f'#include "{file}"', "#include <stddef.h>", *claim]))
        command = [
            "cc",
            "-std=gnu11",
            "-DFT_SCALAR",
            f"-I{KERNELS}",
            f"-I{(KERNELS / file).parent}",
        ]
        compiled = subprocess.run(
            [*command, "-w", "-fsyntax-only", str(unit)], capture_output=True, text=True
        )
        assert compiled.returncode == 0, compiled.stderr


def test_the_record_of_sampling_parameters_is_the_struct_that_c_reads() -> None:
    """`EncodedSampling` packs it by its own table, which Triton's kernels read, too."""
    record = np.dtype([field[:2] for field in encoded._FIELDS], align=True)
    struct = STRUCTS.ft_sampling
    assert sizeof(struct) == record.itemsize
    for name, *_ in struct._fields_:
        assert getattr(struct, name).offset == record.fields[name][1], name  # type: ignore[index]


def test_fields_are_in_the_order_of_c_and_comments_are_no_fields(read: Read) -> None:
    structs = read(
        "typedef struct {\n"
        "    int64_t first, second; /* not a field; neither, this */\n"
        "    const float *numbers, *const others;\n"
        "    const ft_pair *pair;\n"
        "    const ft_pair *const *pairs;\n"
        "    ft_pair whole;\n"
        "} ft_owner;\n"
        "struct ft_pair {\n"
        "    int32_t number;\n"
        "    const struct ft_pair *next;\n"
        "};\n"
    )
    assert [name for name, *_ in structs.ft_owner._fields_] == (
        ["first", "second", "numbers", "others", "pair", "pairs", "whole"]
    )
    last = structs.ft_pair(number=3)
    owner = structs.ft_owner(numbers=64, pair=pointer(structs.ft_pair(next=pointer(last))))
    assert owner.pair.contents.next.contents.number == 3
    assert (owner.numbers, owner.others, owner.second, owner.whole.number) == (64, None, 0, 0)


def test_a_pointer_to_another_struct_is_refused(read: Read) -> None:
    structs = read(
        "typedef struct { int64_t n; } ft_a;\ntypedef struct { int64_t n; } ft_b;\n"
        "typedef struct { const ft_a *a; } ft_owner;\n"
    )
    with pytest.raises(TypeError):
        structs.ft_owner(a=pointer(structs.ft_b(n=1)))


def test_a_struct_and_a_field_that_c_lacks_are_refused() -> None:
    with pytest.raises(AttributeError, match="no struct ft_absent"):
        STRUCTS.ft_absent()
    with pytest.raises(AttributeError, match="epsilon"):
        STRUCTS.ft_norm(epsilon=1e-6)
    with pytest.raises(AttributeError, match="epsilon"):
        STRUCTS.ft_norm().epsilon = 1e-6


@pytest.mark.parametrize("member", ["int64_t counts[4]", "int64_t bits : 4", "void (*call)(int)"])
def test_a_member_that_is_not_understood_is_refused(read: Read, member: str) -> None:
    structs = read(f"typedef struct {{ {member}; }} ft_odd;")
    with pytest.raises(ValueError, match="cannot read the C declaration"):
        _ = structs.ft_odd


def test_a_signature_has_the_types_of_its_prototype(read: Read) -> None:
    structs = read(
        "typedef struct { int64_t n; } ft_a;\n"
        "FT_EXPORT int64_t ft_count(const ft_a *a, const int64_t *numbers, float factor,\n"
        "                           int32_t count, ft_a whole) {\n"
        "FT_EXPORT void ft_rest(void);\n"
        "void ft_inside(int count);\n"
    )
    assert list(signatures()) == [
        ("ft_count", c_int64, [POINTER(structs.ft_a), c_void_p, c_float, c_int, structs.ft_a]),
        ("ft_rest", None, []),
    ]
