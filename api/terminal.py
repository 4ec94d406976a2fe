"""``foretoken run`` and ``foretoken chat``: answers streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from ..core.params import SamplingParams
from .answer import Answer
from .intake import Prompt
from .sdk import AsyncLLM


def run(prompt: str, model: str | None, params: SamplingParams, options: Mapping[str, Any]) -> int:
    """Complete one prompt; the text on stdout, the cost on stderr."""
    return asyncio.run(_run(AsyncLLM(model, **options), prompt, params))


def chat(
    model: str | None,
    params: SamplingParams,
    options: Mapping[str, Any],
    system: str | None = None,
) -> int:
    """Talk, one line of stdin a turn, until it ends."""
    return asyncio.run(_chat(AsyncLLM(model, **options), params, system))


async def _run(llm: AsyncLLM, prompt: str, params: SamplingParams) -> int:
    async with llm:
        await _show(llm, prompt, params)
    return 0


async def _chat(llm: AsyncLLM, params: SamplingParams, system: str | None) -> int:
    messages = [{"role": "system", "content": system}] if system else []
    async with llm:
        while (line := await _read_line()) is not None:
            messages.append({"role": "user", "content": line})
            text = await _show(llm, await llm.render(messages), params)
            messages.append({"role": "assistant", "content": text})
    return 0


async def _read_line() -> str | None:
    """The next line that says something; None at the end of stdin."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return None
        if line.strip():
            return line.rstrip("\n")


async def _show(llm: AsyncLLM, prompt: Prompt, params: SamplingParams) -> str:
    """Print an answer as it comes; the choices of n > 1 one after the other."""
    answer = await llm.open(prompt, params)
    texts = [""] * params.n
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.index] += delta.text
                if params.n == 1:
                    print(delta.text, end="", flush=True)
    finally:
        llm.forget(answer)
    print("" if params.n == 1 else "\n---\n".join(texts))
    print(cost_line(answer), file=sys.stderr)
    return texts[0]


def cost_line(answer: Answer) -> str:
    """What the answer cost, in one line."""
    usage = answer.usage
    parts = [
        f"{usage.completion_tokens} tokens in {usage.verify_steps} steps",
        f"{usage.completion_tokens / max(1, usage.verify_steps):.2f} tokens/step",
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached",
        f"first token {usage.time_to_first_token * 1e3:.0f} ms",
    ]
    if answer.params.n == 1 and usage.completion_tokens > 1:
        between = (usage.total_time - usage.time_to_first_token) / (usage.completion_tokens - 1)
        parts.append(f"ITL {between * 1e3:.1f} ms")
    return f"[{', '.join(parts)}]"
