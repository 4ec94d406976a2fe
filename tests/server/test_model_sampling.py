"""A checkpoint's generation_config.json, from the file to the tokens, by the SDK and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, ModelLoadError, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.interface.sampling import TokenSamplingParams
from support.plain_http import get, post
from support.server_process import running

TARGET = BUILTIN / "target"
OPTIONS = {"kv_tokens": 2048, "max_model_len": 512, "threads": 1}
FLAGS = ["--kv-tokens", "2048", "--max-model-len", "512", "--threads", "1"]
PROMPT = "def quicksort(items):\n"
TALK = [{"role": "user", "content": "Write quicksort."}]
NUM_TOKENS = 24
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": 5},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": NUM_TOKENS, "seed": 5},
    "/v1/responses": {"input": "Write quicksort.", "max_output_tokens": NUM_TOKENS, "seed": 5},
    "/v1/messages": {"messages": TALK, "max_tokens": NUM_TOKENS, "seed": 5},
}


def copy_with(folder: Path, **values: object) -> Path:
    """The built-in target with a generation_config.json of its own."""
    shutil.copytree(TARGET, folder)
    known = json.loads((TARGET / "generation_config.json").read_text("utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(known | values), "utf-8")
    return folder


@pytest.fixture(scope="module")
def greedy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that recommends its most likely token."""
    return copy_with(tmp_path_factory.mktemp("models") / "greedy", temperature=0.0)


def tokens(llm: LLM, **fields: Any) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=5, **fields)
    return list(llm.generate(PROMPT, params).token_ids)


@pytest.fixture(scope="module")
def drawn() -> list[int]:
    """Tokens that seed 5 draws of the same weights without any recommendation."""
    with LLM(TARGET, **OPTIONS) as llm:
        return tokens(llm)


def test_the_sdk_uses_the_models_values_unless_others_are_given(
    greedy_folder: Path, drawn: list[int]
) -> None:
    with LLM(greedy_folder, **OPTIONS) as llm:
        greedy = tokens(llm, temperature=0.0)
        assert tokens(llm) == greedy != drawn
        assert tokens(llm, temperature=1.0) == drawn


@pytest.mark.parametrize(
    "options",
    [
        {"generation_config": "none"},
        {"override_generation_config": {"temperature": 1.0}},
        {"override_generation_config": '{"temperature": 1}'},
    ],
    ids=str,
)
def test_options_set_the_models_values_aside(
    greedy_folder: Path, drawn: list[int], options: dict[str, Any]
) -> None:
    with LLM(greedy_folder, **OPTIONS, **options) as llm:
        assert tokens(llm) == drawn


def test_a_bad_value_ends_the_start(tmp_path: Path) -> None:
    folder = copy_with(tmp_path / "bad", top_k="many")
    problem = r"top_k must be an integer.*--generation-config none"
    with pytest.raises(ModelLoadError, match=problem), LLM(folder, **OPTIONS):
        pass


@pytest.fixture(scope="module")
def url(greedy_folder: Path) -> Iterator[str]:
    with running(FLAGS, model=str(greedy_folder)) as server:
        yield server.url


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any of the APIs."""
    if "choices" in answer:
        [choice] = answer["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return "".join(block["text"] for block in answer["content"])


@pytest.mark.parametrize("path", BODIES)
def test_every_api_uses_them_unless_the_request_has_its_own(url: str, path: str) -> None:
    def ask(**fields: Any) -> str:
        answer = post(url, path, BODIES[path] | fields)
        assert answer.status == 200, answer.content
        return text_of(answer.json)

    assert ask() == ask(temperature=0) != ask(temperature=1.0)


def test_the_server_shows_them_and_what_was_chosen_for_it(url: str) -> None:
    plain = TokenSamplingParams()
    expected = {
        "temperature": 0.0, "top_p": plain.top_p, "top_k": plain.top_k, "min_p": plain.min_p,
        "repetition_penalty": plain.repetition_penalty,
    }  # fmt: skip
    [model] = get(url, "/v1/models").json["data"]
    info = get(url, "/server_info").json
    assert model["default_sampling_params"] == info["default_sampling_params"] == expected
    assert (info["model"], info["max_model_len"]) == (model["id"], model["max_model_len"])
    settings = info["settings"]
    assert settings["generation_config"] == "model"
    assert (settings["kv_tokens"], settings["max_model_len"], settings["threads"]) == (2048, 512, 1)
    assert (settings["page_size"], settings["device"]) == (16, "cpu")
    assert settings["max_running"] > 0


def test_flags_of_the_server_go_before_the_model(greedy_folder: Path) -> None:
    flags = ["--generation-config", "none", "--override-generation-config", '{"top_k": 3}']
    with running([*FLAGS, *flags], model=str(greedy_folder)) as server:
        shown = get(server.url, "/v1/models").json["data"][0]["default_sampling_params"]
    assert (shown["temperature"], shown["top_k"]) == (1.0, 3)
