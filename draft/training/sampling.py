"""Text from a model: greedy, or by Gumbel noise (argmax of logits plus noise is a sample)."""

import torch
from transformers import Qwen3ForCausalLM

from .packing import Ids


def gumbel(num_rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Gumbel noise [num_rows, vocab]."""
    uniform_hazard = torch.empty(num_rows, vocab).exponential_(generator=generator)
    return -uniform_hazard.clamp_min_(1e-30).log_()


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    prompts: torch.Tensor,
    noise: list[torch.Tensor] | None,
    new_tokens: int,
) -> torch.Tensor:
    """Continue prompts [batch, length]: argmax of logits, plus the position's noise if given."""
    text, cache, fed = prompts, None, prompts
    for position in range(new_tokens):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores = out.logits[:, -1] if noise is None else out.logits[:, -1] + noise[position]
        fed, cache = scores.argmax(-1, keepdim=True), out.past_key_values
        text = torch.cat([text, fed], 1)
    return text


def random_prompts(
    documents: list[Ids], count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Prompts [count, length] from places drawn evenly over all tokens of the documents."""
    usable = [torch.from_numpy(document) for document in documents if len(document) > 2 * length]
    weights = torch.tensor([len(d) - length for d in usable], dtype=torch.float64)
    prompts = []
    for index in torch.multinomial(weights, count, replacement=True, generator=generator).tolist():
        start = int(torch.randint(0, len(usable[index]) - length, (1,), generator=generator))
        prompts.append(usable[index][start : start + length])
    return torch.stack(prompts)
