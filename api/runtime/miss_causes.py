"""MissCauses: counts prompts by the cause of their cache miss."""

from __future__ import annotations

import asyncio
from functools import partial

from ..text.executor import Worker
from ..text.tokenizer import APART_BYTES
from .cache_diagnostics import CAUSES, Explainer
from .conversation.prompt_history import PromptLog, Remembered

# maximum number of comparisons that wait for the thread; further misses are not counted by cause
MAX_COMPARISONS = 8


class MissCauses:
    """Counts prompts by the cause of their cache miss, which a comparison with others may show."""

    def __init__(self, prompts: PromptLog) -> None:
        self.counts: dict[str, int] = dict.fromkeys(CAUSES, 0)  # number of prompts by cause
        self._prompts = prompts
        self._tasks: set[asyncio.Task[None]] = set()
        # A separate thread, so that tokenization does not wait for comparisons.
        self._worker = Worker("foretoken-causes")

    def count(self, prompt: Remembered, explainer: Explainer, page_size: int) -> None:
        """Count the cause of a prompt's cache miss.

        If it needs a comparison with earlier prompts, that runs in the background.
        """
        known = explainer.known_cause(prompt)
        if known is not None:
            self.counts[known] += 1
            return
        task = asyncio.create_task(self._compare(prompt, explainer, page_size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, prompt: Remembered, explainer: Explainer, page_size: int) -> None:
        """Count the cause that a comparison with earlier prompts shows.

        A long comparison runs in a thread. If too many comparisons wait for it, nothing is counted.
        """
        earlier = self._prompts.earlier(prompt)
        explain = partial(explainer.explain_among, prompt, earlier)
        if sum(each.num_compared_bytes for each in (prompt, *earlier)) <= APART_BYTES:
            found = explain()
        elif self._worker.num_waiting < MAX_COMPARISONS:
            found = await asyncio.wrap_future(self._worker.submit(explain))
        else:
            return
        is_new = found.cause == "first_seen"
        if is_new and self._prompts.has_in_other_salt(prompt, page_size):
            self.counts["other_salt"] += 1
        else:
            self.counts[found.cause] += 1

    def close(self) -> None:
        """Cancel the comparisons, and end their thread."""
        for task in self._tasks:
            task.cancel()
        self._worker.close()
