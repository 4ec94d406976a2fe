"""Everything that a request and its answer have crosses the wire, field by field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import msgspec
import pytest

from foretoken.api.cluster.wire.forms import (
    CacheForm,
    DefaultsForm,
    DeltaForm,
    ErrorForm,
    JsonObject,
    ParamsForm,
    UsageForm,
    WireError,
    cache_form,
    cache_of,
    defaults_form,
    defaults_of,
    delta_form,
    delta_of,
    error_form,
    error_of,
    ids_form,
    ids_of,
    params_form,
    params_of,
    usage_form,
    usage_of,
)
from foretoken.api.serving import errors as api_errors
from foretoken.api.types.sampling_params import LeftOut, SamplingDefaults, SamplingParams
from foretoken.core import errors as core_errors
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import CacheOptions, Delta, Pin, Usage
from foretoken.core.model.description.fields import UnsupportedConfig
from support.wire_samples import CACHE, DEFAULTS, DELTA, ERRORS, NOW, PARAMS, USAGE

F = TypeVar("F")
STRUCTURED = {"json_schema", "regex", "grammar", "choice"}


def sent(form: F, kind: Any = None) -> F:
    """The form behind the wire."""
    decoded: F = msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=kind or type(form))
    return decoded


def over(params: SamplingParams) -> SamplingParams:
    return params_of(sent(params_form(params)))


def names(owner: Any) -> list[str]:
    return [each.name for each in fields(owner)]


def defaults(owner: Any) -> dict[str, object]:
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(owner)
    }


# A field that one of these classes gains has no value here: the test fails until it is carried.
@pytest.mark.parametrize(
    ("owner", "form", "values"),
    [
        (SamplingParams, ParamsForm, PARAMS),
        (CacheOptions, CacheForm, CACHE),
        (Usage, UsageForm, USAGE),
        (SamplingDefaults, DefaultsForm, {**DEFAULTS.given, "origin": DEFAULTS.origin}),
    ],
)
def test_a_form_has_each_field_of_its_class(owner, form, values) -> None:
    assert {*form.__struct_fields__} == values.keys() == {*names(owner)}
    assert all(values[name] != default for name, default in defaults(owner).items())


def test_the_form_of_a_delta_has_each_of_its_fields() -> None:
    assert DeltaForm.__struct_fields__ == ("request_id", *Delta.__struct_fields__)
    assert tuple(DELTA) == Delta.__struct_fields__
    blank = Delta()
    assert all(getattr(blank, name) != value for name, value in DELTA.items())
    assert names(TokenLogprob) == ["token_id", "logprob", "top"]
    assert names(Pin) == ["num_tokens", "ttl"]


@pytest.mark.parametrize("name", PARAMS)
def test_a_parameter_alone_comes_back_and_all_others_stay_left_out(name: str) -> None:
    params = SamplingParams(**{name: PARAMS[name]})
    again = over(params)
    assert again == params
    for each in names(SamplingParams):
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


def test_parameters_that_no_request_may_have_are_refused() -> None:
    for form in (ParamsForm(top_p=2.0), ParamsForm(regex="a", choice=["b"]), ParamsForm(n=0),
                 ParamsForm(json_schema=JsonObject("{"))):  # fmt: skip
        with pytest.raises(WireError, match="sampling parameters"):
            params_of(form)
    with pytest.raises(WireError):
        cache_of(CacheForm(pins=[(0, 1.0)]))
    with pytest.raises(WireError):
        defaults_of(DefaultsForm(top_p=2.0))


def test_cache_options_come_back() -> None:
    for name, value in CACHE.items():
        options = CacheOptions(**{name: value})
        assert cache_of(sent(cache_form(options))) == options
    assert cache_of(sent(cache_form(CacheOptions()))) == CacheOptions()


def test_default_parameters_come_back() -> None:
    for name, value in DEFAULTS.given.items():
        one = SamplingDefaults(**{name: value})
        assert defaults_of(sent(defaults_form(one))) == one


def test_usage_comes_back_and_a_loss_keeps_its_age_on_another_clock() -> None:
    for name, value in USAGE.items():
        usage = Usage(**{name: value})
        assert usage_of(sent(usage_form(usage, NOW)), NOW) == usage, name
    usage = usage_of(sent(usage_form(Usage(**USAGE), NOW)), 50.0)
    assert usage.cache_loss is not None
    assert (usage.cache_loss.cause, usage.cache_loss.time) == ("late", 20.0)


def described(error: BaseException | None) -> tuple[object, ...]:
    assert error is not None
    return type(error), str(error), vars(error)


def test_a_delta_comes_back() -> None:
    for name, value in DELTA.items():
        form = sent(delta_form("r", Delta(**{name: value})))
        assert form.request_id == "r"
        again = delta_of(form)
        for each in Delta.__struct_fields__:
            mine = value if each == name else getattr(Delta(), each)
            other = getattr(again, each)
            if isinstance(mine, Exception):
                assert described(other) == described(mine)
            else:
                assert other == mine, each
                assert type(other) is type(mine), each
    assert delta_of(sent(delta_form("r", Delta(stop_reason=7)))).stop_reason == 7


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_comes_back_with_its_class_and_its_fields(error: Exception) -> None:
    again = error_of(sent(error_form(error), ErrorForm))
    assert described(again) == described(error)
    if isinstance(error, core_errors.ForetokenError):
        form = sent(delta_form("r", Delta(error=error)))
        assert described(delta_of(form).error) == described(error)


def test_there_is_an_error_of_each_class_that_an_engine_or_a_route_raises() -> None:
    """`ClientGone`, `UpdateUnderWay` and `Unavailable` are of the front alone, and `RankLost` ends
    an engine, so that requests get `EngineDead`: they never cross.
    """
    defined = {
        each
        for module in (core_errors, api_errors)
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Exception) and each.__module__ == module.__name__
    }
    inside = {api_errors.ClientGone, api_errors.UpdateUnderWay}
    inside |= {core_errors.RankLost, core_errors.Unavailable}
    assert {type(error) for error in ERRORS} == defined - inside


def test_an_error_below_a_known_one_crosses_as_that_and_another_one_without_its_text() -> None:
    known = error_of(sent(error_form(UnsupportedConfig("no such layer")), ErrorForm))
    assert described(known) == described(core_errors.ModelLoadError("no such layer"))
    other = error_of(sent(error_form(KeyError("secret")), ErrorForm))
    assert described(other) == described(core_errors.ForetokenError("internal error"))


def test_token_ids_come_back_and_half_of_one_is_refused() -> None:
    ids = [0, 1, 2**31 - 1, -5]
    assert ids_of(ids_form(ids)).tolist() == ids
    assert ids_form([1]) == b"\1" + bytes(7)
    with pytest.raises(WireError):
        ids_of(ids_form(ids)[:-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda form: form | {"surplus": 1},
        lambda form: form | {"queue_time": float("nan")},
        lambda form: form | {"total_time": float("inf")},
        lambda form: form | {"verify_steps": -1},
        lambda form: form | {"closed_early": 1},
    ],
)
def test_a_form_is_decoded_strictly(change: Callable[[dict[str, Any]], object]) -> None:
    plain = msgspec.to_builtins(usage_form(Usage(), NOW))
    data = msgspec.msgpack.encode(change(plain))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=UsageForm)
