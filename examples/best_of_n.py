"""The best of n answers, then the best continuations of it: one prompt, computed once.

    python examples/best_of_n.py [URL]    (or FORETOKEN_URL; the default is `make serve`)

The n answers share the pages of their prompt, and the next round finds the winner in the cache.
"""

from __future__ import annotations

import math
import os
import sys

from foretoken import Client
from foretoken.api.client import TextChoice

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
PROMPT = '''"""A queue on two stacks, and a stack on two queues."""

from collections import deque


class Stack:
    """Last in, first out."""

    def push(self, item):
'''
ROUNDS, N, TOKENS = 3, 4, 24


def score(choice: TextChoice) -> float:
    """Mean log-probability of a token: how sure the model was of its own words."""
    logprobs = (choice.logprobs or {}).get("token_logprobs") or [-math.inf]
    return sum(logprobs) / len(logprobs)


def main(url: str) -> None:
    """Grow the prompt by the best of n, a few times."""
    text = PROMPT
    with Client(url) as client:
        for number in range(1, ROUNDS + 1):
            answer = client.complete(
                text, n=N, max_tokens=TOKENS, temperature=0.8, logprobs=0, seed=number
            )
            best = max(answer.choices, key=score)
            usage = answer.usage
            print(
                f"round {number}: best of {N} scores {score(best):.2f}; "
                f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
                f"{usage.accepted_tokens} of {usage.completion_tokens} tokens were drafted"
            )
            text += best.text
    print(text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else URL)
