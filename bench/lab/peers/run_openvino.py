"""OpenVINO GenAI as a worker: its continuous batching pipeline, as its server uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino_genai as genai

if TYPE_CHECKING:
    from .wire import Call, Generate, Job, Tokens, serve
else:  # run as a script, beside wire.py
    from wire import Call, Generate, Job, Tokens, serve

CACHE_GB = 3


def load(job: Job) -> Generate:
    """Load the converted model; prefix caching on, activations in bfloat16 or, for int8, as is."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    folder = Path(job.checkpoint, "openvino", job.dtype)
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "ENABLE_CPU_PINNING": False}
    if job.dtype == "bf16":
        options["INFERENCE_PRECISION_HINT"] = "bf16"
    if job.mode == "lookup":
        options["prompt_lookup"] = True
    elif job.depth:
        options["draft_model"] = genai.draft_model(
            Path(job.checkpoint, "openvino", f"{job.dtype}-draft"), "CPU", **options
        )
    tokenizer = genai.Tokenizer(folder)
    pipeline = genai.ContinuousBatchingPipeline(folder, tokenizer, scheduler, "CPU", **options)

    def generate(call: Call) -> Tokens:
        config = genai.GenerationConfig(
            max_new_tokens=call.num_new, ignore_eos=True, do_sample=False
        )
        if job.depth:
            config.num_assistant_tokens = job.depth
        if job.mode == "lookup":
            config.max_ngram_size = 3
        prompts = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in call.prompts]
        found = pipeline.generate(prompts, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in found]

    return generate


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
