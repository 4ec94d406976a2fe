"""VisibleText: the text of an answer that its reader sees, token by token."""

from __future__ import annotations

from ...text.detokenizer import AnswerText
from ...types.results import TextDelta
from ..chat import ChoiceReader
from ..engine_client import EngineClient
from ..generation import Answer


class VisibleText:
    """The visible text of an answer, token by token.

    It is the content of the message if a ``reader`` parses the answer, otherwise the whole text.
    """

    def __init__(
        self, llm: EngineClient, answer: Answer, reader: ChoiceReader | None = None
    ) -> None:
        request, params = answer.request, answer.params
        self.finish_reason: str | None = None  # set at the end of the answer
        self._reader = reader
        self._text = AnswerText(
            llm.tokenizer.detokenizer(answer.prompt_token_ids, request.shown_ids),
            stops=tuple(params.stop),
            min_tokens=params.min_tokens,
        )

    def add(self, token_id: int, end: TextDelta | None) -> str:
        """Add a token and return the text that becomes visible with it.

        ``end``: the last delta of the answer, if the token is the last one.
        """
        if not is_stop(end):
            self._text.add_token(token_id)
        piece = self._text.take(final=end is not None)
        reason = None if end is None else end.finish_reason
        if self._reader is None:
            self.finish_reason = reason
            return piece
        stop_reason = None if end is None else end.stop_reason
        delta = TextDelta(
            text=piece, token_ids=[token_id], finish_reason=reason, stop_reason=stop_reason
        )
        parts = self._reader.read(delta)
        self.finish_reason = self._reader.choice.finish_reason or None
        return "".join(part.text for part in parts)


def is_stop(end: TextDelta | None) -> bool:
    """Whether the last token of an answer is a stop token, which has no text."""
    return end is not None and end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
