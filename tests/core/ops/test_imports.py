"""The garbage collector rests while modules are imported, and only then."""

from __future__ import annotations

import gc

import pytest

from foretoken.core.ops.machine.imports import uncollected


def test_the_collector_rests_inside_and_goes_on_behind():
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        with pytest.raises(ImportError), uncollected():
            raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
