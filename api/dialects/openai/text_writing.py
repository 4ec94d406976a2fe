"""Encode answers of /v1/completions, whole and as events, with log-probabilities and echo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from ....core.interface.output import TokenLogprob
from ...runtime.generation import Answer, Answers
from ...serving.answers import AnswerReply
from ...serving.serving_context import Service
from ...text.tokenizer import Tokenizer
from ...types.results import Choice, Completion, TextDelta, batch_usage
from .answers import TextBody, TextChoiceBody, TextLogprobs
from .bodies import CompletionRequest
from .writing import Head, Writer, finite, token_name


def echo_ids(tokenizer: Tokenizer, token_ids: Sequence[int], added_ids: Sequence[int]) -> str:
    """Return the text of a prompt's token ids. ``added_ids`` are left out at its start."""
    count = len(added_ids)
    start = count if list(token_ids[:count]) == list(added_ids) else 0
    return tokenizer.decode(token_ids[start:], skip_special_tokens=False)


def echo_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], echoed: str) -> Iterator[int]:
    """Yield the offset in the echoed text at which each prompt token begins, in characters.

    A special token counts with the length of its name if the text contains the name, else with 0.
    """
    detokenizer = tokenizer.detokenizer()
    offset = 0
    for token_id in token_ids:
        yield min(offset, len(echoed))
        piece = detokenizer.decode(token_id)
        if token_id in tokenizer.special_ids:
            name = token_name(tokenizer, token_id)
            piece += name if echoed.startswith(name, offset + len(piece)) else ""
        elif not echoed.startswith(piece, offset):
            piece = piece.lstrip()  # SentencePiece prepends a space that the text does not have.
        offset += len(piece)


class LegacyLogprobs:
    """The four parallel lists of OpenAI's older log-probabilities. Offsets are in characters.

    With ``echoed``, the text of the choice begins with the prompt, and the lists begin with the
    tokens of the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], echoed: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._first_id = prompt_ids[0]
        echoed_ids = () if echoed is None else prompt_ids
        self._prompt_offsets = echo_offsets(tokenizer, echoed_ids, echoed or "")
        self._offset = len(echoed or "")

    def body(self, entries: Sequence[TokenLogprob | None]) -> TextLogprobs:
        """Return the lists for the next tokens, one entry per token.

        A None in ``entries`` stands for the first prompt token, which has no log-probability.
        """
        ids = [self._first_id if each is None else each.token_id for each in entries]
        return TextLogprobs(
            tokens=[token_name(self._tokenizer, token_id) for token_id in ids],
            token_logprobs=[None if each is None else finite(each.logprob) for each in entries],
            top_logprobs=[None if each is None else self._top(each) for each in entries],
            text_offset=[self._step(token_id) for token_id in ids],
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {token_name(self._tokenizer, token_id): finite(value) for token_id, value in pairs}

    def _step(self, token_id: int) -> int:
        in_prompt = next(self._prompt_offsets, None)
        if in_prompt is not None:
            return in_prompt
        offset = self._offset
        self._offset += len(self._detokenizer.decode(token_id))
        return offset


class TextReply(AnswerReply[Answers]):
    """The answers to all prompts of one body."""

    _writer: CompletionWriter

    async def whole(self) -> object:
        """Return all answers in one body."""
        return self._writer.body(self._answer, await self._answer.collect())


class CompletionWriter(Writer[Answers, TextChoiceBody, TextChoiceBody]):
    """Encodes the answers to all prompts of a body. ``echoed``: the texts to echo, if any."""

    whole_kind = chunk_kind = "text_completion"
    whole_type = chunk_type = TextBody

    def __init__(
        self, service: Service, head: Head, body: CompletionRequest, echoed: list[str] | None
    ) -> None:
        super().__init__(service, head, body)
        self._echoed = echoed
        self._n = body.n or 1
        self._states: list[_ChoiceWriter] = []  # state of each choice in a stream
        self._wants_logprobs = body.logprobs is not None
        self.returns_ids = bool(body.return_token_ids)

    def _lead(self, prompt_index: int) -> str | None:
        return None if self._echoed is None else self._echoed[prompt_index]

    def legacy_logprobs(self, prompt_ids: Sequence[int], echoed: str | None) -> LegacyLogprobs:
        """Return an encoder of log-probabilities for one choice."""
        return LegacyLogprobs(self._service.llm.tokenizer, prompt_ids, echoed)

    # -- whole ----------------------------------------------------------------------------------

    def body(self, answer: Answers, completions: list[Completion]) -> Struct:
        """Return all answers in one body."""
        choices = [
            self._choice(prompt_index, completion, choice)
            for prompt_index, completion in enumerate(completions)
            for choice in completion.choices
        ]
        usage = batch_usage([each.usage for each in completions])
        metrics = self.metrics(usage, len(choices))
        return self.answer(choices, usage, metrics=metrics, receipts=self.receipts(answer))

    def nothing(self, index: int) -> TextChoiceBody:
        """Return the empty choice of a prompt that was only cached."""
        return TextChoiceBody(index=index, text="", finish_reason="length", stop_reason=None)

    def nothing_chunks(self, index: int) -> list[bytes]:
        """Return the events of an empty choice, for a prompt that was only cached."""
        return [self.chunk(TextChoiceBody(index=index, text="", finish_reason="length"))]

    def _choice(self, prompt_index: int, completion: Completion, choice: Choice) -> TextChoiceBody:
        self.refuse_aborted(choice)
        echoed = self._lead(prompt_index)
        return TextChoiceBody(
            index=prompt_index * self._n + choice.index,
            text=(echoed or "") + choice.text,
            logprobs=self._whole_logprobs(completion, choice, echoed),
            finish_reason=self.reason(choice),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.returns_ids else UNSET,
            prompt_token_ids=completion.prompt_token_ids if self.returns_ids else UNSET,
        )

    def _whole_logprobs(
        self, completion: Completion, choice: Choice, echoed: str | None
    ) -> TextLogprobs | None:
        if choice.logprobs is None:
            return None
        entries = [*(completion.prompt_logprobs or ()), *choice.logprobs]
        return self.legacy_logprobs(completion.prompt_token_ids, echoed).body(entries)

    # -- streamed -------------------------------------------------------------------------------

    def begin(self, answer: Answers) -> Iterator[bytes]:
        """Yield the chunks with echoed prompts, unless log-probabilities must be sent with them."""
        self.set_usage(lambda: answer.usage)
        self._states = [
            _ChoiceWriter(self, each, self._lead(prompt_index) if self._wants_logprobs else None)
            for prompt_index, each in enumerate(answer.all)
            for _ in range(self._n)
        ]
        if self._echoed is None or self._wants_logprobs:
            return
        for index in range(answer.num_choices):
            text = self._echoed[index // self._n]
            yield self.chunk(TextChoiceBody(index=index, text=text))

    def write(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield the chunk of a delta; none if the delta is empty."""
        return self._states[delta.index].chunks(delta)


class _ChoiceWriter:
    """Writes one streamed choice. With ``echo``, its log-probabilities begin with the prompt's."""

    def __init__(self, writer: CompletionWriter, answer: Answer, echoed: str | None) -> None:
        self._writer = writer
        self._legacy = writer.legacy_logprobs(answer.prompt_token_ids, echoed)
        self._lead: list[TokenLogprob | None] = [] if echoed is None else [None]
        self._echoed = echoed or ""
        self._prompt_ids: list[int] | UnsetType = UNSET  # sent once
        if writer.returns_ids:
            self._prompt_ids = list(answer.prompt_token_ids)

    def chunks(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield the chunk of a delta; none if the delta is empty."""
        self._writer.count_sent(delta)
        if self._lead:
            self._lead += delta.prompt_logprobs
        if not delta.token_ids and delta.finish_reason is None:
            return
        logprobs = self._logprobs(delta)
        text, self._echoed = self._echoed + delta.text, ""
        reason = delta.finish_reason
        if text or logprobs or reason is not None or self._writer.returns_ids:
            choice = TextChoiceBody(
                index=delta.index,
                text=text,
                logprobs=logprobs,
                finish_reason=None if reason is None else self._writer.reason(delta),
            )
            if delta.stop_reason is not None:
                choice.stop_reason = delta.stop_reason
            if self._writer.returns_ids:
                choice.token_ids = delta.token_ids
                choice.prompt_token_ids, self._prompt_ids = self._prompt_ids, UNSET
            yield self._writer.chunk(choice)

    def _logprobs(self, delta: TextDelta) -> TextLogprobs | None:
        entries = [*self._lead, *(delta.logprobs or ())]
        self._lead = []
        return self._legacy.body(entries) if entries else None


def prompt_ids(head: Head, count: int) -> list[str]:
    """Return the request ids of a body's prompts."""
    return [head.id] if count == 1 else [f"{head.id}-p{index}" for index in range(count)]
