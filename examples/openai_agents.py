"""The OpenAI Agents SDK on /v1/responses: an agent that must call its tool.

pip install openai-agents
python examples/openai_agents.py [URL]    (or FORETOKEN_URL; the default is `make serve`)
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")


@function_tool
def look_outside(window: Literal["north", "south"]) -> str:
    """Look out of a window."""
    return f"rain, seen to the {window}"


async def main(url: str) -> None:
    """Run an agent whose `tool_choice` forces the call, so that an untrained model calls, too."""
    set_tracing_disabled(True)  # traces would go to OpenAI
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    served = (await client.models.list()).data[0].id
    agent = Agent(
        name="porter",
        instructions="Tell the guests about the weather.",
        model=OpenAIResponsesModel(served, openai_client=client),
        model_settings=ModelSettings(
            tool_choice="look_outside", parallel_tool_calls=False, max_tokens=256, temperature=0
        ),
        tools=[look_outside],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, "Do I need an umbrella?")
    print("answer:", result.final_output)
    print("requests:", result.context_wrapper.usage.requests)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else URL))
