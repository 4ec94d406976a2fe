"""Summarizer: passes over a conversation that is longer than the context."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from foretoken import InvalidRequest
from foretoken.api.media.sources import ImageSource
from foretoken.api.runtime.chat import ChatClient
from foretoken.api.runtime.compaction.summarizer import HEAD, Summarizer
from foretoken.api.runtime.conversation.chat_input import ChatInput, Handle
from foretoken.api.types.sampling_params import SamplingParams

CONTEXT = 1024
WORDS = "word after word " * 20


@pytest.fixture
def built(built, engine):
    engine.max_model_len = built.max_model_len = CONTEXT
    return built


@pytest.fixture
def summarize(run, engine, tokenizer):
    """Summarize a conversation; return the summary and the prompts of the requests for it."""
    end = tokenizer.vocab["<|im_end|>"]
    counter = iter(range(100))
    engine.answers = lambda _: [*tokenizer.encode_word(f"Part {next(counter)}."), end]

    def start(messages: list[dict[str, Any]], **fields: Any) -> tuple[Any, list[str]]:
        chat = ChatInput(messages=messages, params=SamplingParams(**fields))

        async def body(llm: Any) -> Any:
            return await Summarizer(llm, ChatClient(llm)).summarize(chat, "Sum up.")

        summary = run(body)
        ids = [request.tokens[: request.prompt_len] for request in engine.requests]
        return summary, [tokenizer.decode(each, skip_special_tokens=False) for each in ids]

    return start


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_that_fits_is_summarized_in_one_request(summarize):
    summary, prompts = summarize([user("a"), {"role": "assistant", "content": "b"}], seed=7)
    assert (summary.text, summary.usage.prompt_tokens > 0) == ("Part 0.", True)
    [prompt] = prompts
    assert prompt.endswith("b<|im_end|>\n<|im_start|>user\nSum up.<|im_end|>\n"
                           "<|im_start|>assistant\n")  # fmt: skip


def test_each_pass_continues_after_the_summary_of_the_last(summarize, engine):
    messages = [
        {"role": "system", "content": "Rules."},
        *(user(f"{n}: {WORDS}") for n in range(20)),
    ]
    summary, prompts = summarize(messages)
    assert len(prompts) > 1
    assert summary.text == f"Part {len(prompts) - 1}."
    assert all(prompt.startswith("<|im_start|>system\nRules.<|im_end|>") for prompt in prompts)
    for number, prompt in enumerate(prompts[1:]):
        assert f"{HEAD}\n\nPart {number}.<|im_end|>" in prompt
        assert prompt.count(HEAD) == 1
    said = "".join(prompts)
    assert [said.count(f"\n{n}: ") for n in range(20)] == [1] * 20
    assert summary.usage.prompt_tokens == sum(each.prompt_len for each in engine.requests)


def test_a_call_stays_with_its_results(summarize):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [user("a")]
    for _ in range(12):
        messages.append({"role": "assistant", "content": "calls", "tool_calls": [call]})
        messages += [{"role": "tool", "content": WORDS, "tool_call_id": "c"}] * 2
    _, prompts = summarize(messages)
    assert len(prompts) > 1
    assert all(prompt.count("calls") * 2 == prompt.count(WORDS) for prompt in prompts)


def test_a_single_message_that_is_too_long_is_refused(summarize, engine):
    with pytest.raises(InvalidRequest, match="prompt is too long"):
        summarize([user(WORDS * 40), user("a")])
    assert not engine.requests


def test_token_ids_stay_with_their_messages(run, engine, tokenizer):
    """Positions of token ids move along with the messages that a pass leaves."""
    end = tokenizer.vocab["<|im_end|>"]
    engine.answers = lambda _: [*tokenizer.encode_word("Sum."), end]
    ids = tokenizer.encode_word("kept words")
    messages = [user(f"{n}: {WORDS}") for n in range(11)]
    messages.append({"role": "assistant", "content": "kept words"})
    chat = ChatInput(messages=messages, params=SamplingParams(), handles=[Handle(11, ids, "x")])

    async def body(llm: Any) -> Any:
        return await Summarizer(llm, ChatClient(llm)).summarize(chat)

    assert run(body).usage.spliced_tokens == len(ids)


def test_each_pass_has_the_images_of_its_messages(run, engine, tokenizer):
    engine.answers = lambda _: [*tokenizer.encode_word("Sum."), tokenizer.vocab["<|im_end|>"]]
    images = [ImageSource(f"data:{number % 9}", str(number)) for number in range(20)]
    messages = [{"role": "assistant", "content": f"{each.mark} {WORDS}"} for each in images]
    chat = ChatInput(messages=messages, images=images, params=SamplingParams())
    asked: list[ChatInput] = []

    async def body(llm: Any) -> Any:
        client = ChatClient(llm)
        submit = client.open

        async def record(question: ChatInput) -> Any:
            asked.append(question)
            return await submit(question)

        client.open = record
        return await Summarizer(llm, client).summarize(chat)

    run(body)
    assert len(asked) > 1
    assert [image for question in asked for image in question.images] == images
    for question in asked:
        marked = [each for each in question.messages if each["role"] == "assistant"]
        assert all(
            each["content"].startswith(image.mark)
            for each, image in zip(marked, question.images, strict=True)
        )


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, CONTEXT * 4 // 5), (10, 10), (10_000, CONTEXT - 1)]
)
def test_the_threshold_is_below_the_context(run, asked, expected):
    async def body(llm: Any) -> int:
        await asyncio.sleep(0)
        return Summarizer(llm, ChatClient(llm)).threshold(asked)

    assert run(body) == expected


@pytest.mark.parametrize(("parser", "share"), [("none", 4), ("think", 2)])
def test_a_model_that_reasons_gets_as_many_tokens_again(run, engine, tokenizer, parser, share):
    thoughts = "" if parser == "none" else "<think>hm</think>"
    ids = [*tokenizer.encode_word(f"{thoughts}Sum."), tokenizer.vocab["<|im_end|>"]]
    engine.answers = lambda _: ids
    chat = ChatInput(messages=[user("a")], params=SamplingParams())

    async def body(llm: Any) -> Any:
        return await Summarizer(llm, ChatClient(llm, reasoning_parser=parser)).summarize(chat)

    assert run(body).text == "Sum.", "the reasoning is no part of the summary"
    assert engine.requests[0].sampling.params.max_tokens == CONTEXT // share
