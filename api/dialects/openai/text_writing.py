"""Encode answers of /v1/completions, whole and as events: log-probabilities, echo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from ....core.interface.output import TokenLogprob
from ....core.interface.request import Request
from ...runtime.generation import Answer, each_of, merge
from ...serving.serving_context import Service
from ...text.tokenizer import Tokenizer
from ...types.results import Choice, Completion, TextDelta, batch_usage
from .answers import TextBody, TextChoiceBody, TextLogprobs
from .bodies import CompletionRequest
from .prefill import RequestReply
from .writing import Head, Writer, finite, reason_body, token_name


def echo_ids(tokenizer: Tokenizer, token_ids: Sequence[int], added_ids: Sequence[int]) -> str:
    """The text that a prompt of token ids stands for; without special tokens that encoding adds."""
    count = len(added_ids)
    start = count if list(token_ids[:count]) == list(added_ids) else 0
    return tokenizer.decode(token_ids[start:], skip_special_tokens=False)


def echo_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], echoed: str) -> Iterator[int]:
    """Offset in the echoed text at which each prompt token begins, in characters.

    A special token has the width of its name where the prompt contains it, else none.
    """
    detokenizer = tokenizer.detokenizer()
    offset = 0
    for token_id in token_ids:
        yield min(offset, len(echoed))
        piece = detokenizer.push(token_id)
        if token_id in tokenizer.special_ids:
            name = token_name(tokenizer, token_id)
            piece += name if echoed.startswith(name, offset + len(piece)) else ""
        elif not echoed.startswith(piece, offset):
            piece = piece.lstrip()  # SentencePiece gives a text a space that was not there
        offset += len(piece)


class LegacyLogprobs:
    """Four parallel lists; offsets are characters into the text of the choice.

    With ``echoed`` the text begins with the prompt, and the lists with its tokens.
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
        """The lists for the next tokens; an entry without a value is the prompt's first token."""
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
        self._offset += len(self._detokenizer.push(token_id))
        return offset


class TextReply(RequestReply):
    """The answers to all prompts of one body."""

    def __init__(self, writer: CompletionWriter, answers: Sequence[Answer]) -> None:
        self._writer, self._answers = writer, answers

    @property
    def request(self) -> Request:
        """The first one's."""
        return self._answers[0].request

    async def read(self) -> list[Completion]:
        """All of them, closed at the end; the first that fails raises."""
        try:
            return await each_of([answer.collect() for answer in self._answers])
        finally:
            self.close()

    async def whole(self) -> object:
        """All of them in one body."""
        return self._writer.whole(await self.read())

    def events(self) -> AsyncGenerator[bytes]:
        """All of them as events, mixed."""
        return self._writer.events(self._answers)

    def close(self) -> None:
        """Abort what still runs."""
        for answer in self._answers:
            self._writer.forget(answer)


class CompletionWriter(Writer[TextChoiceBody, TextChoiceBody]):
    """Encodes the answers to all prompts of a body; ``echoed``: their texts with ``echo``."""

    whole_kind = chunk_kind = "text_completion"
    whole_type = chunk_type = TextBody

    def __init__(
        self, service: Service, head: Head, body: CompletionRequest, echoed: list[str] | None
    ) -> None:
        super().__init__(service, head, body)
        self._echoed = echoed
        self._n = body.n or 1
        self._wants_logprobs = body.logprobs is not None
        self.returns_ids = bool(body.return_token_ids)

    def _lead(self, prompt_index: int) -> str | None:
        return None if self._echoed is None else self._echoed[prompt_index]

    def legacy_logprobs(self, prompt_ids: Sequence[int], echoed: str | None) -> LegacyLogprobs:
        """The log-probabilities of one choice."""
        return LegacyLogprobs(self._service.llm.tokenizer, prompt_ids, echoed)

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, completions: list[Completion]) -> Struct:
        """All answers in one body."""
        choices = [
            self._choice(prompt_index, completion, choice)
            for prompt_index, completion in enumerate(completions)
            for choice in completion.choices
        ]
        usage = batch_usage([each.usage for each in completions])
        return self.answer(choices, usage, metrics=self.metrics(usage, len(choices)))

    def nothing(self, index: int) -> TextChoiceBody:
        """The choice of a prompt that was only to be cached."""
        return TextChoiceBody(index=index, text="", finish_reason="length", stop_reason=None)

    def nothing_chunks(self, index: int) -> list[bytes]:
        """The same as events."""
        return [self.chunk(TextChoiceBody(index=index, text="", finish_reason="length"))]

    def forget(self, answer: Answer) -> None:
        """Abort requests that still run."""
        self._service.llm.forget(answer)

    def _choice(self, prompt_index: int, completion: Completion, choice: Choice) -> TextChoiceBody:
        self.refuse_aborted(choice.finish_reason, len(choice.token_ids))
        echoed = self._lead(prompt_index)
        return TextChoiceBody(
            index=prompt_index * self._n + choice.index,
            text=(echoed or "") + choice.text,
            logprobs=self._whole_logprobs(completion, choice, echoed),
            finish_reason=reason_body(choice.finish_reason),
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

    async def events(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        """All answers as events."""
        states = [
            _ChoiceWriter(self, answer, self._lead(prompt_index) if self._wants_logprobs else None)
            for prompt_index, answer in enumerate(answers)
            for _ in range(self._n)
        ]
        self.follow(lambda: batch_usage([answer.usage for answer in answers]))
        opened = False
        sources = [_shifted(answer, self._n * i) for i, answer in enumerate(answers)]
        async with aclosing(merge(sources)) as deltas:
            async for delta in deltas:
                if not opened:
                    opened = True
                    for chunk in self._echoes(len(states)):
                        yield chunk
                for chunk in states[delta.index].chunks(delta):
                    yield chunk
        usage = batch_usage([answer.usage for answer in answers])
        for last in self.end(usage, len(states)):
            yield last

    def _echoes(self, count: int) -> Iterator[bytes]:
        """The chunks with the echoed prompts; log-probabilities have their prompt with them."""
        if self._echoed is None or self._wants_logprobs:
            return
        for index in range(count):
            text = self._echoed[index // self._n]
            yield self.chunk(TextChoiceBody(index=index, text=text))


class _ChoiceWriter:
    """One streamed choice; with ``echo`` the prompt's log-probabilities lead its first ones."""

    def __init__(self, writer: CompletionWriter, answer: Answer, echoed: str | None) -> None:
        self._writer = writer
        self._legacy = writer.legacy_logprobs(answer.prompt_token_ids, echoed)
        self._lead: list[TokenLogprob | None] = [] if echoed is None else [None]
        self._echoed = echoed or ""
        self._num_tokens = 0
        self._prompt_ids: list[int] | UnsetType = UNSET  # told once
        if writer.returns_ids:
            self._prompt_ids = list(answer.prompt_token_ids)

    def chunks(self, delta: TextDelta) -> Iterator[bytes]:
        """The chunk of a delta; none if the delta is empty."""
        self._num_tokens += len(delta.token_ids)
        self._writer.tell(delta)
        if self._lead:
            self._lead += delta.prompt_logprobs
        if not delta.token_ids and delta.finish_reason is None:
            return
        logprobs = self._logprobs(delta)
        text, self._echoed = self._echoed + delta.text, ""
        reason = delta.finish_reason
        if reason is not None:
            self._writer.refuse_aborted(reason, self._num_tokens)
        if text or logprobs or reason is not None or self._writer.returns_ids:
            choice = TextChoiceBody(
                index=delta.index,
                text=text,
                logprobs=logprobs,
                finish_reason=None if reason is None else reason_body(reason),
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


async def _shifted(answer: Answer, first_index: int) -> AsyncGenerator[TextDelta]:
    """An answer's deltas with the indices that its choices have in the body."""
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            yield replace(delta, index=first_index + delta.index)


def prompt_ids(head: Head, count: int) -> list[str]:
    """Request ids of the prompts of a body."""
    return [head.id] if count == 1 else [f"{head.id}-p{index}" for index in range(count)]
