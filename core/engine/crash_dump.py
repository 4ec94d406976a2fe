"""Crash dumps: a JSON file that describes an engine, written when it dies or on request.

A dump has the ids and numbers of each request, the pools, the last steps and each thread's stack.
It never has a prompt, an answer, a key, a cache salt, or the text of an exception, which may quote
such data.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..._version import __version__
from ..interface.request import Request
from ..scheduling.scheduler import Scheduler
from .audit import inspect
from .model_thread import Watchdog

logger = logging.getLogger(__name__)
CrashReport = dict[str, object]
_NUMBERS = itertools.count(1)  # distinguish dumps of the same second


def make_report(
    reason: str,
    scheduler: Scheduler,
    watchdog: Watchdog,
    now: float,
    *,
    failure: BaseException | None = None,
    about: Mapping[str, object] | None = None,
) -> CrashReport:
    """Return a description of the engine.

    A part that cannot be described is replaced by the type of the error. The function changes
    nothing, so another thread may call it while the event loop is stuck.
    """
    parts: dict[str, Callable[[], object]] = {
        "failure": lambda: None if failure is None else _describe_failure(failure),
        "audit": lambda: inspect(scheduler),
        "requests": lambda: [_describe(request, now) for request in _requests(scheduler)],
        "step_under_way_seconds": lambda: watchdog.seconds_under_way(now),
        "steps": lambda: [note._asdict() for note in tuple(watchdog.records)],
        "threads": stacks,
        "config": lambda: dict(about or {}),
    }
    versions = {"foretoken": __version__, "python": platform.python_version()}
    head: CrashReport = {"reason": reason, "time": _now("%Y-%m-%dT%H:%M:%SZ"), "version": versions}
    return (
        head
        | {"now": now, "pid": os.getpid()}
        | {k: _value_or_error(part) for k, part in parts.items()}
    )


def write_report(report: CrashReport, folder: Path) -> Path | None:
    """Write a report to a new file that only this user may read, and return its path.

    If the file cannot be written, the error is logged and None is returned.
    """
    name = f"foretoken-{os.getpid()}-{_now('%Y%m%dT%H%M%SZ')}-{next(_NUMBERS)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # O_EXCL: in a shared folder, another user may have made a link of that name.
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            json.dump(report, file, indent=1, default=str)
    except (OSError, ValueError, TypeError):
        logger.exception("no crash dump could be written to %s", folder)
        return None
    logger.critical("%s: crash dump in %s", report["reason"], folder / name)
    return folder / name


def stacks() -> dict[str, list[str]]:
    """Return the stack of each thread by the thread's name: code positions without values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": _places(traceback.extract_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def _value_or_error(part: Callable[[], object]) -> object:
    try:
        return part()
    except Exception as error:  # the engine may be broken in any way
        return f"cannot be described: {type(error).__name__}"


def _describe_failure(failure: BaseException) -> object:
    places = _places(traceback.extract_tb(failure.__traceback__))
    return {"kind": type(failure).__name__, "places": places}


def _places(stack: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]


def _requests(scheduler: Scheduler) -> Iterator[Request]:
    yield from list(scheduler.running.values())
    yield from list(scheduler.waiting)


def _describe(request: Request, now: float) -> CrashReport:
    lease, deadline = request.lease, request.deadline
    age = now - request.arrival_time
    return {
        "id": request.request_id,
        "state": request.status.value,
        "prompt_tokens": request.num_given,
        "output_tokens": len(request.tokens) - request.num_given,
        "computed_tokens": request.num_computed,
        "pages": 0 if lease is None else len(lease.page_ids),
        "shared_pages": 0 if lease is None else lease.num_shared_pages,
        "priority": request.priority,
        "preemptions": request.num_preemptions,
        "age_seconds": age,
        "deadline_in_seconds": None if deadline is None else deadline - age,
    }


def _now(form: str) -> str:
    return time.strftime(form, time.gmtime())
