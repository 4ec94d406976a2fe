"""Next turns that the engine computes in idle time: adapters, images and recurrent states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.runtime.chat import ChatClient
from foretoken.api.sdk.async_llm import ChatOptions
from foretoken.api.types.results import Choice
from foretoken.core.interface.request import DEFAULT_CACHE, CacheOptions, Usage
from support.image_folders import TEMPLATE, image_part, picture, text_part, write_image_folder
from support.lora_models import AdaptedModel

SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=1.0)
UNCACHED = CacheOptions(read=False, write=False)
WORDS = "which animals sleep in winter and where do they find their food? "
SECONDS = 60.0
COUNTED = "of {{ messages | length }} messages: "
"""At the beginning of a template: the prompt of the next turn has nothing of the one before."""


class Talker:
    """A client whose conversations are continued in idle time."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._client = ChatClient(llm, idle_prefill=True)
        self._page_size = llm.page_size

    async def ask(
        self, messages: Sequence[Any], *, lora: str | None = None, is_cached: bool = True
    ) -> tuple[Choice, Usage]:
        """Return an answer, once the idle work behind it has ended."""
        idle = self._client.next_turns
        chat = ChatOptions(None, None).chat_input(messages, replace(SAMPLED, lora=lora))
        chat = replace(chat, warms_next=True, cache=DEFAULT_CACHE if is_cached else UNCACHED)
        num_ended = sum(idle.ends.values())
        answer = await self._client.open(chat)
        (choice,) = await answer.collect()
        async with asyncio.timeout(SECONDS):
            while is_cached and sum(idle.ends.values()) == num_ended:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return choice, answer.usage

    async def hold(
        self, first: Sequence[Any], later: Mapping[str, Any], lora: str | None = None
    ) -> list[Any]:
        """Compare a second turn with one that reads nothing from the cache; return its messages."""
        choice, usage = await self.ask(first, lora=lora)
        messages = [*first, {"role": "assistant", "content": choice.text}, later]
        cold, cold_usage = await self.ask(messages, lora=lora, is_cached=False)
        warm, warm_usage = await self.ask(messages, lora=lora)
        assert warm.token_ids == cold.token_ids
        assert warm_usage.prompt_tokens == cold_usage.prompt_tokens
        assert cold_usage.cached_tokens == 0
        assert warm_usage.cached_tokens > usage.prompt_tokens - self._page_size
        return messages


def run(
    folder: Path, template: str, act: Callable[[Talker], Awaitable[None]], **options: Any
) -> None:
    torch.set_num_threads(1)
    path = folder / "counted.jinja"
    path.write_text(COUNTED + template)

    async def body() -> None:
        async with AsyncLLM(
            folder, threads=1, kv_tokens=4096, chat_template=str(path), **options
        ) as llm:
            await act(Talker(llm))

    asyncio.run(body())


def test_the_next_turn_of_an_adapter_is_of_no_use_to_others(tmp_path: Path) -> None:
    adapted = AdaptedModel(tmp_path)
    ask = [{"role": "user", "content": WORDS}]

    async def act(talker: Talker) -> None:
        for name, other in (("sql", "legal"), (None, "poems")):
            messages = await talker.hold(ask, {"role": "user", "content": "why?"}, name)
            _, usage = await talker.ask(messages, lora=other)
            assert usage.cached_tokens == 0

    lora = {name: adapted.path(name) for name in ("sql", "legal", "poems")}
    run(adapted.base, str(adapted.tokenizer.chat_template), act, lora=lora, page_size=4)


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_5"])
def test_the_next_turn_of_a_conversation_with_images_has_their_rows(
    tmp_path: Path, kind: str
) -> None:
    """Qwen3.5 has recurrent states as well."""
    write_image_folder(tmp_path, kind)
    one, other = picture(1), picture(2)

    def asked(image: Any) -> dict[str, Any]:
        return {"role": "user", "content": [image_part(image), text_part(WORDS)]}

    async def act(talker: Talker) -> None:
        messages = await talker.hold([asked(one)], {"role": "user", "content": "why?"})
        _, usage = await talker.ask([asked(other), *messages[1:]])
        assert usage.cached_tokens < usage.prompt_tokens / 3, "only what is before the image"
        await talker.hold(messages, asked(other))

    run(tmp_path, TEMPLATE, act, page_size=16 if kind == "qwen3_5" else 4)
