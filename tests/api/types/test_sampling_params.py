"""Every bad value of a request or an option is refused by name, and by nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.options.settings import parse_size
from support.bounds import BAD

BAD_OPTIONS: list[tuple[str, object]] = [
    *((name, None) for name in ("draft", "speculation", "exact", "max_queued", "dtype", "device")),
    *((name, 10**30) for name in ("page_size", "kv_tokens", "max_running", "speculation")),
    ("draft", 5), ("speculation", "on"), ("speculation", -1), ("speculation", True),
    ("exact", "no"), ("device", "tpu"),
    ("dtype", "int3"), ("quantize", "int3"), ("kv_cache_dtype", "fp4"), ("page_size", 0),
    ("kv_tokens", 0), ("kv_tokens", 1.5), ("kv_memory", "much"), ("kv_memory", "9" * 400),
    ("kv_memory", 0), ("kv_memory", True), ("max_model_len", 1), ("max_batch_tokens", 1),
    ("max_running", 0), ("max_queued", -1), ("max_priority", -1), ("threads", 0), ("threads", "x"),
    ("kv_events", 5), ("kv_events", "5557"), ("kv_events", "http://127.0.0.1:5557"),
    ("kv_events", "tcp://127.0.0.1"), ("kv_events", "tcp://:5557"), ("kv_events", "tcp://h:99999"),
    ("kv_events", "tcp://127.0.0.1:5557/x"), ("kv_events", "tcp://127.0.0.1:65535"),
    ("kv_events_replay", "tcp://127.0.0.1:5558"), ("kv_events_topic", "kv@"),
    ("load_format", "pickle"), ("overlap", "yes"),
    ("generation_config", "auto"), ("generation_config", None),
    ("override_generation_config", "{"), ("override_generation_config", {"temperature": -1}),
]  # fmt: skip


def label(value: object) -> str:
    return repr(value)[:24]


@pytest.mark.parametrize("field", BAD)
def test_a_bad_parameter_is_refused_by_name(field: str) -> None:
    wrong = {}
    for value in BAD[field]:
        try:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
            wrong[label(value)] = "accepted"
        except InvalidRequest as error:
            if error.param != field or field not in str(error):
                wrong[label(value)] = str(error)
    assert wrong == {}


def test_every_parameter_is_in_the_table_of_bad_ones() -> None:
    assert BAD.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


def test_a_prompt_alone_has_no_tokens_and_bad_ones_are_refused_all_the_same() -> None:
    assert SamplingParams(prompt_only=True, max_tokens=5, min_tokens=2).max_tokens == 0
    for bad in (-1, "5"):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(prompt_only=True, max_tokens=bad)  # type: ignore[arg-type]
        assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS, ids=label)
def test_a_bad_option_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", float("nan")), ("top_k", 1.5), ("n", 0), ("seed", True)]
)
def test_a_bad_default_of_a_subclass_is_refused_by_name(field: str, value: object) -> None:
    kind = dataclasses.make_dataclass(
        "Own", [(field, object, value)], bases=(SamplingParams,), frozen=True, kw_only=True
    )
    for _ in range(2):
        assert kind(**{field: 1}) == kind(**{field: 1})
        with pytest.raises(InvalidRequest) as caught:
            kind()
        assert caught.value.param == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_an_answer_has_one_form_at_most() -> None:
    forms = {"json_schema": {}, "regex": "a", "grammar": "start: X", "choice": iter(["a", "b"])}
    for name, value in forms.items():
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^choice cannot be combined with regex$") as caught:
        SamplingParams(regex="a", choice=["a"])
    assert caught.value.param == "choice"


def test_sequences_become_tuples_and_one_stop_string_a_list_of_one() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[1, 2], bad_words=iter(["x"]))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (1, 2), ("x",))


def test_what_none_means_is_allowed() -> None:
    SamplingParams(max_tokens=None, seed=None, logprobs=None, deadline=None, speculation=None)
    EngineConfig(kv_memory=None, kv_tokens=None, max_model_len=None, threads=None)
    EngineConfig(page_size=None, max_batch_tokens=None, max_running=None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("512 MB", 512 * 10**6), ("1.5k", 1500), ("77", 77), (77, 77)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size
