"""Names of all drafters, as they appear in usage, in metrics and on the server's live web page."""

from __future__ import annotations

from collections.abc import Mapping

DRAFTERS: Mapping[str, str] = {
    "radix": "text that followed the same prefix before",
    "suffix": "text that repeats in any request",
    "ngram": "text that repeats in the same request",
    "prediction": "the answer that the client predicts",
    "grammar": "text that structured output forces",
    "lm": "a smaller model",
    "text": "a smaller model with another vocabulary",
    "self": "the model itself, in 4 bits",
    "mtp": "the model's layer for multi-token prediction",
    "assistant": "an assistant that is published with the model",
    "eagle3": "a trained head",
    "block": "a trained head",
    "medusa": "a trained head",
}
"""Origin of each drafter's tokens, as the live page describes it."""
