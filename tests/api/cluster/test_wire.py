"""Messages between a front and its replicas: what they carry, and what is refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from foretoken.api.build.built import Built
from foretoken.api.cluster.wire.forms import WireError, ids_of, params_of, to_msgpack
from foretoken.api.cluster.wire.greeting import built_of, hello_of
from foretoken.api.cluster.wire.messages import (
    KEY_BYTES,
    VERSION,
    Abort,
    Answer,
    Beat,
    Call,
    Fetch,
    FromFront,
    FromReplica,
    Hello,
    Load,
    PageNews,
    Question,
    Step,
    Submit,
    body_form,
    body_of,
    encode,
    fetch_of,
    from_front,
    from_replica,
    page_keys,
    page_news,
    request_of,
    submit_of,
)
from foretoken.api.runtime.preprocess import Prepared, PromptTokens, make_request
from foretoken.api.structured.compiler import Grammars
from foretoken.api.types.sampling_params import SamplingDefaults, SamplingParams
from foretoken.core.interface.request import CacheOptions, Pin, Request
from foretoken.core.interface.sampling import Pooling, SamplingMetadata
from support.fake_engine import FakeEngine
from support.wire_samples import (
    DEFAULTS,
    IMAGE,
    KEYS,
    LOAD,
    POOLING,
    hello,
    of_front,
    of_replica,
    step,
    submit,
)

Message = FromReplica | FromFront
Read = Callable[[bytes], Message]


def both_ways() -> Iterator[tuple[Read, Read, Message]]:
    """Each message, with the reader of its side and that of the other one."""
    yield from ((from_replica, from_front, each) for each in of_replica())
    yield from ((from_front, from_replica, each) for each in of_front())


def altered(message: object, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The bytes of a message whose plain form was changed."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message, enc_hook=to_msgpack))
    change(plain)
    return msgspec.msgpack.encode(plain)


def test_each_message_comes_back_as_it_was_sent() -> None:
    for read, _, message in both_ways():
        again = read(encode(message))
        assert type(again) is type(message)
        assert encode(again) == encode(message)  # not the messages: errors equal nothing


def test_there_is_a_sample_of_each_message_and_of_each_question() -> None:
    for samples, union in ((of_replica(), FromReplica), (of_front(), FromFront)):
        assert {type(each) for each in samples} == {*get_args(union)}
    asked = [each.question for each in of_front() if isinstance(each, Call)]
    assert {type(each) for each in asked} == {*get_args(Question)}


def test_a_sample_has_another_value_than_the_default_in_every_field() -> None:
    """Else a field that is lost on the way would not be missed."""
    for whole in (hello(), step(), submit()):
        for each in msgspec.structs.fields(type(whole)):
            if not each.required:
                default = (
                    each.default_factory() if each.default is msgspec.NODEFAULT else each.default
                )
                assert getattr(whole, each.name) != default, each.name


def test_a_surplus_field_is_refused_wherever_it_stands() -> None:
    """But in usage and log-probabilities: dataclasses for callers, decoded with what they have."""
    for read, _, message in both_ways():
        with pytest.raises(WireError, match="unknown field"):
            read(altered(message, lambda plain: plain.update(surplus=1)))
    inner: list[tuple[Read, Message, Callable[[dict[str, Any]], object]]] = [
        (from_front, submit(), lambda plain: plain["cache"].update(surplus=1)),
        (from_front, submit(), lambda plain: plain["images"][0].update(surplus=1)),
        (from_front, submit(), lambda plain: plain["cache"]["pins"][0].update(surplus=1)),
        (from_front, submit(), lambda plain: plain["pooling"].update(surplus=1)),
        (from_replica, hello(), lambda plain: plain["sampling_defaults"].update(surplus=1)),
        (from_replica, step(), lambda plain: plain["load"].update(surplus=1)),
        (from_replica, hello(), lambda plain: plain["pooling"].update(surplus=1)),
        (from_replica, step(), lambda plain: plain["deltas"][0].append(1)),
        (from_replica, step(), lambda plain: plain["deltas"][0][1].append(1)),
        (from_replica, step(), lambda plain: plain["deltas"][0][1][-1].update(surplus=1)),
        (from_replica, step(), lambda plain: plain["pages"][0].append(1)),
        (from_front, of_front()[2], lambda plain: plain["question"].update(surplus=1)),
    ]
    for read, message, change in inner:
        read(encode(message))
        with pytest.raises(WireError):
            read(altered(message, change))


def test_a_field_that_is_missing_or_of_another_type_is_refused() -> None:
    for message, read in ((hello(), from_replica), (submit(), from_front), (step(), from_replica)):
        for each in msgspec.structs.fields(type(message)):
            wrong = altered(message, lambda plain: plain.update({each.name: [[[]]]}))  # noqa: B023
            with pytest.raises(WireError):
                read(wrong)
            if each.required:
                with pytest.raises(WireError):
                    read(altered(message, lambda plain: plain.pop(each.name)))  # noqa: B023


def test_a_message_of_the_other_side_is_refused() -> None:
    shared = {*get_args(FromReplica)} & {*get_args(FromFront)}
    for _, other, message in both_ways():
        if type(message) not in shared:
            with pytest.raises(WireError, match="an invalid message"):
                other(encode(message))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", b"\x91" * 5000, b"{}", b"\x81\xa4type\xa1x"]
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for read in (from_replica, from_front):
        with pytest.raises(WireError, match=f"version {VERSION}"):
            read(data)


def test_the_greeting_of_another_version_names_it_whatever_its_fields() -> None:
    for fields_ in ({}, {"new": 1}):
        data = altered(hello(), lambda plain: plain.update(version=VERSION + 1, **fields_))  # noqa: B023
        with pytest.raises(WireError, match=f"version {VERSION + 1};.* version {VERSION}"):
            from_replica(data)
    deep = altered(hello(), lambda plain: plain.update(new=0))[:-1] + b"\x91" * 5000 + b"\xc0"
    with pytest.raises(WireError):
        from_replica(deep)
    same = altered(hello(), lambda plain: plain.update(new=1))
    with pytest.raises(WireError, match="unknown field `new`"):
        from_replica(same)


def test_what_msgpack_lacks_cannot_be_sent_and_derived_numbers_lose_their_class() -> None:
    class Half(float):
        pass

    beat = Beat(load=Load(running=1, waiting=0, kv_usage=Half(0.5)))
    assert from_replica(encode(beat)) == Beat(load=Load(running=1, waiting=0, kv_usage=0.5))
    for wrong in ("\ud800", 2**70, object()):
        with pytest.raises(WireError, match="cannot be sent"):
            encode(Abort(request_id=wrong))  # type: ignore[arg-type]


def test_a_report_comes_back_and_a_value_that_json_lacks_as_its_text() -> None:
    assert body_of(body_form({"ok": True, "pages": {"free": 3}, "to": Path("/x")})) == {
        "ok": True, "pages": {"free": 3}, "to": "/x",
    }  # fmt: skip
    for data in (b"", b"[1]", b'{"a":', b"\xff", b'{"a":' + b"[" * 5000):
        with pytest.raises(WireError):
            body_of(data)


def test_pages_are_told_by_the_beginning_of_their_keys_in_order() -> None:
    news = page_news(is_stored=True, keys=KEYS)
    assert news.is_stored
    assert page_keys(news) == [key[:KEY_BYTES] for key in KEYS]
    assert page_keys(page_news(is_stored=False, keys=())) == []
    with pytest.raises(WireError):
        page_keys(PageNews(True, b"123456789"))


# -- greeting -------------------------------------------------------------------------------------

OWN = {
    "engine",
    "path",
    "events",
    "keys",
    "set_openings",
    "transfers",
    "rollouts",
    "adapters",
}  # fields of `Built` that each process has of its own


def test_all_that_is_known_of_a_model_comes_back() -> None:
    there, here = FakeEngine(), FakeEngine()
    built = Built(
        engine=there, path=Path("/there"), name="a/b", aliases=frozenset({"b", "c"}),
        vocab_size=100, max_model_len=256, eos_token_ids=frozenset({1, 2}), exact=False,
        drafters=("radix", "lm"), no_self_draft="is small", model_path="transformers",
        sampling_defaults=DEFAULTS, pooling=POOLING, settings={"draft": "auto", "threads": None},
        takes_images=True, takes_branches=False,
        fingerprint=b"f" * 32, kernels="k",
    )  # fmt: skip
    blank = Built(engine=there, path=Path(), name="", vocab_size=1, max_model_len=1,
                  eos_token_ids=frozenset())  # fmt: skip
    sent = from_replica(encode(hello_of(built, tokenizer="t", pid=3)))
    assert isinstance(sent, Hello)
    again = built_of(sent, here, Path("/here"))
    for name in Built.__struct_fields__:
        if name not in OWN:
            assert getattr(built, name) != getattr(blank, name), name
            assert getattr(again, name) == getattr(built, name), name
    assert (again.engine, again.path, again.events) == (here, Path("/here"), None)
    assert (sent.kernels, sent.tokenizer, sent.pid, sent.version) == ("k", "t", 3, VERSION)
    facts = (sent.max_running, sent.max_queued, sent.page_size, sent.num_pages)
    limits = there.limits
    assert facts == (limits.max_running, limits.max_queued, there.page_size, there.num_pages)


def test_default_parameters_that_no_request_may_have_are_refused() -> None:
    with pytest.raises(WireError, match="top_p"):
        from_replica(altered(hello(), lambda plain: plain["sampling_defaults"].update(top_p=3.0)))
    assert built_of(hello(), FakeEngine(), Path()).sampling_defaults == SamplingDefaults(
        temperature=0.5,
        top_p=0.25,
        top_k=8,
        min_p=0.125,
        repetition_penalty=1.25,
        origin="its card",
    )


# -- requests -------------------------------------------------------------------------------------

CARRIED = {
    "request_id", "tokens", "sampling", "stop_ids", "depth", "prediction", "namespace", "tenant",
    "cache", "priority", "deadline", "num_prompt_logprobs", "shown_ids", "extras",
}  # fmt: skip
ANEW = {  # written by the engine that serves it, or by the process that has its text
    "on_token", "arrival_time", "serial", "urgency", "max_len", "status", "num_computed", "lease",
    "usage", "num_preemptions", "num_charged_not_computed", "num_tokens_accounted",
    "num_uncached", "is_early", "fault",
    "transfer",
}  # fmt: skip
EOS = frozenset({1, 2})


def make(params: SamplingParams, **options: Any) -> Request:
    prepared = Prepared(
        prompt=PromptTokens([5, 6, 7], images=(IMAGE,)), params=params,
        bad_words_ids=((8, 9), (10,)), prediction=array("q", [11, 12]),
        shown_ids=frozenset({3}), pooling=Pooling((8, 9)),
        cache=CacheOptions(read=False, pins=(Pin(2, 60.0),)), **options,
    )  # fmt: skip
    request = make_request("r-1", prepared, seed=2**63 + 1, eos_token_ids=EOS)
    request.tenant = "key-0"
    request.extras = msgspec.structs.replace(request.extras, is_idle_prefill=True)
    request.tokens.extend([13, 14])  # its output so far
    request.num_prompt_logprobs = 2
    request.deadline = 30.0
    return request


def over(request: Request, grammar: Any = None, **options: Any) -> Request:
    sent = from_front(encode(submit_of(request, **options)))
    assert isinstance(sent, Submit)
    return request_of(
        sent, params_of(sent.params), eos_token_ids=EOS, grammar=grammar, on_token=None
    )


def test_all_that_a_caller_says_of_a_request_comes_back_with_its_output_so_far() -> None:
    assert {each.name for each in fields(Request)} == CARRIED | ANEW
    params = SamplingParams(stop_token_ids=[4], speculation=3, cache_salt="mine", priority=2,
                            temperature=0.5)  # fmt: skip
    request, blank = make(params), Request(
        request_id="", tokens=array("q"), sampling=SamplingMetadata(
            params=SamplingParams(), seed=0, prompt_len=0),
    )  # fmt: skip
    again = over(request)
    for name in CARRIED - {"sampling"}:
        assert getattr(request, name) != getattr(blank, name), name
        assert getattr(again, name) == getattr(request, name), name
    for each in fields(SamplingMetadata):
        if each.init and each.name not in ("constraint", "constraint_param"):
            mine = getattr(request.sampling, each.name)
            assert mine != getattr(blank.sampling, each.name), each.name
            assert getattr(again.sampling, each.name) == mine, each.name
    assert again.usage == blank.usage


def test_a_fetch_has_the_tokens_of_its_part_with_the_ids_of_rows_and_no_images() -> None:
    request = make(SamplingParams())
    handed = b'{"remote_request_id": "x", "remote_block_ids": [7]}'
    sent = from_front(encode(fetch_of(request, handed, page_size=1)))
    assert isinstance(sent, Fetch)
    assert sent.submit.images == ()
    again = request_of(
        sent.submit, SamplingParams(), eos_token_ids=EOS, grammar=None, on_token=None
    )
    assert again.tokens == request.tokens[:2]
    assert again.tokens[1] == IMAGE.ids()[0] < 0
    whole = fetch_of(request, handed, page_size=16).submit
    assert ids_of(whole.prompt) == request.tokens[: request.prompt_len]


def test_a_request_is_told_the_time_that_is_left_and_the_special_tokens_of_its_text() -> None:
    request = make(SamplingParams())
    assert over(request, elapsed=10.0).deadline == 20.0
    request.shown_ids = frozenset({4, 3})
    assert submit_of(request).shown_ids == {3, 4}
    assert over(request).shown_ids == {3, 4}
    request.deadline = request.prediction = None
    assert (over(request).deadline, over(request).prediction) == (None, None)


def test_the_limit_of_structured_output_comes_back(tokenizer) -> None:
    async def compiled(params: SamplingParams) -> Any:
        return await grammars.compile(params)

    import asyncio

    params = SamplingParams(regex="a+")
    grammars = Grammars(tokenizer, len(tokenizer.vocab), EOS)
    try:
        grammar = asyncio.run(compiled(params))
    finally:
        grammars.close()
    request = make(params, grammar=grammar, limit=17)
    assert submit_of(request).limit == 17
    again = over(request, grammar)
    assert again.sampling.constraint.limit == 17  # type: ignore[union-attr]
    assert again.sampling.constraint_param == "regex"
    assert again.stop_ids == request.stop_ids


def test_a_request_that_the_api_did_not_make_cannot_be_sent() -> None:
    class Odd:
        """A constraint that no replica could compile."""

    request = make(SamplingParams())
    odd = replace(request.sampling, constraint=Odd())
    with pytest.raises(WireError, match="not a grammar"):
        submit_of(replace(request, sampling=odd))
    from foretoken.core.interface.sampling import TokenSamplingParams

    bare = replace(request.sampling, params=TokenSamplingParams())
    with pytest.raises(WireError, match="no SamplingParams"):
        submit_of(replace(request, sampling=bare))


def test_a_step_without_deltas_has_its_load() -> None:
    assert from_replica(encode(Step(load=LOAD))) == Step(load=LOAD)
    assert from_replica(encode(Answer(call_id=0))) == Answer(call_id=0)
