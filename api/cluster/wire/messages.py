"""Wire: the messages between a front and its replicas, in msgpack.

A replica connects and sends `Hello`. The front sends requests with `Submit`, and the replica sends
one `Step` after each step of its engine, with the deltas of all requests. Both sides send a `Beat`
each second; `Leaving` announces the end of a connection. A message is a map with its kind under
"type". Other data, and a message with unknown fields, are refused with a `WireError`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from ....core.errors import ForetokenError
from ....core.interface.extras.adapter import Adapter, LoadedAdapter
from ....core.interface.extras.images import PromptImage
from ....core.interface.request import (
    DEFAULT_CACHE,
    CacheOptions,
    Delta,
    OnToken,
    Request,
    Usage,
)
from ....core.interface.sampling import Pooling
from ....core.options.checks import Count, Positive, Seconds, TokenId
from ...build.built import ModelFacts
from ...runtime.adapters import ServedAdapter
from ...runtime.preprocess import Prepared, PromptTokens, make_request, warm_params
from ...structured.matcher import Grammar, GrammarMatcher
from ...types.results import Body
from ...types.sampling_params import SamplingParams
from .forms import (
    WireError,
    from_msgpack,
    ids_form,
    ids_of,
    params_form,
    to_msgpack,
    wire_errors,
)

VERSION = 6  # version of all messages and their contents; others are refused at `Hello`
KEY_BYTES = 8  # length of the part of a page's 32-byte key that is sent
M = TypeVar("M")
Seed = Annotated[int, Meta(ge=0)]  # msgpack's integers end at 64 bits


class _Message(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of all messages."""


# -- both sides ------------------------------------------------------------------------------------


class Load(_Message, frozen=True, kw_only=True):
    """A replica's current load. Counts are requests."""

    running: Count
    waiting: Count
    kv_usage: Annotated[float, Meta(ge=0, le=1)]  # share of the pool that running requests hold


class Beat(_Message, tag="beat", frozen=True, kw_only=True):
    """A heartbeat, sent each second; a replica's contains its load."""

    load: Load | None = None
    unready: str | None = None  # reason why the replica's engine cannot take new requests now


class Leaving(_Message, tag="leaving", frozen=True, kw_only=True):
    """The sender ends the connection: a replica stops, or a front refuses this replica.

    A front that stops does not send it: its replicas wait for the next front. The message is the
    same in all versions, so that a replica of another version understands its refusal.
    """

    reason: str
    has_failed: bool = False  # the replica's engine died or hangs


# -- from a replica --------------------------------------------------------------------------------


class Hello(ModelFacts, tag="hello", frozen=True, kw_only=True):
    """A replica's first message: its model, and its engine's attributes from `ServingEngine`."""

    version: int
    release: str  # release of foretoken
    pid: int
    tokenizer: str  # hash of the tokenizer
    settings: bytes  # `Built.settings`, a JSON object
    max_running: Positive
    max_queued: Count
    page_size: Positive
    num_pages: Positive


class PageNews(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages that joined or left the prefix cache, in order."""

    is_stored: bool
    keys: bytes  # [num_pages * KEY_BYTES]


class Step(_Message, tag="step", frozen=True, kw_only=True):
    """A step's result: deltas of all requests, and the engine's state after the step.

    ``usages`` and ``handed`` are by request id; ``usages`` has only requests whose usage the front
    needs now. A message without deltas has page news. If a request in ``handed`` has not ended,
    only a part of its prompt is computed.
    """

    deltas: list[tuple[str, Delta]] = []  # each with the id of its request
    usages: dict[str, Usage] = {}  # encoded by `usage_form`
    handed: dict[str, bytes] = {}  # held prompts, as JSON of `TransferParams.write`
    load: Load
    pages: list[PageNews] = []


class Answer(_Message, tag="answer", frozen=True, kw_only=True):
    """The answer to a call: number of pages that a flush freed, JSON, a text, or an error."""

    call_id: Count
    result: int | bytes | None = None
    error: ForetokenError | None = None


# -- from the front --------------------------------------------------------------------------------


class Submit(_Message, tag="submit", frozen=True, kw_only=True):
    """A request, with its output so far if it ran on another replica before.

    The replica makes the request with the front's parameters, so that stop strings and structured
    output end the answer in the replica.
    """

    request_id: str
    prompt: bytes  # encoded by `ids_form`
    output: bytes = b""  # encoded by `ids_form`
    params: dict[str, Any]  # encoded by `params_form`
    seed: Seed
    bad_words_ids: tuple[tuple[TokenId, ...], ...] = ()
    shown_ids: frozenset[TokenId] = (
        frozenset()
    )  # special tokens that the text shows, for stop strings
    limit: Count | None = None  # output tokens within which structured output is completed
    prediction: bytes | None = None  # encoded by `ids_form`
    tenant: str | None = None
    pooling: Pooling | None = None  # None: the request generates tokens
    cache: CacheOptions = DEFAULT_CACHE
    deadline: Seconds | None = None  # seconds left
    num_prompt_logprobs: Count = 0  # number of prompt log-probabilities sent already
    images: tuple[PromptImage, ...] = ()
    adapter: Count | None = None  # number in the adapter's `LoadAdapter`
    is_idle_prefill: bool = False  # the prompt is computed before a request asks for it
    hands_over: bool = False  # only the prompt is computed, for another replica
    transfer: bytes | None = None  # `Step.handed` of the replica that computed its prompt


class Abort(_Message, tag="abort", frozen=True, kw_only=True):
    """Abort a request; unknown and finished ones are ignored."""

    request_id: str


class ExpectTurn(_Message, tag="expect_turn", frozen=True, kw_only=True):
    """Calls `ServingEngine.expect_turn`; a replica without the session ignores it."""

    session: str
    label: str
    namespace: str | None = None


class Drop(_Message, tag="drop", frozen=True, kw_only=True):
    """Free the pages of a prompt that no replica will read; unknown ones are ignored."""

    name: str  # name of the transfer


class Fetch(_Message, tag="fetch", frozen=True, kw_only=True):
    """Read the pages of a prompt that another replica still computes, for a later request."""

    submit: Submit  # has a ``transfer``; no tokens are generated


class _Question(_Message, tag_field="ask", frozen=True, kw_only=True):
    """The base of all questions of `Call`."""


class FlushCache(_Question, tag="flush", frozen=True, kw_only=True):
    """Calls `ServingEngine.flush_cache`."""

    namespaces: list[str | None] = []


class FlushPrefix(_Question, tag="flush_prefix", frozen=True, kw_only=True):
    """Calls `ServingEngine.flush_prefix`."""

    tokens: bytes  # encoded by `ids_form`
    namespace: str | None = None


class EndSession(_Question, tag="end_session", frozen=True, kw_only=True):
    """Calls `ServingEngine.end_session`; the answer is 1 if the replica had pages of it, else 0."""

    session: str


class CacheInfo(_Question, tag="cache_info", frozen=True, kw_only=True):
    """Calls `ServingEngine.cache_info`."""

    namespace: str | None = None


class Overview(_Question, tag="overview", frozen=True, kw_only=True):
    """Calls `ServingEngine.overview`."""


class Audit(_Question, tag="audit", frozen=True, kw_only=True):
    """Calls `ServingEngine.audit`."""


class Metrics(_Question, tag="metrics", frozen=True, kw_only=True):
    """Requests the text of `ServingMetrics.render`."""


class Report(_Question, tag="report", frozen=True, kw_only=True):
    """Calls `ServingEngine.report`."""

    reason: str


class LoadAdapter(_Question, tag="load_adapter", frozen=True, kw_only=True):
    """Calls `AdapterLoader.load` for a folder on the replica's machine.

    `facts_form` makes the answer.
    """

    name: str
    number: Count
    path: str
    below: str | None = None  # the value of `AdapterFolder.below`


class UnloadAdapter(_Question, tag="unload_adapter", frozen=True, kw_only=True):
    """Calls `HostedAdapters.unload`; the answer is 0."""

    number: Count


Question = (
    FlushCache
    | FlushPrefix
    | EndSession
    | CacheInfo
    | Overview
    | Audit
    | Metrics
    | Report
    | LoadAdapter
    | UnloadAdapter
)


class Call(_Message, tag="call", frozen=True, kw_only=True):
    """A question; the `Answer` has the same id."""

    call_id: Count
    question: Question


FromReplica = Hello | Step | Answer | Beat | Leaving
FromFront = Submit | Abort | ExpectTurn | Drop | Fetch | Call | Beat | Leaving


# -- bytes -----------------------------------------------------------------------------------------


_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(
    FromReplica, dec_hook=from_msgpack
)
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_json_object = msgspec.json.Decoder(dict[str, Any])


class _AnyHello(Struct, tag_field="type", tag="hello"):
    """A `Hello` of any version."""

    version: int


_any_hello = msgspec.msgpack.Decoder(_AnyHello)


def encode(message: FromReplica | FromFront) -> bytes:
    """Return the bytes of a message. Raises `WireError` for a value that cannot be encoded."""
    with wire_errors("a message that cannot be sent"):
        return _encoder.encode(message)


def from_replica(data: bytes) -> FromReplica:
    """Return a replica's message.

    Raises `WireError` for invalid bytes; for a `Hello` of another version it names the version.
    """
    try:
        message = _decoded(_from_replica.decode, data)
    except WireError:
        if (version := _version(data)) not in (None, VERSION):
            raise _other_version(version) from None
        raise
    if isinstance(message, Hello) and message.version != VERSION:
        raise _other_version(message.version)
    return message


def from_front(data: bytes) -> FromFront:
    """Return a front's message. Raises `WireError`."""
    return _decoded(_from_front.decode, data)


def _decoded(decode: Callable[[bytes], M], data: bytes) -> M:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"an invalid message of version {VERSION}: {error}") from None


def _version(data: bytes) -> int | None:
    try:
        return _decoded(_any_hello.decode, data).version
    except WireError:
        return None


def _other_version(version: int | None) -> WireError:
    return WireError(f"a message of version {version}; this process has version {VERSION}")


class _Handed(Struct):
    """The fields of a prompt in `Step.handed` that a front reads."""

    remote_request_id: str
    remote_block_ids: list[Count] = []  # ids of the held pages


_handed = msgspec.json.Decoder(_Handed)


def drop_of(handed: bytes) -> Drop:
    """Return the message that frees the pages of a prompt in `Step.handed`. Raises `WireError`."""
    return Drop(name=_decoded(_handed.decode, handed).remote_request_id)


# -- bodies and keys -------------------------------------------------------------------------------


def body_form(body: Body) -> bytes:
    """Return a report as JSON; values that JSON lacks are written as strings."""
    with wire_errors("a report that cannot be sent"):
        return msgspec.json.encode(body, enc_hook=str)


def body_of(data: bytes) -> Body:
    """Return a JSON object. Raises `WireError` for other data."""
    return _decoded(_json_object.decode, data)


class AdapterFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`LoadedAdapter` without its weights."""

    rank: Count
    num_bytes: Count
    digest: bytes


_adapter_facts = msgspec.json.Decoder(AdapterFacts)


def facts_form(loaded: LoadedAdapter) -> bytes:
    """Return the answer to `LoadAdapter`."""
    facts = AdapterFacts(rank=loaded.rank, num_bytes=loaded.num_bytes, digest=loaded.digest)
    return msgspec.json.encode(facts)


def facts_of(data: bytes) -> AdapterFacts:
    """Return the facts in an answer to `LoadAdapter`. Raises `WireError`."""
    return _decoded(_adapter_facts.decode, data)


def page_news(*, is_stored: bool, keys: Iterable[bytes]) -> PageNews:
    """Return the news that pages were stored or dropped; ``keys`` are full-length keys."""
    return PageNews(is_stored, b"".join(key[:KEY_BYTES] for key in keys))


def page_keys(news: PageNews) -> list[bytes]:
    """Return the keys in page news, `KEY_BYTES` each. Raises `WireError`."""
    data = news.keys
    if len(data) % KEY_BYTES:
        raise WireError(f"page keys have {KEY_BYTES} bytes each, not {len(data)} in total")
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


# -- requests --------------------------------------------------------------------------------------


class RemoteAdapter(Adapter):
    """An adapter whose weights are in replicas. ``number``: the number in its `LoadAdapter`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def submit_of(request: Request, *, elapsed: float = 0.0) -> Submit:
    """Return the message of a request, with its output so far.

    ``elapsed``: seconds since its arrival. Raises `WireError` for a request that `make_request` did
    not make.
    """
    sampling = request.sampling
    params, constraint = sampling.params, sampling.constraint
    if not isinstance(params, SamplingParams):
        raise WireError("the parameters of the request are no SamplingParams of the API")
    if not (constraint is None or isinstance(constraint, GrammarMatcher)):
        raise WireError("the request's constraint is not a grammar")
    adapter = request.extras.adapter
    if not (adapter is None or isinstance(adapter, RemoteAdapter)):
        raise WireError("the request's adapter is loaded in this process")
    guess = request.prediction
    return Submit(
        request_id=request.request_id,
        prompt=ids_form(request.tokens[: request.prompt_len]),
        output=ids_form(request.tokens[request.prompt_len :]),
        params=params_form(params),
        seed=sampling.seed,
        bad_words_ids=sampling.bad_words_ids,
        shown_ids=request.shown_ids,
        limit=None if constraint is None else constraint.limit,
        prediction=None if guess is None else ids_form(guess),
        pooling=sampling.pooling,
        tenant=request.tenant,
        cache=request.cache,
        deadline=None if request.deadline is None else request.deadline - elapsed,
        num_prompt_logprobs=request.num_prompt_logprobs,
        images=request.extras.images,
        adapter=None if adapter is None else adapter.number,
        is_idle_prefill=request.extras.is_idle_prefill,
    )


def prefill_of(request: Request, *, elapsed: float = 0.0) -> Submit:
    """Return the message that lets a replica compute a request's prompt for another replica.

    Fields that only the answer needs are left out. The replica generates one token, which is not
    read, or no token if the request generates none. ``elapsed``: seconds since the request's
    arrival. Raises `WireError` for a request that `make_request` did not make.
    """
    whole = submit_of(request, elapsed=elapsed)
    params = request.sampling.params
    if not isinstance(params, SamplingParams):
        raise WireError("the parameters of the request are no SamplingParams of the API")
    return Submit(
        request_id=whole.request_id,
        prompt=whole.prompt,
        params=params_form(warm_params(params, max_tokens=int(request.sampling.generates))),
        seed=whole.seed,
        tenant=whole.tenant,
        deadline=whole.deadline,
        images=whole.images,
        adapter=whole.adapter,
        hands_over=True,
    )


def fetch_of(request: Request, transfer: bytes, *, page_size: int) -> Fetch:
    """Return the message that lets a replica read the part of a prompt that another computed.

    The message contains a request with an id of its own, because the actual request may arrive
    before the pages are read. Its prompt has the tokens of the held pages and one more, which is
    never read. Image rows are already token ids, so images are not sent. Raises `WireError` for an
    invalid transfer.
    """
    num_pages = len(_decoded(_handed.decode, transfer).remote_block_ids)
    part = request.tokens[: min(request.prompt_len, num_pages * page_size + 1)]
    submit = msgspec.structs.replace(
        prefill_of(request),
        request_id=f"{request.request_id}/{secrets.token_hex(8)}",
        prompt=ids_form(part),
        images=(),
        hands_over=False,
        transfer=transfer,
    )
    return Fetch(submit=submit)


def request_of(
    submit: Submit,
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int],
    grammar: Grammar | None,
    on_token: OnToken | None,
    adapter: ServedAdapter | None = None,
) -> Request:
    """Return the request of a message, in a replica.

    ``params``: the message's parameters, from `params_of`. ``grammar``: the grammar compiled from
    ``params``. ``on_token``: callback that looks for stop strings; the caller passes the output so
    far to it before the request runs. ``adapter``: the adapter with the message's number. Raises
    `WireError`.
    """
    with wire_errors("a request"):
        prepared = Prepared(
            prompt=PromptTokens(ids_of(submit.prompt), images=submit.images),
            params=params,
            bad_words_ids=submit.bad_words_ids,
            prediction=None if submit.prediction is None else ids_of(submit.prediction),
            grammar=grammar,
            limit=submit.limit,
            shown_ids=submit.shown_ids,
            pooling=submit.pooling,
            cache=submit.cache,
            adapter=adapter,
        )
        request = make_request(
            submit.request_id,
            prepared,
            seed=submit.seed,
            eos_token_ids=eos_token_ids,
            on_token=on_token,
        )
    request.tokens.extend(ids_of(submit.output))
    request.tenant = submit.tenant  # the front identified the tenant by its API key
    request.deadline = submit.deadline
    request.num_prompt_logprobs = submit.num_prompt_logprobs
    if submit.is_idle_prefill:
        request.extras = msgspec.structs.replace(request.extras, is_idle_prefill=True)
    return request
