"""Compares the kernels with torch: the backend's tests on the device, then whole layers."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.model.decoder import Decoder
from ....core.ops.batch import Segment
from ....core.ops.kv_pool import KVPool
from .bed import PAGE_SIZE
from .stage import LLAMA, QWEN, SMALL, Stage

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "core" / "ops" / "triton"
# Test processes; most of their time is compilation.
WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))
AFTER_TESTS = 25.0  # Seconds reserved for the parts that follow the tests.
BAD = ("FAILED", "ERROR")
OUTCOME = re.compile(r"^\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED) (\S+?)::(.+?) *$", re.MULTILINE)
REASON = re.compile(r"^(?:FAILED|ERROR) (.+?) - (.+)$", re.MULTILINE)
ON_DEVICE = (  # The other tests check the host's code.
    "test_triton_*.py", "test_graphs.py", "test_graph_best.py", "test_rough_linear.py",
)  # fmt: skip
REHEARSED = ("test_tile_schedule.py",)
WINDOW = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    (QWEN, {}), (LLAMA, {}), (SMALL, {}), (QWEN, WINDOW),
)  # fmt: skip
NUM_LAYERS = 2
NUM_PAGES = 256
NUM_CASES = 12
# Largest relative error ||ours - oracle|| / ||oracle||.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


def run(stage: Stage) -> None:
    """Run the tests, which are the most precise, and then compare layers."""
    layers = {
        f"{name}{', window' if more else ''}": partial(_layers, stage, name, more)
        for name, more in stage.few(*MODELS)
    }
    stage.try_each({"tests": partial(_run_tests, stage)} | layers)


# -- tests --------------------------------------------------------------------------------------


def _run_tests(stage: Stage) -> None:
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default", "-n", "1" if stage.rehearses else str(WORKERS)]
    patterns = REHEARSED if stage.rehearses else ON_DEVICE
    files = [str(file) for pattern in patterns for file in TESTS.glob(pattern)]
    if not files:  # Without files, pytest would run the whole suite.
        stage.wrong(f"no tests in {TESTS.relative_to(ROOT)}: {', '.join(patterns)}")
        return
    command += files
    log = stage.place.work / "tests.log"
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"FORETOKEN_TEST_DEVICE": stage.place.device},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(10.0, stage.seconds_left - AFTER_TESTS),
                check=False,
            )
        except subprocess.TimeoutExpired:
            stage.wrong("the tests ran out of time before all were done")
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text)
    report_tests(stage, text)


def report_tests(stage: Stage, text: str) -> None:
    """Report counts by file, and the reason of each failure, from pytest's verbose output."""
    counts: dict[str, Counter[str]] = {}
    reasons = dict(REASON.findall(text))
    for verdict, file, name in OUTCOME.findall(text):
        counts.setdefault(Path(file).stem, Counter())[verdict.lower()] += 1
        if verdict in BAD:
            reason = reasons.get(f"{file}::{name}", "see the log")
            stage.wrong(f"{Path(file).stem}, {name}: {reason[:200]}")
    if not counts:
        stage.wrong("no test was run; see the log")
    for file, count in sorted(counts.items()):
        bad = sum(count[verdict.lower()] for verdict in BAD)
        row = {"file": file, "passed": count["passed"], "failed": bad, "skipped": count["skipped"]}
        stage.add("Tests of the backend on the device", row)


# -- whole layers -------------------------------------------------------------------------------


def _layers(stage: Stage, name: str, more: dict[str, Any]) -> None:
    """Run random ragged batches through the kernels and the oracle, on equal weights and KV."""
    few = {} if stage.rehearses else {"num_hidden_layers": NUM_LAYERS}
    folder = stage.place.shape(name, **few, **more)
    decoders = [stage.place.decoder(folder, backend=each) for each in ("torch", "triton")]
    pools = [_pool(decoder) for decoder in decoders]
    rng, found = random.Random(11), []
    for _ in range(1 if stage.rehearses else NUM_CASES):
        segments = _ragged(rng, decoders[0].config.vocab_size, stage.rehearses)
        oracle, kernels = map(_computed, decoders, pools, (segments, segments))
        found.append(_compared(oracle, kernels))
    logits, kv, same, untouched = (list(each) for each in zip(*found, strict=True))
    tolerance = TOLERANCE[stage.place.dtype]
    is_right = max(logits + kv) <= tolerance and all(untouched)
    stage.add(
        f"Layers against the oracle, {stage.place.dtype}",
        {
            "model": name + (", window of 100" if more else ""),
            "cases": len(found),
            "logits off by": max(logits),
            "keys and values off by": max(kv),
            "allowed": tolerance,
            "other slots untouched": "yes" if all(untouched) else "NO",
            "likeliest token the same": sum(same) / len(same),
            "verdict": "ok" if is_right else "WRONG",
        },
    )
    if not is_right:
        stage.wrong(f"{folder.name}: the kernels and the oracle disagree")


def _pool(decoder: Decoder) -> KVPool:
    """Return a pool that is ready for steps, with graphs if the backend has them."""
    pool = decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    decoder.warm_up(pool, NUM_PAGES * PAGE_SIZE)
    return pool


def _computed(
    decoder: Decoder, pool: KVPool, segments: Sequence[Segment]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, the KV of the rows [rows, ...] and all other KV.

    The pool has known content before the pass.
    """
    pool.data.normal_(generator=torch.Generator(pool.data.device).manual_seed(5))
    batch = decoder.batch(segments, page_size=PAGE_SIZE)
    logits = decoder.forward(batch, pool).logits
    slots = torch.tensor(_slots(segments), device=pool.data.device)
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    written = pool.data[pages, :, :, :, offsets].clone()
    pool.data[pages, :, :, :, offsets] = 0.0
    return logits, written, pool.data


def _slots(segments: Sequence[Segment]) -> list[int]:
    """Return the slot of each row's keys and values."""
    return [
        each.page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for each in segments
        for position in range(each.start, each.stop)
    ]


def _compared(
    oracle: tuple[Tensor, Tensor, Tensor], kernels: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float, float, bool]:
    """Compare two results.

    Returns the distances of logits and KV, the share of equal argmax tokens, and whether all other
    KV is equal.
    """
    (logits, kv, rest), (our_logits, our_kv, our_rest) = oracle, kernels
    same = (our_logits.argmax(-1) == logits.argmax(-1)).float().mean()
    return (
        _distance(our_logits, logits),
        _distance(our_kv, kv),
        float(same),
        torch.equal(our_rest, rest),
    )


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||; infinite if a value is not finite."""
    ours, theirs = found.double(), expected.double()
    distance = float((ours - theirs).norm() / theirs.norm())
    return distance if distance == distance else float("inf")


def _ragged(rng: random.Random, vocab_size: int, is_small: bool) -> list[Segment]:
    """Return decode, verify and prefill rows, some after a shared prefix."""
    pages, segments = list(range(NUM_PAGES)), []
    rng.shuffle(pages)
    trunk = [pages.pop() for _ in range(2 if is_small else 20)]
    for _ in range(rng.randrange(1, 4 if is_small else 10)):
        length = rng.choice((1, 1, 1, 2, 5, 9, 17) if is_small else (1, 1, 1, 1, 2, 5, 9, 33, 700))
        shared = rng.choice((0, 0, len(trunk)))
        start = shared * PAGE_SIZE + rng.randrange(2 * PAGE_SIZE)
        own = -(-(start + length) // PAGE_SIZE) - shared
        table = [*trunk[:shared], *(pages.pop() for _ in range(own))]
        tokens = array("q", (rng.randrange(vocab_size) for _ in range(length)))
        segments.append(Segment(tokens, start, array("q", table), length))
    return segments
