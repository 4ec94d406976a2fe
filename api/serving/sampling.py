"""Body fields that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from ...core.errors import InvalidRequest
from ...core.interface.request import CacheOptions
from ...core.interface.sampling import MAX_ALLOWED, MAX_BIASED_TOKENS, MAX_LISTED, MAX_LOGPROBS
from ...core.options.checks import MAX_INT
from ..runtime.conversation.tools import (
    GrammarText,
    StructuredOutputs,
    Texts,
    structured_outputs,
)
from ..types.fields import SameAs
from ..types.sampling_params import (
    MAX_DEPTH,
    MAX_N,
    MAX_PREDICTION_CHARS,
    MAX_WORD_CHARS,
    MAX_WORDS,
    STRUCTURED_FIELDS,
    SamplingParams,
)
from .caching.fields import CacheSpec, Marked, PromptCacheOptions, read_cache
from .caching.hints import KvHints, NvExt, hinted_pins
from .peers import RefusedFields

Label = Annotated[str, Meta(max_length=1024)]  # stays in memory after the request
Name = Annotated[str, Meta(max_length=256)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
KvBudget = Annotated[int, Meta(ge=256, le=MAX_INT)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_N)]
# The range is only shown in the schema: a later check raises a clearer error.
One = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 1})]
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = list[StopText]
Stop = StopText | StopTexts
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_WORD_CHARS)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_WORDS)]
StopIds = Annotated[list[Count], Meta(max_length=MAX_LISTED)]
AllowedIds = Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenIds = list[int]
"""Token ids of an answer. They are checked when the message is rendered."""
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Guess = Annotated[str, Meta(max_length=MAX_PREDICTION_CHARS)]
LogitBias = Annotated[
    dict[int, Bias],
    Meta(
        max_length=MAX_BIASED_TOKENS,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Depth = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
Speculation = Literal["auto", "off"] | Depth
JsonSchema = dict[str, Any] | GrammarText


class Sampling(RefusedFields, kw_only=True):
    """Body fields that all APIs share. Null always means the default."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    # fields that OpenAI's API does not have
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    kv_budget: KvBudget | None = None
    min_tokens: Count | None = None
    stop_token_ids: StopIds | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    deadline_ms: Milliseconds | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: Texts | None = None
    json_schema: JsonSchema | None = None
    close_early: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache: CacheSpec | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    nvext: NvExt | None = None
    kv_hints: KvHints | None = None
    explain_cache: bool | None = None
    return_token_ids: bool | None = None
    # other servers' names of fields above
    repeat_penalty: Annotated[RepetitionPenalty | None, SameAs("repetition_penalty")] = None
    min_new_tokens: Annotated[Count | None, SameAs("min_tokens")] = None
    sampling_seed: Annotated[Seed | None, SameAs("seed")] = None
    random_seed: Annotated[Seed | None, SameAs("seed")] = None
    extra_key: Annotated[Salt | None, SameAs("cache_salt")] = None
    ebnf: Annotated[GrammarText | None, SameAs("grammar")] = None
    guided_json: Annotated[JsonSchema | None, SameAs("json_schema")] = None
    guided_regex: Annotated[GrammarText | None, SameAs("regex")] = None
    guided_grammar: Annotated[GrammarText | None, SameAs("grammar")] = None
    guided_choice: Annotated[Texts | None, SameAs("choice")] = None

    def complete(self) -> None:
        """Copy the salt of ``nvext`` to ``cache_salt``. Raises `InvalidRequest` for two salts."""
        salt = None if self.nvext is None else self.nvext.cache_salt or None
        if salt is None:
            return
        if self.cache_salt not in (None, salt):
            message = "cache_salt and nvext.cache_salt are different: send only one of them"
            raise InvalidRequest(message, param="nvext.cache_salt")
        self.cache_salt = salt


class PredictionPart(Struct):
    """A part of a prediction; only text is supported."""

    type: Literal["text"]
    text: str


class Prediction(Struct):
    """``prediction``: the caller's guess of the answer."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos", "seed", "presence_penalty",
    "frequency_penalty", "logit_bias", "speculation", "cache_salt", "priority", "regex", "grammar",
    "choice", "json_schema", "close_early", "kv_budget",
)  # fmt: skip
_read_same = attrgetter(*SAME_NAME)


def sampling_params(
    body: Sampling,
    *,
    guess: Prediction | str | None = None,
    **own: object,
) -> SamplingParams:
    """Return the sampling parameters of a body. Raises `InvalidRequest`.

    ``guess``: the body's prediction. ``own``: parameters that the API names or encodes differently.
    They take precedence; None means that the field was left out.
    """
    values = zip(SAME_NAME, _read_same(body), strict=True)
    given = {name: value for name, value in values if value is not None}
    hints = None if body.nvext is None else body.nvext.agent_hints
    if hints is not None and hints.priority is not None and body.priority is None:
        # Lower numbers are more urgent in `SamplingParams`.
        given["priority"] = -hints.priority
    for more in (structured_outputs(body.structured_outputs), own):
        for name, value in more.items():
            if value is None:
                continue
            if name in STRUCTURED_FIELDS and given.get(name) not in (None, value):
                raise InvalidRequest(f"{name} is given twice, with different values", param=name)
            given[name] = value
    return SamplingParams(
        **given,
        prediction=guess.text if isinstance(guess, Prediction) else guess,
        deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )


def warms_next_turn(body: Sampling) -> bool:
    """Whether the body asks to compute the beginning of the next turn in advance."""
    hints = None if body.nvext is None else body.nvext.agent_hints
    return hints is not None and bool(hints.speculative_prefill)


def cache_options(body: Sampling, messages: Sequence[Marked] = ()) -> CacheOptions:
    """Return how the body asks to use the prefix cache. Raises `InvalidRequest`.

    ``messages``: its messages, which may have breakpoints.
    """
    found = read_cache(
        body.cache,
        body.prompt_cache_retention,
        body.prompt_cache_options,
        messages,
    )
    if body.kv_hints is None:
        return found
    return replace(found, pins=(*found.pins, *hinted_pins(body.kv_hints)))


def is_prewarm(body: Sampling) -> bool:
    """Whether the request only caches its prompt."""
    return body.prompt_cache_options is not None and bool(body.prompt_cache_options.prewarm)
