"""Requests whose answers are known: the same ones all the time, each time asked in another way.

What each of them says is learned while the server is idle, without speculation and without the
cache. Whatever is done to the server afterwards, the words must be these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.bench.load.corpus import pool_text

from .answers import PATHS, Dialect

TENANTS = ("ada", "grace", "alan", "kurt")  # salts; the earlier ones ask more often
NUM_CANARIES = 4
SHARED_CHARS = 900  # of a prefix that several requests have in common
OWN_CHARS = 160
WORDY_TOKENS = 400
COLD = {"read": False, "write": False}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A request; ``body`` holds what decides its words."""

    name: str
    dialect: Dialect
    body: Mapping[str, Any]
    max_tokens: int
    stops: Sequence[str] = ()
    num_choices: int = 1
    tenant: str | None = None  # None: drawn, as its priority is

    @property
    def path(self) -> str:
        """Route of the request."""
        return PATHS[self.dialect]

    def cold(self) -> dict[str, Any]:
        """Return the body that the answer is learned by: nothing speculated, nothing borrowed."""
        return {**self._asked(stream=True), "speculation": "off", "cache": COLD}

    def varied(self, rng: random.Random, *, stream: bool) -> dict[str, Any]:
        """Return a body for later: fields that must not change a word are drawn."""
        body = self._asked(stream=stream)
        body["speculation"] = rng.choice(["auto", "auto", "off", 1, 4, 8])
        body["cache_salt"] = self.tenant or rng.choices(TENANTS, weights=[8, 4, 2, 1])[0]
        if rng.random() < 0.2 and self.tenant is None:
            body["priority"] = rng.choice([-1, 1, 5])
        if rng.random() < 0.05:
            body["cache"] = {"write": False}
        return body

    def _asked(self, *, stream: bool) -> dict[str, Any]:
        body = {**self.body, "stream": stream}
        if stream and self.dialect in ("completions", "chat"):
            body["stream_options"] = {"include_usage": True}
        return body


class Texts:
    """Pieces of Python's own sources: the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._pool, self._seed = pool_text(200_000), seed

    def cut(self, key: object, length: int) -> str:
        """``length`` characters that belong to ``key``."""
        at = random.Random(f"{self._seed}/{key}").randrange(len(self._pool) - length)
        return self._pool[at : at + length]

    def prompt(self, index: int) -> str:
        """Text that shares its beginning with every third other one."""
        return self.cut(("shared", index % 3), SHARED_CHARS) + self.cut(index, OWN_CHARS)


def canaries(texts: Texts) -> list[Known]:
    """A few plain ones, greedy and drawn, text and chat, of a tenant that asks for little."""
    return [replace(_plain(texts, i, 24), tenant="canary") for i in range(NUM_CANARIES)]


def plain(texts: Texts) -> list[Known]:
    """Text and chat, short and long, greedy and drawn."""
    return [_plain(texts, index, (8, 24, 48, 160)[index % 4]) for index in range(4, 24)]


def wordy(texts: Texts) -> list[Known]:
    """Short prompts and long answers: more of them at once than the cache has pages for."""
    made = [_plain(texts, index, WORDY_TOKENS) for index in range(24, 28)]
    return [replace(known, body={**known.body, "prompt": known.body["prompt"][:60]})
            if "prompt" in known.body else known for known in made]  # fmt: skip


def featured(texts: Texts) -> list[Known]:
    """Every dialect and what makes an answer more than text."""
    return [make(texts) for make in _FEATURED] + list(_dialects(texts))


def _plain(texts: Texts, index: int, max_tokens: int) -> Known:
    temperature, prompt = (0.0, 0.8)[index % 2], texts.prompt(index)
    body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature, "seed": index}
    if index % 4 < 2:
        return Known(name=f"text-{index}", dialect="completions", max_tokens=max_tokens,
                     body={**body, "prompt": prompt})  # fmt: skip
    return Known(name=f"chat-{index}", dialect="chat", max_tokens=max_tokens,
                 body={**body, "messages": _turns(prompt)})  # fmt: skip


def _turns(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Write Python."}, {"role": "user", "content": prompt}]


def _chat(name: str, texts: Texts, max_tokens: int = 48, **fields: object) -> Known:
    choices = fields.get("n", 1)
    assert isinstance(choices, int)
    body = {"messages": _turns(texts.prompt(len(name))), "max_tokens": max_tokens, "seed": 7}
    return Known(name=name, dialect="chat", max_tokens=max_tokens, num_choices=choices,
                 body={**body, "temperature": 0.7, **fields})  # fmt: skip


def _schema(texts: Texts) -> Known:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    return _chat("schema", texts, response_format=form)


def _regex(texts: Texts) -> Known:
    return _chat("regex", texts, regex=r"[a-z]{3,9}(, [a-z]{3,9}){2}")


def _choice(texts: Texts) -> Known:
    return _chat("choice", texts, choice=["red", "green", "blue"])


def _several(texts: Texts) -> Known:
    return _chat("several", texts, 16, n=3, ignore_eos=True)


def _logprobs(texts: Texts) -> Known:
    return _chat("logprobs", texts, 24, logprobs=True, top_logprobs=5)


def _penalties(texts: Texts) -> Known:
    return _chat("penalties", texts, presence_penalty=0.5, repetition_penalty=1.2, top_k=40)


def _prediction(texts: Texts) -> Known:
    guess = {"type": "content", "content": texts.cut("guess", 300)}
    return _chat("prediction", texts, 64, temperature=0.0, prediction=guess)


def _call(texts: Texts) -> Known:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    return _chat("call", texts, 96, tools=[tool], tool_choice="required", parallel_tool_calls=False)


def _stopped(texts: Texts) -> Known:
    stops = ["\n", "self"]
    body = {"prompt": texts.prompt(40), "max_tokens": 64, "temperature": 0.0, "stop": stops}
    return Known(name="stopped", dialect="completions", body=body, max_tokens=64, stops=stops)


_FEATURED: Sequence[Callable[[Texts], Known]] = (
    _schema, _regex, _choice, _several, _logprobs, _penalties, _prediction, _call, _stopped,
)  # fmt: skip


def _dialects(texts: Texts) -> Iterator[Known]:
    """Responses and messages: text, a form, a call."""
    others: dict[str, dict[str, Any]]
    turns = [{"role": "user", "content": texts.prompt(41)}]
    flat = {"type": "function", "name": "look_up", "parameters": SCHEMA}
    form = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    drawn = {"max_output_tokens": 48, "temperature": 0.7, "seed": 3}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    others = {"text": {}, "form": {"text": form}, "call": {"tools": [flat], **required}}
    for name, own in others.items():
        yield Known(name=f"responses-{name}", dialect="responses", max_tokens=48,
                    body={"input": texts.prompt(42), **drawn, **own})  # fmt: skip
    tool = {"name": "look_up", "input_schema": SCHEMA}
    forced = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    others = {"text": {}, "call": forced}
    for name, own in others.items():
        yield Known(name=f"messages-{name}", dialect="messages", max_tokens=64,
                    body={"messages": turns, "max_tokens": 64, "temperature": 0.7, "seed": 5,
                          "system": "Write Python.", **own})  # fmt: skip


def long_prompt(texts: Texts, rng: random.Random) -> dict[str, Any]:
    """A prompt of its own that takes a good part of the cache, so that something has to go."""
    length = rng.randrange(2000, 5000)
    prompt = texts.cut(rng.random(), length)
    return {"prompt": prompt, "max_tokens": 8, "cache_salt": rng.choice(TENANTS)}
