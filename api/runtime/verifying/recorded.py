"""RecordedAnswer: an answer to verify, and its comparison with the tokens of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ....core.errors import InvalidRequest
from ....core.interface.sampling import beyond_vocabulary
from ....core.options.checks import check_integer, require
from ...types.sampling_params import MAX_PREDICTION_CHARS, MAX_PREDICTION_IDS, SamplingParams
from ..engine_client import EngineClient
from ..preprocess import children

LOOK_UPS = {"radix", "suffix", "ngram"}  # drafters without weights
WIDEST = 64  # maximum number of draft tokens of one step
# Finish reasons of an answer that may be only the beginning of the model's answer.
INCOMPLETE = (None, "abort")
FINISH_REASONS = (*INCOMPLETE, "stop", "length", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A recorded answer: its token ids or its text, and how it ended.

    ``token_ids`` may lack the stop token. ``text`` is the visible text: in a conversation, the
    content of the message. If ``finish_reason`` is None or "abort", the ends are not compared.
    ``index``: number of the choice. ``checked_from``: number of leading tokens that are taken as
    given; only for token ids.
    """

    token_ids: Sequence[int] | None = None
    text: str | None = None
    finish_reason: str | None = None
    index: int = 0
    checked_from: int = 0

    @property
    def may_continue(self) -> bool:
        """Whether the model's answer may continue after the recorded one."""
        return self.finish_reason in INCOMPLETE

    def check(self, llm: EngineClient) -> None:
        """Raise `InvalidRequest`, which names the field, for an answer that no model can give."""
        if (self.token_ids is None) == (self.text is None):
            raise InvalidRequest("answer must have either token_ids or text", param="answer")
        known = ", ".join(map(str, FINISH_REASONS))
        is_known = self.finish_reason in FINISH_REASONS
        require(is_known, "finish_reason", f"must be one of {known}, not {self.finish_reason!r}")
        if self.text is not None:
            self._check_text(self.text)
            require(self.checked_from == 0, "checked_from", "needs token_ids in the answer")
        else:
            self._check_ids(llm, self.token_ids or ())
            check_integer("checked_from", self.checked_from, 0, len(self.token_ids or ()) - 1)

    def _check_text(self, text: str) -> None:
        name = "answer.text"
        require(isinstance(text, str) and bool(text), name, "must be a text, and not empty")
        # The content does not tell which calls were made.
        has_calls = self.finish_reason == "tool_calls"
        require(not has_calls, name, "does not have the tool calls: send the answer's token_ids")
        fits = len(text) <= MAX_PREDICTION_CHARS
        require(fits, name, f"must have at most {MAX_PREDICTION_CHARS} characters")

    def _check_ids(self, llm: EngineClient, token_ids: Sequence[int]) -> None:
        name, context = "answer.token_ids", llm.built.max_model_len
        require(len(token_ids) > 0, name, "must not be empty")
        fits = len(token_ids) <= MAX_PREDICTION_IDS
        require(fits, name, f"must have at most {MAX_PREDICTION_IDS} token ids")
        require({*map(type, token_ids)} == {int}, name, "must be a list of token ids")
        if problem := beyond_vocabulary(name, token_ids, llm.built.vocab_size):
            raise InvalidRequest(problem, param=name)
        self.check_room(0, context)

    def check_room(self, prompt_len: int, context: int) -> None:
        """Raise `InvalidRequest` if the answer does not fit into the context after the prompt.

        A prompt that does not fit alone is left to the checks of every prompt.
        """
        num_tokens = prompt_len + len(self.token_ids or ())
        message = f"does not fit: prompt and answer have {num_tokens} tokens, the context {context}"
        fits = num_tokens <= context or prompt_len > context
        require(fits, "answer.token_ids", message)

    def replayed(self, llm: EngineClient, params: SamplingParams) -> SamplingParams:
        """Return the parameters with which the model repeats the choice ``index``.

        Raises `InvalidRequest` for a wrong index, and for a missing seed if the answer depends on
        one.
        """
        params = llm.built.sampling_defaults.fill(params)
        check_integer("index", self.index, 0, params.n - 1)
        if params.prompt_only:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if params.seed is None and params.temperature > 0:
            message = "seed is required: at a temperature above 0, the answer depends on it"
            raise InvalidRequest(message, param="seed")
        own, seed = next(islice(children(params), self.index, None))
        return dataclasses.replace(
            own, seed=seed, logprobs=None, prompt_logprobs=None, prediction=None, speculation="off"
        )

    def as_draft(self, llm: EngineClient, params: SamplingParams) -> SamplingParams:
        """Return parameters with which the model generates, with the recorded text as a draft."""
        # A proposer would also draft, at the same depth.
        is_free = LOOK_UPS.issuperset(llm.built.drafters)
        return dataclasses.replace(
            params, prediction=self.text, speculation=WIDEST if is_free else "auto"
        )


class TextComparison:
    """Compares a recorded text with the model's visible text, token by token.

    ``is_different``: the texts differ from the model's last token on. ``is_longer``: the model's
    last token continues the visible text after the end of the recorded one.
    """

    def __init__(self, recorded: str) -> None:
        self.own: list[int] = []  # the model's tokens, including one after the recorded answer
        self.text = ""  # the model's visible text
        self._num_chars_before = 0  # length of the visible text before the last token
        self.is_different = self.is_longer = False
        self._recorded = recorded

    def take(self, token_id: int, text: str, *, is_stop: bool) -> bool:
        """Take the model's next token and its visible text; return whether to continue.

        ``is_stop``: whether the token is a stop token, which has no text.
        """
        self._num_chars_before = len(self.text)
        self.own.append(token_id)
        self.text += text
        known = self._recorded
        self.is_longer = len(self.text) > len(known) and self.text.startswith(known)
        ends_early = is_stop and len(self.text) < len(known)
        self.is_different = ends_early or not (self.is_longer or known.startswith(self.text))
        return not (self.is_different or self.is_longer)

    @property
    def is_shorter(self) -> bool:
        """Whether the recorded answer continues after the model's last token."""
        return len(self.text) < len(self._recorded)

    @property
    def num_same_chars(self) -> int:
        """Number of characters of the visible text before the first difference."""
        return self._num_chars_before if self.is_different else len(self.text)

    @property
    def num_checked(self) -> int:
        """Number of tokens that were compared with recorded ones."""
        return len(self.own) - self.is_longer

    @property
    def same(self) -> list[int]:
        """The model's tokens before the first difference."""
        return self.own[: len(self.own) - (self.is_different or self.is_longer)]
