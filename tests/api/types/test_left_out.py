"""Fields that a request leaves out can be told from given ones, and a model's values fill them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from foretoken.api.types.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams
from foretoken.core.config import EngineConfig, parse_overrides
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.sampling import RECOMMENDED, TokenSamplingParams

VALUES = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
}
MODEL = SamplingDefaults(**VALUES)  # type: ignore[arg-type]


def five(params: TokenSamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in RECOMMENDED}


def test_the_defaults_are_the_numbers_that_they_were() -> None:
    expected = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert five(SamplingParams()) == five(TokenSamplingParams()) == expected
    assert SamplingParams() == SamplingParams(**expected)  # type: ignore[arg-type]
    assert "temperature=1.0, top_p=1.0, top_k=0, " in repr(SamplingParams())
    assert {*RECOMMENDED, "origin"} == {*SamplingDefaults.__struct_fields__}
    assert set(RECOMMENDED) == set(VALUES)


def test_a_model_fills_what_was_left_out() -> None:
    filled = MODEL.fill(SamplingParams(seed=3, stop="x"))
    assert five(filled) == VALUES
    assert (filled.seed, filled.stop) == (3, ("x",))


@pytest.mark.parametrize("name", RECOMMENDED)
def test_a_value_that_was_given_stays_also_where_it_is_the_default(name: str) -> None:
    default = getattr(TokenSamplingParams(), name)
    filled = MODEL.fill(SamplingParams(**{name: default}))  # type: ignore[arg-type]
    assert five(filled) == VALUES | {name: default}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_a_model_with_one_value_fills_one_field(name: str) -> None:
    model = SamplingDefaults(**{name: VALUES[name]})  # type: ignore[arg-type]
    assert five(model.fill(SamplingParams())) == five(SamplingParams()) | {name: VALUES[name]}


def test_what_is_left_out_stays_so_in_copies() -> None:
    params = SamplingParams(max_tokens=5, top_k=0)
    copies = [
        replace(params, n=2),
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
    ]
    for each in copies:
        assert five(MODEL.fill(each)) == VALUES | {"top_k": 0}


def test_filled_values_are_plain_and_are_filled_only_once() -> None:
    filled = MODEL.fill(SamplingParams())
    assert {type(value) for value in five(filled).values()} == {int, float}
    assert five(SamplingDefaults(temperature=0.75).fill(filled)) == VALUES
    assert MODEL.fill(filled) is filled


def test_parameters_are_kept_where_a_model_has_nothing_for_them() -> None:
    params = SamplingParams()
    assert NO_DEFAULTS.fill(params) is params
    given = SamplingParams(temperature=0.5)
    assert SamplingDefaults(temperature=0.25).fill(given) is given


def test_the_values_in_force_are_the_models_and_the_defaults_of_the_rest() -> None:
    assert MODEL.in_force == VALUES
    found = SamplingDefaults(top_p=0.5).in_force
    assert found == five(TokenSamplingParams()) | {"top_p": 0.5}
    assert {type(value) for value in found.values()} == {int, float}, "JSON's encoder needs them"


BAD = [
    ("temperature", -0.1), ("temperature", 101), ("temperature", "0.5"), ("temperature", True),
    ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5),
    ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", [1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_value_outside_its_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingDefaults(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    with pytest.raises(InvalidRequest, match=f"override_generation_config: {name} must be"):
        EngineConfig(override_generation_config={name: value})  # type: ignore[dict-item]


def test_zero_is_a_temperature_of_a_model() -> None:
    assert SamplingDefaults(temperature=0).fill(SamplingParams()).temperature == 0


def test_overrides_are_a_mapping_or_the_text_of_one() -> None:
    expected = {"temperature": 0.5, "top_k": 20}
    text = '{"temperature": 0.5, "top_k": 20}'
    assert parse_overrides(text) == parse_overrides(expected) == expected
    assert EngineConfig(override_generation_config=text).override_generation_config == expected
    assert parse_overrides(None) == parse_overrides("{}") == {}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "must be JSON: "),
        ("[" * 10**5, "must be JSON: "),
        ("[1]", "must be a JSON object, not a value of type list"),
        ("null", "must be a JSON object, not None"),
        ("0.5", "must be a JSON object, not 0.5"),
        (5, "must be a JSON object, not 5"),
        ('{"top_k": null}', ": top_k must be an integer, not None"),
        ('{"temp": 1}', "has no field 'temp'; its fields are temperature, top_p, top_k, min_p"),
        ({"max_tokens": 5}, "has no field 'max_tokens'; "),
        ({1: 2}, "has no field 1; "),
    ],
    ids=lambda value: str(value)[:24],
)
def test_overrides_of_another_form_are_refused(given: object, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(override_generation_config=given)  # type: ignore[arg-type]
    assert caught.value.param == "override_generation_config"
    assert problem in str(caught.value)
