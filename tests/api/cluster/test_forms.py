"""Everything that a request and its answer have crosses the wire, field by field."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
import pytest

from foretoken.api.cluster.wire.forms import (
    ErrorForm,
    WireError,
    error_of,
    from_msgpack,
    ids_form,
    ids_of,
    params_form,
    params_of,
    shown_error,
    to_msgpack,
    usage_form,
    usage_of,
)
from foretoken.api.types.sampling_params import LeftOut, SamplingDefaults, SamplingParams
from foretoken.core import errors as core_errors
from foretoken.core.interface.request import CacheOptions, Delta, Pin, Usage
from foretoken.core.model.description.fields import UnsupportedConfig
from foretoken.core.model.pooling import PoolingSpec
from support.wire_samples import (
    CACHE,
    DEFAULTS,
    DELTA,
    ERRORS,
    NOW,
    PARAMS,
    POOLING,
    USAGE,
    described,
)

T = TypeVar("T")
STRUCTURED = {"json_schema", "regex", "grammar", "choice"}


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=to_msgpack)


def sent(value: T, kind: Any = None) -> T:
    """The value behind the wire."""
    decoded: T = msgspec.msgpack.decode(
        packed(value), type=kind or type(value), dec_hook=from_msgpack
    )
    return decoded


def over(params: SamplingParams) -> SamplingParams:
    return params_of(sent(params_form(params), dict[str, Any]))


# A field that one of these classes gains has no value here: the test fails until it has one.
@pytest.mark.parametrize(
    ("owner", "values"),
    [
        (CacheOptions, CACHE),
        (Usage, USAGE),
        (SamplingDefaults, {**DEFAULTS.given, "origin": DEFAULTS.origin}),
        (PoolingSpec, msgspec.structs.asdict(POOLING)),
        (Delta, DELTA),
    ],
)
def test_each_field_of_what_is_sent_as_it_is_comes_back(
    owner: Any, values: dict[str, object]
) -> None:
    names = [each.name for each in msgspec.inspect.type_info(owner).fields]
    assert {*names} == values.keys()
    blank = owner()
    assert sent(blank) == blank
    for name, value in values.items():
        assert value != getattr(blank, name), name
        again = sent(owner(**{name: value}))
        for each in names:
            mine, other = value if each == name else getattr(blank, each), getattr(again, each)
            if isinstance(mine, Exception):
                assert described(other) == described(mine)
            else:
                assert other == mine, each
                assert type(other) is type(mine), each


def test_the_samples_have_each_parameter_and_a_stop_reason_is_an_id_or_a_text() -> None:
    assert PARAMS.keys() == {each.name for each in fields(SamplingParams)}
    assert sent(Delta(stop_reason=7)).stop_reason == 7


@pytest.mark.parametrize("name", PARAMS)
def test_a_parameter_alone_comes_back_and_all_others_stay_left_out(name: str) -> None:
    params = SamplingParams(**{name: PARAMS[name]})
    again = over(params)
    assert again == params
    for each in PARAMS:
        mine, other = getattr(params, each), getattr(again, each)
        assert isinstance(other, LeftOut) == isinstance(mine, LeftOut), each
        assert type(other) is type(mine), each


@pytest.mark.parametrize("kept", sorted(STRUCTURED))
def test_all_parameters_together_come_back(kept: str) -> None:
    given = {name: PARAMS[name] for name in PARAMS if name not in STRUCTURED - {kept}}
    assert over(SamplingParams(**given)) == SamplingParams(**given)


def test_a_value_that_equals_the_default_was_given_all_the_same() -> None:
    assert not isinstance(over(SamplingParams(temperature=1.0)).temperature, LeftOut)
    assert isinstance(over(SamplingParams()).temperature, LeftOut)
    schema = '{"type": "object"}'
    assert over(SamplingParams(json_schema=schema)).json_schema == schema
    assert over(SamplingParams(prediction="a guess", speculation="off")).prediction == "a guess"


@pytest.mark.parametrize(
    "form",
    [
        {"top_p": 2.0}, {"regex": "a", "choice": ["b"]}, {"n": 0}, {"json_schema": b"{"},
        {"json_schema": b"\xff"}, {"json_schema": b"[" * 10_000}, {"surplus": 1},
        {"temperature": "1"}, {"stop": [1]}, {"stop": 1}, {"seed": 1.5}, {"logit_bias": {"a": 1.0}},
        {"stop_token_ids": ["1"]}, {"regex": b"a"}, {"choice": [b"a"]}, {"lora": 1}, {"n": True},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_that_no_request_may_have_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="sampling parameters"):
        params_of(sent(form, dict[str, Any]))


def test_a_schema_crosses_as_its_text_whatever_its_numbers() -> None:
    schema = {"type": "integer", "maximum": 10**30}
    form = params_form(SamplingParams(json_schema=schema))
    assert form == {"json_schema": json.dumps(schema).encode()}


@pytest.mark.parametrize("value", [Pin(1, 1.0), DEFAULTS], ids=lambda each: type(each).__name__)
def test_a_struct_is_checked_as_where_it_is_made(value: Any) -> None:
    plain = msgspec.to_builtins(value)
    name = next(iter(plain))
    with pytest.raises(msgspec.ValidationError, match=r"must be|needs at least"):
        sent(plain | {name: -1}, type(value))


def test_a_loss_keeps_its_age_on_another_clock() -> None:
    usage = usage_of(sent(usage_form(Usage(**USAGE), NOW)), 50.0)  # type: ignore[arg-type]
    assert usage.cache_loss is not None
    assert (usage.cache_loss.cause, usage.cache_loss.time) == ("late", 20.0)
    assert usage_of(sent(usage_form(Usage(), NOW)), 50.0) == Usage()
    for age in (float("nan"), float("inf")):
        lost = Usage(cache_loss=replace(usage.cache_loss, time=age))
        with pytest.raises(WireError):
            usage_of(sent(lost), 50.0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_comes_back_with_its_class_and_its_fields(
    error: core_errors.ForetokenError,
) -> None:
    assert described(sent(error, core_errors.ForetokenError)) == described(error)


def test_there_is_an_error_of_each_class_that_an_engine_raises() -> None:
    """`Unavailable` is of the front alone, and `RankLost` ends an engine, so that requests get
    `EngineDead`: they never cross.
    """
    defined = {
        each
        for _, each in inspect.getmembers(core_errors, inspect.isclass)
        if issubclass(each, Exception) and each.__module__ == core_errors.__name__
    }
    inside = {core_errors.RankLost, core_errors.Unavailable}
    assert {type(error) for error in ERRORS} == defined - inside


def test_an_error_below_a_known_one_crosses_as_that_and_another_one_without_its_text() -> None:
    known = sent(UnsupportedConfig("no such layer"), core_errors.ForetokenError)
    assert described(known) == described(core_errors.ModelLoadError("no such layer"))
    own = core_errors.QueueFull("full")
    assert shown_error(own) is own
    other = shown_error(KeyError("secret"))
    assert described(other) == described(core_errors.ForetokenError("internal error"))


def test_an_error_of_a_class_that_is_none_is_refused() -> None:
    for kind in ("KeyError", "", "x" * 1000):
        with pytest.raises(WireError, match="is unknown"):
            error_of(ErrorForm(kind=kind, message="no"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_after": float("nan")}, {"retry_after": "1"}, {"param": 1}, {"num_tokens": -1},
        {"message": 1}, {"surplus": 1},
    ],
)  # fmt: skip
def test_the_fields_of_an_error_are_of_their_types(wrong: dict[str, Any]) -> None:
    form: dict[str, Any] = {"kind": "QueueFull", "message": "full"} | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed(form), type=core_errors.ForetokenError, dec_hook=from_msgpack)


def test_token_ids_come_back_and_half_of_one_is_refused() -> None:
    ids = [0, 1, 2**31 - 1, -5]
    assert ids_of(ids_form(ids)).tolist() == ids
    assert ids_form([1]) == b"\1" + bytes(7)
    with pytest.raises(WireError):
        ids_of(ids_form(ids)[:-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda form: form | {"queue_time": float("nan")},
        lambda form: form | {"total_time": float("inf")},
        lambda form: form | {"verify_steps": -1},
        lambda form: form | {"closed_early": 1},
        lambda form: form | {"cache_loss": {"cause": "late"}},
        lambda form: form | {"cache_loss": {"cause": "odd", "time": 1.0}},
    ],
)
def test_usage_is_decoded_strictly(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        sent(change(msgspec.to_builtins(Usage())), Usage)
