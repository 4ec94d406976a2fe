"""transformers as a worker: ``generate`` plain, assisted, by prompt lookup; continuous batching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

if TYPE_CHECKING:
    from .wire import (
        NO,
        YES,
        Call,
        Generate,
        Job,
        Numbers,
        Tokens,
        UnsupportedError,
        serve,
        with_image,
    )
else:  # run as a script, beside wire.py
    from wire import (
        NO,
        YES,
        Call,
        Generate,
        Job,
        Numbers,
        Tokens,
        UnsupportedError,
        serve,
        with_image,
    )

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE = 32  # tokens; 256 by default, of which short prompts share nothing
BATCH_TOKENS = 512
"""Left alone, both sizes are chosen for a GPU's memory: minutes of filling zeros here."""


def load(job: Job) -> Generate:
    """Load the model; ``job.mode`` chooses among its ways."""
    if job.dtype not in DTYPES:
        raise UnsupportedError(f"{job.dtype}: no such weights without other libraries")
    torch.set_num_threads(job.threads)
    if job.mode == "image":
        return _seeing(job)
    model = _model(job, job.target)
    if job.mode in ("embed", "score"):
        return lambda call: _numbers(model, call)
    if job.mode == "lora":
        return _adapted(model, Path(job.checkpoint, "adapters"))
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
    if len(call.prompts) > 1 and not options.keys() <= {"adapter_names"}:
        raise UnsupportedError("speculation for batches")
    longest = max(map(len, call.prompts))
    prompts = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in call.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in call.prompts])
    grown = model.generate(  # type: ignore[operator]
        prompts, attention_mask=mask, **_lengths(call), **options
    )
    tokens: Tokens = grown[:, prompts.shape[1] :].tolist()
    return tokens


@torch.inference_mode()
def _numbers(model: Any, call: Call) -> Numbers:  # noqa: ANN401 - of transformers
    """Unit vectors, or scores, of all prompts as one batch; they are of one length."""
    prompts = torch.tensor(call.prompts)
    if call.task == "embed":
        hidden = model.model(prompts, use_cache=False).last_hidden_state[:, -1]
        vectors: Numbers = torch.nn.functional.normalize(hidden.float(), dim=-1).tolist()
        return vectors
    logits = model(prompts, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    scores: Numbers = (logits[:, YES] - logits[:, NO])[:, None].tolist()
    return scores


def _adapted(base: PreTrainedModel, folder: Path) -> Generate:
    """Adapters by PEFT, which computes those of a batch together."""
    from peft import PeftModel

    model: Any = None
    for each in sorted(folder.iterdir()):
        if model is None:
            model = PeftModel.from_pretrained(base, each, adapter_name=each.name)
        else:
            model.load_adapter(each, adapter_name=each.name)

    def generate(call: Call) -> Tokens:
        names = [str(each) for each in call.adapters]
        if len(set(names)) == 1:
            model.set_adapter(names[0])
            return _generate(model, call, {})
        return _generate(model, call, {"adapter_names": names})

    return generate


def _seeing(job: Job) -> Generate:
    """A picture before the prompt, by the processor that Pillow does for."""
    from PIL import Image

    model: Any = AutoModelForImageTextToText.from_pretrained(job.target, dtype=DTYPES[job.dtype])
    processors: Any = AutoImageProcessor
    processor = processors.from_pretrained(job.target, backend="pil")

    @torch.inference_mode()
    def generate(call: Call) -> Tokens:
        made = processor(images=[Image.open(call.image).convert("RGB")], return_tensors="pt")
        prompts = torch.tensor([with_image(prompt) for prompt in call.prompts])
        grown = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            pixel_values=made["pixel_values"].to(model.dtype),
            pixel_attention_mask=made["pixel_attention_mask"],
            **_lengths(call),
        )
        tokens: Tokens = grown[:, prompts.shape[1] :].tolist()
        return tokens

    return generate


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
