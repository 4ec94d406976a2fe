"""Verdict: whether the model gives a recorded answer, and where it first gives another token."""

from __future__ import annotations

from msgspec import Struct

from ...core.interface.request import Usage


class ComparedToken(Struct, kw_only=True, frozen=True):
    """A token at one position. ``logprob``: its log-probability in the model's raw logits."""

    id: int
    text: str
    logprob: float


class Difference(Struct, kw_only=True, frozen=True):
    """The first position at which a recorded answer differs from the model's answer.

    - ``position``: index of the token in the answer.
    - ``given``: the recorded token; None if the recorded answer ends here and the model's does not.
    - ``own``: the model's token; None if the model's answer ends here and the recorded one does
      not, or if both end here for different reasons.
    - ``margin``: by how much the model's token has the higher score. The score is the processed
      logit, divided by the temperature, plus the noise of the seed. None if the recorded token is
      excluded, or if one of the tokens is missing.
    - ``excluded_by``: the parameter that excludes the recorded token at this position, if one does.
    """

    position: int
    given: ComparedToken | None
    own: ComparedToken | None
    margin: float | None = None
    excluded_by: str | None = None


class Agreement(Struct, kw_only=True, frozen=True):
    """Agreement of recorded tokens with the model's, if rounding may explain differences.

    Another kind of kernels, or another engine, rounds differently. It may give another token where
    two scores are nearly equal, but rarely where the margin is large.

    - ``large_margins``: number of compared tokens whose margin exceeds ``tolerance``, or that a
      parameter excludes.
    - ``p_value``: probability of at least so many, if the same model gave the answer with other
      kernels and 2 in 1000 tokens have such a margin then. This rate is an assumption.
    - ``same_model``: whether ``p_value`` is at least 0.001. At the assumed rate, one answer in 1000
      of the same model is wrongly judged.
    """

    large_margins: int
    tolerance: float
    p_value: float
    same_model: bool


class Verdict(Struct, kw_only=True, frozen=True):
    """Result of the verification of a recorded answer.

    Token ids are compared to the end, each after the recorded tokens before it; a text is compared
    up to the first difference.

    - ``verified``: whether the model gives the recorded answer.
    - ``exact``: whether the model's logits have the same bits in any batch. If not, a difference
      may be due to rounding.
    - ``checked_tokens``: number of compared tokens. After a token that structured output excludes,
      no token is compared.
    - ``checked_from``: index of the first compared token; the tokens before it are taken as given.
    - ``different_tokens``: number of compared tokens that the model would not give; 1 if only the
      ends differ.
    - ``finish_reason``: why the answer ends after the compared tokens; None if it continues.
    - ``agreement``: a statistical verdict, for answers of other kernels or engines.
    - ``token_ids``: the model's tokens that were compared with recorded tokens.
    - ``usage``: tokens and steps of all requests of the verification; the answer counts as prompt
      tokens of each.
    """

    verified: bool
    exact: bool
    checked_tokens: int
    checked_from: int = 0
    different_tokens: int
    finish_reason: str | None
    first_difference: Difference | None
    agreement: Agreement
    token_ids: list[int]
    usage: Usage
