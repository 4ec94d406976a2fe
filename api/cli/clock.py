"""The start time of the command: the time at which this module is first imported."""

from __future__ import annotations

import time

BEGAN = time.perf_counter()
"""Start time in seconds, on the clock of `time.perf_counter`."""
