"""Idle prefill beside other requests: `python -m foretoken.bench.lab.next_turns_load TEMPLATE`.

First, ``--streams`` clients stream answers at the same time and then pause, again and again, while
an agent holds conversations whose answers are given (`next_turns`). The pauses leave time to the
idle work, and the streams that follow find it under way. Windows with idle prefill and without it
alternate; both have the same prompts. The table has the time between the tokens of the streams
(ITL) and to their first tokens, and to the first token of the agent's later turns.

Second, requests arrive while 2,000 tokens are computed in idle time. The table has the time to the
first token of such a request, and of one that arrives while nothing is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...api.runtime.conversation.chat_input import ChatInput
from ...api.runtime.preprocess import PromptTokens
from ...api.runtime.turns.idle_prefill import IdlePrefill
from ...api.sdk.async_llm import AsyncLLM
from ...api.types.results import Choice
from ...api.types.sampling_params import SamplingParams
from ..common.report import heading, read_options, table, write_json
from .next_turns import Talk, add_conversation
from .servers import words

TOKENS = 64  # number of tokens in the answer of a stream
PROMPT = 16  # tokens of a stream's prompt
PAUSE = 0.7  # seconds between two answers of a stream
TOOL = 1.0  # seconds between two turns of the agent
WORK = 2000  # tokens that are computed in idle time while a newcomer arrives
NEWCOMER = 16  # tokens of a newcomer's prompt


@dataclass(slots=True)
class Times:
    """Seconds: between tokens, to first tokens, and to the first token of the agent's turns."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    num_idle: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("template", type=Path, help="file of a chat template of `next_turns`")
    add_conversation(parser, thought=150, result=100)
    parser.add_argument("--streams", type=int, default=4, help="other streams (4)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window (15)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of windows (3)")
    parser.add_argument("--newcomers", type=int, default=20, help="newcomers of each kind (20)")
    options = read_options(parser, argv)
    rows, newcomers = asyncio.run(_measure(options))
    print(table(rows), table(newcomers), sep="\n\n")
    if options.out:
        write_json(options.out, {**heading(), "rows": rows, "newcomers": newcomers})


async def _measure(
    options: argparse.Namespace,
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    async with AsyncLLM(options.model, chat_template=str(options.template)) as llm:
        await _window(llm, options, is_on=True, seed=-1, seconds=2.0)
        found: dict[bool, list[Times]] = {False: [], True: []}
        for index in range(2 * options.rounds):
            # The order changes from pair to pair: off, on; on, off.
            is_on = index % 4 in (1, 2)
            window = await _window(
                llm, options, is_on=is_on, seed=index // 2, seconds=options.seconds
            )
            found[is_on].append(window)
        rows = [_row(is_on, windows) for is_on, windows in found.items()]
        return rows, await _newcomers(llm, options.newcomers)


async def _window(
    llm: AsyncLLM, options: argparse.Namespace, *, is_on: bool, seed: int, seconds: float
) -> Times:
    """Return the times of a window."""
    times, until = Times(), time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(_agent(llm, options, times, until, is_on=is_on, salt=f"{is_on} {seed}"))
        for burst in itertools.count():
            if time.perf_counter() > until:
                break
            salts = [f"{is_on} {seed} {burst} {index}" for index in range(options.streams)]
            await asyncio.gather(*(_stream(llm, salt, seed, burst, times) for salt in salts))
            await asyncio.sleep(PAUSE)
    return times


async def _stream(llm: AsyncLLM, salt: str, seed: int, burst: int, times: Times) -> None:
    """Stream an answer to a new prompt."""
    params = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, seed=seed, speculation="off", cache_salt=salt
    )
    last, into = time.perf_counter(), times.firsts
    async for _ in llm.stream(words(PROMPT, burst), params):
        now = time.perf_counter()
        into.append(now - last)
        into, last = times.gaps, now


async def _agent(
    llm: AsyncLLM,
    options: argparse.Namespace,
    times: Times,
    until: float,
    *,
    is_on: bool,
    salt: str,
) -> None:
    """Hold conversations until the window ends."""
    name = options.template.stem
    while time.perf_counter() < until:
        own = f"{salt} {len(times.turns)}"
        talk = Talk(llm, name, options, is_agent=True, is_on=is_on, salt=own, pause=TOOL)
        for turn in await talk.hold():
            times.turns.append(turn.seconds)
            times.num_idle += turn.num_idle


def _row(is_on: bool, windows: Sequence[Times]) -> dict[str, object]:
    gaps = [gap for window in windows for gap in window.gaps]
    return {
        "idle prefill": "on" if is_on else "off",
        "gaps": len(gaps),
        "ITL p50, ms": _ms(_quantile(gaps, 0.5)),
        "ITL p99, ms": _ms(_quantile(gaps, 0.99)),
        "of each window": " ".join(_ms(_quantile(each.gaps, 0.99)) for each in windows),
        "first token p50, ms": _spread([each for window in windows for each in window.firsts]),
        "agent's first token p50, ms": _spread([each for one in windows for each in one.turns]),
        "idle tokens": sum(window.num_idle for window in windows),
    }


async def _newcomers(llm: AsyncLLM, number: int) -> list[dict[str, object]]:
    """Return the rows of newcomers, during idle work and without it."""
    rng = random.Random(0)
    found: dict[bool, list[float]] = {False: [], True: []}
    limits: list[float] = []
    for index in range(2 * number):
        is_busy = index % 2 == 1
        ids = [rng.randrange(500, 4000) for _ in range(WORK)]
        idle = await _begin(llm, ids) if is_busy else None
        await asyncio.sleep(rng.uniform(0.3, 0.6))
        if idle is not None and any(idle.ends.values()):
            continue  # the idle work has ended before the newcomer
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, speculation="off", cache_salt=str(index))
        await llm.generate(words(NEWCOMER, index), params)
        found[is_busy].append(time.perf_counter() - began)
        if idle is not None:
            size = idle._size
            limits.append(0.0 if size is None else size.seconds)
            idle.flush()
    return [
        {
            "newcomer arrives": "during idle work" if is_busy else "while nothing is computed",
            "requests": len(times),
            "first token p50, ms": _spread(times),
            "a chunk may take, ms": _ms(statistics.median(limits)) if is_busy else "",
        }
        for is_busy, times in found.items()
    ]


async def _begin(llm: AsyncLLM, ids: Sequence[int]) -> IdlePrefill:
    """Return idle work that has begun to compute the prompt ``ids``."""

    async def render(chat: ChatInput) -> PromptTokens:
        return PromptTokens([*ids, ord(str(chat.messages[-1]["content"]))])

    idle = IdlePrefill(llm, render, is_on=True)
    params = SamplingParams(max_tokens=8, ignore_eos=True, speculation="off")
    answer = await llm.open([*ids[:8]], params)
    completion = await llm.finish(answer)
    chat = ChatInput(messages=[{"role": "user", "content": ""}], params=params, warms_next=True)
    choice = Choice(index=0, finish_reason="stop", token_ids=[*completion.token_ids])
    idle.after(chat, answer.request)(choice)
    return idle


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _spread(values: Sequence[float]) -> str:
    """Return the median, the minimum and the maximum."""
    return f"{_ms(statistics.median(values))} ({_ms(min(values))} to {_ms(max(values))})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


if __name__ == "__main__":
    main()
