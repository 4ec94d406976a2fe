"""The recipe: five stages, in the order in which they run.

`target` learns the text. `draft` learns the text, then the target. `copy` teaches the draft to copy
from its context, which so small a model hardly finds by itself, then goes on with text and target.
`match` goes back to the target with the text and the draft's habits in its loss: it gives up a
little of what so small a draft cannot follow. `refine` follows the target there.

With p the target's and q the draft's distribution, a drafted token is accepted with a probability
between (1 - TV) / (1 + TV) and 1 - TV, where TV = 1 - sum min(p, q) (Daliri, Musco, Suresh, arXiv
2408.07978): the closer the better, token by token, whatever the text is worth. Forward KL finds the
way from afar (DistillSpec, arXiv 2310.08461), TV itself is what counts at the end.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from .models import Role

StageName = Literal["target", "draft", "copy", "match", "refine"]
SHORTEST, LONGEST = 8, 96
ATTENTION_WEIGHT = 0.5
FLOOR = 1e-5

# -- losses ---------------------------------------------------------------------------------------


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


# -- copying --------------------------------------------------------------------------------------

# Copying takes a head that looks at the token before, and above it a head that looks behind the
# last occurrence of the current token (induction: Olsson et al., arXiv 2209.11895). Source code
# is full of names to be copied, yet so small a model finds the pair of heads late or never,
# because neither is of use without the other. On repeated patterns the right places are known:
# attention to them is rewarded for a short while, and ordinary training takes over from there.


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


# -- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Settings of one stage. `phases`: shares of the time at which other losses begin to count.

    `rate` scales both peak learning rates; `fresh` starts from new weights instead of the saved;
    until the share `repeat_until`, `repeat_rows` of every batch are patterns to be copied.
    """

    name: StageName
    role: Role
    phases: tuple[tuple[float, Mix], ...]
    fresh: bool
    rate: float = 1.0
    repeat_rows: int = 0
    repeat_until: float = 0.0


STAGES: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage("target", "target", ((0.0, Mix(ce=1)),), fresh=True),
        Stage("draft", "draft", ((0.0, Mix(ce=1)), (0.3, Mix(ce=0.1, kl=1))), fresh=True),
        Stage(
            "copy",
            "draft",
            ((0.0, Mix(ce=1)), (0.4, Mix(ce=0.1, kl=1)), (0.8, Mix(kl=0.3, tv=1))),
            fresh=False,
            repeat_rows=4,
            repeat_until=0.14,
        ),
        Stage("match", "target", ((0.0, Mix(ce=1, tv=4)),), fresh=False, rate=0.4),
        Stage("refine", "draft", ((0.0, Mix(kl=0.3, tv=1)),), fresh=False, rate=0.3),
    )
}
