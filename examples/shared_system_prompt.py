"""A service with the same long system prompt for all users, computed once at the start.

    pip install openai
    python examples/shared_system_prompt.py [URL]    (or FORETOKEN_URL; the default is `make serve`)

Prints the hit rate: the fraction of all prompt tokens that came from the cache.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from openai import AsyncOpenAI

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
WARM = {"prompt_cache_options": {"prewarm": True}}  # compute the prompt, generate no tokens
RULES = "\n".join(
    f"{number}. Rule {number} of this house is to be kind." for number in range(1, 40)
)
SYSTEM = {"role": "system", "content": f"You help the guests of a hotel.\n{RULES}"}
QUESTIONS = ["When is breakfast?", "Is there a pool?", "May I bring a dog?", "Where can I park?"]


async def ask(client: AsyncOpenAI, model: str, user: int) -> Any:  # noqa: ANN401 - usage
    """Ask the question of one user, and return the usage."""
    question = {"role": "user", "content": QUESTIONS[user % len(QUESTIONS)]}
    talk: Any = [SYSTEM, question]
    answer = await client.chat.completions.create(
        model=model, messages=talk, max_tokens=16, seed=user
    )
    return answer.usage


async def main(url: str, num_users: int = 12) -> None:
    """Warm the cache, then serve all users at once."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        only_system: Any = [SYSTEM]
        warm: Any = await client.chat.completions.create(
            model=model, messages=only_system, extra_body=WARM
        )
        print(f"warmed {warm.usage.prompt_tokens} tokens")
        usages = await asyncio.gather(*[ask(client, model, user) for user in range(num_users)])
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    print(f"{num_users} users: {cached} of {prompt} prompt tokens cached")
    print(f"hit rate: {cached / prompt:.0%}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else URL))
