"""Names of all drafters, as they appear in usage, in metrics and on the server's live web page."""

from __future__ import annotations

from collections.abc import Mapping

DRAFTERS: Mapping[str, str] = {
    "radix": "what followed this text before",
    "suffix": "text that repeats, in any request",
    "ngram": "text that repeats, in one request",
    "prediction": "the answer that the client predicts",
    "grammar": "what the required form forces",
    "lm": "a smaller model",
    "text": "a smaller model with another vocabulary",
    "self": "the model itself, in 4 bits",
    "mtp": "a layer of the model that predicts a further token",
    "assistant": "a drafter that is published with the model",
    "eagle3": "a trained head",
    "block": "a trained head",
    "medusa": "a trained head",
}
"""Origin of each drafter's tokens, as the live page describes it."""
