"""The native CPU kernels: C sources, how they are built, and how Python calls them."""

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
