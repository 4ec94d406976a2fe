"""The legacy completion shape: echo, parallel lists of log-probabilities, several prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ..core.step import TokenLogprob
from .answer import Answer, merge
from .intake import Prompt
from .results import Choice, Completion, TextDelta, batch_usage
from .schema import CompletionRequest
from .service import Service
from .shapes import Body, Head, finite, reason_body, refuse_aborted, token_name, usage_body
from .sse import DONE, event


class LegacyLogprobs:
    """Four parallel lists; offsets are characters into the text of the choice."""

    def __init__(self, service: Service, context_ids: Sequence[int]) -> None:
        self._tokenizer = service.llm.tokenizer
        self._detokenizer = self._tokenizer.detokenizer(context_ids)
        self._offset = 0

    def body(self, entries: Sequence[TokenLogprob | None], first_id: int | None = None) -> Body:
        """The lists for the next tokens; an entry without a value is the prompt's first token."""
        ids = [first_id if each is None else each.token_id for each in entries]
        known = [token_id or 0 for token_id in ids]
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id in known],
            "token_logprobs": [None if each is None else finite(each.logprob) for each in entries],
            "top_logprobs": [None if each is None else self._top(each) for each in entries],
            "text_offset": [self._step(token_id) for token_id in known],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {token_name(self._tokenizer, token_id): finite(value) for token_id, value in pairs}

    def _step(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        return offset


class CompletionWriter:
    """Writes the answers to all prompts of one body."""

    def __init__(
        self, service: Service, head: Head, body: CompletionRequest, prompts: list[Prompt]
    ) -> None:
        self._service = service
        self._head = head
        self._prompts = prompts
        self._n = body.n or 1
        self._echo = bool(body.echo)
        self._wants_logprobs = body.logprobs is not None
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    def _echoed(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        if not self._echo:
            return ""
        return prompt if isinstance(prompt, str) else self._service.llm.tokenizer.decode(prompt)

    def legacy_logprobs(self, context_ids: Sequence[int]) -> LegacyLogprobs:
        """For one choice that follows these tokens."""
        return LegacyLogprobs(self._service, context_ids)

    def refuse_aborted(self, reason: str, num_tokens: int) -> None:
        """Raise for an answer that is none."""
        refuse_aborted(reason, num_tokens, draining=self._service.llm.draining)

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, completions: list[Completion]) -> Body:
        """All answers in one body."""
        choices = [
            self._choice(prompt_index, completion, choice)
            for prompt_index, completion in enumerate(completions)
            for choice in completion.choices
        ]
        usage = usage_body(batch_usage([completion.usage for completion in completions]))
        return {**self._head.body("text_completion", choices), "usage": usage}

    def _choice(self, prompt_index: int, completion: Completion, choice: Choice) -> Body:
        self.refuse_aborted(choice.finish_reason, len(choice.token_ids))
        return {
            "index": prompt_index * self._n + choice.index,
            "text": self._echoed(prompt_index) + choice.text,
            "logprobs": self._whole_logprobs(completion, choice),
            "finish_reason": reason_body(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _whole_logprobs(self, completion: Completion, choice: Choice) -> Body | None:
        if choice.logprobs is None:
            return None
        prompt_ids = completion.prompt_token_ids
        if not self._echo:
            return self.legacy_logprobs(prompt_ids).body(choice.logprobs)
        entries = [*(completion.prompt_logprobs or ()), *choice.logprobs]
        return self.legacy_logprobs(()).body(entries, prompt_ids[0])

    # -- streamed -------------------------------------------------------------------------------

    async def events(self, answers: list[Answer]) -> AsyncGenerator[bytes]:
        """All answers as events."""
        lead = self._echo and self._wants_logprobs
        states = [
            _ChoiceWriter(self, answer, self._echoed(prompt_index), lead=lead)
            for prompt_index, answer in enumerate(answers)
            for _ in range(self._n)
        ]
        opened = False
        sources = [_shifted(answer, self._n * i) for i, answer in enumerate(answers)]
        async with aclosing(merge(sources)) as deltas:
            async for delta in deltas:
                if not opened:
                    opened = True
                    for chunk in self._opening(len(states)):
                        yield chunk
                for chunk in states[delta.index].chunks(delta):
                    yield chunk
        if self._include_usage:
            usage = batch_usage([answer.usage for answer in answers])
            yield self._event([], usage_body(usage))
        yield DONE

    def _opening(self, count: int) -> Iterator[bytes]:
        """First chunks in order of the choices, where there are several or a prompt to echo."""
        if count == 1 and not self._echo:
            return
        for index in range(count):
            text = "" if self._wants_logprobs else self._echoed(index // self._n)
            yield self.chunk(index, text)

    def chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: Body | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        """One chunk of one choice."""
        choice: Body = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._event([choice], None)

    def _event(self, choices: list[Body], usage: Body | None) -> bytes:
        chunk = self._head.body("text_completion", choices)
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)


class _ChoiceWriter:
    """One streamed choice; with ``echo`` the prompt's log-probabilities lead its first ones."""

    def __init__(
        self, writer: CompletionWriter, answer: Answer, echoed: str, *, lead: bool
    ) -> None:
        prompt_ids = answer.prompt_token_ids
        self._writer = writer
        self._first_id = prompt_ids[0]
        self._legacy = writer.legacy_logprobs(() if lead else prompt_ids)
        self._lead: list[TokenLogprob | None] = [None] if lead else []
        self._echoed = echoed if lead else ""
        self._num_tokens = 0

    def chunks(self, delta: TextDelta) -> Iterator[bytes]:
        """The chunk of a delta, if it has anything to show."""
        self._num_tokens += len(delta.token_ids)
        if self._lead:
            self._lead += delta.prompt_logprobs
        if not delta.token_ids and delta.finish_reason is None:
            return
        logprobs = self._logprobs(delta)
        text, self._echoed = self._echoed + delta.text, ""
        reason = delta.finish_reason
        if reason is not None:
            self._writer.refuse_aborted(reason, self._num_tokens)
        if text or logprobs or reason is not None:
            yield self._writer.chunk(
                delta.index,
                text,
                logprobs=logprobs,
                finish_reason=None if reason is None else reason_body(reason),
                stop_reason=delta.stop_reason,
            )

    def _logprobs(self, delta: TextDelta) -> Body | None:
        entries = [*self._lead, *(delta.logprobs or ())]
        self._lead = []
        return self._legacy.body(entries, self._first_id) if entries else None


async def _shifted(answer: Answer, first_index: int) -> AsyncGenerator[TextDelta]:
    """An answer's deltas with the indices that its choices have in the body."""
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            yield replace(delta, index=first_index + delta.index)
