"""OpenAI's answers with the versions of the weights that computed them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from msgspec import Struct
from typing_extensions import override

from ...dialects.openai.answers import ChatBody, TextBody
from ...dialects.openai.chat_writing import ChatReply, ChatWriter
from ...dialects.openai.routes import ChatRoute
from ...dialects.openai.text_writing import TextReply
from ...dialects.openai.writing import Head
from ...runtime.generation import EndedChoice
from ...serving.dialect import Dialect
from ...serving.errors import ApiError
from ...serving.serving_context import Service
from ...serving.sse import DONE, event
from ...types.results import TextDelta
from .generate import Generate
from .pauses import is_pause
from .token_numbers import NumberedChatRequest, NumberedChatWriter
from .trainer_completions import TrainerTextRoute
from .versions_body import ChoiceVersions, versions_of


class VersionedChatBody(ChatBody, kw_only=True):
    """Answer of a chat completion, with the versions of the weights."""

    weight_version: str
    weight_versions: list[ChoiceVersions]


class VersionedTextBody(TextBody, kw_only=True):
    """Answer of a text completion, with the versions of the weights."""

    weight_version: str
    weight_versions: list[ChoiceVersions]


def _with_versions(body: object, kind: type[Struct], choices: Iterable[EndedChoice]) -> object:
    """Return a body as a struct of ``kind``, which has two fields more."""
    assert isinstance(body, Struct)
    more = msgspec.structs.asdict(versions_of(choices))
    return kind(**msgspec.structs.asdict(body), **more)


def _versions_event(head: Head, kind: str, choices: Iterable[EndedChoice]) -> bytes:
    """Return the event with the versions, which has no choice."""
    return event(
        {**head.fields(kind), "choices": []} | msgspec.structs.asdict(versions_of(choices))
    )


class VersionedChatReply(ChatReply):
    """The answer to one chat request, with versions. In a stream, they come before the end."""

    @override
    async def whole(self) -> object:
        body = await super().whole()
        return _with_versions(body, VersionedChatBody, self._answer.ended_choices())

    @override
    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(super().events()) as events:
            async for data in events:
                yield data.removesuffix(DONE)
                if data.endswith(DONE):
                    head, kind = self._writer.head, self._writer.chunk_kind
                    yield _versions_event(head, kind, self._answer.ended_choices()) + DONE

    @override
    def _refusal(self, delta: TextDelta) -> ApiError | None:
        return None if is_pause(delta) else super()._refusal(delta)


class VersionedTextReply(TextReply):
    """The answers to all prompts of one body, with versions, which a stream has before its end."""

    @override
    async def whole(self) -> object:
        body = await super().whole()
        return _with_versions(body, VersionedTextBody, self._answer.ended_choices())

    @override
    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(super().events()) as events:
            async for data in events:
                yield data.removesuffix(DONE)
                if data.endswith(DONE):
                    head, kind = self._writer.head, self._writer.chunk_kind
                    yield _versions_event(head, kind, self._answer.ended_choices()) + DONE

    @override
    def _refusal(self, delta: TextDelta) -> ApiError | None:
        return None if is_pause(delta) else super()._refusal(delta)


class VersionedChat(ChatRoute):
    """Answer one conversation, whole or as a stream."""

    body = NumberedChatRequest
    answer: ClassVar[Any] = VersionedChatBody
    writer_kind: ClassVar[type[ChatWriter]] = NumberedChatWriter
    reply_kind: ClassVar[type[ChatReply]] = VersionedChatReply


class VersionedCompletions(TrainerTextRoute):
    """Answer one prompt or a list of them, whole or as a stream."""

    answer: ClassVar[Any] = VersionedTextBody
    reply_kind: ClassVar[type[TextReply]] = VersionedTextReply


def versioned_dialects(service: Service) -> dict[str, Dialect[Any]]:
    """Return the generating routes whose answers report versions, by path."""
    return {kind.path: kind(service) for kind in (VersionedChat, VersionedCompletions, Generate)}
