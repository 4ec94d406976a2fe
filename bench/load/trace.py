"""Replay of traces in Mooncake's format: JSON lines of timestamp, lengths and hash ids.

``timestamp`` is in milliseconds. ``hash_ids`` name the prompt's blocks of 512 tokens; equal ids at
the same place after equal ids stand for equal tokens, so that prefixes are shared as they were. The
traces published with the Mooncake paper have this format (arXiv 2407.00079). Without a file a
**synthetic** trace is made: invented conversations over a few common system prompts, not a
measurement of real traffic.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .generator import Piece, Session
from .workloads import ROOM, Scene, Workload, above_zero, positive, single

BLOCK = 512  # Tokens that a hash id stands for.
SYNTHETIC = "synthetic trace: invented conversations, not recorded traffic"


class Entry(msgspec.Struct):
    """One request of a trace."""

    timestamp: float  # Milliseconds.
    input_length: int
    output_length: int
    hash_ids: list[int]


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON Lines file to replay (default: a synthetic trace)",
    )
    add(
        "--requests",
        type=positive,
        default=48,
        help="number of requests, from the beginning of the trace",
    )
    add(
        "--speedup",
        type=above_zero,
        default=1.0,
        help="factor by which requests arrive faster than in the trace",
    )
    add(
        "--scale",
        type=above_zero,
        default=0.125,
        help="factor for all lengths; 1: as recorded",
    )
    add("--write-trace", type=Path, metavar="FILE", help="file to write the replayed trace to")


def read_trace(path: Path, count: int) -> list[Entry]:
    """Read the first ``count`` entries. Raises SystemExit with the number of a malformed line."""
    found: list[Entry] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(found) == count:
                break
            if line.strip():
                found.append(_entry(line, f"{path}, line {number}"))
    if not found:
        raise SystemExit(f"{path} has no entries")
    return found


def _entry(line: bytes, where: str) -> Entry:
    try:
        entry = msgspec.json.decode(line, type=Entry)
    except msgspec.DecodeError as error:
        raise SystemExit(f"{where}: {error}") from None
    if entry.input_length < 1 or entry.output_length < 1 or entry.timestamp < 0:
        raise SystemExit(
            f"{where}: lengths must be above 0, and the timestamp must not be negative"
        )
    if entry.input_length > BLOCK * len(entry.hash_ids):
        raise SystemExit(
            f"{where}: {len(entry.hash_ids)} hash ids are too few for {entry.input_length} tokens"
        )
    return entry


def write_trace(path: Path, entries: Sequence[Entry]) -> None:
    """Write entries as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))


# -- synthetic ----------------------------------------------------------------------------------


def synthetic(count: int, seed: int) -> list[Entry]:
    """Return conversations over 4 system prompts, the first of which are more popular.

    A conversation has 1 to 5 turns; each sends the whole history and adds to it.
    """
    rng = random.Random(f"{seed}/trace")
    ids = iter(range(10**9))
    systems = [[next(ids) for _ in range(blocks)] for blocks in (4, 2, 6, 3)]
    entries: list[Entry] = []
    now = 0.0
    while len(entries) < count:
        shared = rng.choices(systems, weights=(8, 4, 2, 1))[0]
        entries += _conversation(now, shared, ids, rng)
        now += rng.expovariate(1 / 1500)
    return sorted(entries, key=lambda entry: entry.timestamp)[:count]


def _conversation(
    begin: float, shared: Sequence[int], ids: Iterator[int], rng: random.Random
) -> Iterator[Entry]:
    """Yield the turns of one user; its blocks differ from all other users' blocks."""
    blocks, length, now = list(shared), BLOCK * len(shared), begin
    for _ in range(rng.randint(1, 5)):
        length += rng.randint(100, 1200)
        blocks += [next(ids) for _ in range(-(-length // BLOCK) - len(blocks))]
        output_length = rng.randint(60, 500)
        yield Entry(round(now), length, output_length, list(blocks))
        # The last, partial block changes once the answer is appended.
        blocks = blocks[: length // BLOCK]
        length += output_length
        now += rng.expovariate(1 / 4000) + 1000


# -- replay -------------------------------------------------------------------------------------


def replay(scene: Scene) -> list[Session]:
    """Return one session for each entry, which arrives at the entry's time."""
    args = scene.args
    if args.trace is None:
        entries = synthetic(args.requests, scene.seed)
        scene.notes.append(SYNTHETIC)
    else:
        entries = read_trace(args.trace, args.requests)
    if args.write_trace is not None:
        write_trace(args.write_trace, entries)
    first = entries[0].timestamp
    return [_session(scene, each, (each.timestamp - first) / 1e3) for each in entries]


def _session(scene: Scene, entry: Entry, at: float) -> Session:
    args = scene.args
    block = max(1, round(BLOCK * args.scale))
    output_len = max(1, round(entry.output_length * args.scale))
    if scene.max_len is not None:
        output_len = min(output_len, scene.max_len // 2 - ROOM)
    length = scene.fitted(max(1, round(entry.input_length * args.scale)), output_len)
    pieces, left = [], length
    for hash_id in entry.hash_ids:
        if left <= 0:
            break
        pieces.append(Piece("user", scene.corpus.cut(("block", hash_id), block)))
        left -= block
    if left < 0:  # The last block is cut at the prompt's length.
        last = scene.corpus.cut(("block", entry.hash_ids[len(pieces) - 1]), block + left)
        pieces[-1] = Piece("user", last)
    return single("trace", pieces, output_len, at / args.speedup)


TRACE = Workload(
    "trace",
    "replay of a trace in Mooncake's format, or of a synthetic one",
    _flags,
    replay,
    has_schedule=True,
)
