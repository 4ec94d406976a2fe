"""Log-probabilities whose tokens are named by their ids, as trainers ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ....core.interface.output import TokenLogprob
from ...dialects.openai.answers import ChatLogprobs, TextLogprobs, TokenInfo
from ...dialects.openai.bodies import ChatRequest
from ...dialects.openai.chat_writing import ChatWriter
from ...dialects.openai.text_writing import LegacyLogprobs
from ...dialects.openai.writing import Head, finite, token_infos
from ...serving.serving_context import Service
from ...text.tokenizer import Tokenizer
from .pauses import PausedWriter


class NumberedChatRequest(ChatRequest, kw_only=True):
    """Body of a chat completion. ``return_tokens_as_token_ids``: name tokens by their ids."""

    return_tokens_as_token_ids: bool | None = None


def token_number(token_id: int) -> str:
    """Return the name of a token that has its id, in vLLM's form."""
    return f"token_id:{token_id}"


def numbered_infos(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[TokenInfo]:
    """Return one entry per token, which is named by its id."""
    infos = token_infos(tokenizer, entries)
    for info, entry in zip(infos, entries, strict=True):
        info.token = token_number(entry.token_id)
        for shown, (token_id, _) in zip(info.top_logprobs, entry.top, strict=True):
            shown.token = token_number(token_id)
    return infos


class NumberedLogprobs(LegacyLogprobs):
    """The four parallel lists of log-probabilities, with ids in place of the tokens' texts."""

    @override
    def body(self, entries: Sequence[TokenLogprob | None]) -> TextLogprobs:
        found = super().body(entries)
        found.tokens = [
            token_number(self._first_id if each is None else each.token_id) for each in entries
        ]
        return found

    @override
    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {token_number(token_id): finite(value) for token_id, value in pairs}


class NumberedChatWriter(PausedWriter, ChatWriter):
    """Encodes the answer to a chat request, with ids in place of the tokens' texts if requested."""

    def __init__(self, service: Service, head: Head, body: ChatRequest) -> None:
        super().__init__(service, head, body)
        assert isinstance(body, NumberedChatRequest)
        self._by_number = bool(body.return_tokens_as_token_ids)

    @override
    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if logprobs is None or not self._by_number:
            return super()._logprobs(logprobs)
        return ChatLogprobs(content=numbered_infos(self._service.llm.tokenizer, logprobs))
