"""Time from the call of an update from shared memory to the first token of the new version.

The checkpoints have random weights in bfloat16, with the shapes of SmolLM2-135M or of a Qwen2.5
model with 1.5 billion weights: the time depends on shapes alone. A second number is the time after
which the self-draft follows.

    python -m foretoken.bench.lab.weight_updates --shape smollm2-135m --repeats 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from ...api.build.model_files import BUILTIN
from ...api.sdk.async_llm import AsyncLLM
from ...api.types.sampling_params import SamplingParams
from ...core.model.formats.files import SINGLE_FILE
from ...core.model.opening import read_config
from ...core.model.weights.layer import tensor_shapes

SHAPES: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 100000.0,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "rope_theta": 1000000.0,
    },
}  # fmt: skip
COMMON: dict[str, object] = {
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
PROMPT = list(range(1, 65))  # 64 token ids


class Measured(NamedTuple):
    """Seconds from the call to the new version, to its first token, and to the self-draft."""

    update: float
    first_token: float
    self_draft: float


def make_checkpoint(folder: Path, shape: str) -> None:
    """Write a checkpoint with random weights in bfloat16. Blocking."""
    tokenizer = (each for each in (BUILTIN / "target").iterdir() if each.suffix != ".safetensors")
    for file in tokenizer:
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        for name, size in tensor_shapes(read_config(folder)).items()
    }
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def share(file: Path) -> SharedMemory:
    """Return a block of shared memory with the bytes of a file. Blocking."""
    size = file.stat().st_size
    block = SharedMemory(create=True, size=size)
    assert block.buf is not None
    with file.open("rb") as stream:
        assert stream.readinto(block.buf) == size
    return block


async def measure_once(llm: AsyncLLM, block: SharedMemory) -> Measured:
    """Update the weights from a block of shared memory, and generate one token."""
    rollouts = llm.built.rollouts
    assert rollouts is not None
    began = time.perf_counter()
    await llm.update_weights_from_shared_memory(block.name, block.size)
    updated = time.perf_counter()
    await llm.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    answered = time.perf_counter()
    await rollouts.settle()
    return Measured(updated - began, answered - began, time.perf_counter() - began)


async def measure(folder: Path, block: SharedMemory, repeats: int) -> list[Measured]:
    """Return the times of ``repeats`` updates, after one that is not counted."""
    options: dict[str, Any] = {
        "kv_tokens": 4096,
        "max_model_len": 512,
        "allow_weight_updates": True,
    }
    async with AsyncLLM(folder, **options, draft="self") as llm:
        return [await measure_once(llm, block) for _ in range(repeats + 1)][1:]


def summary(name: str, seconds: Sequence[float]) -> str:
    """Return the median and the range of some times."""
    middle = statistics.median(seconds)
    return f"{name}: {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    """Print the times of updates of one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    with TemporaryDirectory(prefix="weight-updates-") as name:
        folder = Path(name)
        make_checkpoint(folder, words.shape)
        block = share(folder / SINGLE_FILE)
        try:
            found = asyncio.run(measure(folder, block, words.repeats))
        finally:
            block.close()
            block.unlink()
    print(f"{words.shape}, {block.size / 1e9:.2f} GB, {words.repeats} updates")
    for number, field in enumerate(Measured._fields):
        print(summary(field, [each[number] for each in found]))


if __name__ == "__main__":
    main()
