"""vLLM's CPU build as a worker: its offline engine in this process."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .wire import Call, Generate, Job, Tokens, UnsupportedError, serve
else:  # run as a script, beside wire.py
    from wire import Call, Generate, Job, Tokens, UnsupportedError, serve

KV_GIB = 2
"""About the tokens that the others get; it must hold the 16 requests of the shared prefix."""


def load(job: Job) -> Generate:
    """Load at vLLM's own settings: compiled, prefix caching on."""
    if job.dtype not in ("bf16", "int8"):
        raise UnsupportedError(f"{job.dtype}: needs a checkpoint made for it")
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(
            map(str, sorted(os.sched_getaffinity(0))[: job.threads])
        ),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    target = job.target if job.dtype == "bf16" else Path(job.checkpoint, "vllm", job.dtype)
    llm = LLM(
        str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job.max_len,
        speculative_config=_speculation(job) if job.depth else None,
        seed=0,
    )

    def generate(call: Call) -> Tokens:
        params = SamplingParams(
            temperature=0, max_tokens=call.num_new, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in call.prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def _speculation(job: Job) -> dict[str, object]:
    """Options of speculation by the draft model, or by look-ups in earlier text."""
    if job.mode == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": job.depth,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    if job.mode == "suffix":
        if find_spec("arctic_inference") is None:
            raise UnsupportedError("suffix: arctic-inference is not installed")
        return {"method": "suffix", "num_speculative_tokens": job.depth}
    return {
        "method": "draft_model",
        "model": str(job.draft),
        "num_speculative_tokens": job.depth,
    }


if __name__ == "__main__":
    serve(load, ("vllm-cpu", "torch"))
