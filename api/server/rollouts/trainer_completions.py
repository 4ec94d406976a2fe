"""Text completions for trainers: tokens by their ids, and log-probabilities of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from typing_extensions import override

from ....core.errors import InvalidRequest
from ....core.interface.output import TokenLogprob
from ...dialects.openai.answers import TextChoiceBody, TextLogprobs
from ...dialects.openai.bodies import CompletionRequest
from ...dialects.openai.routes import CompletionsRoute
from ...dialects.openai.text_writing import CompletionWriter, LegacyLogprobs
from ...dialects.openai.writing import Head, finite
from ...runtime.preprocess import Prompt
from ...serving.sampling import NumTop
from ...serving.serving_context import Service
from ...types.results import Choice, Completion
from ...types.sampling_params import SamplingParams
from .pauses import PausedWriter
from .token_numbers import NumberedLogprobs


class TrainerTextRequest(CompletionRequest, kw_only=True):
    """Body of a text completion, with fields of vLLM's.

    ``return_tokens_as_token_ids``: name tokens by their ids. ``prompt_logprobs``: number of
    alternatives to report for each prompt token. ``prompt_token_logprobs``: report one number a
    prompt token. With log-probabilities of the prompt, ``max_tokens`` may be 0.
    """

    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NumTop | None = None
    prompt_token_logprobs: bool | None = None

    @property
    def num_prompt_top(self) -> int | None:
        """Number of alternatives for each prompt token; None without log-probabilities."""
        if self.prompt_logprobs is None and self.prompt_token_logprobs:
            return 0
        return self.prompt_logprobs


class PromptLogprob(Struct, kw_only=True):
    """A prompt token's log-probability.

    ``rank``: 1 for the most probable token. A token outside of the alternatives has the rank after
    the last of them.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TrainerChoiceBody(TextChoiceBody, kw_only=True):
    """One completion of a text. Lists of the prompt have one entry a token; the first is null."""

    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_logprobs: list[float | None] | UnsetType = UNSET


class TrainerTextWriter(PausedWriter, CompletionWriter):
    """Encodes the answers to all prompts of a trainer's body."""

    def __init__(
        self, service: Service, head: Head, body: CompletionRequest, echoed: list[str] | None
    ) -> None:
        super().__init__(service, head, body, echoed)
        assert isinstance(body, TrainerTextRequest)
        self._by_number = bool(body.return_tokens_as_token_ids)
        self._has_top = body.prompt_logprobs is not None
        self._has_numbers = bool(body.prompt_token_logprobs)

    @override
    def legacy_logprobs(self, prompt_ids: Sequence[int], echoed: str | None) -> LegacyLogprobs:
        kind = NumberedLogprobs if self._by_number else LegacyLogprobs
        return kind(self._service.llm.tokenizer, prompt_ids, echoed)

    @override
    def _choice(self, prompt_index: int, completion: Completion, choice: Choice) -> TextChoiceBody:
        found = super()._choice(prompt_index, completion, choice)
        if not self._has_top and not self._has_numbers:
            return found
        entries = completion.prompt_logprobs or []
        more: dict[str, Any] = {}
        if self._has_top:
            more["prompt_logprobs"] = [None if each is None else ranked(each) for each in entries]
        if self._has_numbers:
            more["prompt_token_logprobs"] = [
                None if each is None else finite(each.logprob) for each in entries
            ]
        return TrainerChoiceBody(**msgspec.structs.asdict(found), **more)

    @override
    def _whole_logprobs(
        self, completion: Completion, choice: Choice, echoed: str | None
    ) -> TextLogprobs | None:
        if echoed is None:  # the prompt's are reported in other fields
            completion = replace(completion, prompt_logprobs=None)
        return super()._whole_logprobs(completion, choice, echoed)


class TrainerTextRoute(CompletionsRoute):
    """Answer one prompt or a list of them, with log-probabilities of the prompts if requested."""

    body = TrainerTextRequest
    writer_kind: ClassVar[type[CompletionWriter]] = TrainerTextWriter

    @override
    async def read(
        self, body: CompletionRequest
    ) -> tuple[SamplingParams, list[Prompt], list[str] | None]:
        assert isinstance(body, TrainerTextRequest)
        num_top = body.num_prompt_top
        if num_top is None:
            return await super().read(body)
        field = "prompt_logprobs" if body.prompt_logprobs is not None else "prompt_token_logprobs"
        self.service.settings.limits.check(field, num_top, "max_top_logprobs")
        if body.stream:
            raise InvalidRequest(f"{field} cannot be streamed", param=field)
        if body.echo:
            raise InvalidRequest(f"{field} and echo are not supported together", param=field)
        # A body that only echoes its prompts computes them without generating a token.
        alone = body.max_tokens == 0
        asked = msgspec.structs.replace(body, echo=True, logprobs=num_top) if alone else body
        params, prompts, _ = await super().read(asked)
        return replace(params, logprobs=body.logprobs, prompt_logprobs=num_top), prompts, None


def ranked(entry: TokenLogprob) -> dict[str, PromptLogprob]:
    """Return a prompt token and its alternatives, by token id."""
    found = {
        str(token_id): PromptLogprob(logprob=finite(value), rank=rank)
        for rank, (token_id, value) in enumerate(entry.top, 1)
    }
    own = PromptLogprob(logprob=finite(entry.logprob), rank=len(entry.top) + 1)
    found.setdefault(str(entry.token_id), own)
    return found
