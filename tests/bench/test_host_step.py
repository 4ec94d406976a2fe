"""The host's work in a step is counted in calls, and does not grow unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import json, sys
from foretoken.bench.lab.host_step import FORMULA, Case, count_calls
for draft, requests in json.loads(sys.argv[1]):
    rounds = count_calls(Case(requests, draft, context=64), 20)
    parts = [each.parts for each in rounds]
    total = sum(sum(each.values()) - each[FORMULA] for each in parts)
    print(draft, requests, total / len(parts) / requests)
"""
ALLOWED = 1.3  # times the recorded calls; versions of Python differ a little
RECORDED = {
    ("none", 4): 240,
    ("none", 16): 148,
    ("lookups", 4): 455,
    ("lookups", 16): 371,
    ("model", 4): 1102,
}
"""Calls a step and request with Python 3.11. Whoever makes them fewer records it here."""


def test_the_calls_of_a_step_and_request_do_not_grow() -> None:
    """In a process of its own: a profiler sees what other tests have left in this one, too."""
    command = [sys.executable, "-c", CODE, json.dumps(list(RECORDED))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in done.stdout.splitlines()]
    counted = {(draft, int(requests)): float(calls) for draft, requests, calls in lines}
    assert counted.keys() == RECORDED.keys()
    more = {case: calls for case, calls in counted.items() if calls > ALLOWED * RECORDED[case]}
    assert not more, f"recorded were {RECORDED}"
