"""foretoken as a worker: the engine in this process, native kernels."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Literal

from ....api.build.adapter_loader import AdapterFolder
from ....api.build.built import Built
from ....api.build.engine_builder import build
from ....api.media.placeholders import ImageTokens
from ....api.media.reader import ImageReader
from ....api.media.sources import ImageSource
from ....api.runtime.pooled.embedder import HIDDEN_STATE, unit_vector
from ....api.types.sampling_params import SamplingParams
from ....core.config import EngineConfig
from ....core.engine.engine import Engine
from ....core.interface.adapter import Adapter
from ....core.interface.images import PromptImage, image_key, with_image_rows
from ....core.interface.request import Delta, Request
from ....core.interface.sampling import Pooling, SamplingMetadata
from .wire import (
    IMAGE_BEGIN,
    NO,
    NUM_VECTORS,
    YES,
    Call,
    Generate,
    Job,
    Numbers,
    Tokens,
    serve,
    with_image,
)

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
    worker = _Worker(build(job.target, config), config)
    if job.mode == "lora":
        worker.load_adapters(Path(job.checkpoint, "adapters"))
    return worker.generate


class _Worker:
    """An engine, and an event loop that lives as long."""

    def __init__(self, built: Built[Engine], config: EngineConfig) -> None:
        self._built, self._loop, self._serials = built, asyncio.new_event_loop(), count()
        self._adapters: list[Adapter] = []
        self._reader = ImageReader(built.path, config)
        self._loop.run_until_complete(built.engine.start())

    def load_adapters(self, folder: Path) -> None:
        """Load all that are in a folder."""
        loader = self._built.adapters
        assert loader is not None
        for number, each in enumerate(sorted(folder.iterdir())):
            loaded = self._loop.run_until_complete(
                loader.load(each.name, number, AdapterFolder(each))
            )
            self._adapters.append(loaded.weights)

    def generate(self, call: Call) -> Tokens | Numbers:
        """Compute a call."""
        picture = Path(call.image).read_bytes() if call.image else b""
        return self._loop.run_until_complete(self._run(call, picture))

    async def _run(self, call: Call, picture: bytes) -> Tokens | Numbers:
        images = [await self._image(picture)] if picture else []
        adapters = call.adapters if self._adapters and call.adapters else [-1] * len(call.prompts)
        requests = [
            self._request(call, prompt, adapter, images)
            for prompt, adapter in zip(call.prompts, adapters, strict=True)
        ]
        answers = await asyncio.gather(*map(self._follow, requests))
        if call.task:
            return [_numbers(call.task, each.pooled) for each in answers]
        return [each.token_ids for each in answers]

    def _request(
        self, call: Call, prompt: list[int], adapter: int, images: Sequence[PromptImage]
    ) -> Request:
        params = SamplingParams(temperature=0, max_tokens=call.num_new, ignore_eos=True)
        token_ids = with_image(prompt) if images else prompt
        return Request(
            request_id=f"peer-{next(self._serials)}",
            tokens=with_image_rows(token_ids, images),
            sampling=SamplingMetadata(
                params=params, seed=0, prompt_len=len(token_ids), pooling=_pooling(call.task)
            ),
            namespace=None if adapter < 0 else f"adapter-{adapter}",
            adapter=None if adapter < 0 else self._adapters[adapter],
            images=tuple(images),
        )

    async def _follow(self, request: Request) -> Delta:
        """All of an answer."""
        whole = Delta()
        async for delta in self._built.engine.submit(request):
            if delta.error is not None:
                raise delta.error
            whole.merge(delta)
        return whole

    async def _image(self, data: bytes) -> PromptImage:
        """A picture as a request has it: from a data URL, by the server's own reader."""
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        source = ImageSource(url, "image")
        read = (await self._reader.read([source], ImageTokens("", "")))[source.digest]
        runs = ((len(IMAGE_BEGIN), NUM_VECTORS),)
        return PromptImage(image_key(None, read.content), runs, read.inputs)


def _pooling(task: str) -> Pooling | None:
    return {"embed": HIDDEN_STATE, "score": Pooling((NO, YES))}.get(task)


def _numbers(task: str, pooled: array[float] | None) -> list[float]:
    assert pooled is not None
    if task == "embed":
        return list(unit_vector(pooled))
    no, yes = pooled
    return [yes - no]


if __name__ == "__main__":
    serve(load, ("foretoken", "torch"))
