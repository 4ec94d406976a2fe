"""The variants of the native kernels that tests can run here."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.core.ops.native import Variant, variants
from foretoken.core.ops.native import build as building
from foretoken.core.ops.native.build import can_run

EMULATION = Path(__file__).parents[1] / "core" / "ops" / "native" / "amx_emulated.c"
building.EMULATION = EMULATION  # whoever imports this module has the variant "amx-emulated"


def every_variant() -> tuple[Variant, ...]:
    """Return this machine's variants, and the emulated matrix unit wherever it can be compiled.

    Where the environment names a variant (`make test-avx2`) that one alone: `make test` has them
    all.
    """
    every = (*variants(), "amx-emulated") if can_run("amx-emulated") else variants()
    named = os.environ.get(building.SETTING, "auto")
    return every if named == "auto" else tuple(each for each in every if each == named)
