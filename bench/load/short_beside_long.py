"""Short beside long: whether short prompts wait for long ones, and how much they slow them down.

A round has three phases: short requests one after another, alone; long prompts, all sent at once,
alone; long prompts of other text together with short requests, which are sent one after another
until the last long one has its first token. There is a round for each number of long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from .figures import Record, by_round, chunk_gaps, percentile
from .generator import Ask, Job, Piece, Session, at_once
from .workloads import Scene, Workload, positive

LONG_OUTPUT = 1  # A long request ends with its first token.
PAUSE_SECONDS = 0.01  # Pause before each short request.
ALONE, BESIDE = "alone", "beside"


def counts(text: str) -> list[int]:
    """Parse a list such as ``4`` or ``1,4,16``; for argparse."""
    return [positive(part) for part in text.split(",")]


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--long-len", type=positive, default=6000, help="length of a long prompt, in tokens")
    add(
        "--num-long",
        type=counts,
        default="4",
        metavar="N[,N...]",
        help="number of long prompts sent at once; a list such as 1,4,16 runs a round for each",
    )
    add("--short-len", type=positive, default=30, help="length of a short prompt")
    add(
        "--shorts",
        type=positive,
        default=20,
        help="number of short requests alone, and their largest number during long prompts",
    )
    add("--output-len", type=positive, default=8, help="length of the answer to a short prompt")


async def _round(scene: Scene, index: int, num_long: int, ask: Ask) -> None:
    await _shorts(scene, ask, f"short-{ALONE}/{index}")
    async with at_once(_longs(scene, ask, f"long-{ALONE}/{index}", num_long)):
        pass
    async with at_once(_longs(scene, ask, f"long-{BESIDE}/{index}", num_long)) as longs:
        running = partial(_any_runs, longs)
        num_sent = await _shorts(scene, ask, f"short-{BESIDE}/{index}", running)
    if not num_sent:
        scene.notes.append(
            f"{num_long} long prompts had their first tokens before a short request was sent; "
            "raise --long-len"
        )


def _longs(
    scene: Scene, ask: Ask, name: str, num_long: int
) -> Iterable[Coroutine[Any, Any, object]]:
    length = scene.args.long_len
    return [_send(scene, ask, name, number, length, LONG_OUTPUT) for number in range(num_long)]


async def _shorts(
    scene: Scene, ask: Ask, name: str, goes_on: Callable[[], bool] = lambda: True
) -> int:
    """Send short requests, each after the end of the one before; return their number."""
    args, num_sent = scene.args, 0
    while num_sent < args.shorts:
        await asyncio.sleep(PAUSE_SECONDS)
        if not goes_on():
            break
        await _send(scene, ask, name, num_sent, args.short_len, args.output_len)
        num_sent += 1
    return num_sent


def _any_runs(tasks: Sequence[asyncio.Task[object]]) -> bool:
    return not all(task.done() for task in tasks)


async def _send(
    scene: Scene, ask: Ask, name: str, number: int, prompt_len: int, output_len: int
) -> None:
    """Send one request with text of its own, so that no two prompts share a prefix."""
    text = scene.corpus.cut((name, number), scene.fitted(prompt_len, output_len))
    await ask(Job(name=name, prompt=[Piece("user", text)], output_len=output_len))


def short_beside_long(scene: Scene) -> list[Session]:
    """Return one session for each number of long prompts."""
    args = scene.args
    return [
        Session(partial(_round, scene, index, num_long), planned=2 * (args.shorts + num_long))
        for index, num_long in enumerate(args.num_long)
    ]


# -- figures ------------------------------------------------------------------------------------


def beside_figures(records: Iterable[Record]) -> list[dict[str, object]]:
    """Return the times of short and long prompts, alone and together; failed rounds are omitted."""
    rounds = (_one_round(group) for group in by_round(records))
    return [figures for figures in rounds if figures is not None]


def _one_round(records: Sequence[Record]) -> dict[str, object] | None:
    if any(record.error is not None or record.was_cut for record in records):
        return None
    shorts, longs = ({phase: _named(records, f"{kind}-{phase}") for phase in (ALONE, BESIDE)}
                     for kind in ("short", "long"))  # fmt: skip
    if not shorts[BESIDE]:
        return None
    found: dict[str, object] = {"num_long": len(longs[BESIDE]), "num_short": len(shorts[BESIDE])}
    alone, beside = (_times_ms(shorts[phase], longs[phase]) for phase in (ALONE, BESIDE))
    for name in alone:
        found[f"{name}_{ALONE}_ms"] = one = alone[name]
        found[f"{name}_{BESIDE}_ms"] = other = beside[name]
        found[f"{name}_ratio"] = None if one is None or other is None else other / one
    return found


def _named(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.name.startswith(kind)]


def _times_ms(shorts: Sequence[Record], longs: Sequence[Record]) -> dict[str, float | None]:
    """Return the times of one phase.

    Every short request that was sent in it counts, however late it was answered: requests that wait
    for the long ones are the point of the measurement.
    """
    ttfts = sorted(record.ttft for record in shorts)
    gaps = [end - begin for record in shorts for begin, end, _ in chunk_gaps(record)]
    long = max(record.times[0] for record in longs) - min(record.sent for record in longs)
    return {
        "ttft_p50": 1e3 * percentile(ttfts, 0.5),
        "ttft_p99": 1e3 * percentile(ttfts, 0.99),
        "longest_gap": 1e3 * max(gaps) if gaps else None,
        "long": 1e3 * long,
    }


SHORT_BESIDE_LONG = Workload(
    "short-beside-long",
    "short prompts, one after another, while long ones are computed",
    _flags,
    short_beside_long,
    lambda records, _: {"short_beside_long": beside_figures(records)},
    has_loop=True,
)
