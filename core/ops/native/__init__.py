"""The native CPU kernels: C sources, their build, and their calls from Python."""

from __future__ import annotations

from .build import NativeBuildError, variants
from .library import NativeLibrary, native_library
from .recipe import Variant

__all__ = [
    "NativeBuildError",
    "NativeLibrary",
    "Variant",
    "native_library",
    "variants",
]
