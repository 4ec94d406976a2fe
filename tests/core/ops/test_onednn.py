"""oneDNN is forbidden AMX exactly where the CPU has it and exact rows are asked for."""

from __future__ import annotations

import logging

import pytest

from foretoken.core.ops import backends
from foretoken.core.ops.torch.torch_ops import ONEDNN_SETTING, keep_rows_exact

AMX = frozenset({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})


@pytest.mark.parametrize("exact", ["spec", "batch"])
def test_with_amx_exact_rows_lower_onednns_instruction_set_and_say_so(exact, caplog):
    environ: dict[str, str] = {}
    with caplog.at_level(logging.INFO):
        assert keep_rows_exact(exact, AMX, environ)
    assert environ == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    assert "limiting oneDNN to AVX-512 (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)" in caplog.text


@pytest.mark.parametrize(
    ("exact", "flags", "before"),
    [
        ("off", AMX, {}),
        ("spec", AMX - {"amx_bf16"}, {}),
        ("spec", AMX, {ONEDNN_SETTING: "AVX2"}),  # the user's own limit is lower, and stays
    ],
)
def test_otherwise_nothing_is_set_or_logged(exact, flags, before, caplog):
    environ = dict(before)
    with caplog.at_level(logging.INFO):
        assert not keep_rows_exact(exact, flags, environ)
    assert environ == before
    assert not caplog.records


@pytest.mark.parametrize("exact", ["spec", "off"])
def test_the_torch_backend_on_a_cpu_asks_for_it(exact, monkeypatch):
    asked = []
    monkeypatch.setattr(backends, "keep_rows_exact", asked.append)
    backends.choose_ops("cpu", backend="torch", exact=exact)
    assert asked == [exact]
