"""Triton's interpreter, without repeated work, and with matrix products of one order.

Types, constants and a check for overflow of every addition are made in Python for each launch and
each value: nearly all of the time of a test over small tiles. What is refused stays as it is.

Products of tiles are NumPy's, whose sums on some CPUs depend on the number of rows (OpenBLAS'
kernels for AVX2). A GPU's do not, so they are computed here in an order that K alone decides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


@cache
def quicken() -> None:
    """Once a process, before the first launch."""
    from triton import language as tl
    from triton.runtime import interpreter

    _fix_products(interpreter, tl)
    numpy_type = cache(interpreter._get_np_dtype)

    def type_of(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):  # has no hash
            return numpy_type.__wrapped__(scalar)
        return numpy_type(scalar)

    interpreter._get_np_dtype = type_of
    _patch_once(interpreter, tl)
    _share_shapes(tl)
    _unwrap_at_once(tl)
    _meet_at_once(tl)
    # It computes whether sums leave 32 bits, and drops the answer outside of its debug mode.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _fix_products(interpreter: Any, tl: Any) -> None:
    """Sum each element of a product along K alone, whatever the number of rows and columns."""
    handle, convert = interpreter.TensorHandle, interpreter._convert_float

    def wide(operand: Any, dtype: Any) -> Any:
        data = operand.data
        if operand.dtype.is_floating() and operand.dtype.primitive_bitwidth == 8:
            data = convert(data, operand.dtype, tl.float16, None).view(np.float16)
        return data.astype(dtype)

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_ignored: Any) -> Any:
        dtype = d.data.dtype
        rows, columns = wide(a, dtype), wide(b, dtype).swapaxes(-1, -2)
        # The last axis is contiguous: NumPy sums along it in pairs, by its length.
        products = np.multiply(rows[..., :, None, :], columns[..., None, :, :], order="C")
        return handle(products.sum(axis=-1, dtype=dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_once(interpreter: Any, tl: Any) -> None:
    """The interpreter's functions stay in the language's place.

    By itself it puts them there at each launch, and whenever a kernel calls another function. No
    one else reads the language where it is asked for.
    """
    patch, patched = interpreter._patch_lang, set[int]()
    seen: dict[int, Any] = {}  # modules of kernels, which live as long as their ids are known
    unpatched = interpreter._LangPatchScope()

    def patch_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in seen:
            seen[id(names)] = names
            known = {id(each) for each in names.values() if each is tl or each is tl.core}
            if not known <= patched:
                patch(fn)  # and never restore
                patched.update(known)
        return unpatched

    def patch_attribute(place: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        called = getattr(member, "__wrapped__", member)  # which does not look for a semantic again

        def interpreted(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return called(*args, **options)

        scope.set_attr(place, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute


def _share_shapes(tl: Any) -> None:
    """Tensors and types of one shape have the same constants."""
    core = tl.core
    init_type = tl.block_type.__init__

    @cache
    def type_parts(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        made = object.__new__(tl.block_type)
        init_type(made, tl.int32, list(shape))
        return made.shape, made.numel, str(made.shape)

    @cache
    def tensor_parts(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = shape.values if type(shape) is core.tuple else shape
        sizes = tuple([n.value if type(n) is tl.constexpr else n for n in numbers])
        self.element_ty, self.sizes = element_ty, sizes
        self.shape, self.numel, text = type_parts(sizes)
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_parts(type.sizes if type.is_block() else ())

    tl.block_type.__init__, tl.tensor.__init__ = make_type, make_tensor


def _unwrap_at_once(tl: Any) -> None:
    """Most values are no constants, and most types that are compared are one object."""
    core, unwrap, equals = tl.core, tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    integers = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
    types = (tl.dtype, tl.pointer_type, tl.block_type)
    plain = frozenset((tl.tensor, int, float, bool, str, type(None), *types))

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrapped
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    tl.dtype.is_int = lambda self: self.name in integers


def _meet_at_once(tl: Any) -> None:
    """Operands mostly have one type, or shapes that have met before. Others take the usual way."""
    from triton.language.semantic import TritonSemantic as Semantic

    check, broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
    promote, promoted = Semantic.computation_type_impl, dict[tuple[Any, ...], Any]()

    def type_of(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, *more: Any) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, *more)
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, *more)
        return promoted[key]

    @cache
    def joined(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        pairs = list(zip(left, right, strict=False))
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in pairs):
            return None
        return tuple(map(max, left, right))

    def meet(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        ours, theirs = (getattr(each.type, "sizes", None) for each in (left, right))
        if ours == theirs:
            return left, right
        if ours is None:
            return fill(self, left, theirs), right
        if theirs is None:
            return left, fill(self, right, ours)
        shape = joined(ours, theirs)
        if shape is None:
            return broadcast(self, left, right)
        return (
            left if ours == shape else grow(self, left, shape),
            right if theirs == shape else grow(self, right, shape),
        )

    def fill(self: Any, scalar: Any, shape: tuple[int, ...]) -> Any:
        kind = tl.block_type(scalar.dtype, shape)
        return self.make_tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def grow(self: Any, block: Any, shape: tuple[int, ...]) -> Any:
        kind = tl.block_type(block.dtype, shape)
        return self.make_tensor(self.builder.create_broadcast(block.handle, shape), kind)

    def operands(self: Any, left: Any, right: Any, *allowed: bool, **options: bool) -> Any:
        is_division = len(allowed) > 3 or "div_or_mod" in options
        if type(left) is type(right) is tl.tensor and not is_division:
            kind = left.dtype
            if kind.name == right.dtype.name and not kind.is_ptr():
                return self.broadcast_impl_value(left, right)
        return check(self, left, right, *allowed, **options)

    Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value = operands, meet
    Semantic.computation_type_impl = type_of
