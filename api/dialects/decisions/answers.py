"""Answer of /v1/decisions, for encoding and for /openapi.json."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PredicateAnswer(Struct, tag="predicate", kw_only=True):
    """The probability that a statement is true."""

    name: str | None
    probability: float


class ChoiceProbability(Struct, kw_only=True):
    """A choice and its probability."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag="choice", kw_only=True):
    """The most likely choice. ``confidence`` is its probability."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(Struct, kw_only=True):
    """A level, its index from 0, and its probability."""

    label: str
    value: int
    probability: float


class ScoreAnswer(Struct, tag="score", kw_only=True):
    """The expected index. ``confidence`` is the probability of the most likely level."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionInputDetails(Struct, kw_only=True):
    """``usage.input_tokens_details``."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(Struct, kw_only=True):
    """``usage.output_tokens_details``. No token is generated."""

    reasoning_tokens: int = 0


class DecisionUsage(Struct, kw_only=True):
    """``usage``: the tokens of the input, counted once, and of all questions."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int = 0
    output_tokens_details: DecisionOutputDetails
    total_tokens: int
    cost: float | UnsetType = UNSET  # only with --prices


class DecisionsBody(Struct, kw_only=True):
    """Answer of /v1/decisions, in the order of the questions."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage
