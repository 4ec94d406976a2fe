"""Triton's interpreter stands in for a GPU, and must be asked for before anybody imports Triton.

torch may do so whenever it likes; a language that is half compiled and half interpreted is neither.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine breaks no promise
settings.load_profile("untimed")
if os.environ.get("FORETOKEN_TEST_DEVICE", "cpu") == "cpu":  # see core/ops/triton/conftest.py
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Ask oneDNN for exact rows before its first call, when it reads its settings."""
    from foretoken.core.ops.torch.onednn import (
        keep_rows_exact,  # imports torch, which may import Triton
    )

    keep_rows_exact("spec")
