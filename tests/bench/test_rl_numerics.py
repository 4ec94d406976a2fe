"""The numerics check prints 0.0 on the tiny checkpoint: drafts, batches, caches, updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

from foretoken.api.build.model_files import BUILTIN
from foretoken.bench.lab.rl_numerics import Lengths, check, is_zero

SHORT = Lengths(pages=2, page_words=12, turn_tokens=8, updates=20, batches=(1, 2, 16))


def test_sampling_and_training_have_equal_log_probabilities_after_twenty_updates(
    tmp_path: Path,
) -> None:
    rows = asyncio.run(check(BUILTIN / "target", tmp_path, SHORT, threads=1))
    assert is_zero(rows)
    measured = rows[:-1]
    assert [row["version"] for row in measured] == ["0", *["20"] * 6]
    assert [(row["batch"], row["cache"]) for row in measured[1:]] == [
        (size, cache) for size in (1, 2, 16) for cache in ("on", "off")
    ]
    assert all((row["cached tokens"] != 0) == (row["cache"] == "on") for row in measured)
    assert sum(int(str(row["accepted drafts"])) for row in measured) > 100
    assert all(float(str(row["torch v2"])) > 0 for row in measured), "torch alone is not exact"
    assert str(rows[-1]["different"]).startswith("0 of 1")


def test_any_difference_is_reported() -> None:
    row: dict[str, object] = {"kl_sample_train_v1": 0.0, "kl_sample_train_v2": 0.0}
    assert is_zero([row])
    assert not is_zero([row, {**row, "kl_sample_train_v2": 1e-300}])
