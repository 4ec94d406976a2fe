"""Teach a two-layer model to copy from its context, by telling two heads where to look.

Copying takes a head that looks at the token before, and above it a head that looks behind the last
occurrence of the current token (induction: Olsson et al., arXiv 2209.11895). Source code is full of
names to be copied, yet so small a model finds the pair of heads late or never, because neither is
of use without the other. On repeated patterns the right places are known: attention to them is
rewarded for a short while, and ordinary training takes over from there.
"""

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

SHORTEST, LONGEST = 8, 96
ATTENTION_WEIGHT = 0.5
FLOOR = 1e-5


def with_repeats(
    rows: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[int]]:
    """Rows [num_rows, n] whose first `count` are shuffled patterns repeated to the end; periods."""
    rows, periods = rows.clone(), []
    for index in range(count):
        period = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=generator))
        pattern = rows[index, torch.randperm(rows.shape[1], generator=generator)[:period]]
        rows[index] = pattern.repeat(rows.shape[1] // period + 1)[: rows.shape[1]]
        periods.append(period)
    return rows, periods


def missing_attention(weights: torch.Tensor, first: int, distance: int) -> torch.Tensor:
    """Mean -log of the weights [..., n, n] that queries from `first` on give `distance` behind."""
    queries = torch.arange(first, weights.shape[-1])
    return -(weights[..., queries, queries - distance].float() + FLOOR).log().mean()


def copying_loss(model: Qwen3ForCausalLM, rows: torch.Tensor, periods: list[int]) -> torch.Tensor:
    """Cross-entropy, plus head 0 of layer 0 looking one back, and of layer 1 one period less one.

    The first `len(periods)` of rows [num_rows, n] are repeated patterns; eager attention is needed.
    """
    out = model(input_ids=rows[:, :-1], use_cache=False, output_attentions=True)
    loss = F.cross_entropy(out.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    before, behind = out.attentions[0][:, 0], out.attentions[1][:, 0]
    looked = [
        missing_attention(behind[index], period, period - 1) for index, period in enumerate(periods)
    ]
    return loss + ATTENTION_WEIGHT * (missing_attention(before, 1, 1) + torch.stack(looked).mean())
