"""Recordings that a test replays: texts that a model wrote, and step times of machines.

    python -m foretoken.bench.lab.recorded_steps texts             SmolLM2's answers
    python -m foretoken.bench.lab.recorded_steps prices NAME       this machine's step times

Both commands write to one small file. Texts are token ids. Prices are the time of a pass of SmolLM2
in bfloat16 by its number of rows, the best of several, and the median time that a step takes in
addition to its pass, with and without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...api.build.engine_builder import LocalBuilt, build
from ...api.sdk.llm import LLM
from ...api.types.sampling_params import SamplingParams
from ...core.config import EngineConfig
from ...core.execution.model_runner import ModelRunner
from ...core.interface.output import StepOutput
from ...core.interface.plan import StepPlan
from ...core.scheduling.chunk_budget import num_step_tokens
from ...core.scheduling.guarded_speculator import GuardedSpeculator
from ...draft.control import profiler
from ..common.real_tasks import ADVERSARIAL, KINDS, adversarial, prompts
from ..common.report import command, write_json
from ..real import Bench, Cell, Figures, streams

FILE = Path(__file__).with_name("recorded_steps.json")
LOADS = (1, 4, 16)  # Numbers of requests at a time.
NUM_REQUESTS, ANSWER_LEN = 8, 144  # Requests of each text, and tokens of an answer.
ROWS = (*range(1, 34), 36, 37, 48, 49, 64, 65, 96, 128, 192, 256)
TEMPERATURES = (0.0, 1.0)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of steps on one machine, in seconds."""

    name: str
    forward: dict[int, float]  # Seconds of a pass of the target by its rows.
    knots: tuple[int, ...]  # Numbers of rows that an engine times on that machine at its start.
    key_s: float  # Seconds that each context token of a request adds per row after the first.
    host_plain: dict[int, float]  # Seconds that a step adds to its pass, by number of requests.
    host_drafts: dict[int, float]  # Seconds that a step adds to its pass if drafts are looked up.


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one kind at one temperature: pairs of prompt and answer, as packed token ids."""

    kind: str
    temperature: float
    packed: list[tuple[str, str]]

    def requests(self) -> list[tuple[array[int], array[int]]]:
        """Return prompts and their answers as token ids."""
        return [(_unpack(prompt), _unpack(answer)) for prompt, answer in self.packed]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """All texts and prices of the file."""

    command: str = ""
    texts: list[Text] = []
    prices: list[Prices] = []


def load(path: Path = FILE) -> Recording:
    """Read the file; return an empty recording if it does not exist."""
    if not path.is_file():
        return Recording()
    return msgspec.json.decode(path.read_bytes(), type=Recording)


def _pack(token_ids: Sequence[int]) -> str:
    return base64.b85encode(zlib.compress(array("H", token_ids).tobytes(), 9)).decode()


def _unpack(packed: str) -> array[int]:
    narrow = array("H", zlib.decompress(base64.b85decode(packed)))
    return array("q", narrow)


# -- texts -----------------------------------------------------------------------------------------


def record_texts() -> list[Text]:
    """Return SmolLM2's answers to real tasks, and adversarial texts."""
    texts = []
    with LLM("smollm2", dtype="bfloat16", draft="none", generation_config="none") as llm:
        for kind in KINDS:
            asked = prompts(kind, "show")[:NUM_REQUESTS]
            for temperature in TEMPERATURES:
                outs = [
                    llm.chat(
                        [{"role": "user", "content": text}],
                        SamplingParams(temperature=temperature, seed=seed, max_tokens=ANSWER_LEN),
                    )
                    for seed, text in enumerate(asked)
                ]
                packed = [(_pack(out.prompt_token_ids), _pack(out.token_ids)) for out in outs]
                texts.append(Text(kind=kind, temperature=temperature, packed=packed))
    made = adversarial(NUM_REQUESTS, 256, ANSWER_LEN, 40_000)
    packed = [(_pack(prompt), _pack(answer)) for prompt, answer in made]
    return [*texts, Text(kind=ADVERSARIAL, temperature=0.0, packed=packed)]


# -- prices ----------------------------------------------------------------------------------------


async def record_prices(name: str) -> Prices:
    """Time passes of many numbers of rows, then steps of answers with drafts and without."""
    config = EngineConfig(
        device="cpu", dtype="bfloat16", kv_tokens=32_768, max_model_len=2_048, max_running=16
    )
    built = build("smollm2", config)
    runner = built.engine.runner
    assert isinstance(runner, ModelRunner)
    knots = profiler.rows_to_time(runner.decoder)
    forward, key_s = profiler.profile_pass(runner.decoder, runner.pool, ROWS, patience=6)
    await built.engine.start()
    hosts = {load: await _host_seconds(built, load) for load in LOADS}
    await built.engine.close()
    return Prices(
        name=name,
        forward=forward,
        knots=tuple(knots),
        key_s=key_s,
        host_plain={load: plain for load, (plain, _) in hosts.items()},
        host_drafts={load: drafts for load, (_, drafts) in hosts.items()},
    )


async def _host_seconds(built: LocalBuilt, load: int) -> tuple[float, float]:
    """Return the median seconds that a step adds to its pass, without and with drafts."""
    speculator = built.engine.scheduler.speculator
    assert isinstance(speculator, GuardedSpeculator)
    found: dict[bool, list[float]] = {False: [], True: []}
    inner = speculator.inner

    class Noting:
        """Calls the inner speculator, and records the time of each decode step."""

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
            inner.observe_step(plan, output, seconds)
            if len(plan.requests) == load and num_step_tokens(plan.requests) == load:
                beyond = seconds - output.times.get("forward", 0.0)
                found[output.num_rows > load].append(beyond)

    speculator.inner = Noting()  # type: ignore[assignment]
    bench = Bench(built, ANSWER_LEN, None)
    for kind, setting in (("chat", "off"), ("chat", "2"), ("quote", "4")):
        asked = await streams(built, kind, "tune", max(4, load))
        for group in [asked] if load > 1 else [[each] for each in asked]:
            await bench.group(Cell(kind, load, 0.0), group, setting, Figures())
    speculator.inner = inner
    return statistics.median(found[False]), statistics.median(found[True])


def main(argv: Sequence[str] | None = None) -> None:
    """Record texts, or this machine's prices under a name, and write them to the file."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.recorded_steps", description=__doc__
    )
    parser.add_argument("what", choices=("texts", "prices"))
    parser.add_argument("name", nargs="?", help="name of this machine (with prices only)")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args(argv)
    before = load(args.out)
    texts, prices = before.texts, before.prices
    if args.what == "texts":
        texts = record_texts()
    elif not args.name:
        parser.error("prices need a name, such as the CPU and its kernels")
    else:
        measured = asyncio.run(record_prices(args.name))
        prices = [*(each for each in prices if each.name != args.name), measured]
    after = Recording(command=command(), texts=texts, prices=prices)
    write_json(args.out, msgspec.to_builtins(after))


if __name__ == "__main__":
    main()
