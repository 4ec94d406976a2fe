"""Triton's interpreter, without work that it repeats in each call of each function."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Look for the functions of the language once a launch, and make the table of types once.

    The interpreter puts its own functions in the language's place whenever a kernel calls another
    function, though they stand there from the launch on: a sixth of the time of these tests.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, cache(interpreter._get_np_dtype)
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        known = {id(each) for each in fn.__globals__.values() if each is tl or each is tl.core}
        if known <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(known)
        restore = scope.restore

        def forget() -> None:
            patched.clear()
            restore()

        scope.restore = forget
        return scope

    def type_of(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):  # has no hash
            return numpy_type.__wrapped__(scalar)
        return numpy_type(scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, type_of
