"""LangChain: streaming, structured output, and a forced tool call.

pip install langchain-openai
python examples/langchain_chat.py [URL]    (or FORETOKEN_URL; the default is `make serve`)
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")


class Weather(BaseModel):
    """The weather outside."""

    sky: Literal["clear", "cloudy", "rainy"]
    wind: Literal["none", "some", "a lot"]


@tool
def look_outside(window: Literal["north", "south"]) -> str:
    """Look out of a window."""
    return f"rain, seen to the {window}"


def main(url: str) -> None:
    """Stream an answer, ask for structured output, and force a tool call."""
    served = OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=served,
        max_tokens=128,
        temperature=0,
        stream_usage=True,
        extra_body={"speculation": "auto"},  # request fields that only foretoken has go here
    )
    whole = AIMessageChunk("")
    for chunk in chat.stream("Hello!"):
        print(chunk.text, end="", flush=True)
        whole += chunk
    print(f"\n{whole.usage_metadata}")
    print(chat.with_structured_output(Weather, method="json_schema").invoke("What is it like?"))
    forced = chat.bind_tools([look_outside], tool_choice="look_outside", strict=True)
    (call,) = forced.invoke("Is it raining?", parallel_tool_calls=False).tool_calls
    print(call["name"], call["args"], "->", look_outside.invoke(call["args"]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else URL)
