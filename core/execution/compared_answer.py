"""Comparison of a recorded answer with the model's own tokens, within a chunk of a prefill.

The recorded answer follows the prompt in the request's tokens. So every row of the chunk has the
recorded tokens before it, and the comparison continues after a difference.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence

from torch import Tensor

from ..interface.extras.token_comparison import EXCLUDERS, TokenComparison, comparison_numbers
from ..interface.plan import ScheduledRequest
from ..interface.sampling import Pooling, SamplingMetadata
from ..sampling.drafted_row import DraftedRow
from ..sampling.explanation import CONSTRAINT, excluded_by
from ..sampling.logprobs import token_logprobs
from ..sampling.sampler import Sampler
from ..sampling.verifier import SampledToken, margins


def compare_answer(scheduled: ScheduledRequest, logits: Tensor, sampler: Sampler) -> array[float]:
    """Return the `TokenComparison` of each row of ``logits`` [num_pooled, vocab], as numbers.

    The last one is of the end of the answer if the chunk reaches it. After a token that a
    constraint excludes, and after a failed choice, nothing is compared: what may follow is unknown.
    """
    first = scheduled.stop - len(logits)  # index of the token whose row is the first one
    tokens = scheduled.tokens
    whole = DraftedRow(
        tokens[: first + 1], _forked(scheduled.sampling), tokens[first + 1 : scheduled.stop]
    )
    rows = [whole.at(node) for node in range(-1, len(whole.draft))]
    own = sampler.sample(logits, rows)
    given = list(tokens[first + 1 : scheduled.stop + 1])
    start = first + 1 - scheduled.sampling.prompt_len  # index in the answer
    begins = scheduled.sampling.pooling == Pooling(compare_from=start)
    detailed = [
        i
        for i, (chosen, recorded) in enumerate(zip(own, given, strict=False))
        if (begins and i == 0) or (chosen.error is None and chosen.token_id != recorded)
    ]
    details = _details(logits, rows, own, given, detailed)
    compared: list[TokenComparison] = []
    for i, chosen in enumerate(own):
        found = details.get(i) or TokenComparison(start + i, chosen.token_id)
        compared.append(found._replace(position=start + i))
        if chosen.error is not None or found.excluder == CONSTRAINT:
            break
    return comparison_numbers(compared)


def _details(
    logits: Tensor,
    rows: Sequence[DraftedRow],
    own: Sequence[SampledToken],
    given: Sequence[int],
    detailed: Sequence[int],
) -> dict[int, TokenComparison]:
    """Return comparisons with log-probabilities of the ``detailed`` rows, by row.

    The row after the whole answer is included, if ``rows`` has it.
    """
    own_ids = [each.token_id for each in own]
    found: dict[int, TokenComparison] = {}
    if detailed:
        values, recorded = logits[detailed], [given[i] for i in detailed]
        gaps = margins(values, [rows[i] for i in detailed], recorded)
        given_logprobs = token_logprobs(values, recorded, 0)
        # After a failed choice there is no own token.
        own_or_given = [own_ids[i] if own_ids[i] >= 0 else given[i] for i in detailed]
        own_logprobs = token_logprobs(values, own_or_given, 0)
        for at, i in enumerate(detailed):
            name = None
            if math.isinf(gaps[at]):
                name = excluded_by(values[at : at + 1].float(), rows[i], recorded[at])
            found[i] = TokenComparison(
                0,
                own_ids[i],
                max(0.0, gaps[at]),
                given_logprobs[at].logprob,
                own_logprobs[at].logprob,
                -1 if name is None else EXCLUDERS.index(name),
            )
    if len(given) < len(own) and own[-1].error is None:
        (last,) = token_logprobs(logits[-1:], own_ids[-1:], 0)
        found[len(own) - 1] = TokenComparison(0, own_ids[-1], own_logprob=last.logprob)
    return found


def _forked(sampling: SamplingMetadata) -> SamplingMetadata:
    """Return parameters whose constraint reads the answer from its beginning.

    A preempted request compares its tokens again, and a constraint cannot go back.
    """
    if sampling.constraint is None:
        return sampling
    return dataclasses.replace(sampling, constraint=sampling.constraint.fork())
