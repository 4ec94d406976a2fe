"""Measures the phases of inference on any model: ``foretoken bench phases``.

Prefill by prompt length, decode by position, throughput and latency by batch size, cold and cached
prefixes, and tokens per step by draft depth; each compared with the roofline of this machine,
measured in the same run. Writes a plot of each (PNG), a report of one page, and a JSON file.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ...api.build.engine_builder import LocalBuilt, build
from ...api.build.model_files import find_model
from ...api.cli.flags import Parser, add_engine_flags, engine_options
from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from ...core.execution.model_runner import ModelRunner
from ...core.model.description.config import DecoderConfig
from ...core.model.opening import read_config
from ..common.machine import Meter, largest_cache, prompt_text, shape_of
from ..common.oracle import oracles
from ..common.report import command, machine, write_json
from .data import Phases, load
from .measure import (
    BATCHES,
    QUICK,
    Lab,
    Sizes,
    measure_batches,
    measure_decode,
    measure_depths,
    measure_prefill,
)
from .report import TITLES, tables, write_report

ABOUT = (
    "Measure prefill, decode, batching, the prefix cache and speculation on the CPU, and compare "
    "each with the roofline of this machine. Writes a JSON file, a report of one page, and plots."
)
ACCURACY = 0.8  # Accuracy of the oracle that drafts for a checkpoint without a draft model.
RANDOM = "random-0.6b"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write JSON, plots and report; return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if not args.no_plots:
            require_matplotlib()
        phases = load(args.redraw) if args.redraw else _measure(args)
        _write(phases, args.out, draw=not args.no_plots)
    except InvalidRequest as error:
        parser.error(str(error))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="foretoken bench phases", description=ABOUT)
    add = parser.add_argument
    add("--model", metavar="MODEL", help=f"folder, hub id or {RANDOM}; default: smollm2")
    add(
        "--quick",
        action="store_true",
        help="measure fewer points, which takes a minute for a small model",
    )
    add("--max-len", type=int, metavar="N", help="longest prompt, in tokens")
    add("--repeats", type=int, metavar="N", help="maximum number of measurements of a point")
    add(
        "--budget",
        type=float,
        metavar="S",
        help="seconds after which a point is not repeated",
    )
    add(
        "--out",
        type=Path,
        default=Path("bench/results/phases"),
        help="folder for the report; the JSON file is written next to it",
    )
    add(
        "--no-plots",
        action="store_true",
        help="write only the report and JSON, which needs no matplotlib",
    )
    add(
        "--redraw",
        type=Path,
        metavar="JSON",
        help="JSON file of a run to plot and report again, without measuring",
    )
    add_engine_flags(parser)
    return parser


def require_matplotlib() -> None:
    """Raise `ForetokenError` if matplotlib is missing, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        message = "plots need matplotlib: pip install 'foretoken[bench]', or pass --no-plots"
        raise ForetokenError(message)


def _write(phases: Phases, folder: Path, *, draw: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder.with_suffix(".json"), msgspec.to_builtins(phases))
    if draw:
        from .plots import draw_all

        draw_all(phases, folder)
    print(f"\n{write_report(phases, folder, has_plots=draw)}")


# -- measuring ----------------------------------------------------------------------------------


def _measure(args: Any) -> Phases:  # noqa: ANN401 - argparse's own
    """Build the engine and measure everything on it."""
    sizes = _sizes(args)
    options = engine_options(args)
    if "speculation" in options:
        raise InvalidRequest(
            "speculation cannot be set: it is measured at several depths", param="speculation"
        )
    options.setdefault("threads", max(1, len(os.sched_getaffinity(0)) - 1))
    if options.setdefault("device", "cpu") != "cpu":
        raise InvalidRequest(
            "device must be cpu or auto: phases are measured on the CPU", param="device"
        )
    with _model(args.model) as (model, more), oracles(ACCURACY) as (oracle,):
        options |= more
        if model != "builtin":  # The built-in model has a draft model of its own.
            options.setdefault("draft", oracle)
        # Invalid options are rejected here, before files are read.
        config = EngineConfig(**options)
        if config.kv_tokens is None and config.kv_memory is None:
            path = find_model(model).path
            options["kv_tokens"] = _kv_tokens(read_config(path), sizes, config)
        built = build(model, EngineConfig(**options))
        return asyncio.run(_run(built, sizes, options, args.model or built.name))


def _sizes(args: Any) -> Sizes:  # noqa: ANN401
    sizes = QUICK if args.quick else Sizes()
    given = {name: getattr(args, name) for name in ("max_len", "repeats", "budget")}
    for name, value in given.items():
        if value is not None and value <= 0:
            raise InvalidRequest(f"{name} must be above 0", param=name)
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


@contextmanager
def _model(name: str | None) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the model to build, and its options."""
    if name != RANDOM:
        yield name, {}
        return
    from ..common.shapes import shape, write_config

    with tempfile.TemporaryDirectory() as folder:
        # The context of the real model.
        config = shape("qwen3-0.6b", max_position_embeddings=40960)
        write_config(Path(folder), config)
        yield folder, {"load_format": "random"}


def _kv_tokens(model: DecoderConfig, sizes: Sizes, config: EngineConfig) -> int:
    """Return the KV tokens for the longest prompt or largest batch, in half the free memory."""
    page_size = config.sizes("cpu").page_size
    in_batch = BATCHES[-1] * (5 * page_size + sizes.batch_len)  # Prompt, answer, and one more page.
    longest = min(model.max_model_len, sizes.max_len + sizes.decode_len) + 2 * page_size
    item_bytes = _ITEM_BYTES[model.dtype if config.dtype == "auto" else config.dtype]
    num_blocks = 2 if model.latent is None else 1
    per_token = num_blocks * model.num_layers * model.num_kv_heads * model.head_dim * item_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(page_size, min(max(in_batch, longest), free // 2 // per_token))


async def _run(built: LocalBuilt, sizes: Sizes, options: dict[str, Any], name: str) -> Phases:
    runner = built.engine.runner
    if not isinstance(runner, ModelRunner):
        raise ForetokenError("load_format must be auto: phases are measured on a real model")
    meter = Meter.of(runner.decoder, options["threads"])
    needed = max(sizes.max_len, 64 * BATCHES[-1], sizes.depth_prompts * sizes.depth_prompt_len)
    text, kind = prompt_text(built.path, built.vocab_size, needed)
    meter.measure()
    # Otherwise the system would map the pool's pages while prompts are timed.
    runner.pool.data.zero_()
    draft = options.get("draft", "auto")
    phases = Phases(
        command=command(),
        machine=machine(),
        model=name,
        settings={**options, "dtype": str(runner.decoder.dtype).removeprefix("torch.")},
        text=kind,
        draft=draft,
        simulated=draft.startswith("oracle:"),
        cache_bytes=largest_cache(),
        shape=shape_of(runner.decoder, runner.pool),
        limits=meter.limits,
    )
    await built.engine.start()
    try:
        await _measure_all(Lab(built, text, sizes), phases, meter)
    finally:
        await built.engine.close()
    return phases


async def _measure_all(lab: Lab, phases: Phases, meter: Meter) -> None:
    """Measure all phases and print each as it ends; the limits are measured in between."""
    phases.prefill = await measure_prefill(lab)
    meter.measure()
    phases.decode = await measure_decode(lab)
    phases.batches = await measure_batches(lab)
    meter.measure()
    if phases.draft != "none":
        found = await measure_depths(lab, simulated=phases.simulated)
        phases.depths, phases.depth_position = found
    meter.measure()
    phases.limits = meter.limits
    for name, rows in tables(phases):
        print(f"\n{TITLES[name]}\n\n{rows}", flush=True)
