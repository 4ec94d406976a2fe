"""LabelTree: the token ids of a question's labels, and their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Ids = tuple[int, ...]
MAX_READS = 2**14  # reads of one call


class Read(NamedTuple):
    """The log-probabilities to read: for ``token_ids``, after the prompt and the ids ``prefix``."""

    prefix: Ids
    token_ids: Ids


class LabelTree:
    """The labels of one question as a prefix tree of token ids.

    The log-probability of a label is the sum over its tokens. If a label is a prefix of
    others, it has the probability that the answer begins with it and with none of the others. The
    probabilities are normalised over the labels. Raises `ValueError` for equal and empty labels,
    and if more than `MAX_READS` reads are needed.
    """

    def __init__(self, labels: Sequence[Ids]) -> None:
        if len({*labels}) < len(labels) or not all(labels):
            raise ValueError("labels must not be empty, and must differ in their tokens")
        self._labels = labels
        branches: dict[Ids, dict[int, None]] = {}
        for label in labels:
            for length, token_id in enumerate(label):
                branches.setdefault(label[:length], {})[token_id] = None
            if len(branches) > MAX_READS:
                raise ValueError(f"the labels need more than {MAX_READS} reads")
        self.reads = [Read(prefix, tuple(branches[prefix])) for prefix in sorted(branches, key=len)]
        """One read for each inner node of the tree, shortest prefixes first."""

    def probabilities(self, found: Sequence[Sequence[float]]) -> list[float]:
        """Return the probabilities of the labels, with the sum 1.

        ``found``: the log-probabilities that were read for each entry of `reads`. O(tokens of all
        labels).
        """
        logprobs = {
            (*read.prefix, token_id): logprob
            for read, values in zip(self.reads, found, strict=True)
            for token_id, logprob in zip(read.token_ids, values, strict=True)
        }
        wholes = {
            label: math.fsum(logprobs[label[: end + 1]] for end in range(len(label)))
            for label in self._labels
        }
        # Share of a label's probability that belongs to longer labels with this prefix.
        longer: dict[Ids, float] = {}
        for label, logprob in wholes.items():
            ends = range(len(label) - 1, 0, -1)
            inside = next((label[:end] for end in ends if label[:end] in wholes), None)
            if inside is not None:
                share = math.exp(min(0.0, logprob - wholes[inside]))
                longer[inside] = longer.get(inside, 0.0) + share
        own = [logprob + _log(1.0 - longer.get(label, 0.0)) for label, logprob in wholes.items()]
        highest = max(own)
        weights = [math.exp(each - highest) for each in own]
        total = math.fsum(weights)
        return [each / total for each in weights]


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf
