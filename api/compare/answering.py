"""Answers of a variant: from an engine in this process, or from a server by its address."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError, InvalidRequest
from ..runtime.interrupts import ending_at_once
from ..sdk.async_llm import AsyncLLM
from ..serving.http_client import HttpServer
from ..types.sampling_params import SamplingParams
from .answer import Answer
from .judging import Judge, LocalJudge, ServerJudge
from .tasks import Task
from .variants import Variant

DEFAULTS: dict[str, Any] = {"exact": "batch"}
"""Options of engines that a variant does not give: answers must not depend on the batch."""


class Answering(Protocol):
    """Gives the answers of a variant. ``exact``: whether they depend on task and seed alone."""

    variant: Variant
    exact: bool

    async def answer(self, task: Task, seed: int) -> Answer:
        """Return the answer to a task. Raises `ForetokenError`, without the name of the task."""
        ...


class LocalVariant:
    """A variant on an engine of this process."""

    def __init__(self, variant: Variant, llm: AsyncLLM) -> None:
        self.variant = variant
        self.exact = llm.built.exact
        self._llm = llm

    async def answer(self, task: Task, seed: int) -> Answer:
        """Return the answer to a task."""
        variant = self.variant
        params = SamplingParams(**variant.sampling, seed=seed, lora=variant.lora)
        if task.messages is None:
            done = await self._llm.generate(_prompt(variant, task), params)
        else:
            done = await self._llm.chat(
                _messages(variant, task), params, tools=_tools(variant, task)
            )
        calls = [_call(each.name, each.arguments) for each in done.tool_calls]
        return Answer(
            text=done.text,
            calls=calls,
            is_cut=done.finish_reason == "length",
            num_tokens=done.usage.completion_tokens,
        )


class ServerVariant:
    """A variant on a server with the API of OpenAI."""

    def __init__(self, variant: Variant, server: HttpServer, model: Mapping[str, Any]) -> None:
        self.variant = variant
        self.exact = model.get("exact") is True and model.get("owned_by") == "foretoken"
        self._server = server
        self._name = model["id"]

    @classmethod
    async def connect(cls, variant: Variant, access: Access) -> ServerVariant:
        """Return the variant of a server. Raises `ForetokenError` if it does not have the model."""
        assert variant.url is not None
        server = access.server(variant.url)
        models = await server.models()
        names = [each.get("id") for each in models]
        if variant.model is None:
            return cls(variant, server, models[0])
        if variant.model not in names:
            problem = f"{server.url} has no model {variant.model}, but {', '.join(map(str, names))}"
            raise InvalidRequest(f"{variant.text!r}: {problem}", param="variant")
        return cls(variant, server, models[names.index(variant.model)])

    async def answer(self, task: Task, seed: int) -> Answer:
        """Return the answer to a task."""
        body: dict[str, Any] = {"model": self._name, "seed": seed, **self.variant.sampling}
        if task.messages is None:
            if "max_tokens" not in body:  # a server's default is 16, an engine's the whole context
                raise InvalidRequest("a prompt for a server needs max-tokens", param="variant")
            body["prompt"] = _prompt(self.variant, task)
            found = await self._server.json("POST", "/v1/completions", body)
        else:
            body["messages"] = _messages(self.variant, task)
            if (tools := _tools(self.variant, task)) is not None:
                body["tools"] = tools
            found = await self._server.json("POST", "/v1/chat/completions", body)
        try:
            return _read(found)
        except (LookupError, TypeError, AttributeError):
            raise ForetokenError(f"{self._server.url} did not answer with a completion") from None


def _read(found: Mapping[str, Any]) -> Answer:
    """Return the answer of a body of OpenAI's API. Raises the errors of a body in another form."""
    choice = found["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise TypeError("the content is not a text")
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return Answer(
        text=text,
        calls=[_call(each["name"], each["arguments"]) for each in calls],
        is_cut=choice.get("finish_reason") == "length",
        num_tokens=(found.get("usage") or {}).get("completion_tokens") or 0,
    )


def _call(name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call; arguments that are not JSON stay a text.

    NaN is not JSON: it does not even equal itself.
    """
    try:
        return {"name": name, "arguments": msgspec.json.decode(arguments)}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"name": name, "arguments": arguments}


def _prompt(variant: Variant, task: Task) -> str:
    if variant.system is not None:
        raise InvalidRequest("system needs a task with messages, not a prompt", param="variant")
    return task.prompt or ""


def _messages(variant: Variant, task: Task) -> list[dict[str, Any]]:
    """Return the conversation of a task with the system message of the variant."""
    messages = task.messages or []
    if variant.system is None:
        return messages
    others = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": variant.system}, *others]


def _tools(variant: Variant, task: Task) -> list[dict[str, Any]] | None:
    return task.tools if variant.tools is None else variant.tools


class Access(Struct, frozen=True):
    """API key for all servers, and time limit of each answer in seconds."""

    key: str | None = None
    seconds: float | None = None

    def server(self, url: str) -> HttpServer:
        """Return a client of a server. Raises `ForetokenError` if the address is invalid."""
        return HttpServer(url, self.key, seconds=self.seconds)


class Opened(Struct, frozen=True):
    """The two variants, and the judge if there is one."""

    a: Answering
    b: Answering
    judge: Judge | None


@asynccontextmanager
async def opened(
    variants: Sequence[Variant], judge: str | None, access: Access
) -> AsyncGenerator[Opened]:
    """Load the models of two variants and of the judge, and connect to servers.

    Variants that need the same engine share it. ``judge``: a model or the address of a server.
    Raises `ForetokenError`.
    """
    async with AsyncExitStack() as stack:
        engines = _Engines(stack, [each.lora for each in variants if each.lora is not None])
        a, b = [await _open(each, engines, access) for each in variants]
        yield Opened(a, b, None if judge is None else await _open_judge(judge, engines, access))


async def _open(variant: Variant, engines: _Engines, access: Access) -> Answering:
    if variant.url is not None:
        return await ServerVariant.connect(variant, access)
    return LocalVariant(variant, await engines.get(variant.model, variant.engine))


async def _open_judge(judge: str, engines: _Engines, access: Access) -> Judge:
    if "://" not in judge:
        return LocalJudge(await engines.get(judge, {}))
    server = access.server(judge)
    return ServerJudge(server, (await server.models())[0]["id"])


class _Engines:
    """Engines of this process, each with a model and its options. They close with the stack.

    Each engine has all ``adapters``, folders that are their own names: a variant with an adapter
    shares the engine of one without.
    """

    def __init__(self, stack: AsyncExitStack, adapters: Sequence[str]) -> None:
        self._stack = stack
        self._defaults = DEFAULTS | (
            {"lora": {each: each for each in adapters}} if adapters else {}
        )
        self._llms: list[tuple[str | None, Mapping[str, Any], AsyncLLM]] = []

    async def get(self, model: str | None, options: Mapping[str, Any]) -> AsyncLLM:
        """Return the engine with a model and options. It is started if it does not run yet."""
        wanted = {**self._defaults, **options}
        for own_model, own_options, llm in self._llms:
            if (own_model, own_options) == (model, wanted):
                return llm
        llm = AsyncLLM(model, **wanted)
        with ending_at_once():
            await llm.start()
        await self._stack.enter_async_context(llm)
        self._llms.append((model, wanted, llm))
        return llm
