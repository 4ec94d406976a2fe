"""Promises of docs/sdk.md about the errors and the life of `LLM`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretoken
from foretoken import (
    LLM,
    Completion,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    SamplingParams,
)
from foretoken.api.build.model_files import BUILTIN
from support.bounds import BAD_FOR_THE_ENGINE

OPTIONS = {"kv_tokens": 4096, "max_model_len": 512, "threads": 1}
PROMPT = "class Stack:\n    def push("
TARGET = BUILTIN / "target"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **OPTIONS) as llm:
        yield llm


def long(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 400, "ignore_eos": True, **fields})


def short(**fields: object) -> SamplingParams:
    return long(**{"max_tokens": 12, **fields})


def test_the_errors_form_the_tree_of_the_contract() -> None:
    assert issubclass(InvalidRequest, ValueError)
    assert issubclass(PromptTooLong, InvalidRequest)
    for error in (InvalidRequest, QueueFull, EngineDead, ModelLoadError):
        assert issubclass(error, ForetokenError)
    assert foretoken.__version__


@pytest.mark.parametrize("field", BAD_FOR_THE_ENGINE)
def test_what_the_engine_cannot_do_is_refused_by_name(llm: LLM, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        llm.generate(PROMPT, SamplingParams(**{field: BAD_FOR_THE_ENGINE[field]}))
    assert caught.value.param == field


def test_sampling_params_take_keywords_only_and_no_unknown_ones() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises((TypeError, InvalidRequest)):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_a_bad_prompt_is_an_invalid_request(llm: LLM) -> None:
    for prompt in ("", b"x", 3, None, [10**9], [-1], [True], [5, 1.5], ["a", 3], ["a", None]):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompt, short())  # type: ignore[arg-type]
        assert caught.value.param == "prompt", prompt


@pytest.mark.parametrize("conversation", [[{"role": "user"}], [{"content": "x"}], [3]], ids=str)
def test_a_bad_conversation_is_an_invalid_request(llm: LLM, conversation: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(conversation, short())  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_context_is_too_long(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"maximum context length is 51[12] tokens"):
        llm.generate([300] * 600, short())
    assert len(llm.generate(PROMPT, short()).token_ids) == 12


def test_one_bad_prompt_of_a_list_fails_the_call_and_not_the_next(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([PROMPT, [-1], PROMPT], short())
    assert len(llm.generate(PROMPT, short()).token_ids) == 12


@pytest.mark.parametrize(
    ("option", "value"), [("kv_token", 1), ("device", "tpu"), ("kv_tokens", -1)]
)
def test_a_bad_option_names_itself(option: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=option) as caught:
        LLM("builtin", **{option: value})
    assert caught.value.param == option


@pytest.mark.parametrize("options", [{"model": "/no/such/model"}, {"draft": "/no/such/draft"}])
def test_a_missing_folder_is_a_model_load_error(options: dict[str, str]) -> None:
    with pytest.raises(ModelLoadError, match="/no/such"):
        LLM(**{"model": "builtin"} | options)


def test_random_weights_need_a_config_only_and_real_ones_need_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    first, second = ([], [])
    for ids in (first, second):
        with LLM(tmp_path, load_format="random", **OPTIONS) as llm:
            ids += llm.generate([1, 2, 3], short(max_tokens=4)).token_ids
    assert len(first) == 4
    assert first == second
    with pytest.raises(ModelLoadError):
        LLM(tmp_path, **OPTIONS)


def test_a_closed_llm_refuses_and_closing_twice_is_harmless() -> None:
    with LLM("builtin", **OPTIONS) as llm:
        assert llm.generate(PROMPT, short()).token_ids
    llm.close()
    with pytest.raises(ForetokenError):
        llm.generate(PROMPT, short())


def test_threads_share_an_llm_and_abort_ends_a_request_of_another_thread(llm: LLM) -> None:
    outs: list[Completion] = []
    thread = threading.Thread(
        target=lambda: outs.append(llm.generate(PROMPT, long(), request_id="victim"))
    )
    thread.start()
    while thread.is_alive():
        assert len(llm.generate(PROMPT, short()).token_ids) == 12
        llm.abort("victim")
    thread.join()
    assert outs[0].finish_reason == "abort"
    assert len(outs[0].token_ids) < 400


def test_aborting_an_unknown_request_is_harmless(llm: LLM) -> None:
    llm.abort("nobody")
