"""ReplayClient: submits the requests of a replay with the noise of the recorded ones.

Routes render prompts and read answers as a server does. Here a request gets the recorded seed, and
the recorded answer as its draft, so that an equal answer costs a few steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.interface.sampling import RECOMMENDED
from ...core.sampling.seeds import sibling_seed
from ..certify.records import RecordedRequest
from ..runtime.chat import ChatAnswer, ChatClient
from ..runtime.conversation.chat_input import ChatInput
from ..runtime.generation import Answer
from ..runtime.preprocess import Prompt, PromptTokens
from ..runtime.verifying.recorded import LOOK_UPS, WIDEST
from ..sdk.async_llm import AsyncLLM
from ..types.sampling_params import MAX_PREDICTION_IDS, LeftOut, SamplingParams


@dataclass(slots=True)
class Opened:
    """An answer of the engine to one request of a turn, and the recorded answers of its choices."""

    answer: Answer
    records: list[RecordedRequest | None]


@dataclass(slots=True, kw_only=True)
class Taking:
    """The turn that is being submitted.

    ``records``: the recorded answers by their part. ``is_same``: whether nothing that the prompt or
    the parameters depend on was changed. ``seed``: the noise of requests without a record.
    """

    records: Mapping[int, RecordedRequest]
    is_same: bool
    seed: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    other_model: bool = False
    opened: list[Opened] = field(default_factory=list)
    chats: list[ChatAnswer] = field(default_factory=list)
    has_other_prompt: bool = False  # the template renders another prompt today

    def next(self, n: int) -> list[RecordedRequest | None]:
        """Return the recorded answers of the next n choices."""
        start = sum(len(each.records) for each in self.opened)
        return [self.records.get(start + index) for index in range(n)]


class ReplayClient(AsyncLLM):
    """An engine client whose requests belong to the turn ``taking``, if it is set."""

    taking: Taking | None = None

    async def open(
        self,
        prompt: Prompt | PromptTokens,
        params: SamplingParams,
        **options: Any,  # noqa: ANN401 - of `EngineClient.open`
    ) -> Answer:
        """Submit a request as `EngineClient.open` does, with the noise of its record."""
        taking = self.taking
        if taking is None or params.prompt_only or options.get("pooling") is not None:
            return await super().open(prompt, params, **options)
        records = taking.next(params.n)
        first = records[0]
        if taking.is_same and first is not None:
            prompt = self._recorded_prompt(taking, prompt, first)
        params = self._params(taking, params, first)
        answer = await super().open(prompt, params, **options)
        taking.opened.append(Opened(answer, records))
        return answer

    def _recorded_prompt(
        self, taking: Taking, prompt: Prompt | PromptTokens, record: RecordedRequest
    ) -> Prompt | PromptTokens:
        """Return the recorded prompt. A template that writes the date renders another one."""
        given = prompt.token_ids if isinstance(prompt, PromptTokens) else prompt
        if not record.prompt or min(record.prompt) < 0 or list(given) == record.prompt:
            return prompt
        taking.has_other_prompt = True
        if isinstance(prompt, PromptTokens):
            return dataclasses.replace(prompt, token_ids=record.prompt)
        return record.prompt

    def _params(
        self, taking: Taking, params: SamplingParams, record: RecordedRequest | None
    ) -> SamplingParams:
        changed: dict[str, Any] = {"seed": taking.seed if record is None else record.seed}
        if record is not None and not taking.other_model:
            for name in RECOMMENDED:  # the server's defaults may have been others
                if isinstance(getattr(params, name), LeftOut) and name in record.params:
                    changed[name] = record.params[name]
            if params.n == 1:
                changed |= self.draft(record.tokens)
        return dataclasses.replace(params, **(changed | dict(taking.sampling)))

    def draft(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the parameters with which an answer has these tokens as its draft."""
        if not 0 < len(tokens) <= MAX_PREDICTION_IDS:
            return {}
        is_free = LOOK_UPS.issuperset(self.built.drafters)  # a proposer would draft as deep
        return {"prediction": tuple(tokens), "speculation": WIDEST if is_free else "auto"}


class ReplayChat(ChatClient):
    """A chat client that passes its answers on to the turn that is being submitted."""

    def __init__(self, llm: ReplayClient, **options: Any) -> None:  # noqa: ANN401 - ChatClient's
        super().__init__(llm, **options)
        self._client = llm

    async def open(self, chat: ChatInput, **options: Any) -> ChatAnswer:  # noqa: ANN401
        """Submit a conversation as `ChatClient.open` does."""
        answer = await super().open(chat, **options)
        if self._client.taking is not None:
            self._client.taking.chats.append(answer)
        return answer


def seed_of(first: RecordedRequest, number: int) -> int:
    """Return the seed of a turn that the recording does not have. ``number`` counts from 1."""
    return sibling_seed(first.seed, number)
