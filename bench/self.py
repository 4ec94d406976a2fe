"""``foretoken bench self``: what a model gains that drafts for itself in 4 bits, and what it costs.

Models are SmolLM2 with its weights off the grid of its file (off_grid.py: a copy on that grid would
be the model itself), and the shapes of Qwen3-0.6B, Llama-3.2-1B and, with recurrent states,
Qwen3.5-0.8B with random weights.

*Prices*: memory and seconds of the copy, and a pass of the drafter beside a step of the model, as
the proposer runs it, choosing included. The floor is the share of bytes that it reads.
*Acceptance*, of SmolLM2 alone: how often the token at each position of a chain is accepted, where
those before it were. *Speed*: tokens a second with chains over those without drafts, in turns as in
``foretoken bench real``. Random weights have no acceptance: there each token of a chain is made
right with a given chance, which the table says, at the true price of its pass.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec.structs import replace
from transformers import PretrainedConfig

from ..api.build.engine_builder import LocalBuilt, build
from ..core.config import EngineConfig
from ..core.execution.model_runner import ModelRunner
from ..core.execution.proposer import PageRows, Proposer, VerifiedRequest
from ..core.interface.draft import Draft, DraftPlan
from ..core.interface.output import RequestOutput
from ..core.interface.plan import ScheduledRequest, StateUse
from ..core.interface.protocols import ProposerTraits
from ..core.interface.request import Request
from ..core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ..core.model.decoder import OwnDecoder
from ..core.model.drafting.rough_copy import rough_decoder, rounded_matrices
from ..core.model.loader import load_decoder
from ..core.ops.batch import ForwardOutput, RaggedBatch, Segment, SegmentState, Taps
from ..core.ops.kv_pool import KVPool
from ..draft.proposers.self_draft import SelfProposer
from .common.drafting import FixedDrafts
from .common.replay import ReplayRunner
from .common.report import heading, table, write_json
from .common.shapes import llama32_1b, qwen3_06b, qwen35_08b
from .off_grid import write_off_grid
from .real import Bench, Cell, Turns, paired, streams, total

ABOUT = (
    "Measure a model that drafts for itself in 4 bits: the price of its passes, acceptance by "
    "position, and tokens a second over those without drafts."
)
OFF_GRID = "smollm2-off-grid"
RANDOM: dict[str, Callable[[], PretrainedConfig]] = {
    "random-0.6b": qwen3_06b,
    "random-1b": llama32_1b,
    "random-hybrid-0.8b": qwen35_08b,
}
SIMULATED = (0.85, 0.92)  # chances of a token
CHAINS = (2, 3, 4, 6, 8)
BY_POSITION = 6  # tokens of the chains whose acceptance is counted
BEHIND = 128  # tokens behind each request of a price
PAGE_SIZE = 16
ROWS = (2, 3, 4, 5, 9)


@dataclass(frozen=True)
class Counting(FixedDrafts):
    """Chains, and how often the token at each position was tried and accepted."""

    tried: list[int] = field(default_factory=lambda: [0] * BY_POSITION)
    right: list[int] = field(default_factory=lambda: [0] * BY_POSITION)

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Count the accepted tokens and the first rejected one."""
        del request, scheduled, num_served
        accepted = len(output.path)
        for at in range(min(accepted + 1, len(output.draft.token_ids))):
            self.tried[at] += 1
            self.right[at] += at < accepted


class Simulated:
    """A self-draft whose tokens are right with the chance ``odds``; its passes are real."""

    def __init__(self, inner: SelfProposer, runner: ReplayRunner) -> None:
        self._inner, self._runner = inner, runner
        self._random = random.Random(5)
        self.odds = 1.0

    @property
    def source(self) -> str:
        """The name of the real one."""
        return self._inner.source

    @property
    def traits(self) -> ProposerTraits:
        """The traits of the real one."""
        return self._inner.traits

    @property
    def taps(self) -> Taps:
        """None."""
        return self._inner.taps

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """The real drafts, their tokens replaced."""
        pairs = zip(requests, self._inner.propose(requests), strict=True)
        return [self._steered(*pair) for pair in pairs]

    def _steered(self, scheduled: ScheduledRequest, draft: Draft) -> Draft:
        answer = self._runner.recorded[scheduled.request_id]
        position = len(scheduled.tokens) - scheduled.sampling.prompt_len
        tokens = [
            answer[at] if at < len(answer) and self._random.random() < self.odds else 0
            for at in range(position, position + len(draft.token_ids))
        ]
        return replace(draft, token_ids=tokens)

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Let the real one learn."""
        self._inner.observe(batch, output, verified)

    @property
    def stored(self) -> tuple[PageRows, ...]:
        """Nothing of its own: it drafts on the target's KV."""
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Do nothing: it keeps nothing that could come back."""

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Nothing of a request is kept."""


# -- prices ----------------------------------------------------------------------------------------


def prices(name: str, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """The copy, and its passes beside the model's steps, in turn."""
    target = load_decoder(
        folder,
        dtype="bfloat16",
        backend="auto",
        load_format="random" if name in RANDOM else "auto",
    )
    assert isinstance(target, OwnDecoder)
    target.ops.set_threads(args.threads)
    began = time.perf_counter()
    copy = rough_decoder(target)
    line: dict[str, object] = {"model": name, "copy, s": time.perf_counter() - began}
    most = max(args.requests)
    each = (BEHIND + 64) // PAGE_SIZE
    pool = _make_pool(target, most, each)
    proposer = SelfProposer(copy, pool)
    pages = [array("q", range(i * each, (i + 1) * each)) for i in range(most)]
    rng = random.Random(3)
    tokens = array("q", (rng.randrange(target.config.vocab_size) for _ in range(BEHIND + 1)))

    def step(num_requests: int, rows: int) -> float:
        segments = [
            Segment(tokens[:rows], BEHIND, own, rows, state=_state_of(pool, index))
            for index, own in enumerate(pages[:num_requests])
        ]
        began = time.perf_counter()
        target.forward(target.batch(segments, page_size=PAGE_SIZE), pool)
        return time.perf_counter() - began

    def drafts(num_requests: int, length: int) -> float:
        asked = [
            _scheduled(tokens, own, length, _state_of(pool, index))
            for index, own in enumerate(pages[:num_requests])
        ]
        began = time.perf_counter()
        proposer.propose(asked)
        return (time.perf_counter() - began) / length

    pool.data.zero_()
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.repeats):
        for count in args.requests:
            found.setdefault(("step", count), []).append(step(count, 1))
            found.setdefault(("pass", count), []).append(drafts(count, 3))
        for rows in ROWS:
            found.setdefault(("rows", rows), []).append(step(1, rows))
    took = {key: statistics.median(values) for key, values in found.items()}
    line["floor"] = _read_bytes(copy) / _read_bytes(target)
    line["copy, MiB"] = _read_bytes(copy) / 2**20
    line["step, ms"] = 1e3 * took["step", 1]
    line |= {f"pass, {n}": took["pass", n] / took["step", n] for n in args.requests}
    line |= {f"{rows} rows": took["rows", rows] / took["step", 1] for rows in ROWS}
    return line


def _make_pool(target: OwnDecoder, num_requests: int, pages_each: int) -> KVPool:
    """Pages of so many requests, and a state and a log of each where the model has them."""
    states = None
    if target.states:
        states = target.make_state_pool(num_requests, num_requests, page_size=PAGE_SIZE)
    return target.make_pool(num_requests * pages_each, page_size=PAGE_SIZE, states=states)


def _state_of(pool: KVPool, index: int) -> SegmentState | None:
    """The state of a request before the row at `BEHIND`, of any content; None without states."""
    if pool.states is None:
        return None
    pool.states.stand_in(index, index, BEHIND)
    return SegmentState(index, index, BEHIND + 1)


def _scheduled(
    tokens: array[int], pages: array[int], length: int, state: SegmentState | None
) -> ScheduledRequest:
    params = TokenSamplingParams(temperature=1.0)
    return ScheduledRequest(
        request_id="",
        tokens=tokens,
        start=BEHIND,
        stop=BEHIND + 1,
        page_ids=pages,
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=length, row_prices=tuple([1e-6] * length)),
        state=None if state is None else StateUse(state.slot, state.log),
    )


def _read_bytes(decoder: OwnDecoder) -> int:
    """Bytes of the matrices that a pass reads, experts that no row chose included."""
    return sum(matrix.weight.nbytes for matrix in rounded_matrices(decoder.weights))


# -- speed -----------------------------------------------------------------------------------------


async def speed(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Lines of acceptance and tokens a second."""
    config = EngineConfig(
        device="cpu", dtype="bfloat16", threads=args.threads, kv_tokens=16384, max_model_len=1024,
        draft="auto,self", max_running=max(args.requests),
        load_format="random" if name in RANDOM else "auto",
    )  # fmt: skip
    built = build(folder, config)
    runner = built.engine.runner
    assert isinstance(runner, ModelRunner)
    simulated = None
    if name in RANDOM:
        steered = ReplayRunner.over(runner)
        assert isinstance(steered.proposer, SelfProposer)
        simulated = Simulated(steered.proposer, steered)
        steered.proposer = cast("Proposer", simulated)
        built.engine.runner = steered
    await built.engine.start()
    try:
        if simulated is None:
            return [await _real(built, each, args) for each in args.temperatures]
        return [await _simulated(built, simulated, odds, name, args) for odds in SIMULATED]
    finally:
        await built.engine.close()


async def _real(
    built: LocalBuilt, temperature: float, args: argparse.Namespace
) -> dict[str, object]:
    asked = await streams(built, "chat", "show", args.prompts)
    bench = Bench(built, args.max_tokens, None)
    counting = Counting(DraftPlan(max_draft=BY_POSITION))
    cell = Cell("chat", 1, temperature)
    bench.use(f"chain-{BY_POSITION}", counting)
    line: dict[str, object] = {"model": OFF_GRID, "T": temperature}
    line |= await _turns(bench, cell, asked, ("look-ups", "auto"), args)
    pairs = enumerate(zip(counting.right, counting.tried, strict=True), 1)
    return line | {f"accepted at {at}": right / tried for at, (right, tried) in pairs if tried}


async def _simulated(
    built: LocalBuilt, simulated: Simulated, odds: float, name: str, args: argparse.Namespace
) -> dict[str, object]:
    rng, vocab_size = random.Random(11), built.vocab_size

    def made(count: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(count)]

    recorded = {tuple(made(BEHIND)): made(args.max_tokens) for _ in range(args.prompts)}
    bench = Bench(built, args.max_tokens, recorded)
    simulated.odds = odds
    line: dict[str, object] = {"model": name, "simulated acceptance": odds}
    cell = Cell("made up", 1, 0.0)
    return line | await _turns(bench, cell, [list(each) for each in recorded], (), args)


async def _turns(
    bench: Bench, cell: Cell, asked: Sequence[Sequence[int]], more: Sequence[str],
    args: argparse.Namespace,
) -> dict[str, object]:  # fmt: skip
    """Each setting over "off"."""
    settings = ["off", *more, *(f"chain-{length}" for length in CHAINS)]
    found = await bench.cell(cell, asked, settings, Turns(args.turns, 0.0))
    rate = total(found["off"]).rate
    return {"off, tok/s": rate} | {
        f"{setting} / off": str(paired(found["off"], found[setting])) for setting in settings[1:]
    }


# -- command ---------------------------------------------------------------------------------------


@contextmanager
def _folder(name: str, kept: Path | None) -> Iterator[Path]:
    if name == OFF_GRID and kept is not None:
        yield write_off_grid(kept)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if name == OFF_GRID:
            write_off_grid(folder)
        else:
            RANDOM[name]().save_pretrained(folder)
        yield folder


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="foretoken bench self", description=ABOUT)
    parser.add_argument(
        "--models", nargs="+", choices=(OFF_GRID, *RANDOM), default=[OFF_GRID, *RANDOM],
        help="models to measure",
    )  # fmt: skip
    parser.add_argument(
        "--off-grid", type=Path, metavar="FOLDER", help="folder to keep the off-grid model in"
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 4, 16], help="requests of a pass"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="sampling temperatures"
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="runs of each setting (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each price (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/self.json"), help="JSON file to write"
    )
    args = parser.parse_args(argv)
    report: dict[str, object] = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    priced, measured = list[dict[str, object]](), list[dict[str, object]]()
    for name in args.models:
        with _folder(name, args.off_grid) as folder:
            priced.append(prices(name, folder, args))
            print(table(priced[-1:]), flush=True)
            measured += asyncio.run(speed(name, folder, args))
        for line in measured[-2:]:
            print(table([line]), flush=True)
    write_json(args.out, report | {"prices": priced, "speed": measured})
