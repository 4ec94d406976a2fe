"""Decider: answers questions about one input by the probabilities of the questions' labels."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....core.errors import InvalidRequest, PromptTooLong
from ....core.interface.request import Usage
from ....core.interface.sampling import Pooling
from ...parsing.reasoning import ThinkingState
from ...types.results import Decisions
from ...types.sampling_params import SamplingParams
from ..chat import ChatClient
from ..conversation.chat_input import ChatInput
from ..conversation.conversation_tokens import TAIL_IDS
from ..engine_client import EngineClient
from ..pooled.pooled_prompts import Pooled, PooledPrompts
from .labels import MAX_READS, Ids, LabelTree, Part
from .questions import Question

MAX_LABEL_TOKENS = 256  # so that the prefixes of one label stay small
TEMPLATE_OPTIONS = {"add_generation_prompt": True, "enable_thinking": False}


class Row(NamedTuple):
    """One request of a call. It reads log-probabilities for the question ``question``."""

    question: int
    part: Part
    pooling: Pooling


class Decider:
    """Asks questions about a conversation.

    Each question is the last message of a prompt of its own. The conversation precedes it, so its
    tokens are computed once and shared through the prefix cache. No token is generated: the
    log-probabilities of labels are read from the last row of a prompt. The tokens of longer labels
    follow the prompt as its branches, so that one request reads the log-probabilities of all labels
    of a question.
    """

    def __init__(self, chat: ChatClient, llm: EngineClient) -> None:
        self._chat, self._llm = chat, llm

    async def open(
        self, chat: ChatInput, questions: Sequence[Question], params: SamplingParams
    ) -> Deciding:
        """Return the call that asks the questions about a conversation.

        A prompt is written just before it runs. Raises `InvalidRequest`, which names the question,
        if the tokens of its labels do not differ, for a label of more than `MAX_LABEL_TOKENS`
        tokens, for labels that need too many reads, and for images.
        """
        for image in chat.images:
            raise InvalidRequest(f"{image.param}: images are not supported", param=image.param)
        trees = await self._trees(questions)
        with_branches = self._llm.built.takes_branches
        rows = [
            Row(index, part, part.pooling)
            for index, tree in enumerate(trees)
            for part in tree.parts(with_branches=with_branches)
        ]
        rows.sort(key=lambda row: len(row.part.prefix))  # prompts that others extend come first
        prompts = _Prompts(self._chat, self._llm, chat, questions, params, rows)
        return Deciding(prompts, questions, trees, rows)

    async def _trees(self, questions: Sequence[Question]) -> list[LabelTree]:
        tokenizer = self._llm.tokenizer
        labels = [each.labels() for each in questions]
        num_chars = sum(len(label) for listed in labels for label in listed)
        known: dict[str, Ids] = {}

        def encode() -> list[LabelTree]:
            trees: list[LabelTree] = []
            num_reads = 0
            for index, listed in enumerate(labels):
                trees.append(_tree(index, listed))
                num_reads += trees[-1].num_reads
                if num_reads > MAX_READS:
                    message = f"the labels of all questions need more than {MAX_READS} reads"
                    raise InvalidRequest(message, param="questions")
            return trees

        def _tree(index: int, listed: Sequence[str]) -> LabelTree:
            param = f"questions[{index}]"
            for label in listed:
                if label not in known:
                    literal = tokenizer.names_special(label)
                    ids = tokenizer.encode_after(label, is_literal=literal)
                    if len(ids) > MAX_LABEL_TOKENS:
                        message = f"a label has {len(ids)} tokens, more than {MAX_LABEL_TOKENS}"
                        raise InvalidRequest(f"{param}: {message}", param=param)
                    known[label] = tuple(ids)
            try:
                return LabelTree([known[label] for label in listed])
            except ValueError as error:
                raise InvalidRequest(f"{param}: {error}", param=param) from None

        return await tokenizer.work(num_chars, encode, "questions")


class Deciding:
    """A call with questions. Read ``prompts``, then call `decide` with their results.

    The caller must close ``prompts`` in a ``finally``.
    """

    def __init__(
        self,
        writer: _Prompts,
        questions: Sequence[Question],
        trees: Sequence[LabelTree],
        rows: Sequence[Row],
    ) -> None:
        self.prompts = writer.pooled()
        self._writer, self._questions, self._trees, self._rows = writer, questions, trees, rows

    @property
    def num_reads(self) -> int:
        """Number of reads; each takes the log-probabilities of one row."""
        return sum(tree.num_reads for tree in self._trees)

    async def prompt_ids(self, question: int) -> list[int]:
        """Write a question's prompt again, and return its token ids."""
        return await self._writer.write(question)

    def decide(self, pooled: Sequence[Pooled]) -> Decisions:
        """Return the answers. ``pooled``: the results of reading ``prompts``."""
        found: list[dict[Ids, float]] = [{} for _ in self._questions]
        usages: dict[int, Usage] = {}  # usage of each question's first request
        for row, each in zip(self._rows, pooled, strict=True):
            found[row.question].update(row.part.found(each.numbers))
            usages.setdefault(row.question, each.usage)
        answers = [
            question.decide(tree.probabilities(logprobs))
            for question, tree, logprobs in zip(self._questions, self._trees, found, strict=True)
        ]
        usage = self._writer.lengths.usage(list(usages.values()))
        return Decisions(answers=answers, usage=usage)


class PromptLengths:
    """The lengths of prompts and of their common prefix; no prompt but the prefix is kept."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._shared: array[int] | None = None

    def add(self, question: int, token_ids: array[int]) -> None:
        """Note the prompt of a question."""
        self._lengths[question] = len(token_ids)
        if self._shared is None:
            self._shared = token_ids
            return
        most = min(len(token_ids), len(self._shared))
        differs = np.asarray(token_ids)[:most] != np.asarray(self._shared)[:most]
        self._shared = self._shared[: int(differs.argmax()) if differs.any() else most]

    def usage(self, usages: Sequence[Usage]) -> Usage:
        """Return the usage of all prompts together; count their common prefix once.

        ``usages``: the usage of each prompt.
        """
        num_shared = len(self._shared or ())
        cached = [usage.cached_tokens for usage in usages]
        num_tokens = num_shared + sum(each - num_shared for each in self._lengths.values())
        num_cached = min(*cached, num_shared) + sum(max(0, each - num_shared) for each in cached)
        num_written = sum(usage.cache_write_tokens for usage in usages)
        return Usage(
            prompt_tokens=num_tokens,
            cached_tokens=num_cached,
            cache_write_tokens=min(num_written, num_tokens - num_cached),
            queue_time=min(usage.queue_time for usage in usages),
            time_to_first_token=max(usage.time_to_first_token for usage in usages),
            total_time=max(usage.total_time for usage in usages),
        )


class _Prompts:
    """Renders the prompts of a call. Its errors name the question or ``input``."""

    def __init__(
        self,
        chat: ChatClient,
        llm: EngineClient,
        conversation: ChatInput,
        questions: Sequence[Question],
        params: SamplingParams,
        rows: Sequence[Row],
    ) -> None:
        self._chat, self._llm, self._conversation = chat, llm, conversation
        self._questions, self._params, self._rows = questions, params, rows
        self.lengths = PromptLengths()
        self._token_ids: dict[int, array[int]] = {}  # prompts of the questions with further rows
        self._num_left = Counter(row.question for row in rows)
        # The longest row of each question.
        longest = sorted(range(len(rows)), key=lambda index: len(rows[index].part.token_ids))
        self._longest = {rows[index].question: index for index in longest}

    def pooled(self) -> PooledPrompts:
        """Return the prompts, which are rendered and computed when they are read."""
        cache = self._conversation.cache
        return PooledPrompts(
            self._llm, len(self._rows), self._prompt, self._params, self._pooling, cache=cache
        )

    def _pooling(self, index: int) -> Pooling:
        return self._rows[index].pooling

    async def _prompt(self, index: int) -> Sequence[int]:
        """Return the checked token ids of the prompt of row ``index``. Raises `InvalidRequest`."""
        asked, part, _ = self._rows[index]
        try:
            if asked not in self._token_ids:
                await self._begin(asked)
            token_ids = [*self._token_ids[asked], *part.token_ids]
            self._num_left[asked] -= 1
            if not self._num_left[asked]:
                del self._token_ids[asked]
            return await self._check(token_ids, index)
        except InvalidRequest as error:
            if isinstance(error, PromptTooLong):
                error.param = f"questions[{asked}]" if await self._has_room() else "input"
            elif error.param in ("messages", "prompt"):
                error.param = "input"
            raise

    async def _begin(self, question: int) -> None:
        """Write a question's prompt, and check that its longest row fits into the context."""
        token_ids = array("i", await self.write(question))
        if self._num_left[question] > 1:  # otherwise `_prompt` checks the only row
            longest = self._longest[question]
            await self._check([*token_ids, *self._rows[longest].part.token_ids], longest)
        self.lengths.add(question, token_ids)
        self._token_ids[question] = token_ids

    async def _check(self, token_ids: Sequence[int], index: int) -> Sequence[int]:
        return await self._llm.check(token_ids, self._params, pooling=self._pooling(index))

    async def write(self, question: int) -> list[int]:
        """Return the token ids of a question's prompt."""
        return await self._write(self._questions[question].prompt(), f"questions[{question}]")

    async def _has_room(self) -> bool:
        """Whether the input fits into the context without a question."""
        try:
            await self._llm.check(await self._write("", "questions"), self._params)
        except PromptTooLong:
            return False
        return True

    async def _write(self, question: str, path: str) -> list[int]:
        """Return the token ids of the conversation with a question, up to the answer."""
        chat = self._conversation
        paths = [chat.path(index) for index in range(len(chat.messages))]
        asked = {"role": "user", "content": question}
        prompt = await self._chat.render(
            dataclasses.replace(
                chat,
                messages=[*chat.messages, asked],
                paths=[*paths, path],
                template=TEMPLATE_OPTIONS,
            )
        )
        return [*prompt.token_ids, *self._closing_ids(prompt.token_ids)]

    def _closing_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the tokens that end the reasoning if the chat template has begun it."""
        thinking, tokenizer = self._chat.syntax.thinking, self._llm.tokenizer
        if thinking is None:
            return []
        tail = tokenizer.decode(prompt_ids[-TAIL_IDS:], skip_special_tokens=False)
        if thinking.state(tail) is not ThinkingState.OPEN:
            return []
        return tokenizer.encode_after(f"{thinking.end}\n\n")
