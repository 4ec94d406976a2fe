"""Two Python agents at the task of `record_agents.py`: ``python_agents.py NAME URL TASK``."""

from __future__ import annotations

import sys
from pathlib import Path

MODEL, KEY, MAX_STEPS = "foretoken-64k", "sk-local", 40


def read_part(name: str) -> str:
    """Read a part of the report.

    Args:
        name: Name of the file.
    """
    return Path(name).read_text("utf-8")


def openai_agents(url: str, task: str) -> None:
    """An agent of the OpenAI Agents SDK over chat completions."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    model = OpenAIChatCompletionsModel(MODEL, openai_client=client)
    agent = Agent(
        name="reader",
        instructions="Read the parts with the tool.",
        model=model,
        tools=[function_tool(read_part)],
    )
    Runner.run_sync(agent, task, max_turns=MAX_STEPS)


def pydantic_ai(url: str, task: str) -> None:
    """An agent of pydantic-ai over chat completions."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    Agent(model, tools=[read_part], instructions="Read the parts with the tool.").run_sync(task)


if __name__ == "__main__":
    {"openai-agents": openai_agents, "pydantic-ai": pydantic_ai}[sys.argv[1]](*sys.argv[2:])
