"""The native CPU kernels: C sources, how they are built, and how Python calls them."""

from __future__ import annotations

from .build import NativeBuildError, Variant, variants
from .library import NativeLibrary, native_library

__all__ = [
    "NativeBuildError",
    "NativeLibrary",
    "Variant",
    "native_library",
    "variants",
]
