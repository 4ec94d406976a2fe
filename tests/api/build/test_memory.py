"""A model that cannot fit is refused before it is read, with what would fit."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.api.build import memory
from foretoken.api.build.memory import check_room, most_billions, room_for
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.cli.commands import main
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from foretoken.core.model.drafting.rough_copy import rounded_matrices
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.report import ModelReport, inspect_model
from foretoken.core.ops.machine.system_memory import free_swap
from foretoken.core.options.settings import parse_size

GIB, MIB = 2**30, 2**20
BILLION = 10**9
PLAIN = ModelReport(
    model_type="qwen3", path="own", file_format="safetensors", num_parameters=8 * BILLION,
    num_embedding=BILLION // 2, weight_bytes=16 * BILLION, used_bytes=16 * BILLION,
    dtype="bfloat16", kv_bytes_per_token=144 * 2**10, max_model_len=40_960,
)  # fmt: skip
PACKED = replace(
    PLAIN, file_format="GGUF", quantization="Q4_K", weight_bytes=5 * BILLION, used_bytes=5 * BILLION
)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask whether a model of this report fits into so many bytes."""

    def ask(report: ModelReport, free: float, swap: int = 0, **options: Any) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda _: int(free))
        monkeypatch.setattr(memory, "free_swap", lambda: swap)
        monkeypatch.setattr(memory, "inspect_model", lambda _: report)
        monkeypatch.setattr(memory, "weight_files", lambda _: ("any", report.weight_bytes))
        check_room(Path("qwen3-8b"), EngineConfig(**options), torch.device("cpu"))

    return ask


@pytest.mark.parametrize(
    ("report", "least", "options"),
    [
        (PLAIN, 16 * BILLION, {}),
        (PLAIN, 32 * BILLION, {"dtype": "float32"}),
        (replace(PLAIN, dtype="float16"), 32 * BILLION, {}),
        (PLAIN, 8 * BILLION, {"quantize": "int8"}),
        (PLAIN, 4 * BILLION, {"quantize": "int4"}),
        (PACKED, 4 * BILLION, {}),
        (PACKED, 16 * BILLION, {"dtype": "bfloat16"}),
        (replace(PACKED, path="transformers"), 16 * BILLION, {}),
        (PLAIN, 8 * BILLION, {"tp": 2}),
    ],
)
def test_a_model_is_refused_where_its_weights_alone_do_not_fit(
    check, report, least, options
) -> None:
    pool = 4 * 256 * PLAIN.kv_bytes_per_token
    check(report, least + pool, **options)
    with pytest.raises(ModelLoadError, match="qwen3-8b does not fit: its weights need ") as refused:
        check(report, least - 1, **options)
    assert not refused.value.may_pass, "a restart would not help"


def test_swap_may_hold_a_part(check) -> None:
    check(PLAIN, 8 * BILLION, swap=9 * BILLION)


@pytest.mark.parametrize(
    ("report", "free", "options", "told"),
    [
        (PLAIN, 12 * GIB, {}, "use --quantize int8 (7.92 GiB) or use --quantize int4 (5.3 GiB)"),
        (PLAIN, 7 * GIB, {}, "use --quantize int4 (5.3 GiB)"),
        (
            PLAIN,
            17 * GIB,
            {"dtype": "float32"},
            "use --dtype bfloat16 (14.9 GiB) or use --quantize",
        ),
        (PLAIN, 4 * GIB, {}, "use a file with at most 4.1 bits per weight"),
        (PLAIN, 1 * GIB, {}, "use a model of at most 1.3 billion parameters in 4 bits"),
        (PACKED, 3 * GIB, {}, "use a file with at most 3.1 bits per weight"),
        (PACKED, 8 * GIB, {"kv_memory": "6GiB"}, "use --kv-memory 3033MiB"),
        (PACKED, 8 * GIB, {"kv_tokens": 10**5}, "use --kv-tokens 21568"),
    ],
)
def test_a_refusal_says_what_would_fit(check, report, free, options, told) -> None:
    with pytest.raises(ModelLoadError) as refused:
        check(report, free, **options)
    assert f"of memory are free; {told}" in str(refused.value)


def test_what_is_proposed_is_taken(check) -> None:
    for free in (2 * GIB, 5 * GIB, 9 * GIB, 14 * GIB):
        for options in ({}, {"kv_memory": "1TiB"}, {"kv_tokens": 10**8}):
            for report in (PLAIN, PACKED):
                with pytest.raises(ModelLoadError) as refused:
                    check(
                        report,
                        min(free, report.least_weights() - 1) if not options else free,
                        **options,
                    )
                for flag, value in re.findall(r"use --([\w-]+) (\w+)", str(refused.value)):
                    name = flag.replace("-", "_")
                    check(report, free, **{name: int(value) if name == "kv_tokens" else value})


def test_a_model_that_is_near_is_warned_of_and_loaded(check, caplog) -> None:
    check(PLAIN, 15.5 * GIB)
    [warning] = caplog.messages
    assert warning == (
        "qwen3-8b may not fit: its weights need about 14.9 GiB and the KV pool 1.12 GiB, but "
        "only 15.5 GiB of memory are free"
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(PLAIN, 17 * GIB)
    assert not caplog.messages


def test_a_model_that_surely_fits_is_not_looked_at_and_one_that_is_damaged_tells_its_own_story(
    check,
) -> None:
    check(replace(PLAIN, problem="it is damaged"), GIB)
    check(replace(PLAIN, weight_bytes=MIB, num_parameters=10**15), GIB)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_the_estimate_is_what_is_loaded(options: dict[str, Any]) -> None:
    """Compare it with the kernels' own account of their matrices, and with the embedding."""
    report = inspect_model(BUILTIN / "target")
    decoder = load_decoder(BUILTIN / "target", backend="native", **options)
    weights = decoder.weights  # type: ignore[attr-defined]
    found = weights.embedding.nbytes
    found += sum(each.weight.nbytes for each in rounded_matrices(weights))
    room = room_for(report, EngineConfig(**options))
    assert room.least_weights <= found
    assert found == pytest.approx(room.weights, rel=0.1)


def test_the_command_says_it_with_exit_code_2(monkeypatch, capsys) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 10 * MIB)
    monkeypatch.setattr(memory, "free_swap", lambda: 0)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "builtin", "hi", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("foretoken: target does not fit: its weights need 13 MiB")
    assert err.count("\n") == 1


def test_show_says_what_is_needed_and_what_is_free(monkeypatch, capsys) -> None:
    where = "foretoken.core.ops.machine.system_memory.available_memory"
    monkeypatch.setattr(where, lambda: 20 * GIB)
    assert main(["show", "builtin"]) == 0
    told = (
        "memory    425 MiB: weights 13 MiB, KV of 4,096 tokens 12 MiB, program 400 MiB; 20 GiB are"
    )
    assert told in capsys.readouterr().out
    monkeypatch.setattr(where, lambda: 10 * MIB)
    assert main(["show", "builtin"]) == 2
    assert "refused   its weights need 13 MiB, but only 10 MiB of memory are free" in (
        capsys.readouterr().out
    )


def test_the_list_says_how_large_a_model_may_be(capsys, monkeypatch) -> None:
    where = "foretoken.core.ops.machine.system_memory.available_memory"
    monkeypatch.setattr(where, lambda: 16 * GIB)
    assert main(["list"]) == 0
    found = re.search(
        r"for about (\S+) billion parameters in 4 bits, (\S+) in 8, (\S+) in 16",
        capsys.readouterr().out,
    )
    assert found is not None
    four, eight, plain = map(float, found.groups())
    assert four > eight > plain
    assert most_billions(16 * GIB, "none") * 2 * BILLION + parse_size("2GiB") <= 16 * GIB


def test_swap_that_is_free_is_read_from_the_system(tmp_path: Path) -> None:
    assert free_swap(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 7 kB\nSwapFree: 3 kB\n")
    assert free_swap(tmp_path) == 3072
