"""The best of n answers, then the best of n continuations of it: each prompt is computed once.

    pip install openai
    python examples/best_of_n.py [URL]    (or FORETOKEN_URL; the default is `make serve`)

The n answers share the pages of their prompt, and the next round finds the winner in the cache.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from openai import OpenAI

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
PROMPT = '''"""A queue on two stacks, and a stack on two queues."""

from collections import deque


class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = deque()

    def push(self, item):
        self.items'''
ROUNDS, N, TOKENS = 3, 4, 24


def score(choice: Any) -> float:  # noqa: ANN401 - a choice of openai's
    """Return the mean log-probability of a choice's tokens: how sure the model was of them."""
    logprobs = choice.logprobs.token_logprobs or [-math.inf]
    return sum(logprobs) / len(logprobs)


def main(url: str) -> None:
    """Extend the prompt by the best of n continuations, `ROUNDS` times."""
    text = PROMPT
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        for number in range(1, ROUNDS + 1):
            answer = client.completions.create(
                model=model,
                prompt=text,
                n=N,
                max_tokens=TOKENS,
                temperature=0.5,
                logprobs=0,
                seed=number,
            )
            best = max(answer.choices, key=score)
            usage: Any = answer.usage
            cached, drafted = usage.prompt_tokens_details.cached_tokens, usage.speculation
            print(
                f"round {number}: best of {N} scores {score(best):.2f}; "
                f"{cached} of {usage.prompt_tokens} prompt tokens cached, "
                f"{drafted['accepted_tokens']} of {usage.completion_tokens} tokens were drafted"
            )
            text += best.text
    print(text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else URL)
