"""The backends of a model, and the variants of the native kernels, that tests can run here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from foretoken.core.ops.native import build as building
from foretoken.core.ops.native import variants
from foretoken.core.ops.native.build import can_run

EMULATION = Path(__file__).parents[1] / "core" / "ops" / "native" / "amx_emulated.c"
building.EMULATION = EMULATION  # whoever imports this module has the variant "amx-emulated"


def slow(*params: str) -> list[ParameterSet]:
    """Return parameters of tests that `make test` leaves to `make test-rest`."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in params]


BACKENDS = [*slow("torch"), "native"]
"""Of a whole model, which the native kernels compute in a third of the time."""


def every_variant() -> list[ParameterSet]:
    """Return this machine's variants, and the emulated matrix unit wherever it can be compiled.

    All but the fastest are `slow`: `make test` compiles and runs that one alone. Where the
    environment names a variant (`make test-avx2`), it is the only one.
    """
    every = (*variants(), "amx-emulated") if can_run("amx-emulated") else variants()
    named = os.environ.get(building.SETTING, "auto")
    if named != "auto":
        return [pytest.param(each) for each in every if each == named]
    return [pytest.param(every[0]), *slow(*every[1:])]
