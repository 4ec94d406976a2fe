"""``foretoken bench real``: speculation on real text, with all settings on the same prompts.

A cell is a kind of task (real_tasks.py), a number of concurrent requests and a temperature. In each
cell the settings take turns on every group of prompts, in rotating order. Prompts are cached once
and answers never, so that no setting profits from another's. Answers must be equal under all
settings. The figure is tokens per second while that number of requests runs: an ended request is
followed by the next one at once, and prompts are cached. So it measures decoding alone, and not the
slowest answer. Each run begins with a few untimed tokens, because the cost model has just seen the
steps of another setting. The ratio compares ``auto`` with the best fixed depth, ``off`` included.
Settings take turns until the standard error of that ratio, computed from the ratios of the turns,
is small; it is printed beside each ratio. The JSON also has the processor time per token
(``cpu_ms_per_token``), which other load on the machine affects less than tokens per second.

If ``--draft`` names a draft model or head, "chain-N" and "tree-N" are drafts of N tokens from it
alone, "look-ups" is the controller without it, and "auto" has both. ``--model smollm2-off-grid
--draft auto,self`` lets SmolLM2 draft with its own 4-bit copy (off_grid.py).

``--model random-0.6b`` has the step times of that shape on the same text: it replays SmolLM2's
recorded answers, so acceptance depends on the text. The kind ``adversarial`` is replayed, too: five
tokens in random order, on which speculation must cost next to nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from ..api.build.drafts import AUTO, DraftSpec, make_sources, parse_draft
from ..api.build.engine_builder import LocalBuilt, build
from ..api.text.tokenizer import Tokenizer
from ..api.types.sampling_params import SamplingParams
from ..core.config import EngineConfig
from ..core.execution.model_runner import ModelRunner
from ..core.interface.protocols import Speculator
from ..core.interface.request import DEFAULT_CACHE, CacheOptions, Request, Usage
from ..core.interface.sampling import SamplingMetadata
from ..core.model.opening import read_config
from ..core.scheduling.guarded_speculator import GuardedSpeculator, guarded
from ..draft.control.controller import Controller
from ..draft.control.estimators import AcceptanceModel
from ..draft.speculator import DraftSpeculator
from .common.drafting import chain, tree
from .common.real_tasks import ADVERSARIAL, KINDS, PER_HALF, Half, adversarial, prompts
from .common.replay import ReplayRunner
from .common.report import Spread, heading, table, write_json
from .common.shapes import shape
from .off_grid import write_off_grid

ABOUT = (
    "Measure speculation on real text: tokens per second by task, number of requests and "
    "temperature, without drafts, at fixed depths and with auto. All settings must give the same "
    "answers."
)
SETTINGS = ("off", "1", "2", "4", "8", "16", "auto")
LOOK_UPS = "look-ups"
DRAFT_SETTINGS = (
    "off", LOOK_UPS, "chain-2", "chain-4", "chain-8", "tree-8", "tree-16", "auto",
)  # fmt: skip
RANDOM, OFF_GRID = "random-0.6b", "smollm2-off-grid"
LEAST_TURNS = 3  # Minimum number of turns, to estimate the standard error.
LAPS = 2  # With concurrency C above 1, a run has at least C times this many requests.
LEAD_IN = 40  # Tokens of each concurrent request before a run is timed.
_NUMBERS = count()  # Numbers for request ids.


@dataclass(frozen=True, slots=True)
class Cell:
    """A task, a concurrency and a temperature, with which all settings run in turn."""

    kind: str
    concurrency: int
    temperature: float


@dataclass(slots=True)
class Figures:
    """Time and tokens of one setting in a cell, over all groups of prompts."""

    seconds: float = 0.0  # Time at full concurrency, summed over the groups.
    num_timed: int = 0  # Tokens generated at full concurrency.
    cpu_seconds: float = 0.0  # Processor time of the process in this time, on all threads.
    num_tokens: int = 0  # Tokens of all answers.
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    by_source: dict[str, int] = field(default_factory=dict)

    def add(self, usages: Sequence[Usage]) -> None:
        """Add a group of requests that ran together."""
        for usage in usages:
            self.num_tokens += usage.completion_tokens
            self.num_steps += usage.verify_steps
            self.num_proposed += usage.proposed_tokens
            self.num_accepted += usage.accepted_tokens
            for source, num in usage.accepted_by_source.items():
                self.by_source[source] = self.by_source.get(source, 0) + num

    @property
    def cpu_ms(self) -> float:
        """Processor time per token in milliseconds."""
        return 1e3 * self.cpu_seconds / self.num_timed

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_timed / self.seconds


class Turns(NamedTuple):
    """Number of turns that the settings of a cell take."""

    most: int
    # A cell ends early once the standard error of its ratio is below this share.
    error: float


class Ratio(NamedTuple):
    """One setting over another: the ratio over all turns, and its standard error."""

    value: float
    error: float  # Standard error as a share of the value; infinite for a single turn.

    def __str__(self) -> str:
        return f"{self.value:.3f} ±{self.error * self.value:.3f}"


def paired(base: Sequence[Figures], other: Sequence[Figures]) -> Ratio:
    """Return the token rate of ``other`` over the rate of ``base``, turn by turn."""
    value = total(other).rate / total(base).rate
    logs = [math.log(b.rate / a.rate) for a, b in zip(base, other, strict=True)]
    if len(logs) < 2:
        return Ratio(value, math.inf)
    return Ratio(value, statistics.stdev(logs) / math.sqrt(len(logs)))


def total(turns: Sequence[Figures]) -> Figures:
    """Add up all turns."""
    return Figures(sum(each.seconds for each in turns), sum(each.num_timed for each in turns))


def best_of(found: Mapping[str, Sequence[Figures]]) -> str | None:
    """Return the fastest setting except ``auto``; None if there is nothing to compare."""
    others = [setting for setting in found if setting != "auto"]
    if "auto" not in found or not others:
        return None
    return max(others, key=lambda setting: total(found[setting]).rate)


class Bench:
    """Runs cells on one engine. ``recorded``: answers to replay, by prompt."""

    def __init__(
        self, built: LocalBuilt, max_tokens: int, recorded: dict[tuple[int, ...], list[int]] | None
    ) -> None:
        self._built, self._max_tokens, self._recorded = built, max_tokens, recorded
        self._runner = built.engine.runner
        self._own = built.engine.scheduler.speculator
        self._others: dict[str, Speculator] = {}

    async def cell(
        self, cell: Cell, asked: Sequence[Sequence[int]], settings: Sequence[str], turns: Turns
    ) -> dict[str, list[Figures]]:
        """Return the figures of every turn by setting. Raises SystemExit if answers differ."""
        found: dict[str, list[Figures]] = {setting: [] for setting in settings}
        groups = [[prompt] for prompt in asked] if cell.concurrency == 1 else [asked]
        for turn in range(turns.most):
            for figures in found.values():
                figures.append(Figures())
            for number, group in enumerate(groups):
                first = (turn + number) % len(settings)
                answers: list[list[list[int]]] = []
                for setting in (*settings[first:], *settings[:first]):
                    answers.append(await self.group(cell, group, setting, found[setting][-1]))
                if any(answer != answers[0] for answer in answers):
                    raise SystemExit(f"{cell}: tokens differ between settings: this is a bug")
            best = best_of(found) if turn + 1 >= LEAST_TURNS else None
            if best is not None and paired(found[best], found["auto"]).error < turns.error:
                break
        return found

    async def group(
        self, cell: Cell, group: Sequence[Sequence[int]], setting: str, figures: Figures
    ) -> list[list[int]]:
        """Answer the prompts of a group, ``cell.concurrency`` at a time.

        If several run at a time, prompts are repeated until there are ``LAPS * cell.concurrency``
        requests.
        """
        self._built.engine.scheduler.speculator = self._speculator(setting)
        laps = 1 if cell.concurrency == 1 else -(-LAPS * cell.concurrency // len(group))
        asked = [prompt for _ in range(laps) for prompt in group]
        # The prompts are computed first and alone, because only decoding is measured.
        prompts = [self._request(prompt, cell, "off", seed=0, most=1) for prompt in group]
        lead_in = [
            self._request(prompt, cell, setting, seed=0, most=LEAD_IN)
            for prompt in asked[: cell.concurrency]
        ]
        requests = [
            self._request(prompt, cell, setting, seed=index) for index, prompt in enumerate(asked)
        ]
        if isinstance(self._runner, ReplayRunner):
            self._runner.recorded = {}
        if isinstance(self._runner, ReplayRunner) and self._recorded is not None:
            pairs = [*zip(prompts, group, strict=True), *zip(requests, asked, strict=True)]
            pairs += zip(lead_in, asked, strict=False)
            self._runner.recorded = {
                each.request_id: self._recorded[tuple(prompt)] for each, prompt in pairs
            }
        for each in prompts:
            each.cache = DEFAULT_CACHE
            await self._serve(each, [])
        await asyncio.gather(*(self._serve(each, []) for each in lead_in))
        answers: list[list[int]] = [[] for _ in requests]
        waiting = iter(zip(requests, answers, strict=True))
        began, cpu_began = time.perf_counter(), time.process_time()
        timed: list[tuple[float, int, float]] = []

        async def seat() -> None:
            for request, answer in waiting:
                await self._serve(request, answer)
            seconds = time.perf_counter() - began
            timed.append((seconds, sum(map(len, answers)), time.process_time() - cpu_began))

        await asyncio.gather(*(seat() for _ in range(cell.concurrency)))
        # The timed part ends when fewer requests than ``cell.concurrency`` are left.
        seconds, num_tokens, cpu_seconds = timed[0]
        figures.seconds += seconds
        figures.num_timed += num_tokens
        figures.cpu_seconds += cpu_seconds
        figures.add([each.usage for each in requests])
        self._built.engine.scheduler.speculator = self._own
        return answers

    def _speculator(self, setting: str) -> Speculator:
        """Return the speculator that plans the drafts of a setting.

        Call it while the engine is idle.
        """
        if not is_of_draft(setting):
            return self._own
        if setting not in self._others:
            self._others[setting] = guarded(self._make_speculator(setting))
        return self._others[setting]

    def _make_speculator(self, setting: str) -> Speculator:
        if setting != LOOK_UPS:
            kind, _, count = setting.partition("-")
            return chain(int(count)) if kind == "chain" else tree(int(count))
        assert isinstance(self._own, GuardedSpeculator)
        inner = self._own.inner
        assert isinstance(inner, DraftSpeculator)
        controller = Controller(copy.deepcopy(inner.controller.costs))
        sources = make_sources(DraftSpec(AUTO))
        return DraftSpeculator(sources, controller, AcceptanceModel())

    def _request(
        self,
        prompt: Sequence[int],
        cell: Cell,
        setting: str,
        *,
        seed: int,
        most: int | None = None,
    ) -> Request:
        depth: int | str = "auto"
        if setting not in ("auto", LOOK_UPS) and not is_of_draft(setting):
            depth = 0 if setting == "off" else int(setting)
        max_tokens, stop_ids = most or self._max_tokens, self._built.eos_token_ids
        if self._recorded is not None:
            max_tokens = most or len(self._recorded[tuple(prompt)])
            stop_ids = frozenset()
        params = SamplingParams(temperature=cell.temperature, max_tokens=max_tokens)
        return Request(
            request_id=str(next(_NUMBERS)),
            tokens=array("q", prompt),
            sampling=SamplingMetadata(params=params, seed=seed, prompt_len=len(prompt)),
            stop_ids=stop_ids,
            depth=cast("int | Literal['auto']", depth),
            cache=CacheOptions(write=False),
        )

    async def _serve(self, request: Request, answer: list[int]) -> None:
        """Append the request's tokens to ``answer`` as they arrive."""
        async for delta in self._built.engine.submit(request):
            if delta.error is not None:
                raise delta.error
            answer += delta.token_ids


def is_of_draft(setting: str) -> bool:
    """Whether a setting has a speculator of its own. Raises ValueError for unknown ones."""
    kind, _, count = setting.partition("-")
    if setting == LOOK_UPS or (kind in ("chain", "tree") and count.isdigit() and int(count) > 0):
        return True
    if setting in ("off", "auto") or setting.isdigit():
        return False
    raise ValueError(
        f"unknown setting {setting!r}; use off, auto, a depth, look-ups, chain-N or tree-N"
    )


def drafts_by(setting: str) -> str:
    """Return the names of the drafters of a setting, for the JSON."""
    if is_of_draft(setting):
        return LOOK_UPS if setting == LOOK_UPS else "draft model or head"
    return {"off": "nothing", "auto": "everything"}.get(setting, "everything, at a fixed depth")


def row(cell: Cell, found: dict[str, list[Figures]]) -> dict[str, object]:
    """Return the cell's row: token rates by setting, ``auto`` against the best, standard errors."""
    line: dict[str, object] = {
        "task": cell.kind, "requests": cell.concurrency, "T": cell.temperature,
    }  # fmt: skip
    line |= {f"{setting}, tok/s": total(runs).rate for setting, runs in found.items()}
    best = best_of(found)
    if best is not None:
        line |= {"turns": len(found["auto"]), "best": best}
        line["auto / best"] = str(paired(found[best], found["auto"]))
        for name in (each for each in ("off", LOOK_UPS) if each in found):
            line[f"auto / {name}"] = str(paired(found[name], found["auto"]))
        last = found["auto"]
        num_proposed = sum(figures.num_proposed for figures in last)
        line |= {
            "tokens/step": sum(f.num_tokens for f in last) / sum(f.num_steps for f in last),
            "precision": sum(f.num_accepted for f in last) / num_proposed if num_proposed else "-",
        }
    return line


def details(cell: Cell, found: dict[str, list[Figures]]) -> dict[str, object]:
    """Return all figures of a cell, for the JSON."""
    auto = found.get("auto")
    settings = {
        setting: {
            "drafts_by": drafts_by(setting),
            "tokens_per_s": Spread.of([figures.rate for figures in runs]),
            "cpu_ms_per_token": Spread.of([figures.cpu_ms for figures in runs]),
            "auto_over_it": None if auto is None else paired(runs, auto)._asdict(),
            "tokens_per_step": sum(f.num_tokens for f in runs) / sum(f.num_steps for f in runs),
            "proposed": sum(f.num_proposed for f in runs),
            "accepted": sum(f.num_accepted for f in runs),
            "accepted_by_source": runs[-1].by_source,
        }
        for setting, runs in found.items()
    }
    return {"cell": cell, "settings": settings}


# -- prompts and models ----------------------------------------------------------------------------


async def streams(built: LocalBuilt, kind: str, half: Half, number: int) -> list[list[int]]:
    """Return prompts as token ids, rendered by the model's own chat template."""
    tokenizer = Tokenizer.load(built.path, max_model_len=built.max_model_len)
    try:
        messages = ([{"role": "user", "content": text}] for text in prompts(kind, half)[:number])
        return [await tokenizer.encode_chat(each, {}) for each in messages]
    finally:
        tokenizer.close()


@contextmanager
def _config(args: argparse.Namespace) -> Iterator[tuple[str, EngineConfig]]:
    options: dict[str, Any] = {"device": "cpu", "dtype": args.dtype, "threads": args.threads}
    options |= {"kv_tokens": 32768, "max_model_len": 2048, "max_running": max(args.concurrency)}
    options["draft"] = args.draft or ",".join(AUTO)
    options["draft_vocab"] = args.draft_vocab
    if args.model not in (RANDOM, OFF_GRID):
        yield args.model, EngineConfig(**options)
        return
    with tempfile.TemporaryDirectory() as name:
        if args.model == OFF_GRID:
            yield str(write_off_grid(Path(name))), EngineConfig(**options)
            return
        shape("qwen3-0.6b").save_pretrained(name)
        read_config(name)
        yield name, EngineConfig(**options, load_format="random")


async def _record(
    args: argparse.Namespace,
) -> dict[tuple[str, float], dict[tuple[int, ...], list[int]]]:
    """Return SmolLM2's answers by kind and temperature, to replay them on another shape."""
    config = EngineConfig(device="cpu", dtype="bfloat16", kv_tokens=32768, max_model_len=2048)
    built = build("smollm2", config)
    await built.engine.start()
    bench = Bench(built, args.max_tokens, None)
    found = {}
    for kind in args.kinds:
        if kind == ADVERSARIAL:
            continue
        asked = await streams(built, kind, args.half, args.prompts)
        for temperature in args.temperatures:
            cell = Cell(kind, 1, temperature)
            answers = await bench.group(cell, asked, "off", Figures())
            found[kind, temperature] = dict(zip(map(tuple, asked), answers, strict=True))
    await built.engine.close()
    return found


async def _main(args: argparse.Namespace) -> list[dict[str, object]]:
    recorded = await _record(args) if args.model == RANDOM else {}
    lines, reports = [], []
    with _config(args) as (model, config):
        built = build(model, config)
        made = adversarial(args.prompts, 256, args.max_tokens, built.vocab_size)
        for temperature in args.temperatures:
            recorded[ADVERSARIAL, temperature] = {tuple(prompt): answer for prompt, answer in made}
        if args.model == RANDOM or ADVERSARIAL in args.kinds:
            assert isinstance(built.engine.runner, ModelRunner)
            built.engine.runner = ReplayRunner.over(built.engine.runner)
        await built.engine.start()
        for kind in args.kinds:
            for temperature in args.temperatures:
                answers = recorded.get((kind, temperature))
                if answers is None:
                    asked = await streams(built, kind, args.half, args.prompts)
                else:
                    asked = [list(prompt) for prompt in answers]
                bench = Bench(built, args.max_tokens, answers)
                for concurrency in args.concurrency:
                    cell = Cell(kind, concurrency, temperature)
                    turns = Turns(args.turns, args.error)
                    found = await bench.cell(cell, asked, args.settings, turns)
                    lines.append(row(cell, found))
                    reports.append(details(cell, found))
                    print(table(lines[-1:]), flush=True)
        await built.engine.close()
    print(f"\n{table(lines)}")
    return reports


def _setting(text: str) -> str:
    try:
        is_of_draft(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON."""
    args = _parsed(argv)
    report: dict[str, object] = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    report["cells"] = asyncio.run(_main(args))
    write_json(args.out, report)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with 2 if a setting needs a draft model and lacks one."""
    parser = argparse.ArgumentParser(prog="foretoken bench real", description=ABOUT)
    parser.add_argument(
        "--model",
        default="smollm2",
        help=f"model as for `foretoken serve`, {RANDOM} or {OFF_GRID}",
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="data type of the weights; auto: as stored"
    )
    parser.add_argument("--draft", help="drafters, as for `foretoken serve --draft`")
    parser.add_argument(
        "--draft-vocab",
        choices=("same", "any"),
        default="same",
        help="vocabulary of a draft model; any: another one, drafts are converted as text "
        "(%(default)s)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=(*KINDS, ADVERSARIAL),
        default=list(KINDS),
        help="kinds of prompts",
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16], help="requests at a time"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="sampling temperatures"
    )
    parser.add_argument(
        "--settings", nargs="+", type=_setting, metavar="SETTING",
        help="settings to compare: off, auto, a depth, look-ups, chain-N or tree-N; default: "
        "depths, or chains and trees where --draft names a model or head",
    )  # fmt: skip
    parser.add_argument(
        "--half",
        choices=("tune", "show"),
        default="show",
        help="half of the prompts; tune: for fitting priors, show: for published figures",
    )
    parser.add_argument("--prompts", type=int, default=PER_HALF, help="prompts of each kind")
    parser.add_argument(
        "--max-tokens", type=int, default=160, help="maximum length of an answer in tokens"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=8,
        help="maximum number of runs of each setting in a cell (%(default)s)",
    )
    parser.add_argument(
        "--error",
        type=float,
        default=0.03,
        help="standard error of auto over the best setting, as a share, below which a cell ends"
        " early, after 3 turns or more (%(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="number of CPU threads (all cores)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/real.json"), help="JSON file to write"
    )
    args = parser.parse_args(argv)
    draft = parse_draft(EngineConfig(draft=args.draft or "auto"), own_draft=None)
    has_model = draft.model is not None and not draft.may_lack_model
    if args.settings is None:
        args.settings = list(DRAFT_SETTINGS if has_model else SETTINGS)
    if not has_model and any(each.startswith(("chain-", "tree-")) for each in args.settings):
        parser.error("chain-N and tree-N need a draft model or head: name one with --draft")
    return args
