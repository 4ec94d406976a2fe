"""Processes that lead a group of their own, so that all processes of a group can be killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.005


async def start_group(*command: str, **options: Any) -> Process:  # noqa: ANN401 - any options of asyncio
    """Start a process as the leader of a new group, and return it.

    ``options`` go to `asyncio.create_subprocess_exec`. If the caller is cancelled meanwhile,
    the group is killed as soon as its id is known. Raises OSError.
    """
    making = asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    starting = asyncio.create_task(making, name="foretoken-start-process")
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        while not starting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await end_group(starting.result())
        raise


async def end_group(process: Process) -> None:
    """Kill the processes of the group that ``process`` leads, and wait for the leader's end.

    `Process.wait` would also wait for the end of the output, and a process that left the group may
    keep it open. If all processes belong to another user, as after ``sudo``, they run on.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except PermissionError:
        logger.warning("a process of another user could not be killed: %d", process.pid)
    except ProcessLookupError:
        pass
    else:
        while process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
    process._transport.close()  # type: ignore[attr-defined]
