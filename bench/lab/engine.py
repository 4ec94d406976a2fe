"""The engine beside transformers: shared prefixes, with and without cache and speculation.

Every request is a shared prefix and a suffix of its own. "cache off" gives each request a
``cache_salt`` of its own, so that nothing is shared. Run: ``python -m foretoken.bench.lab.engine``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from ...api.build.engine_builder import LocalBuilt, build
from ...api.build.model_files import BUILTIN
from ...api.types.sampling_params import SamplingParams
from ...core.config import EngineConfig
from ...core.interface.request import Request, Usage
from ...core.interface.sampling import SamplingMetadata
from ..common.machine import torch_read_bandwidth
from ..common.report import Spread, heading, table, write_json
from ..common.shapes import qwen3_06b, write_pair


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_requests`` prompts of ``prefix_len`` shared and ``suffix_len`` own tokens."""

    num_requests: int
    prefix_len: int
    suffix_len: int
    output_len: int
    concurrency: int

    def prompts(self, text: Sequence[int]) -> list[list[int]]:
        """Cut the prompts out of a running text."""
        prefix, rest = list(text[: self.prefix_len]), text[self.prefix_len :]
        cuts = range(0, self.num_requests * self.suffix_len, self.suffix_len)
        return [prefix + list(rest[at : at + self.suffix_len]) for at in cuts]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run over a workload; seconds, tokens."""

    seconds: float
    token_ids: list[list[int]]
    usages: list[Usage]
    gaps: list[float]  # between the deltas of one stream, divided by their tokens


# -- foretoken ----------------------------------------------------------------------------------


async def _stream(
    built: LocalBuilt, request: Request, limit: asyncio.Semaphore, out: Outcome
) -> None:
    async with limit:
        last, index = None, int(request.request_id.rsplit("-", 1)[1])
        async for delta in built.engine.submit(request):
            now = time.perf_counter()
            if last is not None and delta.token_ids:
                out.gaps.append((now - last) / len(delta.token_ids))
            last = now
            out.token_ids[index] += delta.token_ids
        out.usages[index] = request.usage


async def _run_engine(
    built: LocalBuilt,
    prompts: Sequence[Sequence[int]],
    work: Workload,
    *,
    cache: bool,
    depth: int | None,
) -> Outcome:
    await built.engine.flush_cache()
    limit = asyncio.Semaphore(work.concurrency)
    out = Outcome(0.0, [[] for _ in prompts], [Usage() for _ in prompts], [])
    requests = [
        _request(index, prompt, work.output_len, None if cache else str(index), depth)
        for index, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    await asyncio.gather(*(_stream(built, request, limit, out) for request in requests))
    return Outcome(time.perf_counter() - began, out.token_ids, out.usages, out.gaps)


def _request(
    index: int, prompt: Sequence[int], output_len: int, salt: str | None, depth: int | None
) -> Request:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return Request(
        request_id=f"bench-{index}",
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=len(prompt)),
        depth=depth,
        namespace=salt,
    )


async def _measure_engine(
    built: LocalBuilt, prompts: Sequence[Sequence[int]], work: Workload, repeats: int
) -> dict[tuple[bool, bool], list[Outcome]]:
    """Alternate the four settings, so that a slow spell of the machine hits all of them."""
    await built.engine.start()
    settings = [(cache, spec) for cache in (True, False) for spec in (True, False)]
    found: dict[tuple[bool, bool], list[Outcome]] = {setting: [] for setting in settings}
    for _ in range(repeats + 1):
        for cache, spec in settings:
            outcome = await _run_engine(
                built, prompts, work, cache=cache, depth=None if spec else 0
            )
            found[cache, spec].append(outcome)
    await built.engine.close()
    return {setting: outcomes[1:] for setting, outcomes in found.items()}  # the first warms up


# -- transformers -------------------------------------------------------------------------------


@torch.inference_mode()
def _measure_transformers(
    folder: Path, prompts: Sequence[Sequence[int]], work: Workload, repeats: int
) -> list[Outcome]:
    """``generate`` in batches of the same concurrency; it has no cache across requests."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [_generate(model, prompts, work) for _ in range(repeats + 1)][1:]


def _generate(model: torch.nn.Module, prompts: Sequence[Sequence[int]], work: Workload) -> Outcome:
    token_ids: list[list[int]] = []
    began = time.perf_counter()
    for at in range(0, len(prompts), work.concurrency):
        batch = torch.tensor(prompts[at : at + work.concurrency])
        grown = model.generate(  # type: ignore[operator]
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=work.output_len,
            min_new_tokens=work.output_len,
            do_sample=False,
            pad_token_id=0,
        )
        token_ids += grown[:, batch.shape[1] :].tolist()
    return Outcome(time.perf_counter() - began, token_ids, [], [])


# -- figures ------------------------------------------------------------------------------------


def _figures(name: str, outcomes: Sequence[Outcome], baseline: float) -> dict[str, object]:
    usages = [usage for outcome in outcomes for usage in outcome.usages]
    proposed = sum(usage.proposed_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    rates = [sum(map(len, o.token_ids)) / o.seconds for o in outcomes]
    steps = sum(usage.verify_steps for usage in usages)
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
    return {
        "setting": name,
        "tok/s": Spread.of(rates),
        "x transformers": Spread.of(rates).median / baseline,
        "TTFT s": Spread.of([u.time_to_first_token for u in usages]) if usages else "-",
        "ITL ms p50": 1e3 * gaps[len(gaps) // 2] if gaps else "-",
        "ITL ms p99": 1e3 * gaps[int(len(gaps) * 0.99)] if gaps else "-",
        "acceptance": accepted / proposed if proposed else "-",
        "tokens/step": sum(u.completion_tokens for u in usages) / steps if steps else "-",
        "cached": sum(u.cached_tokens for u in usages) // len(outcomes) if usages else "-",
    }


def _compare(
    folder: Path, built: LocalBuilt, work: Workload, repeats: int
) -> list[dict[str, object]]:
    text = _text(work, built.vocab_size)
    prompts = work.prompts(text)
    peer = _measure_transformers(folder, prompts, work, repeats)
    baseline = Spread.of([sum(map(len, o.token_ids)) / o.seconds for o in peer]).median
    rows = [_figures("transformers generate", peer, baseline)]
    measured = asyncio.run(_measure_engine(built, prompts, work, repeats))
    for (cache, spec), outcomes in measured.items():
        name = f"foretoken, cache {_on(cache)}, speculation {_on(spec)}"
        rows.append(_figures(name, outcomes, baseline))
    _check_equal(measured)
    return [*rows, _roofline(folder, rows[0], baseline)]


def _roofline(folder: Path, columns: dict[str, object], baseline: float) -> dict[str, object]:
    """Plain decoding at batch 1 cannot be faster than reading every weight once a token."""
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rate = torch_read_bandwidth() / num_bytes
    found = {"setting": "roofline, batch 1", "tok/s": rate, "x transformers": rate / baseline}
    return {column: found.get(column, "-") for column in columns}


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _check_equal(measured: dict[tuple[bool, bool], list[Outcome]]) -> None:
    """The promise: cache and speculation change the time, never the tokens."""
    streams = [outcome.token_ids for outcomes in measured.values() for outcome in outcomes]
    if any(stream != streams[0] for stream in streams):
        raise SystemExit("tokens differ between settings: this is a bug")


def _text(work: Workload, vocab_size: int) -> list[int]:
    """Token ids to cut prompts from: real code for the built-in pair, random ids otherwise."""
    needed = work.prefix_len + work.num_requests * work.suffix_len
    if vocab_size < 10_000:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(BUILTIN / "target")
        source = Path(argparse.__file__).read_text(encoding="utf-8")[: 8 * needed]
        ids: list[int] = tokenizer(source).input_ids
        return ids[:needed]
    torch.manual_seed(1)
    return torch.randint(vocab_size, (needed,)).tolist()


def _builtin(args: argparse.Namespace) -> list[dict[str, object]]:
    built = build(
        "builtin", EngineConfig(device="cpu", threads=args.threads, speculation=args.depth)
    )
    work = Workload(args.requests, 512, 32, 96, args.concurrency)
    return _compare(BUILTIN / "target", built, work, args.repeats)


def _random(args: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.checkpoints or name)
        write_pair(folder, qwen3_06b(), torch.bfloat16, eps=0.06)
        config = EngineConfig(
            draft=str(folder / "draft"),
            device="cpu",
            threads=args.threads,
            speculation=args.depth,
            kv_tokens=8192,
        )
        built = build(folder / "target", config)
        work = Workload(args.requests, 256, 32, 24, args.concurrency)
        return _compare(folder / "target", built, work, args.repeats)


MODELS = {"builtin": _builtin, "random-0.6b": _random}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table for each model, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.engine", description=__doc__
    )
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, default=2, help="draft tokens a step")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--checkpoints", help="keep the random checkpoint in this folder")
    parser.add_argument("--out", type=Path, default=Path("bench/results/engine.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report: dict[str, object] = heading()
    report["read_gb_per_s"] = torch_read_bandwidth() / 1e9
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    for name in MODELS if args.model == "all" else [args.model]:
        rows = MODELS[name](args)
        report[name] = rows
        print(f"\n{name}\n\n{table(rows)}", flush=True)
    write_json(args.out, report)


if __name__ == "__main__":
    main()
