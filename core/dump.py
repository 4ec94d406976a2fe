"""What an engine leaves behind when it dies, or when it is asked to: a JSON file.

Requests by id and counts, pools, the last steps, where each thread stands. Never a prompt, an
answer, a key, a cache salt, or the text of an exception, which may quote any of them.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .._version import __version__
from .audit import inspect
from .request import Request
from .scheduler import Scheduler
from .step import StepPlan

logger = logging.getLogger(__name__)
MAX_STEPS = 64
Report = dict[str, object]
_NUMBERS = itertools.count(1)  # two dumps of one second


class StepNote(NamedTuple):
    """One run of the model thread, in brief."""

    began: float  # on the engine's clock
    seconds: float
    num_rows: int
    num_tokens: int
    failure: str | None  # the kind of exception


class StepLog:
    """The last runs, and the one under way. Cheap enough to be written every step."""

    def __init__(self) -> None:
        self.notes: deque[StepNote] = deque(maxlen=MAX_STEPS)
        self.began: float | None = None  # of the run under way, on the engine's clock

    def begin(self, now: float) -> None:
        """A run begins."""
        self.began = now

    def end(self, plan: StepPlan, now: float, failure: BaseException | None) -> None:
        """It is over."""
        began, self.began = self.began, None
        if began is not None:
            kind = None if failure is None else type(failure).__name__
            seconds = now - began
            self.notes.append(StepNote(began, seconds, len(plan.rows), plan.num_tokens, kind))

    def seconds_under_way(self, now: float) -> float:
        """How long the present run has taken; 0 between two."""
        return 0.0 if self.began is None else now - self.began


def make_report(
    reason: str,
    scheduler: Scheduler,
    steps: StepLog,
    now: float,
    *,
    failure: BaseException | None = None,
    about: Mapping[str, object] | None = None,
) -> Report:
    """Everything worth knowing afterwards. A part that cannot be told says why instead.

    It only reads, so a thread may call it when the event loop stands still.
    """
    parts: dict[str, Callable[[], object]] = {
        "failure": lambda: None if failure is None else _describe_failure(failure),
        "audit": lambda: inspect(scheduler),
        "requests": lambda: [_describe(request, now) for request in _requests(scheduler)],
        "step_under_way_seconds": lambda: steps.seconds_under_way(now),
        "steps": lambda: [note._asdict() for note in tuple(steps.notes)],
        "threads": stacks,
        "config": lambda: dict(about or {}),
    }
    versions = {"foretoken": __version__, "python": platform.python_version()}
    head: Report = {"reason": reason, "time": _now("%Y-%m-%dT%H:%M:%SZ"), "version": versions}
    return head | {"now": now, "pid": os.getpid()} | {k: _told(part) for k, part in parts.items()}


def write_report(report: Report, folder: Path) -> Path | None:
    """Put it into a new file that only this user may read; None, and a log line, if that fails."""
    name = f"foretoken-{os.getpid()}-{_now('%Y%m%dT%H%M%SZ')}-{next(_NUMBERS)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Exclusive: in a folder that others write to, the name may be a link of theirs.
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            json.dump(report, file, indent=1, default=str)
    except (OSError, ValueError, TypeError):
        logger.exception("no crash dump could be written to %s", folder)
        return None
    logger.critical("%s: crash dump in %s", report["reason"], folder / name)
    return folder / name


def stacks() -> dict[str, list[str]]:
    """Where each thread stands, by its name: places in the code, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": _places(traceback.extract_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def _told(part: Callable[[], object]) -> object:
    try:
        return part()
    except Exception as error:  # a broken engine is what this is for
        return f"cannot be told: {type(error).__name__}"


def _describe_failure(failure: BaseException) -> object:
    places = _places(traceback.extract_tb(failure.__traceback__))
    return {"kind": type(failure).__name__, "places": places}


def _places(stack: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]


def _requests(scheduler: Scheduler) -> Iterator[Request]:
    yield from list(scheduler.running.values())
    yield from list(scheduler.waiting)


def _describe(request: Request, now: float) -> Report:
    lease, deadline = request.lease, request.deadline
    age = now - request.arrival_time
    return {
        "id": request.request_id,
        "state": request.status.value,
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.num_output,
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
