"""LabelTree: the token ids of a question's labels, and their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ....core.interface.sampling import BranchPooling, Pooling

Ids = tuple[int, ...]
MAX_READS = 2**14  # reads of one call
MAX_BRANCHES = 128  # branches of one prompt, unless half of them would repeat another prompt's


class Read(NamedTuple):
    """The log-probabilities to read: for ``token_ids``, after the prompt and the ids ``prefix``."""

    prefix: Ids
    token_ids: Ids


class Part(NamedTuple):
    """Reads of one request, whose prompt is the question's prompt, ``prefix`` and `branch_ids`.

    The prefix of the first read is ``prefix``; each other read continues an earlier one.
    """

    prefix: Ids
    reads: Sequence[Read]

    @property
    def token_ids(self) -> Ids:
        """The tokens after the question's prompt: ``prefix``, then a branch for each later read."""
        return (*self.prefix, *(read.prefix[-1] for read in self.reads[1:]))

    @property
    def pooling(self) -> Pooling:
        """The numbers to read: the log-probabilities of each read, in order."""
        first, *later = self.reads
        places = {read.prefix: place for place, read in enumerate(self.reads, -1)}
        branches = [BranchPooling(places[each.prefix[:-1]], each.token_ids) for each in later]
        return Pooling(first.token_ids, is_normalized=True, branches=tuple(branches))

    def found(self, numbers: Sequence[float]) -> Iterator[tuple[Ids, float]]:
        """Yield the log-probability of each token that was read, by the path up to the token."""
        paths = ((*prefix, each) for prefix, token_ids in self.reads for each in token_ids)
        return zip(paths, numbers, strict=True)


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
        self._reads = {prefix: Read(prefix, (*branches[prefix],)) for prefix in sorted(branches)}

    @property
    def num_reads(self) -> int:
        """Number of inner nodes of the tree. The log-probabilities after each one are read."""
        return len(self._reads)

    def parts(self, *, with_branches: bool) -> list[Part]:
        """Return the requests that read all inner nodes of the tree.

        ``with_branches``: the model computes `Branches`. Then a request has up to `MAX_BRANCHES` of
        them, and repeats the reads on the path to its first new one. After a long path it has more,
        so that at least `MAX_BRANCHES` / 2 are new. Otherwise each read is a request, those with
        the shortest prefixes first.
        """
        reads = [*self._reads.values()]  # depth first
        if not with_branches:
            return [Part(each.prefix, [each]) for each in sorted(reads, key=_depth)]
        parts, num_repeated = [[reads[0]]], 0
        for read in reads[1:]:
            num_new = len(parts[-1]) - num_repeated
            if len(parts[-1]) > MAX_BRANCHES and num_new > MAX_BRANCHES // 2:
                parts.append([self._reads[read.prefix[:end]] for end in range(len(read.prefix))])
                num_repeated = len(read.prefix)
            parts[-1].append(read)
        return [Part((), each) for each in parts]

    def probabilities(self, logprobs: Mapping[Ids, float]) -> list[float]:
        """Return the probabilities of the labels, with the sum 1.

        ``logprobs``: the log-probability of the last token of each path in the tree, after the
        prompt and the tokens before it. O(tokens of all labels).
        """
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


def _depth(read: Read) -> int:
    return len(read.prefix)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf
