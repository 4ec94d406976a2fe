"""Predicted outputs: how much of what a caller predicted stands in the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

RUN = 3  # tokens in a row by which the answer is found again in the prediction


def count_standing(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of the prediction that stand in the answer, in their order.

    Where the two part, the answer is found again further on in the prediction by the next `RUN`
    tokens that both have. O(len(prediction) + len(answer) log len(prediction)).
    """
    places: dict[tuple[int, ...], list[int]] | None = None
    count = at = index = 0
    while index < len(answer) and at < len(prediction):
        if answer[index] == prediction[at]:
            count, at, index = count + 1, at + 1, index + 1
            continue
        places = _places(prediction) if places is None else places
        found = places.get(tuple(answer[index : index + RUN]), ())
        later = bisect_left(found, at)
        if later < len(found):
            at = found[later]
        else:
            index += 1
    return count


def _places(prediction: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Where each run of tokens begins."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(prediction) - RUN + 1):
        places.setdefault(tuple(prediction[start : start + RUN]), []).append(start)
    return places
