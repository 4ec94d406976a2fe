"""Compiles every kernel that the other stages need, many models at a time.

Kernels are otherwise compiled one after another, at their first launch. Here processes compile them
in parallel for models of the real widths with four layers, and Triton caches the results.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....api.build.model_files import BUILTIN
from ....core.execution.warm_up import warm_up
from ....core.model.decoder import OwnDecoder
from ....core.model.drafting.rough_copy import rough_decoder
from ....core.ops.base import RoughOps
from ....core.ops.batch import SamplingPlan, Wanted
from ....draft.control.outcome import NUM_BEST
from .bed import PAGE_SIZE, fill
from .stage import EXPERTS, LLAMA, QWEN, SMALL, STATES, Place, Stage

BUILTIN_PARTS = ("target", "draft")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": (SMALL, {}),
    "8B": (QWEN, {}),
    "8B Llama": (LLAMA, {}),
    "0.6B, batch": (SMALL, {"exact": "batch"}),
    "8B, batch": (QWEN, {"exact": "batch"}),
    "8B, int8": (QWEN, {"quantize": "int8"}),
    "8B, fp8 keys and values": (QWEN, {"kv_dtype": "fp8"}),
    "8B, int8 keys and values": (QWEN, {"kv_dtype": "int8"}),
    "1B of experts": (EXPERTS, {}),
    "0.8B with states": (STATES, {}),
    **{f"built-in {part}": (part, {}) for part in BUILTIN_PARTS},
}
NUM_LAYERS = 4  # Enough layers to have one of each kind.
MAX_LEN, NUM_TOKENS, NUM_REQUESTS = 16384, 2048, 256  # Sizes of the largest steps.
POLL_SECONDS = 0.1


def run(stage: Stage) -> None:
    """Compile all cases in parallel; report the seconds until each was ready to serve."""
    began = time.monotonic()
    started = {name: _start(stage.place, name) for name in stage.few(*CASES)}
    while started and stage.seconds_left > 0:
        for name in [name for name, process in started.items() if process.poll() is not None]:
            code = started.pop(name).returncode
            stage.add("Compiling", {"model": name, "seconds": time.monotonic() - began})
            if code:
                stage.wrong(f"{name} ended with code {code}")
        time.sleep(POLL_SECONDS)
    for name, process in started.items():
        process.kill()
        stage.note(f"{name} was not finished in time; later stages compile the missing kernels.")
    stage.note(
        "The cases ran in parallel, one process each; later stages reuse the compiled kernels."
    )


def _start(place: Place, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __spec__.name, str(place.work), name]
    return subprocess.Popen([*command, *(["--rehearse"] if place.rehearses else [])])


def compile_all(place: Place, name: str) -> None:
    """Compile everything that a server of this model compiles."""
    model, options = CASES[name]
    if model in BUILTIN_PARTS:
        decoder = place.decoder(BUILTIN / model, load_format="auto")
    else:
        decoder = place.decoder(place.shape(model, num_hidden_layers=NUM_LAYERS), **options)
    num_tokens = 64 if place.rehearses else NUM_TOKENS
    max_len = min(4 * num_tokens if place.rehearses else MAX_LEN, decoder.config.max_model_len)
    pool = decoder.make_pool(
        max_len // PAGE_SIZE, page_size=PAGE_SIZE, kv_dtype=options.get("kv_dtype", "auto")
    )
    fill(pool)
    requests = 2 if place.rehearses else NUM_REQUESTS
    warm_up(decoder, pool, max_len=max_len, num_tokens=num_tokens, num_requests=requests)
    if isinstance(decoder, OwnDecoder) and isinstance(decoder.ops, RoughOps) and not options:
        rough_decoder(decoder).warm_up(pool, max_len, Wanted(SamplingPlan((), (), NUM_BEST)))


def main(argv: Sequence[str]) -> None:
    """Compile one case; the arguments are the stages' folder, the case, and ``--rehearse``."""
    work, name, *flags = argv
    compile_all(Place(work=Path(work), rehearses="--rehearse" in flags), name)


if __name__ == "__main__":
    main(sys.argv[1:])
