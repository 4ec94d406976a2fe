"""Noisy neighbour: the effect of a long prompt on running streams.

In each round some streams run; once all are steady, a long prompt joins. The gaps between the
streams' tokens are assigned by their middle: before the long prompt joined, or from then to its
first token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from ..common.report import Spread
from .figures import Record, by_round, gaps_between, percentile, token_gaps
from .generator import Ask, Job, Piece, Session, at_once
from .http import Failure
from .workloads import Scene, Workload, positive

LONG_OUTPUT = 8  # Answer length of the long prompt, in tokens.
STREAM, LONG = "stream", "long"
AIM = 2.0  # Aim: the streams' p99 grows at most by this factor while the long prompt joins.


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="number of rounds, each with a new long prompt")
    add("--streams", type=positive, default=8, help="streams that run when the long prompt arrives")
    add("--long", type=positive, default=4096, help="length of the long prompt, in tokens")
    add("--prompt-len", type=positive, default=64, help="length of a stream's prompt")
    add("--output-len", type=positive, default=256, help="length of a stream's answer")
    add(
        "--steady",
        type=positive,
        default=16,
        help="chunks of a stream to skip before it is measured",
    )
    add(
        "--before",
        type=positive,
        default=48,
        help="chunks of a stream to measure before the long prompt arrives",
    )


class _Steady:
    """Signals when every stream has had a given number of chunks."""

    def __init__(self, num_streams: int, num_chunks: int) -> None:
        self.reached = asyncio.Event()
        self._left, self._num_chunks = num_streams, num_chunks

    def watch(self, record: Record) -> None:
        """Count a chunk of a stream."""
        if len(record.times) == self._num_chunks:
            self._left -= 1
            if not self._left:
                self.reached.set()


async def _round(scene: Scene, index: int, ask: Ask) -> None:
    args = scene.args
    steady = _Steady(args.streams, args.steady + args.before)
    streams = [_stream(scene, ask, steady, (index, number)) for number in range(args.streams)]
    # The streams are not cut off, because usage comes with the last chunk.
    async with at_once(streams) as tasks:
        await _until(steady.reached, tasks)
        length = scene.fitted(args.long, LONG_OUTPUT)
        prompt = [Piece("user", scene.corpus.cut((LONG, index), length))]
        await ask(Job(name=f"{LONG}/{index}", prompt=prompt, output_len=LONG_OUTPUT))


async def _stream(scene: Scene, ask: Ask, steady: _Steady, key: tuple[int, int]) -> None:
    length = scene.fitted(scene.args.prompt_len, scene.args.output_len)
    prompt = [Piece("user", scene.corpus.cut((STREAM, key), length))]
    name, output_len = f"{STREAM}/{key[0]}", scene.args.output_len
    await ask(Job(name=name, prompt=prompt, output_len=output_len, watch=steady.watch))


async def _until(reached: asyncio.Event, tasks: Sequence[asyncio.Task[object]]) -> None:
    """Wait until the streams are steady. Raises `Failure` if one ends before that."""
    waiter = asyncio.create_task(reached.wait())
    done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if waiter in done:
        return
    waiter.cancel()
    for task in done:
        task.result()  # This raises the stream's failure.
    raise Failure("not steady", "a stream ended before the others were steady")


def noisy_neighbour(scene: Scene) -> list[Session]:
    """Return one session for each round."""
    args = scene.args
    return [
        Session(partial(_round, scene, index), planned=args.streams + 1)
        for index in range(args.rounds)
    ]


# -- figures ------------------------------------------------------------------------------------


def neighbour_figures(records: Iterable[Record], steady: int) -> dict[str, object] | None:
    """Return the streams' ITL before a long prompt joined and during its prefill, or None."""
    found = (_one_round(group, steady) for group in by_round(records))
    rounds = [each for each in found if each is not None]
    if not rounds:
        return None
    figures = {name: Spread.of([each[name] for each in rounds]) for name in rounds[0]}
    return {"rounds": len(rounds), **figures, "aim": AIM}


def _one_round(records: Sequence[Record], steady: int) -> dict[str, float] | None:
    streams = [record for record in records if record.name.startswith(STREAM) and record.times]
    longs = [r for r in records if r.name.startswith(LONG) and r.times and r.error is None]
    if not longs or not streams:
        return None
    long = longs[0]
    before = [gap for r in streams for gap in gaps_between(r, 0.0, long.sent, steady)]
    during = [gap for r in streams for gap in gaps_between(r, long.sent, long.times[0])]
    if not before or not during:
        return None
    alone, joined = _p99(token_gaps(before)), _p99(token_gaps(during))
    if not alone:
        return None  # All tokens came at once, so there is no gap to compare with.
    gap_alone, gap_joined = (_p99([end - begin for begin, end, _ in x]) for x in (before, during))
    return {
        "streams_left": float(sum(r.ended > long.times[0] for r in streams)),
        "itl_p99_before_ms": 1e3 * alone,
        "itl_p99_during_ms": 1e3 * joined,
        "itl_ratio": joined / alone,
        "chunk_gap_p99_before_ms": 1e3 * gap_alone,
        "chunk_gap_p99_during_ms": 1e3 * gap_joined,
        "chunk_gap_ratio": gap_joined / gap_alone,
        "long_ttft_ms": 1e3 * long.ttft,
        "long_tokens": float(long.prompt_tokens or 0),
    }


def _p99(values: Iterable[float]) -> float:
    return percentile(sorted(values), 0.99)


NOISY_NEIGHBOUR = Workload(
    "noisy-neighbour",
    "a long prompt joins running streams",
    _flags,
    noisy_neighbour,
    lambda records, args: {"neighbour": neighbour_figures(records, args.steady)},
    has_loop=True,
    temperature=1.0,  # Greedy streams fall into loops, and drafts of a loop are always right.
)
