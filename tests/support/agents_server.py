"""A server with a context of 64k that computes nothing: ``agents_server.py LOG [flags]``.

The HTTP stack, the engine, the scheduler and the prefix cache are the real ones. The model says
what the conversation asks it to, as in `scripted_server.py`, without a layer: a prompt of an agent
has tens of thousands of tokens. For each request that ends, LOG gets a line of JSON: its prompt
tokens and those of them that were cached.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from foretoken.api.build import engine_builder as builder
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.cli.commands import main
from foretoken.core.engine.engine import Engine
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from foretoken.core.interface.request import Delta, Request
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.radix_cache import PrefixCache
from support.fake_engine import make_built
from support.launch_behind import Finished
from support.scripted_server import END, MARKED, UNMARKED, Tokens

FOLDER = BUILTIN / "target"
CONTEXT = 2**16
PAGE_SIZE = 16
ASSISTANT = "<|im_start|>assistant"


def wanted_answer(prompt: str) -> str:
    """The last marked text of all that came since the model last spoke.

    Agents put reminders behind what the user says, as messages of their own.
    """
    *before, since, _ = prompt.split(ASSISTANT)
    marked = MARKED.findall(since.partition(END)[2] if before else since)
    return marked[-1] if marked else UNMARKED


class SayingRunner:
    """Says what it is told."""

    is_async = False

    def prepare_thread(self) -> None: ...

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._answers: dict[str, list[int]] = {}

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """At once."""
        del after
        on_kernels_started()
        return Finished(StepOutput(requests=[self._row(row) for row in plan.requests]))

    def _row(self, row: ScheduledRequest) -> RequestOutput:
        if not row.samples:
            return RequestOutput(request_id=row.request_id)
        prompt_len = row.sampling.prompt_len
        if row.request_id not in self._answers:
            prompt = self._tokens.text(row.tokens[:prompt_len])
            ids = self._tokens.encode(wanted_answer(prompt))
            self._answers[row.request_id] = [*ids, self._tokens.end_id]
        answer = self._answers[row.request_id]
        number = min(len(row.tokens) - prompt_len, len(answer) - 1)
        return RequestOutput(request_id=row.request_id, token_ids=[answer[number]])


class Log(EngineObserver):
    """Writes what each request found in the cache."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """A line for each request that ends."""
        if not delta.terminal:
            return
        usage = request.usage
        line = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def build(path: str, _model: object, _config: object) -> Any:
    """The engine in place of the one that the flags ask for."""
    tokens = Tokens(FOLDER)
    vocab_size = max(tokens.bytes_of) + 1
    limits = SchedulerLimits(
        max_batch_tokens=8192,
        max_running=8,
        max_queued=64,
        max_model_len=CONTEXT,
        vocab_size=vocab_size,
    )
    scheduler = Scheduler(PrefixCache(8 * CONTEXT // PAGE_SIZE, PAGE_SIZE), limits)
    engine = Engine(scheduler, SayingRunner(tokens))
    engine.metrics.observers.append(Log(path))
    built = make_built(engine, FOLDER, tokens.end_id, vocab_size=vocab_size)  # type: ignore[arg-type]
    built.name, built.max_model_len = "foretoken-64k", CONTEXT
    return built


if __name__ == "__main__":
    builder.build = partial(build, sys.argv[1])  # type: ignore[assignment]
    sys.exit(main(["serve", "builtin", *sys.argv[2:]]))
