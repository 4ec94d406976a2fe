"""foretoken as a worker: the engine in this process, native kernels."""

from __future__ import annotations

import asyncio
from array import array
from itertools import count
from typing import Literal

from ....api.build.engine_builder import build
from ....api.types.sampling_params import SamplingParams
from ....core.config import EngineConfig
from ....core.engine.engine import Engine
from ....core.interface.request import Request
from ....core.interface.sampling import SamplingMetadata
from .wire import Call, Generate, Job, Tokens, serve

QUANTIZE: dict[str, Literal["none", "int8", "int4"]] = {
    "bf16": "none",
    "int8": "int8",
    "int4": "int4",
}


def load(job: Job) -> Generate:
    """Build the engine; calls run on an event loop that lives as long as the worker."""
    draft = "ngram" if job.mode == "lookup" else str(job.draft)
    is_auto = job.mode == "auto"
    # The rest of what "auto" has: SmolLM2's weights come from a 4-bit file, so in 4 bits it would
    # draft as itself.
    config = EngineConfig(
        draft="radix,suffix" if is_auto else draft if job.depth else "none",
        speculation="auto" if is_auto else job.depth or "off",
        device="cpu",
        dtype="bfloat16",
        quantize=QUANTIZE[job.dtype],
        threads=job.threads,
        kv_tokens=job.kv_tokens,
        max_model_len=job.max_len,
    )
    engine = build(job.target, config).engine
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    serials = count()

    def generate(call: Call) -> Tokens:
        requests = [_request(next(serials), prompt, call.num_new) for prompt in call.prompts]
        return loop.run_until_complete(_run(engine, requests))

    return generate


def _request(serial: int, prompt: list[int], num_new: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    return Request(
        request_id=f"peer-{serial}",
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=len(prompt)),
    )


async def _run(engine: Engine, requests: list[Request]) -> Tokens:
    async def follow(request: Request) -> list[int]:
        token_ids: list[int] = []
        async for delta in engine.submit(request):
            token_ids += delta.token_ids
        return token_ids

    return list(await asyncio.gather(*map(follow, requests)))


if __name__ == "__main__":
    serve(load, ("foretoken", "torch"))
