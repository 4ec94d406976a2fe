"""KV tiers under shared prefixes that the pool cannot hold: `python -m foretoken.bench.lab.tiers`.

Requests begin with one of a few long texts, several times as many tokens as the small pool has. The
same requests, with the same seeds, are served with a pool that holds all, with the small pool, with
the small pool and a disk, and once more after a restart; then with a disk that sleeps and one that
fails. Tokens must be equal in all of them. Hit rate and seconds to the first token are compared
with the large and the small pool of the same run; what was read and written is compared with plain
reads and writes of files of the same size.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from ...api.sdk.async_llm import AsyncLLM
from ...api.types.sampling_params import SamplingParams
from ...core.interface.tiers import PageStore
from ...core.tiers.tiers import Tiers
from ..common.report import RESULTS, heading, table, write_json

if TYPE_CHECKING:
    from ...core.engine.engine import Engine

NUM_PREFIXES = 8
TAIL, MAX_TOKENS = 200, 24  # characters of a request's own; tokens of an answer
SLEEP_SECONDS = 0.3
DISK_BYTES = 1 << 30
PROBE_PAGES = 64  # that are written and read to measure the disk


@dataclass(frozen=True, kw_only=True)
class Served:
    """Requests of one setting."""

    name: str
    tokens: Sequence[Sequence[int]]
    hit_rate: float
    first_s: Sequence[float]  # to the first token of each request
    load_gb_s: float
    closed: int  # times


class Slow:
    """A store that sleeps in some calls, or raises."""

    def __init__(self, store: PageStore, *, raises: bool) -> None:
        self._store, self._raises = store, raises
        self._rng = random.Random(0)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page, if that succeeds."""
        if self._rng.random() < 0.1:
            if self._raises:
                raise OSError("injected")
            time.sleep(SLEEP_SECONDS)
        return self._store.get(key, into)


def prompts(num: int, chars: int) -> list[str]:
    """Requests over a few beginnings: source files of the standard library."""
    rng = random.Random(1)
    files = [Path(each.__file__ or "") for each in (argparse, random, asyncio.base_events, shutil)]
    text = "".join(each.read_text("utf-8") for each in files)
    starts = rng.sample(range(0, len(text) - chars, chars // 2), NUM_PREFIXES)
    shared = [text[at : at + chars] for at in starts]
    return [
        f"{rng.choice(shared)}\n# {number}\n{text[at : at + TAIL]}"
        for number, at in enumerate(rng.choices(range(len(text) - TAIL), k=num))
    ]


async def serve(
    name: str,
    texts: Sequence[str],
    model: str,
    kv_tokens: int,
    at_once: int,
    disk: Path | None = None,
    fault: str = "",
) -> Served:
    """Serve all requests, some at once."""
    places = asyncio.Semaphore(at_once)
    kv_disk = None if disk is None else f"{disk}:{DISK_BYTES}"
    async with AsyncLLM(model, kv_tokens=kv_tokens, kv_disk=kv_disk, draft="radix,suffix") as llm:
        engine = cast("Engine", llm.engine)
        loads = engine.scheduler.page_loads
        if loads is not None and fault and isinstance(loads.tiers, Tiers):
            for tier in loads.tiers._tiers:
                tier.store = Slow(tier.store, raises=fault == "raises")  # type: ignore[assignment]

        async def one(number: int, text: str) -> tuple[Sequence[int], int, int, float]:
            async with places:
                params = SamplingParams(temperature=0.8, seed=number, max_tokens=MAX_TOKENS)
                out = await llm.generate(text, params)
                first = out.usage.time_to_first_token
                return out.token_ids, out.usage.prompt_tokens, out.usage.cached_tokens, first

        outs = await asyncio.gather(*(one(*each) for each in enumerate(texts)))
        states = [] if loads is None else loads.tiers.describe()
        page_bytes = engine.runner.pool.data[0].nbytes  # type: ignore[attr-defined]
    seconds = sum(state.load_seconds for state in states)
    num_bytes = sum(state.loaded_pages for state in states) * page_bytes
    return Served(
        name=name,
        tokens=[out[0] for out in outs],
        hit_rate=sum(out[2] for out in outs) / sum(out[1] for out in outs),
        first_s=[out[3] for out in outs],
        load_gb_s=num_bytes / seconds / 1e9 if seconds else 0.0,
        closed=sum(state.times_closed for state in states),
    )


def disk_rates(folder: Path, page_bytes: int) -> tuple[float, float]:
    """GB/s of writing and of reading pages one by one in a plain file."""
    page = os.urandom(page_bytes)
    path = folder / "probe"
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(PROBE_PAGES):
            file.write(page)
        written = time.perf_counter() - began
    with path.open("rb", buffering=0) as file:
        into = bytearray(page_bytes)
        began = time.perf_counter()
        for _ in range(PROBE_PAGES):
            file.readinto(into)
        read = time.perf_counter() - began
    path.unlink()
    size = PROBE_PAGES * page_bytes / 1e9
    return size / written, size / read


def main() -> None:
    """Serve the same requests in every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin", help="model, as for `foretoken serve`")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--chars", type=int, default=2400, help="length of a shared beginning")
    parser.add_argument("--pool", type=int, default=2304, help="tokens of the small pool")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers.json")
    options = parser.parse_args()
    report = heading()
    texts = prompts(options.requests, options.chars)
    for at_once in options.at_once:
        found = asyncio.run(_settings(texts, options, at_once))
        _show(found, at_once)
        report[f"{at_once} at once"] = [_row(each, found[0]) for each in found]
    write_json(options.out, report)


async def _settings(
    texts: Sequence[str], options: argparse.Namespace, at_once: int
) -> list[Served]:
    large = 16 * options.pool
    with tempfile.TemporaryDirectory() as name:
        disk = Path(name)
        found = []
        for title, tokens, folder, fault in (
            ("large pool", large, None, ""),
            ("small pool", options.pool, None, ""),
            ("small pool, disk", options.pool, disk, ""),
            ("after a restart", options.pool, disk, ""),
            ("a disk that sleeps", options.pool, disk, "sleeps"),
            ("a disk that fails", options.pool, disk, "raises"),
        ):
            served = await serve(title, texts, options.model, tokens, at_once, folder, fault)
            found.append(served)
    return found


def _row(served: Served, large: Served) -> dict[str, object]:
    ordered = sorted(served.first_s)
    return {
        "setting": served.name,
        "hit rate": round(served.hit_rate, 3),
        "first token p50, ms": round(1e3 * median(ordered), 1),
        "p90, ms": round(1e3 * ordered[len(ordered) * 9 // 10], 1),
        "load, GB/s": round(served.load_gb_s, 2),
        "times closed": served.closed,
        "tokens equal": list(served.tokens) == list(large.tokens),
    }


def _show(found: Sequence[Served], at_once: int) -> None:
    print(f"\n{at_once} at once")
    print(table([_row(each, found[0]) for each in found]), flush=True)


if __name__ == "__main__":
    main()
