"""The time at which the command began, which is when this module is first imported."""

from __future__ import annotations

import time

BEGAN = time.perf_counter()
"""Seconds on the clock of `time.perf_counter`."""
