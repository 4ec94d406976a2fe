"""Profile of a round's time, from one turn of the event loop to the next.

Run: ``python -m foretoken.bench.lab.profile``.

Streams of plain decoding run together through the SDK, detokenisation included. Each part of a
round is timed by a wrapper around the one function that does it, which costs about a third of a
microsecond per call. The host's part is everything except the forward pass; a bigger model or a
faster device would not reduce it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ...api.sdk.async_llm import AsyncLLM
from ...api.types.sampling_params import SamplingParams
from ...core.engine.engine import Engine
from ...core.execution.model_runner import ModelRunner
from ..common.report import heading, table, write_json
from ..common.shapes import shape, write_pair

PROMPT_LEN = 32  # Prompt length in tokens; each stream has a different prompt.


class Timer:
    """Seconds by part; a nested part is subtracted from the one around it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = threading.local()

    def clear(self) -> None:
        """Forget all measurements."""
        self.seconds.clear()

    def wrap(self, holder: Any, name: str, part: str) -> None:  # noqa: ANN401 - any object
        """Time calls of ``holder.name`` as ``part``."""
        inner = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            outer, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
            began = self.clock()
            try:
                return inner(*args, **kwargs)
            finally:
                whole = self.clock() - began
                self.seconds[part] += whole - self._inner.seconds
                self._inner.seconds = outer + whole

        setattr(holder, name, timed)


HOST = ("schedule", "drafts", "hop", "batch", "verify", "commit", "learn", "rest")
"""Parts of a round outside the forward pass, in their order."""
OVERLAPPED = ("deliver", "index")
"""Parts that the event loop runs while the model thread computes, except readers of streams."""


class Round:
    """Times the rounds of one engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.timer = timer = Timer(clock)
        self.num_rounds = 0
        self.rows = 0
        scheduler, runner = engine.scheduler, engine.runner
        assert isinstance(runner, ModelRunner)
        timer.wrap(scheduler, "schedule", "schedule")
        timer.wrap(scheduler.speculator, "plan", "drafts")
        timer.wrap(scheduler.speculator, "observe", "drafts")
        timer.wrap(scheduler.speculator, "work", "index")
        timer.wrap(runner, "_batch", "batch")
        timer.wrap(runner.decoder, "forward", "forward")
        timer.wrap(runner, "_verify", "verify")
        timer.wrap(runner, "launch", "in the model thread")
        timer.wrap(runner, "_finish", "in the model thread")
        timer.wrap(scheduler, "commit", "commit")
        timer.wrap(engine, "_deliver", "deliver")
        timer.wrap(engine.metrics, "observe_step", "learn")
        timer.wrap(engine, "_report_step", "learn")
        self._count(engine)

    def _count(self, engine: Any) -> None:  # noqa: ANN401 - its private parts
        turn, start = engine._turn, engine._thread.start

        def started(work: Any) -> Any:  # noqa: ANN401 - passed on
            job, began = start(work), time.perf_counter()
            end = job.end

            def ended(*outcome: Any) -> None:  # noqa: ANN401 - passed on
                end(*outcome)
                self.timer.seconds["step"] += time.perf_counter() - began

            job.end = ended
            return job

        engine._thread.start = started

        async def counted() -> None:
            began = time.perf_counter()
            await turn()
            self.timer.seconds["round"] += time.perf_counter() - began
            self.num_rounds += 1

        engine._turn = counted

    def clear(self) -> None:
        """Reset the counters."""
        self.timer.clear()
        self.num_rounds = 0

    def parts(self) -> dict[str, float]:
        """Return the milliseconds of a round by part; "round" is the whole."""
        seconds = dict(self.timer.seconds)
        computed = sum(seconds.get(part, 0.0) for part in ("batch", "forward", "verify"))
        own = seconds.pop("in the model thread", 0.0)
        seconds["batch"] = seconds.get("batch", 0.0) + own  # Time of the step outside its parts.
        seconds["hop"] = seconds.pop("step") - computed - own
        known = [part for part in (*HOST, "forward") if part != "rest"]
        seconds["rest"] = seconds["round"] - sum(seconds.get(part, 0.0) for part in known)
        scale = 1e3 / max(1, self.num_rounds)
        return {
            part: seconds.get(part, 0.0) * scale
            for part in ("round", "forward", *HOST, *OVERLAPPED)
        }


async def _stream(llm: AsyncLLM, index: int, length: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=index, max_tokens=length,
                            ignore_eos=True)  # fmt: skip
    prompt = [(7 * index + at) % 4000 + 10 for at in range(PROMPT_LEN)]
    async for _ in llm.stream(prompt, params):
        pass


async def measure(
    llm: AsyncLLM, num_streams: int, length: int, temperature: float, timed: Round
) -> dict[str, object]:
    """Run ``num_streams`` streams of ``length`` tokens after a short warm-up."""
    await asyncio.gather(*(_stream(llm, i, 8, temperature) for i in range(num_streams)))
    timed.clear()
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(_stream(llm, i, length, temperature) for i in range(num_streams)))
    seconds = time.perf_counter() - began
    parts = timed.parts()
    host = parts["round"] - parts["forward"]
    return {
        "streams": num_streams,
        "temperature": temperature,
        "tok/s": num_streams * length / seconds,
        "cores busy": (time.process_time() - cpu) / seconds,
        "ms a round": parts["round"],
        "forward": parts["forward"],
        **{part: parts[part] for part in HOST},
        "host": f"{host / parts['round']:.1%}",
        "host us a token": 1e3 * host / num_streams,
        **{f"({part})": parts[part] for part in OVERLAPPED},
    }


async def _run(args: argparse.Namespace, model: str) -> list[dict[str, object]]:
    options: dict[str, Any] = {"speculation": args.speculation, "max_running": 256}
    if args.threads:
        options["threads"] = args.threads
    rows = []
    async with AsyncLLM(model, **options) as llm:
        clock = time.thread_time if args.cpu else time.perf_counter
        timed = Round(cast("Engine", llm.engine), clock)
        for temperature in args.temperatures:
            for num_streams in args.streams:
                rows.append(await measure(llm, num_streams, args.length, temperature, timed))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.profile", description=__doc__
    )
    parser.add_argument(
        "--model", help="model: builtin, random-0.6b or a folder (builtin)", default="builtin"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--length", type=int, default=200, help="tokens of each stream (200)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--speculation", default="off", help="speculation: off, auto or a draft depth (off)"
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="measure CPU time in place of wall time, for a busy machine; hop and rest are "
        "meaningless then",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/profile.json"))
    args = parser.parse_args(argv)
    report: dict[str, object] = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    rows = _with_model(args, lambda model: asyncio.run(_run(args, model)))
    print(f"\nmilliseconds a round of {args.model}\n\n{table(rows)}", flush=True)
    write_json(args.out, {**report, "rows": rows})


def _with_model(
    args: argparse.Namespace, run: Callable[[str], list[dict[str, object]]]
) -> list[dict[str, object]]:
    if args.model != "random-0.6b":
        return run(args.model)
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), shape("qwen3-0.6b"), torch.bfloat16, eps=0.06)
        return run(str(Path(name) / "target"))


if __name__ == "__main__":
    main()
