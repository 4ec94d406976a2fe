"""Losses that bring one model's next-token distribution to another's.

With p the target's and q the draft's distribution, a drafted token is accepted with a probability
between (1 - TV) / (1 + TV) and 1 - TV, where TV = 1 - sum min(p, q) (Daliri, Musco, Suresh, arXiv
2408.07978): the closer the better, token by token, whatever the text is worth. Forward KL finds the
way from afar (DistillSpec, arXiv 2310.08461), TV itself is what counts at the end.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM


@dataclass(frozen=True)
class Mix:
    """Weights of the three losses: cross-entropy on the text, KL and TV to the other model."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0


def forward_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) in nats per token, from logits [num_tokens, vocab]."""
    log_q, log_p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def total_variation(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean of 1 - sum min(p, q) per token, from logits [num_tokens, vocab]."""
    return 1 - torch.minimum(F.softmax(student, -1), F.softmax(teacher, -1)).sum(-1).mean()


def logits_of(model: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Logits [num_tokens, vocab] in fp32 for every position but the last of rows [num_rows, n]."""
    logits: torch.Tensor = model(input_ids=rows[:, :-1], use_cache=False).logits
    return logits.flatten(0, 1).float()


def cross_entropy(model: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per token over rows [num_rows, length + 1]."""
    return F.cross_entropy(logits_of(model, rows), rows[:, 1:].flatten())


def mixed_loss(
    model: Qwen3ForCausalLM, other: Qwen3ForCausalLM, rows: torch.Tensor, mix: Mix
) -> torch.Tensor:
    """The weighted sum over rows [num_rows, length + 1]; no gradient goes to `other`."""
    with torch.no_grad():
        theirs = logits_of(other, rows)
    ours = logits_of(model, rows)
    loss = ours.new_zeros(())
    if mix.ce:
        loss = loss + mix.ce * F.cross_entropy(ours, rows[:, 1:].flatten())
    if mix.kl:
        loss = loss + mix.kl * forward_kl(ours, theirs)
    if mix.tv:
        loss = loss + mix.tv * total_variation(ours, theirs)
    return loss
