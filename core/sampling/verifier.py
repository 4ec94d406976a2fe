"""Verifier of drafts. Plain decoding uses it, too: it verifies an empty draft.

The target's token at an output position is the argmax of its processed log-probabilities plus
Gumbel noise keyed by (seed, position): an exact sample (Gumbel-max). At temperature 0 there is no
noise. A draft is compared with the target's tokens along its path:

    accepted    a draft token that equals the target's token, after draft tokens that do so, too
    recovered   the target's own token at the first position where the draft differs
    bonus       the target's own token after a draft that was accepted as a whole

So a step yields the accepted tokens and one recovered or bonus token. No token depends on the
draft, so the output is the same for every drafter, draft length and batch. Drafts that are drawn
with the same noise (`sample`) are accepted most often: Daliri, Musco, Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ..interface.output import Refusal, TokenLogprob
from .drafted_row import DraftedRow
from .encoded import CUT, GREEDY, MIN_P, SAMPLED, EncodedSampling
from .gumbel import gumbel_rows, vocabulary_hashes
from .logits_processors import apply_processors, argmax, best_ids, scaled, truncate
from .logprobs import token_logprobs

NOT_FINITE = "the model's logits are not finite"
ALL_BANNED = Refusal("the request's parameters ban every token")
_CPU_BLOCK = 2**17  # number of logits processed at once; more would exceed the core's cache
_DEVICE_BLOCK = 2**25


class Verified(msgspec.Struct, frozen=True, gc=False):
    """The accepted path of a draft and the recovered or bonus token after it.

    If ``error`` is not None, the path ends before the position that failed, and the request must
    end.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]  # accepted nodes of the draft
    logprobs: tuple[TokenLogprob, ...] = ()  # [len(token_ids)], or empty if not requested
    error: str | None = None

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)


NOTHING_VERIFIED = Verified((), ())


class SampledToken(NamedTuple):
    """A drawn token. If ``error`` is not None, ``token_id`` is -1."""

    token_id: int
    error: str | None = None


class Choices(NamedTuple):
    """The drawn tokens of rows, and the errors of rows for which none could be drawn."""

    token_ids: list[int]  # [num_rows]; -1 for a row with an error
    errors: Mapping[int, str]  # by row

    def by_row(self) -> list[SampledToken]:
        """Return the token or the error of each row."""
        return [
            SampledToken(token_id, self.errors.get(row) if token_id < 0 else None)
            for row, token_id in enumerate(self.token_ids)
        ]


class Best(NamedTuple):
    """The tokens with the highest Gumbel scores at one position.

    A score is the processed logit divided by the temperature plus the position's noise, or at
    temperature 0 the processed logit. Scores have an arbitrary offset per position, so only their
    differences are meaningful. There are fewer tokens than requested if the parameters allow fewer,
    and no tokens if ``error`` is not None.
    """

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]  # descending
    error: str | None = None


@torch.inference_mode()
def verify(logits: Tensor, requests: Sequence[DraftedRow]) -> list[Verified]:
    """Verify drafts against the target's own tokens.

    ``logits`` [sum of (len(draft) + 1), vocab] are the target's raw logits: for each request, one
    row after its last token and one after each node of its draft. They are not changed. A token
    outside the vocabulary is never accepted. A request whose logits along its path are not finite
    gets an error; other requests are not affected.
    """
    return walk_drafts(logits, requests, lambda places: _sample(logits, places))


def walk_drafts(
    logits: Tensor,
    requests: Sequence[DraftedRow],
    choose: Callable[[Sequence[LogitsRow]], Sequence[SampledToken]],
) -> list[Verified]:
    """Verify drafts like `verify`, with ``choose`` to sample the rows that are needed."""
    starts = first_rows(logits, requests)
    walks = [_Walk(request, start) for request, start in zip(requests, starts, strict=True)]
    for wave in _waves(walks, logits.device):
        choices = choose([walk.place(node) for walk, node in wave])
        for (walk, node), choice in zip(wave, choices, strict=True):
            walk.take(node, choice)
    return [walk.verified(logits) for walk in walks]


def follow_choices(
    logits: Tensor, requests: Sequence[DraftedRow], choices: Choices
) -> list[Verified]:
    """Verify drafts like `verify`, with the target's tokens of all rows given as ``choices``."""
    starts = first_rows(logits, requests)
    return [
        _followed(logits, request, start, stop, choices)
        for request, start, stop in zip(requests, starts, [*starts[1:], len(logits)], strict=True)
    ]


def _followed(
    logits: Tensor, request: DraftedRow, start: int, stop: int, choices: Choices
) -> Verified:
    """Return the outcome of a request whose rows of the logits are [start, stop)."""
    chosen = choices.token_ids[start:stop]  # after the request's own tokens, then after each node
    if request.parents:
        path = _path(request.draft, request.parents, chosen)
        token_ids = [chosen[0], *[chosen[1 + node] for node in path]]
    else:
        num_accepted = 0
        for drafted, token in zip(request.draft, chosen, strict=False):
            if drafted != token:
                break
            num_accepted += 1
        path, token_ids = tuple(range(num_accepted)), [*chosen[: num_accepted + 1]]
    error = None
    if token_ids[-1] < 0:
        token_ids.pop()
        error = choices.errors[start + (1 + path[-1] if path else 0)]
    logprobs: tuple[TokenLogprob, ...] = ()
    if request.sampling.params.logprobs is not None:
        logprobs = _logprobs(logits, request, start, token_ids, path)
    return Verified(tuple(token_ids), path, logprobs, error)


def _path(draft: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the accepted nodes of a draft tree.

    ``chosen``: tokens after the request's own, then after each node. A node comes after its parent,
    so one pass over the nodes finds the path.
    """
    path, last, token = list[int](), -1, chosen[0]
    for node, (drafted, parent) in enumerate(zip(draft, parents, strict=True)):
        if parent == last and drafted == token:
            path.append(node)
            last, token = node, chosen[1 + node]
    return tuple(path)


def first_rows(logits: Tensor, requests: Sequence[DraftedRow]) -> list[int]:
    """Return the first row of each request in ``logits``.

    Raises ValueError if ``logits`` do not have one row more for each request than its draft.
    """
    lens = map(len, [request.draft for request in requests])
    starts = list(accumulate([num_nodes + 1 for num_nodes in lens], initial=0))
    if starts.pop() != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(requests)} drafts")
    return starts


def verified(
    logits: Tensor, request: DraftedRow, start: int, token_ids: Sequence[int], error: str | None
) -> Verified:
    """Build the result of a request from the target's ``token_ids`` along its draft.

    ``start``: first row of the request in ``logits``.
    """
    path: tuple[int, ...] = ()
    if request.draft:
        path = request.follow(token_ids if error is not None else token_ids[:-1])
    logprobs = _logprobs(logits, request, start, token_ids, path)
    return Verified(tuple(token_ids), path, logprobs, error)


def _logprobs(
    logits: Tensor,
    request: DraftedRow,
    start: int,
    token_ids: Sequence[int],
    path: Sequence[int],
) -> tuple[TokenLogprob, ...]:
    num_top = request.sampling.params.logprobs
    if num_top is None:
        return ()
    places = [start, *(start + 1 + node for node in path)][: len(token_ids)]
    return tuple(token_logprobs(logits[places], token_ids, num_top))


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
    """Draw one token per row of ``logits`` [num_rows, vocab], which are not changed.

    Drafters call it, so that they use the same processors and the same noise as the target.
    """
    return _sample(logits, list(enumerate(rows)))


@torch.inference_mode()
def best(logits: Tensor, rows: Sequence[DraftedRow], num_best: int) -> list[Best]:
    """Return the ``num_best`` tokens of each row with the highest scores, best first.

    `sample` would draw the first one. ``logits`` [num_rows, vocab] are not changed. Of tokens with
    equal scores, the lowest id comes first.
    """
    found = [Best((), ())] * len(rows)
    for indices, edited, score in _blocks(list(enumerate(rows)), logits):
        block = [rows[i] for i in indices]
        values, errors = processed(_take(logits, indices), block, edited)
        sound = [i for i, error in enumerate(errors) if error is None]
        for i in range(len(indices)) if len(sound) < len(indices) else ():
            found[indices[i]] = Best((), (), errors[i])
        if sound:
            values = values if len(sound) == len(indices) else values[sound]
            scores, ids = score(values, [block[i] for i in sound])
            for at, (columns, kept) in enumerate(_ranked(scores, num_best)):
                count = sum(map(math.isfinite, kept))
                token_ids = columns if ids is None else ids[at, columns].tolist()
                found[indices[sound[at]]] = Best(tuple(token_ids[:count]), tuple(kept[:count]))
    return found


@torch.inference_mode()
def margins(logits: Tensor, rows: Sequence[DraftedRow], token_ids: Sequence[int]) -> list[float]:
    """Return by how much each row's highest score exceeds the score of its token in ``token_ids``.

    The margin of a token that the parameters exclude is infinite. ``logits`` [num_rows, vocab] are
    not changed. `Best` describes scores.
    """
    found = [math.inf] * len(rows)
    for indices, edited, score in _blocks(list(enumerate(rows)), logits):
        block = [rows[i] for i in indices]
        values, _ = processed(_take(logits, indices), block, edited)
        scores, ids = score(values, block)
        wanted = torch.tensor([[token_ids[i]] for i in indices], device=scores.device)
        if ids is None:
            own = scores.gather(-1, wanted)[:, 0]
        else:
            own = scores.masked_fill(ids != wanted, -torch.inf).amax(-1)
        for i, margin in zip(indices, (scores.amax(-1) - own).tolist(), strict=True):
            found[i] = margin if math.isfinite(margin) else math.inf
    return found


def _ranked(scores: Tensor, num_best: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yield the best columns of each row and their scores, best first, then the lowest column."""
    # topk returns equal values in arbitrary order, and arbitrary values of those equal to the last.
    top = scores.topk(min(num_best + 1, scores.shape[-1]), dim=-1)
    for row, columns, kept in zip(scores, top.indices.tolist(), top.values.tolist(), strict=True):
        if any(a == b and math.isfinite(a) for a, b in pairwise(kept)):
            columns = best_ids(row, num_best).tolist()
            kept = row[columns].tolist()
        yield columns[:num_best], kept[:num_best]


class _Walk:
    """Progress of the verification of one request: its accepted tokens and its current node."""

    def __init__(self, request: DraftedRow, start: int) -> None:
        self._request = request
        self._start = start  # first row of the request in the logits
        self._token_ids: list[int] = []
        self._error: str | None = None
        self.node: int | None = -1  # node after which to choose a token next; None: finished

    @property
    def num_nodes(self) -> int:
        return len(self._request.draft)

    def place(self, node: int) -> LogitsRow:
        return self._start + 1 + node, self._request.at(node)

    def take(self, node: int, choice: SampledToken) -> None:
        """Record the target's token after ``node``, and move to the child with this token or end.

        The token is ignored if ``node`` is not the current node.
        """
        if node != self.node:
            return
        if choice.error is None:
            self._token_ids.append(choice.token_id)
            self.node = self._request.child(node, choice.token_id)
        else:
            self._error, self.node = choice.error, None

    def verified(self, logits: Tensor) -> Verified:
        return verified(logits, self._request, self._start, self._token_ids, self._error)


def _waves(walks: Sequence[_Walk], device: torch.device) -> Iterator[list[tuple[_Walk, int]]]:
    """Yield groups of (walk, node) to sample together; a node never precedes its parent.

    On a CPU each group has the current node of every walk, because sampling nodes off the accepted
    path would waste time. On other devices a single group has all nodes, because waiting for each
    level would cost more.
    """
    if device.type != "cpu":
        yield [(walk, node) for walk in walks for node in range(-1, walk.num_nodes)]
        return
    while wave := [(walk, walk.node) for walk in walks if walk.node is not None]:
        yield wave


def _sample(logits: Tensor, places: Sequence[LogitsRow]) -> list[SampledToken]:
    choices = [SampledToken(-1)] * len(places)
    for indices, edited, score in _blocks(places, logits):
        block = [places[i][1] for i in indices]
        values = _take(logits, [places[i][0] for i in indices])
        values, errors = processed(values, block, edited)
        drawn = _draw_sound(score, values, block, errors)
        for i, token_id, error in zip(indices, drawn, errors, strict=True):
            choices[i] = SampledToken(token_id, error)
    return choices


def _blocks(
    places: Sequence[LogitsRow], logits: Tensor
) -> Iterator[tuple[list[int], bool, _Score]]:
    """Yield groups of rows of one kind: indices in ``places``, whether to edit, score function."""
    vocab_size = logits.shape[-1]
    kinds = [_kind(row, vocab_size) for _, row in places]
    most = _CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, most // vocab_size)
    by_kind = sorted(range(len(places)), key=kinds.__getitem__)
    for (edited, kind), group in groupby(by_kind, key=kinds.__getitem__):
        indices = list(group)
        for start in range(0, len(indices), step):
            yield indices[start : start + step], edited, _SCORES[kind]


def _kind(row: DraftedRow, vocab_size: int) -> tuple[bool, int]:
    """Return whether the row's logits are edited, and its kind, which selects a score function."""
    encoded = row.sampling.cached(EncodedSampling, vocab_size)
    until = encoded.edited_until
    return until > 0 and row.position < until, encoded.kind


def _take(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows ``indices`` of ``logits`` in float32; adjacent float32 rows are a view."""
    first, after = indices[0], indices[0] + len(indices)
    adjacent = indices == list(range(first, after))
    return (logits[first:after] if adjacent else logits[indices]).to(torch.float32)


def processed(
    values: Tensor, rows: Sequence[DraftedRow], edited: bool
) -> tuple[Tensor, list[str | None]]:
    """Return the logits after the edits that precede the temperature, and an error or None per row.

    ``edited``: whether the rows have edits; then the returned logits are a copy.
    """
    errors = _unfit(values, NOT_FINITE)
    if not edited:
        return values, errors
    values = values.clone()
    refusals = apply_processors(values, rows)
    banned = _unfit(values, ALL_BANNED)
    return values, [a or b or c for a, b, c in zip(errors, refusals, banned, strict=True)]


def _unfit(values: Tensor, message: str) -> list[str | None]:
    return [None if math.isfinite(top) else message for top in values.amax(-1).tolist()]


def _draw_sound(
    score: _Score,
    values: Tensor,
    rows: Sequence[DraftedRow],
    errors: Sequence[str | None],
) -> list[int]:
    """Return a token for each row; -1 for the rows with an error, which are not computed."""
    sound = [i for i, error in enumerate(errors) if error is None]
    drawn = [-1] * len(rows)
    if sound:
        values = values if len(sound) == len(rows) else values[sound]
        scores, ids = score(values, [rows[i] for i in sound])
        winners = argmax(scores)
        token_ids = winners if ids is None else ids.gather(-1, winners[:, None])[:, 0]
        for i, token_id in zip(sound, token_ids.tolist(), strict=True):
            drawn[i] = token_id
    return drawn


def _score_greedy(
    values: Tensor,
    rows: Sequence[DraftedRow],  # noqa: ARG001
) -> tuple[Tensor, None]:
    return values, None


def _score_gumbel(values: Tensor, rows: Sequence[DraftedRow]) -> tuple[Tensor, None]:
    noise = _noise(rows, vocabulary_hashes(values.shape[-1], values.device))
    return noise.add_(scaled(values, rows)), None


def _score_cut(values: Tensor, rows: Sequence[DraftedRow]) -> tuple[Tensor, Tensor]:
    kept, ids = truncate(scaled(values, rows), rows)
    noise = _noise(rows, vocabulary_hashes(values.shape[-1], values.device)[ids])
    return noise.add_(kept), ids


def _noise(rows: Sequence[DraftedRow], hashes: Tensor) -> Tensor:
    return gumbel_rows([(row.sampling.seed, row.position) for row in rows], hashes)


LogitsRow = tuple[int, DraftedRow]  # (index of a row of the logits, the `DraftedRow` to sample)
_Score = Callable[[Tensor, Sequence[DraftedRow]], tuple[Tensor, Tensor | None]]
"""Returns scores [num_rows, width], whose greatest wins, and the ids of columns or None."""
_SCORES: dict[int, _Score]
_SCORES = {GREEDY: _score_greedy, SAMPLED: _score_gumbel, MIN_P: _score_cut, CUT: _score_cut}
