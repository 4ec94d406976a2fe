"""Triton's interpreter stands in for a GPU, and must be asked for before anybody imports Triton.

torch may do so whenever it likes; a language that is half compiled and half interpreted is neither.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from support.browser import MISSING

settings.register_profile("untimed", deadline=None)  # a busy machine breaks no promise
settings.load_profile("untimed")
# Every client of a test speaks plain HTTP to this machine. Most read all certificates when they are
# made nevertheless, which takes longer than the test: here is a folder without any.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# A thread that has nothing to do sleeps. OpenMP's would spin, and hold up whoever has work: two
# workers of pytest on two cores are far slower wherever a test computes in two threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if os.environ.get("FORETOKEN_TEST_DEVICE", "cpu") == "cpu":  # see core/ops/triton/conftest.py
    os.environ.setdefault("TRITON_INTERPRET", "1")

ASYNC_SECONDS = 30.0  # a test that is a coroutine fails after this time


def pytest_configure() -> None:
    """Ask oneDNN for exact rows before its first call, when it reads its settings."""
    from foretoken.core.ops.torch.torch_ops import (
        keep_rows_exact,  # imports torch, which may import Triton
    )

    keep_rows_exact("spec")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage neither while modules are imported nor, later, among what they leave.

    All of it lives as long as the process: to look through it takes a third of the collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**given), ASYNC_SECONDS))
    return True


def pytest_unconfigure() -> None:
    """At the end all of it is garbage, or modules of extensions would complain of leaks."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud that the page was not tested in a browser."""
    skipped = [str(each.longrepr) for each in terminalreporter.getreports("skipped")]
    if count := sum(MISSING in each for each in skipped):
        terminalreporter.section("the live page was not tested", red=True, bold=True)
        terminalreporter.line(f"{MISSING}: {count} tests of it were skipped", red=True)
