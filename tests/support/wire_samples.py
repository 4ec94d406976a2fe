"""Messages between a front and a replica: every field of each has a value of its own."""

from __future__ import annotations

from array import array

from foretoken.api.cluster.wire.forms import ids_form, params_form, usage_form
from foretoken.api.cluster.wire.messages import (
    VERSION,
    Abort,
    Answer,
    Audit,
    Beat,
    CacheInfo,
    Call,
    Drop,
    EndSession,
    ExpectTurn,
    Fetch,
    FlushCache,
    FlushPrefix,
    FromFront,
    FromReplica,
    Hello,
    Leaving,
    Load,
    LoadAdapter,
    Metrics,
    Overview,
    Report,
    Step,
    Submit,
    UnloadAdapter,
    body_form,
    page_news,
)
from foretoken.api.types.sampling_params import SamplingDefaults, SamplingParams
from foretoken.core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
)
from foretoken.core.interface.extras.images import PromptImage, TowerInput
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason, Pin, Usage
from foretoken.core.interface.sampling import Pooling
from foretoken.core.model.pooling import PoolingSpec
from foretoken.radix_cache import Eviction

NOW = 1000.0


def described(error: BaseException | None) -> tuple[object, ...]:
    """Return what two equal errors have in common."""
    return type(error), str(error), {} if error is None else vars(error)


PARAMS: dict[str, object] = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "max_tokens": 9,
    "min_tokens": 2, "stop_token_ids": (3, 4), "logprobs": 1, "prompt_logprobs": 2,
    "kv_budget": 300, "prompt_only": True,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
    "logit_bias": {5: -1.5, 6: 2.0}, "allowed_token_ids": (5, 6), "n": 3, "stop": ("end", "ß"),
    "ignore_eos": True, "seed": 2**64 - 1, "bad_words": ("no", "never"),
    "json_schema": {"type": "integer", "maximum": 10**30}, "regex": "a+", "grammar": "start: /a/",
    "choice": ("yes", "no"), "close_early": False, "prediction": (8, 9), "speculation": 4,
    "cache_salt": "mine", "lora": "sql", "priority": -3, "deadline": 1.5,
}  # fmt: skip
PINS = (Pin(16, 300.0), Pin(32, 3600.0))
CACHE: dict[str, object] = {
    "read": False,
    "write": False,
    "session": "s",
    "pins": PINS,
    "ends_session": True,
}
LOGPROB = TokenLogprob(5, -0.25, ((5, -0.25), (7, -1.5)))
DELTA: dict[str, object] = {
    "token_ids": [5, 2**31 - 1], "logprobs": [LOGPROB], "prompt_logprobs": [TokenLogprob(1, -2.0)],
    "num_proposed": 3, "proposed_sources": ["radix", "lm", "lm"], "accepted_sources": ["radix"],
    "token_sources": ["radix", ""], "finish_reason": FinishReason.STOP, "stop_reason": "end",
    "pooled": array("f", [0.5, -2.0]), "error": QueueFull("full", retry_after=2.5),
}  # fmt: skip
USAGE: dict[str, object] = {
    "prompt_tokens": 11, "cached_tokens": 10, "matched_tokens": 10, "loaded_tokens": 9,
    "cache_write_tokens": 8, "image_tokens": 6, "spliced_tokens": 7,
    "normalized": ("billing-header",),
    "cache_loss": Eviction("late", NOW - 30.0), "completion_tokens": 7, "proposed_tokens": 6,
    "accepted_tokens": 5, "verify_steps": 4, "draft_steps": 4, "tree_steps": 3,
    "accepted_by_source": {"lm": 2}, "proposed_by_source": {"lm": 3, "radix": 1},
    "steps_by_accepted": {0: 1, 4: 2}, "accepted_prediction_tokens": 2,
    "rejected_prediction_tokens": 1, "closed_early": True, "evicted_tokens": 128,
    "moves": 2, "queue_time": 0.5, "time_to_first_token": 0.75, "total_time": 1.25,
}  # fmt: skip
POOLING = PoolingSpec(dimensions=64, embeds=True, cuts=(16, 32), score_ids=(5, 6))
DEFAULTS = SamplingDefaults(
    temperature=0.5,
    top_p=0.25,
    top_k=8,
    min_p=0.125,
    repetition_penalty=1.25,
    origin="its card",
)
ERRORS: tuple[ForetokenError, ...] = (
    ForetokenError("steps failed"),
    InvalidRequest("no", param="stop"),
    InvalidRequest("no"),
    PromptTooLong(9, 8, param="messages"),
    QueueFull("full", retry_after=2.5),
    DeadlineExceeded("late", retry_after=3.5),
    EngineDead("dead"),
    ModelLoadError("missing", may_pass=True),
)
IMAGE = PromptImage(
    b"k" * 32, ((1, 1),), (TowerInput("pixel_values", "float32", (1, 2), bytes(8)),), (1, 1)
)
LOAD = Load(running=2, waiting=3, kv_usage=0.5)
KEYS = (bytes(range(32)), bytes(range(32, 64)))


def hello() -> Hello:
    return Hello(
        version=VERSION, release="1.2", pid=77, kernels="native-avx2", tokenizer="0a1b",
        fingerprint=b"f" * 32, name="tiny/model", aliases=frozenset({"tiny"}),
        model_path="transformers",
        vocab_size=100, max_model_len=256, eos_token_ids=frozenset({1, 2}), exact=False,
        drafters=("radix", "lm"), no_self_draft="is small",
        sampling_defaults=DEFAULTS, pooling=POOLING,
        takes_images=True, takes_branches=False,
        settings=body_form({"draft": "auto", "threads": None}),
        max_running=8, max_queued=32, page_size=16, num_pages=64,
    )  # fmt: skip


def submit() -> Submit:
    given = {**PARAMS, "n": 1, "regex": None, "grammar": None, "choice": None}
    return Submit(
        request_id="r-1", prompt=ids_form([1, 2, 3]), output=ids_form([4]),
        params=params_form(SamplingParams(**given)), seed=2**64 - 1,  # type: ignore[arg-type]
        bad_words_ids=((1, 2), (3,)), shown_ids=frozenset({4, 5}), limit=6,
        prediction=ids_form([7, 8]), pooling=Pooling((5, 6)), tenant="key-0",
        cache=CacheOptions(**CACHE),  # type: ignore[arg-type]
        deadline=2.5, num_prompt_logprobs=2, images=(IMAGE,), adapter=3,
        is_idle_prefill=True, hands_over=True, transfer=b"{}",
    )  # fmt: skip


def step() -> Step:
    delta, usage = Delta(**DELTA), Usage(**USAGE)  # type: ignore[arg-type]
    return Step(
        deltas=[("r-1", delta), ("r-2", Delta(token_ids=[3]))],
        usages={"r-1": usage_form(usage, NOW)},
        handed={"r-2": b"{}"},
        load=LOAD,
        pages=[page_news(is_stored=True, keys=KEYS), page_news(is_stored=False, keys=KEYS[:1])],
    )


def of_replica() -> list[FromReplica]:
    """Each message that a replica sends."""
    return [
        hello(),
        step(),
        Answer(call_id=1, result=3),
        Answer(call_id=2, result=b"{}"),
        *(Answer(call_id=3, error=each) for each in ERRORS),
        Beat(load=LOAD, unready="busy"),
        Leaving(reason="stopped", has_failed=True),
    ]


def of_front() -> list[FromFront]:
    """Each message that a front sends."""
    questions = (
        FlushCache(namespaces=[None, "mine"]), FlushPrefix(tokens=ids_form([1]), namespace="mine"),
        EndSession(session="a"),
        CacheInfo(namespace="mine"), Overview(), Audit(), Metrics(), Report(reason="asked"),
        LoadAdapter(name="sql", number=3, path="/adapters/sql"), UnloadAdapter(number=3),
    )  # fmt: skip
    calls = [Call(call_id=index, question=each) for index, each in enumerate(questions)]
    told = ExpectTurn(session="a", label="tests", namespace="mine")
    return [submit(), Abort(request_id="r-1"), *calls, Beat(), Drop(name="t"),
            Fetch(submit=submit()), Leaving(reason="another model"), told]  # fmt: skip
