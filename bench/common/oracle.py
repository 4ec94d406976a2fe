"""OracleSource: simulates an acceptance rate by corrupting a recorded answer."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from unittest.mock import patch

import numpy as np

from ...api.build.drafts import FREE
from ...core.interface.request import Request
from ...draft.sources.source import Guess, Priors, Source
from ...radix_cache.namespaces import FlushedNamespaces

Key = tuple[str | None, bytes]
"""A namespace, and a digest of the prompt."""


@contextmanager
def oracles(*accuracies: float) -> Iterator[tuple[str, ...]]:
    """Register oracles of given accuracies (0 to 1) as values of ``draft``; yield their names."""
    made = {f"oracle:{accuracy}": partial(OracleSource, accuracy) for accuracy in accuracies}
    with patch.dict(FREE, made):
        yield tuple(made)


class OracleSource(Source):
    """Drafts from the recorded answer of an earlier request with the same prompt.

    Each token is right with probability ``accuracy``; wrong tokens replace the others. This depends
    only on the request's seed and the position, not on the tokens so far. The most recent answers
    are kept, up to ``max_tokens`` tokens in total. The source's name contains "simulated", so that
    reports show it.
    """

    def __init__(self, accuracy: float, *, max_tokens: int = 1_000_000) -> None:
        self.name = f"oracle:{accuracy} (simulated)"
        self.priors = Priors.constant(accuracy)
        self._accuracy = accuracy
        self._max_tokens = max_tokens
        self._num_kept = 0  # Total number of tokens in the kept answers.
        self._answers: OrderedDict[Key, array[int]] = OrderedDict()
        # Answers of running requests, wrong tokens included.
        self._live: dict[Request, array[int]] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return the next tokens of the recorded answer, if there is one and it is long enough."""
        answer = self._live.get(request)
        if answer is None:
            answer = self._live[request] = self._recall(request)
        start = request.num_output
        token_ids = answer[start : start + most]
        return (Guess(token_ids, self.name, 0),) if token_ids else ()

    def leave(self, request: Request) -> None:
        """Record the answer for later requests with the same prompt."""
        self._live.pop(request, None)
        if request.num_output:
            self._forget(_key(request))
            self._answers[_key(request)] = request.tokens[request.prompt_len :]
            self._num_kept += request.num_output
        while self._num_kept > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def flush(self, *namespaces: str | None) -> None:
        """Drop the answers of the given namespaces, or of all if no namespace is named."""
        flushed = FlushedNamespaces(namespaces)
        for key in list(self._answers):
            if key[0] in flushed:
                self._forget(key)
        for request in self._live:
            if request.namespace in flushed:
                self._live[request] = array("q")

    def _forget(self, key: Key) -> None:
        self._num_kept -= len(self._answers.pop(key, ()))

    def _recall(self, request: Request) -> array[int]:
        key = _key(request)
        if key not in self._answers:
            return array("q")
        self._answers.move_to_end(key)
        return self._spoil(self._answers[key], request.sampling.seed)

    def _spoil(self, answer: array[int], seed: int) -> array[int]:
        """Return the answer with some ids replaced by wrong ones: the id minus 1, or 1 for id 0."""
        token_ids = np.array(answer, np.int64)
        wrong = np.random.default_rng(seed).random(len(answer)) >= self._accuracy
        spoilt = np.where(wrong, np.abs(token_ids - 1), token_ids)
        return array("q", spoilt.tobytes())


def _key(request: Request) -> Key:
    prompt = request.tokens[: request.prompt_len].tobytes()
    return request.namespace, blake2b(prompt, digest_size=16).digest()
