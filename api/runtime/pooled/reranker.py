"""Reranker: scores documents for a query with a model that answers yes or no."""

from __future__ import annotations

import logging
import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....core.errors import InvalidRequest, PromptTooLong
from ....core.interface.request import DEFAULT_CACHE, CacheOptions
from ....core.interface.sampling import Pooling, beyond_vocabulary
from ...types.request_context import random_id
from ...types.sampling_params import SamplingParams
from ..chat import ChatClient
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from .pooled_prompts import Pooled, PooledPrompts

logger = logging.getLogger(__name__)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
"""Prompt texts of Qwen3-Reranker, used for all models that answer yes or no."""
PROBES = ("foretokenquery", "foretokendocument")  # texts to find in a rendered prompt
TEMPLATE_OPTIONS = {"add_generation_prompt": True, "enable_thinking": False}
ROLE = re.compile("""['"]query['"]""")  # matches in a template with the role "query"
WORDS = ("no", "yes")


def score_of(numbers: array[float]) -> float:
    """Return the probability of "yes", from the logits of "no" and "yes"."""
    no, yes = numbers
    return 1 / (1 + math.exp(min(700.0, no - yes)))


def ranked(pooled: Sequence[Pooled], top_n: int | None = None) -> list[tuple[int, float]]:
    """Return (index, score) of the ``top_n`` best documents, or of all, best first."""
    scores = [score_of(each.numbers) for each in pooled]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [(index, scores[index]) for index in order[:top_n]]


class Reranker:
    """Writer of prompts that ask whether a document answers a query.

    The query and the instruction precede the document, so all documents share cached pages. A
    template with roles for query and document is used as it is; otherwise the prompt follows
    Qwen3-Reranker.
    """

    def __init__(self, chat: ChatClient, llm: EngineClient) -> None:
        self._chat, self._llm = chat, llm
        self._has_roles: bool | None = None  # whether the template has roles; None: not probed
        self._has_warned = False

    def open(
        self,
        pairs: Sequence[tuple[str, str]],
        params: SamplingParams,
        instruct: str | None = None,
        *,
        name: Callable[[int], str],
        query_name: Callable[[int], str],
        cache: CacheOptions = DEFAULT_CACHE,
    ) -> PooledPrompts:
        """Return the prompts that score ``pairs`` of a query and a document.

        A prompt is written just before it runs. ``name`` and ``query_name`` return the names of the
        fields of a pair's document and query from its index, for errors. Raises `InvalidRequest` if
        the model cannot rerank.
        """
        writer = PairWriter(self, pairs, params, instruct, self.pooling(), name, query_name)
        return PooledPrompts(
            self._llm, len(pairs), writer.prompt, params, lambda _: writer.pooling, cache=cache
        )

    def pooling(self) -> Pooling:
        """Return a request for the logits of "no" and "yes".

        Raises `InvalidRequest` if the model has no such tokens or no chat template.
        """
        if not self._llm.tokenizer.chat_template:
            raise InvalidRequest("the model cannot rerank: no chat template", param="model")
        ids, vocab_size = self._llm.built.pooling.score_ids, self._llm.built.vocab_size
        if ids is None:
            found = [self._llm.tokenizer.encode_after(word) for word in WORDS]
            if any(len(each) != 1 for each in found):
                message = 'the model cannot rerank: its vocabulary lacks a token "yes" or "no"'
                raise InvalidRequest(message, param="model")
            ids = found[0][0], found[1][0]
        if problem := beyond_vocabulary("the tokens of yes and no", ids, vocab_size):
            raise InvalidRequest(problem, param="model")
        return Pooling(ids)

    async def prompt(
        self,
        query: str,
        document: str,
        instruct: str | None,
        params: SamplingParams,
        pooling: Pooling,
    ) -> Sequence[int]:
        """Return the checked token ids of the question whether a document answers a query.

        Raises `InvalidRequest`.
        """
        if self._has_roles is None:
            self._has_roles = await self._tries_roles()
        self._warn()
        messages = with_roles if self._has_roles else as_question
        if any(map(self._llm.tokenizer.names_special, (query, document, instruct or ""))):
            marks = {f"\ue000{random_id()}": text for text in (query, document, instruct or "")}
            of_query, of_document, of_instruct = marks
            marked = messages(of_query, of_document, of_instruct if instruct else None)
            text = await self._llm.render_text(marked, TEMPLATE_OPTIONS)
            token_ids: Sequence[int] = await self._llm.tokenizer.encode_marked(text, marks)
        else:
            given = messages(query, document, instruct)
            chat = ChatInput(messages=given, params=params, template=TEMPLATE_OPTIONS)
            token_ids = (await self._chat.render(chat)).token_ids
        return await self._llm.check(token_ids, params, pooling=pooling, param="messages")

    def _warn(self) -> None:
        built = self._llm.built
        is_named = self._has_roles is not False or built.pooling.score_ids is not None
        if not (is_named or self._has_warned):
            self._has_warned = True
            logger.warning(
                "%s is not marked as a reranker (no LogitScore in modules.json, no roles query and "
                "document in the chat template): unless it was trained to answer yes or no, its "
                "scores may be of low quality",
                built.name,
            )

    async def _tries_roles(self) -> bool | None:
        """Whether the template renders messages with the roles query and document.

        None if rendering failed: a template that timed out may succeed the next time.
        """
        if not ROLE.search(self._llm.tokenizer.chat_template):
            return False
        try:
            text = await self._llm.render_text(with_roles(*PROBES))
        except InvalidRequest:
            return None
        return all(probe in text for probe in PROBES)


@dataclass(frozen=True, slots=True)
class PairWriter:
    """Writer of the prompts of a call's pairs. Its errors name the field of the pair."""

    reranker: Reranker
    pairs: Sequence[tuple[str, str]]
    params: SamplingParams
    instruct: str | None
    pooling: Pooling
    name: Callable[[int], str]
    query_name: Callable[[int], str]

    async def prompt(self, index: int) -> Sequence[int]:
        """Return the checked token ids of the prompt for one pair. Raises `InvalidRequest`."""
        query, document = self.pairs[index]
        try:
            return await self._write(query, document)
        except InvalidRequest as error:
            if error.param in ("messages", "prompt"):
                error.param = self.name(index)
            if isinstance(error, PromptTooLong) and not await self._fits(query):
                error.param = self.query_name(index)
            raise

    async def _fits(self, query: str) -> bool:
        """Whether the prompt fits into the context with an empty document."""
        try:
            await self._write(query, "")
        except PromptTooLong:
            return False
        return True

    async def _write(self, query: str, document: str) -> Sequence[int]:
        return await self.reranker.prompt(query, document, self.instruct, self.params, self.pooling)


def with_roles(query: str, document: str, instruct: str | None = None) -> list[Mapping[str, str]]:
    """Return messages for a reranker's own template, as sentence-transformers passes them."""
    system = [] if instruct is None else [{"role": "system", "content": instruct}]
    return [
        *system,
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]


def as_question(query: str, document: str, instruct: str | None) -> list[Mapping[str, str]]:
    """Return messages for the template of a chat model."""
    text = f"<Instruct>: {instruct or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
