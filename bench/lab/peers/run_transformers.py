"""transformers as a worker: ``generate`` plain, assisted, by prompt lookup; continuous batching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

if TYPE_CHECKING:
    from .wire import Call, Generate, Job, Tokens, UnsupportedError, serve
else:  # run as a script, beside wire.py
    from wire import Call, Generate, Job, Tokens, UnsupportedError, serve

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE = 32  # tokens; 256 by default, of which short prompts share nothing
BATCH_TOKENS = 512
"""Left alone, both sizes are chosen for a GPU's memory: minutes of filling zeros here."""


def load(job: Job) -> Generate:
    """Load the model; ``job.mode`` chooses among its ways."""
    if job.dtype not in DTYPES:
        raise UnsupportedError(f"{job.dtype}: no such weights without other libraries")
    torch.set_num_threads(job.threads)
    model = _model(job, job.target)
    if job.mode == "continuous":
        return _continuous(model, job)
    options: dict[str, Any] = {}
    if job.mode == "lookup":
        options["prompt_lookup_num_tokens"] = job.depth
    elif job.depth:
        options["assistant_model"] = _assistant(job)
    return lambda call: _generate(model, call, options)


def _model(job: Job, folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[job.dtype])
    return model


def _assistant(job: Job) -> PreTrainedModel:
    """A draft of fixed depth: neither grown nor cut by confidence."""
    draft = _model(job, job.draft)
    draft.generation_config.num_assistant_tokens = job.depth
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@torch.inference_mode()
def _generate(model: PreTrainedModel, call: Call, options: dict[str, Any]) -> Tokens:
    if options and len(call.prompts) > 1:
        raise UnsupportedError("speculation for batches")
    longest = max(map(len, call.prompts))
    prompts = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in call.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in call.prompts])
    grown = model.generate(  # type: ignore[operator]
        prompts, attention_mask=mask, **_lengths(call), **options
    )
    tokens: Tokens = grown[:, prompts.shape[1] :].tolist()
    return tokens


def _lengths(call: Call) -> dict[str, Any]:
    return {
        "max_new_tokens": call.num_new,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def _continuous(model: PreTrainedModel, job: Job) -> Generate:
    """``generate_batch``; blocks may be shared, as by default. One manager for all calls."""
    settings = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=-(-job.kv_tokens // PAGE), max_batch_tokens=BATCH_TOKENS
    )

    def generate(call: Call) -> Tokens:
        options = _lengths(call) | {"eos_token_id": -1}
        config = GenerationConfig(**options)  # type: ignore[no-untyped-call]
        found = model.generate_batch(  # type: ignore[operator]
            call.prompts,
            generation_config=config,
            continuous_batching_config=settings,
            progress_bar=False,
            persistent_manager=True,
        )
        by_number = sorted(found.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [list(output.generated_tokens) for _, output in by_number]

    return generate


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
